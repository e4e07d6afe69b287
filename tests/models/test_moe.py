"""The sparse MLP: its values, its gradients, what it computes, one device and several."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.models import moe
from dllm.train.sharding import MeshConfig, batch_sharding, make_mesh, shardings

EXPERTS, ACTIVE, WIDTH, HIDDEN = 8, 3, 16, 12
MLP = moe.SparseMLP(EXPERTS, ACTIVE, HIDDEN)


def inputs(rows=4, length=12):
    x = jax.random.normal(jax.random.key(0), (rows, length, WIDTH))
    return jax.jit(MLP.init)(jax.random.key(1), x), x


def dense(variables, x):
    """All experts for every token, weighted; the largest few of the router's weights are kept."""
    p = variables["params"]
    share = jax.nn.softmax(x @ p["router"])
    share = jnp.where(share >= jnp.sort(share)[..., -ACTIVE, None], share, 0)
    hidden = jax.nn.silu(jnp.einsum("bld,edf->blef", x, p["gate"])) * jnp.einsum("bld,edf->blef", x, p["up"])
    return jnp.einsum("blef,efd,ble->bld", hidden, p["down"], share / share.sum(-1, keepdims=True))


def value_and_gradients(mlp):
    return jax.jit(jax.value_and_grad(lambda v, x: (mlp(v, x) * jnp.cos(jnp.arange(WIDTH))[None, None]).sum(), (0, 1)))


@pytest.mark.parametrize("length", [1, 12])
def test_against_a_loop_over_tokens_and_experts(length):
    variables, x = inputs(4, length)
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), variables["params"])
    want = np.zeros(x.shape)
    for place in np.ndindex(x.shape[:2]):
        row = np.asarray(x[place], np.float64)
        score = np.exp(row @ p["router"])
        best = np.argsort(-score)[:ACTIVE]
        for e in best:
            gate = row @ p["gate"][e]
            want[place] += score[e] / score[best].sum() * (gate / (1 + np.exp(-gate)) * (row @ p["up"][e]) @ p["down"][e])
    np.testing.assert_allclose(jax.jit(MLP.apply)(variables, x), want, atol=1e-5)


def test_gradients_are_those_of_the_dense_product():
    variables, x = inputs()
    for got, want in zip(*(jax.tree.leaves(value_and_gradients(f)(variables, x)) for f in (MLP.apply, dense)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [[0, 0, 40, 0], [10, 10, 10, 10], [1, 0, 38, 1], [3, 0, 0, 0], [0, 0, 0, 17]])
def test_tiles_are_the_ragged_product_however_the_rows_are_spread(sizes):
    rng = np.random.default_rng(0)
    shapes = (sum(sizes), 6), (4, 6, 5), (4, 6, 5), (4, 5, 6)
    x, *weights = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)
    run = lambda f: jax.tree.leaves(
        jax.jit(jax.value_and_grad(lambda x, w: (f(x, jnp.asarray(sizes), *w) ** 2).sum(), (0, 1)))(x, tuple(weights))
    )
    for got, want in zip(run(moe.tiled), run(moe.ragged), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


def products(jaxpr):
    """FLOPs of the matrix products of a program, those in a scan as often as it runs."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            ((contract, _), _), a = eqn.params["dimension_numbers"], eqn.invars[0].aval
            total += 2 * eqn.outvars[0].aval.size * int(np.prod([a.shape[d] for d in contract]))
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        inner = [getattr(p, "jaxpr", p) for p in eqn.params.values()]  # closed or not
        total += times * sum(products(p) for p in inner if hasattr(p, "eqns"))
    return total


@pytest.mark.parametrize("tokens", [1, 8, 128, 1000])
def test_work_is_at_most_1_3_times_that_of_the_active_experts(tokens):
    """Counted in the program, as XLA's cost analysis counts a loop's body once; and that what is compiled for a CPU is this loop."""
    D, F, E, A = 32, 24, 128, 8  # 128 experts of which 8 are active, as in Qwen3-30B-A3B
    shapes = (tokens * A, D), (E, D, F), (E, D, F), (E, F, D)
    x, *weights = (jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
    counted = products(jax.make_jaxpr(moe.tiled)(x, jax.ShapeDtypeStruct((E,), jnp.int32), *weights).jaxpr)
    active = 6 * tokens * A * D * F
    assert active <= counted <= 1.3 * active
    if tokens > 8:
        mlp, text = moe.SparseMLP(E, A, F), jax.ShapeDtypeStruct((1, tokens, D), jnp.float32)
        variables = jax.eval_shape(mlp.init, jax.random.key(0), text)
        compiled = jax.jit(mlp.apply).lower(variables, text).compile()
        assert compiled.cost_analysis()["flops"] < active  # dense: over 100 times


@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 2, 1), (1, 1, 4)])
def test_one_device_and_four_give_the_same_numbers(sizes):
    """https://github.com/Labman42/JetEngine/issues/10: experts run on one device, and spread over `tensor` and `fsdp`."""
    variables, x = inputs()
    one = value_and_gradients(MLP.apply)(variables, x)
    mesh = make_mesh(MeshConfig(*sizes))
    with jax.set_mesh(mesh):
        named = {"params": {"moe": variables["params"]}}
        spread = jax.device_put(named, shardings(named, moe.RULES, mesh))["params"]["moe"]
        assert not spread["gate"].sharding.is_fully_replicated
        four = value_and_gradients(MLP.apply)({"params": spread}, jax.device_put(x, batch_sharding(mesh)))
    for got, want in zip(jax.tree.leaves(four), jax.tree.leaves(one), strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)

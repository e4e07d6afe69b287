"""Products counted in jaxprs: against closed forms, against the compiled program, and 6ND + attention of whole train steps."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, PartitionSpec

from dllm.evals import flops, hlo
from dllm.kernels.block_attention import gpu, tpu
from dllm.ops import masks

N = 16
X = jnp.ones((N, N))
ONE = 2.0 * N**3


def work(f, *arguments, platform="cpu"):
    return flops.work(jax.make_jaxpr(f)(*arguments), platform)


def test_loops_branches_and_what_nothing_hangs_on():
    body = lambda x, _: (x @ x, (x @ x @ x).sum())
    assert work(lambda x: lax.scan(body, x, None, length=5)[0], X).products == 5 * ONE  # of the second output nothing is used
    assert work(lambda x: lax.scan(body, x, None, length=5), X).products == 15 * ONE
    assert work(lambda x: lax.while_loop(lambda x: x.sum() < 1, lambda x: x @ x, x), X).products == ONE
    assert work(lambda x: lax.cond(x.sum() < 1, lambda x: x @ x @ x, lambda x: x, x), X).products == 2 * ONE
    assert work(lambda x: jax.vmap(lambda y: y @ x)(jnp.ones((3, N, N))), X).products == 3 * ONE


def test_gradients_and_what_is_recomputed():
    loss = lambda x, w: jnp.sin(jnp.sin(x @ w) @ w).sum()
    plain = work(jax.value_and_grad(loss, 1), X, X).products
    assert plain == 5 * ONE  # two forward, three backward: the first factor's input wants no gradient
    assert work(jax.value_and_grad(jax.checkpoint(loss), 1), X, X).products == plain + 2 * ONE


def test_a_branch_is_the_platforms():
    f = lambda x: lax.platform_dependent(x, tpu=lambda x: x @ x, cuda=lambda x: x @ x @ x, default=lambda x: x @ x @ x @ x)
    assert [work(f, X, platform=p).products / ONE for p in ("tpu", "gpu", "cpu")] == [1, 2, 3]


def test_ragged_products():
    f = lambda x, w, n: lax.ragged_dot(x, w, n)
    assert work(f, jnp.ones((24, 8)), jnp.ones((4, 8, 5)), jnp.full(4, 6)).products == 2 * 24 * 8 * 5


def test_shards_count_all():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        f = jax.shard_map(lambda x: x @ X, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"))
        assert work(f, jnp.ones((4 * N, N))).products == 4 * ONE
        whole = jax.shard_map(lambda x: x @ x, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
        assert work(whole, X).products == 4 * ONE  # each computes it


def test_the_cycle_is_the_last_outermost_loop():
    def sampler(x):
        x = lax.while_loop(lambda x: x.sum() < 1, lambda x: x @ x @ x @ x, x)
        return jax.jit(lambda x: lax.while_loop(lambda x: x.sum() < 2, lambda x: lax.fori_loop(0, 3, lambda _, x: x @ x, x), x))(x)

    assert flops.cycle(jax.make_jaxpr(sampler)(X)).products == 3 * ONE
    assert flops.cycle(jax.make_jaxpr(lambda x: x @ x)(X)) is None


def test_a_kernels_estimate_counts_wherever_it_runs():
    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...]

    estimate = pl.CostEstimate(flops=100, transcendentals=0, bytes_accessed=7)
    call = pl.pallas_call(kernel, jax.ShapeDtypeStruct((N, N), jnp.float32), cost_estimate=estimate, interpret=True)
    assert work(lambda x: lax.scan(lambda x, _: (call(x), None), x, None, length=6)[0], X) == flops.Work(kernels=600.0)


@pytest.mark.parametrize("mask", [masks.causal, masks.full, masks.CleanNoisy(4, 512)])
def test_attention_kernels_count_the_tiles_that_they_visit(mask):
    """On TPUs by their own estimate, on GPUs by their lists, wherever these come from: the same number, tiles being of one size."""
    q, k = jax.ShapeDtypeStruct((2, 1024, 4, 128), jnp.bfloat16), jax.ShapeDtypeStruct((2, 1024, 2, 128), jnp.bfloat16)
    layers = lambda f: lambda q, k, v: lax.scan(lambda q, _: (jax.checkpoint(f)(q, k, v), None), q, None, length=3)[0]
    at = dict(scale=0.1)
    of_gpu = work(layers(lambda q, k, v: gpu.forward(q, k, v, mask, **at)[0]), q, k, k, platform="gpu")
    of_tpu = work(layers(lambda q, k, v: tpu.forward(q, k, v, mask, tiles=tpu.Tiles(128, 128), **at)[0]), q, k, k, platform="tpu")
    assert of_gpu.kernels == of_gpu.unread == of_tpu.kernels > 0
    assert of_gpu.unread_bytes > 3 * 2 * 2 * 1024 * 4 * 128 * 2
    assert of_tpu.unread == 0
    square = 3 * 4.0 * 2 * 4 * 1024 * 1024 * 128
    assert (of_gpu.kernels == square) == (mask == masks.full)


def test_the_decode_kernel_reads_the_whole_cache():
    q, cache = jax.ShapeDtypeStruct((2, 16, 8, 128), jnp.bfloat16), jax.ShapeDtypeStruct((3, 2, 1024, 2, 128), jnp.bfloat16)
    number, lengths = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    found = work(lambda q, c, i, n: gpu.decode(q, c, c, i, n, masks.causal, scale=0.1), q, cache, number, lengths, platform="gpu")
    assert found.kernels == 4 * 2 * 8 * 16 * 1024 * 128
    assert found.unread_bytes >= 2 * 2 * 1024 * 2 * 128 * 2


def test_it_agrees_with_the_compiled_program():
    def f(x, w):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), (x @ w).sum()), x, w)

    arguments = X, jnp.ones((5, N, N))
    step = lambda x, w: jax.grad(lambda w: f(x, w)[0].sum())(w)
    compiled = hlo.Program(jax.jit(step).lower(*arguments).compile().as_text()).cost()
    assert work(step, *arguments).products == compiled.flops

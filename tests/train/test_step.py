from __future__ import annotations

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from dllm.core.paths import named_leaves
from dllm.core.types import UserError
from dllm.ops import masks
from dllm.train import optim, sharding, step
from dllm.train.state import create
from tests.train import tiny

TOKENS = np.random.default_rng(0).integers(0, 27, (5, 8, 16)).astype(np.int32)


@functools.cache
def program(run):
    """Returns (mesh, train step, gradients) of a run, compiled once for all tests."""
    mesh = sharding.make_mesh(run.mesh)
    return (
        mesh,
        step.make_train_step(run, mesh),
        jax.jit(lambda params, tokens, key: step.gradients(run, params, {"tokens": tokens}, key)[0]),
    )


def steps(run, number):
    """Returns (state, metrics of each step) after `number` updates on the run's mesh."""
    mesh, train_step, _ = program(run)
    with jax.set_mesh(mesh):
        state, rows = create(run, mesh), []
        for tokens_BL in TOKENS[:number]:
            state, metrics = train_step(state, step.put({"tokens": tokens_BL}, mesh))
            rows.append(jax.device_get(metrics))
    return state, rows


def fresh_gradients(run, key):
    """Returns the gradients of the fresh state on the first batch."""
    mesh, _, gradients = program(run)
    with jax.set_mesh(mesh):
        return jax.device_get(gradients(create(run, mesh).params, sharding.put_batch(TOKENS[0], mesh), key))


def test_learning_rate_rises_then_falls_to_zero():
    config = tiny.run(optim__warmup=4).optim
    rates = [float(optim.learning_rate(config, 12, t)) for t in range(13)]
    np.testing.assert_allclose(rates[:4], [0.0025, 0.005, 0.0075, 0.01], rtol=1e-6)
    np.testing.assert_allclose([rates[4], rates[8], rates[12]], [0.01, 0.005, 0.0], atol=1e-9)
    flat = dataclasses.replace(config, decay="constant")
    np.testing.assert_allclose([float(optim.learning_rate(flat, 12, t)) for t in (0, 3, 8, 12)], [0.0025, 0.01, 0.01, 0.01], rtol=1e-6)


def test_first_update_is_adamw_by_hand():
    """After one step Adam's direction is the gradient's sign; scales don't decay, matrices do; the norm is clipped before."""
    run, lr = tiny.run(), 0.01 / 4
    before = named_leaves(jax.device_get(create(run, sharding.make_mesh(run.mesh)).params))
    grads = fresh_gradients(run, jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 1), 0))
    clipped = 1.0 / max(1.0, float(optax.tree.norm(grads)))
    after, rows = steps(run, 1)
    assert clipped < 1
    assert np.isclose(rows[0]["grad_norm"], 1 / clipped, rtol=1e-5)
    grads = named_leaves(grads)
    for name, leaf in named_leaves(jax.device_get(after.params)).items():
        g = np.asarray(grads[name]) * clipped
        decay = 0.5 * before[name] if name.endswith(("kernel", "embedding")) else 0
        np.testing.assert_allclose(leaf, before[name] - lr * (g / (np.abs(g) + 1e-8) + decay), atol=5e-5, err_msg=name)


def test_ema_follows_with_its_early_decay():
    run = tiny.run()
    expected = jax.device_get(create(run, sharding.make_mesh(run.mesh)).ema)
    for number in (1, 2, 3):
        state, _ = steps(run, number)
        decay = min(0.15, number / (9 + number))  # 0.1, then 0.15
        expected = jax.tree.map(lambda e, p, d=decay: d * e + (1 - d) * p, expected, jax.device_get(state.params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), jax.device_get(state.ema), expected)


@pytest.mark.parametrize("mesh", [pytest.param((4, 1, 1), marks=pytest.mark.slow), (1, 2, 2)])
def test_four_devices_equal_one(mesh):
    """Same losses and gradient norms over five updates, same gradients; Adam magnifies dust, so parameters are not compared."""
    one, four = tiny.run(), tiny.run(mesh=dict(zip(("data", "fsdp", "tensor"), mesh)))
    (_, rows), (state4, rows4) = steps(one, 5), steps(four, 5)
    for key in rows[0]:
        np.testing.assert_allclose([row[key] for row in rows4], [row[key] for row in rows], rtol=2e-4, err_msg=key)
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(state4)} == {4}
    split = [leaf for leaf in jax.tree.leaves(state4) if not leaf.is_fully_replicated]
    assert bool(split) == (mesh != (4, 1, 1)), "parameters and moments lie in slices"
    grads, grads4 = (fresh_gradients(run, jax.random.key(7)) for run in (one, four))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grads4, grads)


def test_train_only_leaves_the_rest_bit_equal_and_without_optimiser_state():
    run = tiny.run(optim__train_only="^(causal|join|gain)")
    before = named_leaves(jax.device_get(create(run, sharding.make_mesh(run.mesh))))
    state, rows = steps(run, 5)
    after = named_leaves(jax.device_get(state))
    for name, leaf in after.items():
        tree, _, path = name.partition("/")
        if tree in ("params", "ema"):
            trained = path.startswith(("causal", "join", "gain"))
            assert np.array_equal(leaf, before[name]) != trained, name
    moments = [name for name in after if "/mu/" in name or "/nu/" in name]
    assert moments
    assert all("/causal/" in name or "/join" in name or name.endswith("/gain") for name in moments)
    assert rows[-1]["loss"] < rows[0]["loss"] + 1


def test_frozen_gradients_are_not_built():
    """Training the causal part alone costs fewer matrix products than training all."""

    def products(run):
        mesh = sharding.make_mesh(run.mesh)
        gradients = lambda params: step.gradients(run, params, {"tokens": jnp.asarray(TOKENS[0])}, jax.random.key(0))
        return str(jax.make_jaxpr(gradients)(create(run, mesh).params)).count("dot_general")

    assert products(tiny.run(optim__train_only="^causal")) < products(tiny.run()) - 10


def test_lr_factor_scales_the_updates_of_the_causal_part_alone():
    params = create(tiny.run(), sharding.make_mesh(tiny.run().mesh)).params
    grads = jax.tree.map(jnp.ones_like, params)

    def updates(**options):
        tx = optim.optimizer(tiny.run(**options).optim, 40)
        return named_leaves(jax.jit(lambda g, p: tx.update(g, tx.init(p), p)[0])(grads, params))

    plain, scaled = updates(), updates(optim__lr_factor=3.0)
    for name, leaf in plain.items():
        factor = 3 if name.startswith(("join", "causal", "gain")) else 1
        np.testing.assert_allclose(scaled[name], factor * leaf, rtol=1e-6, err_msg=name)
    assert len({name.partition("/")[0] for name in plain} & {"join", "causal", "gain", "stack"}) == 4


def test_train_only_that_matches_nothing_is_an_error():
    run = tiny.run(optim__train_only="backbone")
    with pytest.raises(UserError, match="train_only='backbone' matches no parameter"):
        create(run, sharding.make_mesh(run.mesh))


def test_the_step_reuses_the_old_state():
    mesh, train_step, _ = program(tiny.run())
    with jax.set_mesh(mesh):
        old = create(tiny.run(), mesh)
        train_step(old, step.put({"tokens": TOKENS[0]}, mesh))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))


def test_evaluation_draws_the_same_noise_every_time_and_other_noise_a_batch():
    run = tiny.run()
    mesh = sharding.make_mesh(run.mesh)
    params, eval_step = create(run, mesh).ema, step.make_eval_step(run, mesh)
    evaluate = lambda *numbers: step.evaluate(eval_step, params, [{"tokens": TOKENS[n]} for n in numbers], mesh)
    first = evaluate(0, 1)
    assert first == evaluate(0, 1)
    assert evaluate(0, 0)["loss"] != evaluate(0)["loss"]


def test_further_fields_reach_the_objective_by_name():
    run, seen = tiny.run(), {}

    def loss(functions, tokens_BL, key, config, *, segment_BL, trained_BL):
        seen.update(segment=segment_BL.shape, trained=trained_BL.dtype)
        return jnp.sum(trained_BL) * 1.0, {"loss": jnp.sum(trained_BL) * 1.0, "tokens": jnp.sum(trained_BL)}

    module = types.ModuleType("objective")
    module.loss = loss
    run = dataclasses.replace(run, objective=dataclasses.replace(run.objective, module=module))
    mesh = sharding.make_mesh(run.mesh)
    trained_BL = np.ones((8, 16), bool)
    batches = [{"tokens": TOKENS[0], "segment": TOKENS[0], "trained": trained_BL & (np.arange(16) < n)[None]} for n in (16, 4)]
    row = step.evaluate(step.make_eval_step(run, mesh), create(run, mesh).params, batches, mesh)
    assert seen == {"segment": (8, 16), "trained": np.bool_}
    assert row["loss"] == pytest.approx((128 * 128 + 32 * 32) / (128 + 32))  # the mean over trained tokens, not over batches


@pytest.mark.parametrize("mesh", [pytest.param((1, 1, 1), marks=pytest.mark.slow), (2, 2, 1)])
def test_accumulated_parts_give_the_whole_batchs_gradient(mesh):
    parts = dict(model=tiny.GPT | {"vocab": 27}, objective={"name": "next_token"})
    whole, cut = tiny.run(**parts), tiny.run(train__accumulate=2, mesh=dict(zip(("data", "fsdp", "tensor"), mesh)), **parts)
    grads, accumulated = (fresh_gradients(run, jax.random.key(7)) for run in (whole, cut))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), accumulated, grads)
    (_, rows), (_, cut_rows) = steps(whole, 3), steps(cut, 3)
    np.testing.assert_allclose([r["loss"] for r in cut_rows], [r["loss"] for r in rows], rtol=1e-5)


def test_accumulated_parts_weigh_by_their_tokens():
    """Rows of unequal numbers of trained tokens: a mean of the parts' means would be another objective."""

    def loss(functions, tokens_BL, key, config, *, trained_BL):
        logits_BLV = functions.forward(None, tokens_BL, jnp.zeros_like(tokens_BL), masks.causal)[0]
        tokens = jnp.sum(trained_BL, dtype=jnp.float32)
        mean = jnp.sum(trained_BL * logits_BLV[:, : trained_BL.shape[1], 3]) / tokens
        return mean, {"loss": mean, "tokens": tokens}

    module = types.ModuleType("objective")
    module.loss = loss
    trained_BL = np.arange(16)[None] < np.array([16, 1] * 4)[:, None]
    found = []
    for parts in (1, 2):
        run = tiny.run(model=tiny.GPT | {"vocab": 27}, objective={"name": "next_token"}, train__accumulate=parts)
        run = dataclasses.replace(run, objective=dataclasses.replace(run.objective, module=module))
        params = create(run, sharding.make_mesh(run.mesh)).params
        batch = {"tokens": TOKENS[0], "trained": trained_BL}
        found.append(jax.device_get(jax.jit(functools.partial(step.gradients, run))(params, batch, jax.random.key(0))))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *found)
    assert found[1][1]["tokens"] == trained_BL.sum()


def test_mesh_errors_say_what_to_set():
    for sizes, message in [((16, 1, 1), "wants 16 devices, there are 8"), ((-1, 3, 1), "doesn't divide"), ((0, 1, 1), "must be positive")]:
        with pytest.raises(UserError, match=message):
            sharding.make_mesh(sharding.MeshConfig(*sizes))


def test_partition_rules():
    mesh = sharding.make_mesh(sharding.MeshConfig(1, 2, 2))
    tree = {"a": {"kernel": jnp.zeros((3, 4, 6))}, "odd": {"kernel": jnp.zeros((5, 4))}, "count": jnp.zeros(())}
    specs = sharding.partition_specs(tree, ((r"kernel$", ("fsdp", "tensor")), *sharding.COUNTERS), mesh)
    assert specs == {"a": {"kernel": P(None, "fsdp", "tensor")}, "odd": {"kernel": P(None, "tensor")}, "count": P()}
    with pytest.raises(ValueError, match="no partition rule matches 'count'"):
        sharding.partition_specs(tree, ((r"kernel$", ()),), mesh)

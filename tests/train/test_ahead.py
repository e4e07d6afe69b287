"""Programs over abstract arrays: on the CPUs here they compile, fit the mesh, and count what 6ND + attention say."""

import jax
import jax.numpy as jnp
import pytest

from dllm.core.types import UserError
from dllm.evals import flops
from dllm.train import ahead, run, sharding, step
from tests.train import tiny

MESH = sharding.MeshConfig


def mesh(data=-1, fsdp=1, tensor=1, devices=4):
    return ahead.make_mesh(MESH(data, fsdp, tensor), jax.devices()[:devices])


@pytest.mark.parametrize("sizes, shape", [((-1, 1, 1), (4, 1, 1)), ((-1, 2, 1), (2, 2, 1)), ((1, 2, 2), (1, 2, 2))])
def test_a_mesh_takes_all_devices(sizes, shape):
    assert mesh(*sizes).devices.shape == shape


@pytest.mark.parametrize("sizes", [(-1, 3, 1), (1, 1, 1), (2, 2, 2), (-1, 8, 1), (-1, 0, 1), (-1, 1, 0)])
def test_a_mesh_that_does_not_divide_is_refused(sizes):
    with pytest.raises(UserError, match=r"doesn't divide 4 devices; set mesh\.fsdp"):
        mesh(*sizes)


def test_rows_that_cannot_be_shared_out_are_refused():
    with pytest.raises(UserError, match=r"6 rows can't be shared out; .* = 4"):
        ahead.train_program(tiny.run(train__batch=6), mesh())
    with pytest.raises(UserError, match=r"8 rows can't be shared out; .*train\.accumulate = 12"):
        ahead.train_program(tiny.run(train__batch=8, train__accumulate=3), mesh())
    with pytest.raises(UserError, match="no sampler"):
        ahead.sampler_program(tiny.run(), mesh(), 8, 16)


def test_a_train_step_is_the_real_one_and_nothing_is_made():
    here, made = mesh(2, 2), tiny.run(train__accumulate=2)
    function, arguments, sizes = ahead.train_program(made, here)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(arguments))
    with jax.set_mesh(here):
        compiled = function.lower(*arguments).compile()
        real = step.make_train_step(made, here).lower(*arguments).as_text()
        assert function.lower(*arguments).as_text() == real
    assert sum(sizes.values()) == pytest.approx(compiled.memory_analysis().argument_size_in_bytes, rel=0.05)
    assert sizes["parameters"] == sizes["ema"]
    assert sizes["optimizer"] == pytest.approx(2 * sizes["parameters"], rel=0.01)


def test_a_sampler_is_compiled_whole():
    made = run.run_config(tiny.config(sampler={"name": "self_speculative", "rate": 0.3, "n_verify": 1}))
    function, arguments, sizes = ahead.sampler_program(made, mesh(), 8, 16)
    with jax.set_mesh(mesh()):
        traced = function.trace(*arguments)
        samples = jax.eval_shape(function, *arguments)
    assert samples.tokens.shape == (8, 16)
    assert sizes["ema"] == sizes["optimizer"] == 0
    assert 0 < flops.cycle(traced.jaxpr).flops <= flops.work(traced.jaxpr).flops


def train_work(made):
    here = mesh(1, 1, devices=1)
    function, arguments, _ = ahead.train_program(made, here)
    with jax.set_mesh(here):
        return flops.work(function.trace(*arguments).jaxpr), arguments


def products(made):
    """Returns (weights that multiply, attention's multiplications a row and layer) x 2 of a hybrid's forward pass, a token."""
    model = made.model.config
    layers = model.n_noncausal + model.n_causal
    weights = layers * (4 * model.width**2 + 3 * model.width * model.mlp) + 3 * model.width**2 + 2 * model.width * model.vocab
    return weights, layers * 2 * made.data.length * model.width


BIG = dict(
    data__length=256,
    model={
        "name": "hybrid", "length": 256, "width": 768, "n_noncausal": 11, "n_causal": 1, "heads": 12, "mlp": 2048, "dtype": "bfloat16",
    },
    train__batch=512,
)  # fmt: skip


@pytest.mark.parametrize("changes, remat", [({}, False), ({}, True), (BIG, False), (BIG, True)])
def test_a_step_is_6nd_and_attention(changes, remat):
    """6ND, and attention's 4 L D a layer and token three times; 8ND and four times with every layer computed again in the backward pass.

    The head, read by draft and target, counts twice, and isn't recomputed.
    """
    made = run.run_config(tiny.config(**changes))
    config = made.model.config
    made = run.run_config(tiny.config(**changes | {"model": {"name": "hybrid", **vars(config), "remat": remat}}))
    weights, attention = products(made)
    tokens = made.train.batch * made.data.length
    head = 2 * config.width * config.vocab
    closed = 6 * (weights + attention) * tokens + remat * 2 * (weights + attention - head) * tokens
    assert train_work(made)[0].flops == pytest.approx(closed, rel=0.1)


def test_a_frozen_backbone_has_no_backward_pass():
    whole = train_work(tiny.run())[0].flops
    causal = train_work(tiny.run(optim__train_only="^(join|causal|gain)"))[0].flops
    assert causal < 0.75 * whole


def test_accumulation_asks_for_the_same_work():
    one, two = (train_work(tiny.run(train__accumulate=parts))[0].flops for parts in (1, 2))
    assert one == two
    assert jnp.isfinite(one)

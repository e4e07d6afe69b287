import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dllm.core.types import UserError
from dllm.models import gpt, qwen3, uno
from dllm.ops import masks
from dllm.train import sharding

CONFIG = uno.Config(vocab=31, length=32, width=16, layers=2, heads=2, kv_heads=1, head_width=8, mlp=24, rank=3, alpha=6.0, remat=True)
L = 12


def network(config=CONFIG, seed=0):
    """Fresh variables with b drawn too: as made, the adapter adds nothing."""
    variables = uno.init(config, jax.random.key(seed))
    draw = lambda path, x: 0.3 * jax.random.normal(jax.random.key(len(str(path))), x.shape) if path[-1].key == "b" else x
    lora = jax.tree_util.tree_map_with_path(draw, variables["params"]["lora"])
    return {"params": {**variables["params"], "lora": lora}}


def rows(config=CONFIG):
    tokens = jax.random.randint(jax.random.key(1), (2, L), 0, config.vocab)
    return tokens, jnp.broadcast_to(jnp.arange(L, dtype=jnp.int32), tokens.shape)


def run(config, variables, gate, mask=masks.causal, model=uno):
    tokens, positions = rows(config)
    extra = {} if gate is None else {"gate_BQ": gate}
    return jax.jit(lambda v: model.bind(config, v).forward(None, tokens, positions, mask, **extra)[0])(variables)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_closed_rows_have_the_bits_of_the_base_model(dtype):
    config = dataclasses.replace(CONFIG, dtype=dtype)
    variables = network(config)
    base = {"params": {name: tree for name, tree in variables["params"].items() if name != "lora"}}
    plain_config = qwen3.Config(**{f.name: getattr(config, f.name) for f in dataclasses.fields(qwen3.Config)})
    plain = run(plain_config, base, None, model=qwen3)
    np.testing.assert_array_equal(run(config, variables, None), plain)
    np.testing.assert_array_equal(run(config, variables, jnp.zeros((2, L), bool)), plain)
    open_ = jnp.arange(L) >= 7
    part = run(config, variables, jnp.broadcast_to(open_, (2, L)))
    np.testing.assert_array_equal(part[:, :7], plain[:, :7])
    assert (jnp.abs(part - plain).max(-1)[:, 7:] > 1e-3).all()


def test_every_target_acts_and_no_other():
    variables, gate = network(), jnp.ones((2, L), bool)
    plain, whole = run(CONFIG, variables, None), run(CONFIG, variables, gate)
    for target in uno.TARGETS:
        config = dataclasses.replace(CONFIG, targets=target)
        only = uno.init(config, jax.random.key(0))["params"]["lora"]
        names = {path[-2].key for path, _ in jax.tree_util.tree_flatten_with_path(only)[0]}
        assert names == {target}
        got = run(config, network(config), gate)
        assert jnp.abs(got - plain).max() > 1e-3
        assert jnp.abs(got - whole).max() > 1e-3


def test_a_fresh_adapter_adds_nothing_and_learns():
    variables = uno.init(CONFIG, jax.random.key(0))
    gate = jnp.ones((2, L), bool)
    np.testing.assert_array_equal(run(CONFIG, variables, gate), run(CONFIG, variables, None))
    spread = jax.tree.map(lambda x: x[0], variables["params"]["lora"]["stack"]["layers"]["q"]["a"])
    assert 0.5 * CONFIG.width**-0.5 < jnp.abs(spread).max() <= CONFIG.width**-0.5
    square = lambda lora: (run(CONFIG, {"params": {**variables["params"], "lora": lora}}, gate) ** 2).sum()
    grads = jax.grad(square)(variables["params"]["lora"])
    for path, leaf in jax.tree_util.tree_flatten_with_path(grads)[0]:
        assert (jnp.abs(leaf).max() > 0) == (path[-1].key == "b")


def test_the_gate_is_needed_where_there_is_an_adapter():
    module, variables = uno.build(CONFIG), network()
    tokens, positions = rows()
    collections = {"params": {k: v for k, v in variables["params"].items() if k != "lora"}, "lora": variables["params"]["lora"]}
    with pytest.raises(ValueError, match="has an adapter, so the call needs a gate"):
        module.apply(collections, None, tokens, positions, masks.causal)


def test_without_a_gate_no_product_of_the_adapter_is_in_the_program():
    tokens, positions = rows()
    count = lambda gate: str(
        jax.make_jaxpr(lambda v: uno.bind(CONFIG, v).forward(None, tokens, positions, masks.causal, gate_BQ=gate)[0])(network())
    ).count("dot_general")
    assert count(jnp.ones((2, L), bool)) == count(None) + 2 * len(uno.TARGETS)


def test_a_gpt_is_a_base_too():
    base = gpt.Config(vocab=27, length=16, width=16, layers=2, heads=2, mlp=24)
    config = uno.Config(vocab=27, length=16, width=16, layers=2, heads=2, kv_heads=2, head_width=8, mlp=24, begins=True, rank=2)
    variables = gpt.init(base, jax.random.key(0))
    tokens = jnp.array([[27, 3, 4, 26]])
    positions = jnp.arange(4)[None]
    ours = uno.init(config, jax.random.key(1))
    ours = {"params": {**variables["params"], "lora": ours["params"]["lora"]}}
    theirs = gpt.bind(base, variables).forward(None, tokens, positions, masks.causal)[0]
    np.testing.assert_array_equal(uno.bind(config, ours).forward(None, tokens, positions, masks.causal)[0], theirs)
    assert uno.bind(config, ours).lead == gpt.bind(base, variables).lead == 1


def test_hidden_and_logits_are_forward_in_two_parts():
    variables, (tokens, positions) = network(), rows()
    functions, gate = uno.bind(CONFIG, variables), jnp.broadcast_to(jnp.arange(L) > 4, (2, L))
    h, _ = functions.hidden(None, tokens, positions, masks.causal, gate_BQ=gate)
    np.testing.assert_array_equal(functions.logits(h), functions.forward(None, tokens, positions, masks.causal, gate_BQ=gate)[0])


def test_noise():
    make = lambda **changes: uno.bind(dataclasses.replace(CONFIG, **changes), network())
    uniform = make(noise_low=2, noise_high=9)
    assert uniform.make_noise(jnp.arange(uniform.noise_range)).tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert make().noise_range == CONFIG.vocab - 1
    mask = make(noise="mask", noise_mask=5)
    assert mask.noise_range == 1
    assert mask.make_noise(jnp.zeros(3, jnp.int32)).tolist() == [5, 5, 5]
    assert make(noise="mask", begins=True).make_noise(jnp.zeros(1, jnp.int32)).tolist() == [31]


def test_adapters_follow_their_products_over_the_mesh():
    mesh = sharding.make_mesh(sharding.MeshConfig(data=1, fsdp=2, tensor=2))
    specs = sharding.partition_specs(jax.eval_shape(lambda: uno.init(CONFIG, jax.random.key(0))["params"]), uno.RULES, mesh)
    layers = specs["lora"]["stack"]["layers"]
    assert [layers["q"]["a"], layers["q"]["b"]] == [P(None, "fsdp", None), P(None, None, "tensor")]
    assert [layers["down"]["a"], layers["down"]["b"]] == [P(None, "tensor", None), P(None, None, "fsdp")]


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(targets="q,z"), "model.targets names 'z'"),
        (dict(rank=0), "model.rank is 0; make it 1 or more"),
        (dict(mask_id=3), "model.mask_id is 3; an adapter's frozen model is autoregressive"),
        (dict(noise_low=9, noise_high=9), "noise_low and noise_high are 9 and 9"),
        (dict(noise_high=40), "make them 0 <= noise_low < noise_high <= 31"),
        (dict(noise="mask"), "model.noise_mask is -1; with noise=mask make it an id below 31"),
        (dict(noise="mask", noise_mask=31), "model.noise_mask is 31"),
    ],
)
def test_bad_configs(changes, message):
    with pytest.raises(UserError, match=message):
        uno.build(dataclasses.replace(CONFIG, **changes))

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dllm.core.types import UserError
from dllm.models import decoder, gpt
from dllm.models.attention import attention
from dllm.models.cache import Cache
from dllm.ops import masks
from dllm.ops.rotary import rotary_table

BLOCK = decoder.BlockConfig(width=16, heads=4, kv_heads=2, head_width=4, mlp=24)
LAYERS = 3


def randn(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def tables(B, L):
    return rotary_table(jnp.broadcast_to(jnp.arange(L)[None, :, None], (B, L, 1)), BLOCK.head_width, 1e4)


def shaken(params, scale=0.3):
    """Returns params with noise on every leaf: norms and gains start at constants that could hide a mistake."""
    leaves, tree = jax.tree.flatten(params)
    return jax.tree.unflatten(tree, [leaf + scale * randn(i, *leaf.shape) for i, leaf in enumerate(leaves)])


@pytest.fixture(scope="module")
def stack():
    h, table = randn(0, 2, 6, 16), tables(2, 6)
    init = jax.jit(lambda key: decoder.Stack(BLOCK, LAYERS).init(key, h, masks.causal, table, table))
    return shaken(init(jax.random.key(1))), h, table


def run_stack(config, params, h, mask, table, cache=None):
    return jax.jit(lambda p, h, cache: decoder.Stack(config, LAYERS).apply(p, h, mask, table, table, cache))(params, h, cache)


@pytest.mark.parametrize("mask", [masks.full, masks.causal])
def test_scanned_equals_unrolled(stack, mask):
    params, h, table = stack

    @jax.jit
    def unrolled(params, h):
        for n in range(LAYERS):
            layer = {"params": jax.tree.map(lambda x: x[n], params["params"]["layers"])}  # noqa: B023
            (h, _), _ = decoder.Block(BLOCK, LAYERS).apply(layer, (h, None), jnp.int32(n), mask, table, table)
        return h

    np.testing.assert_allclose(run_stack(BLOCK, params, h, mask, table)[0], unrolled(params, h), atol=1e-5)


def test_remat_changes_no_gradient_and_is_in_the_program(stack):
    params, h, table = stack

    def loss(remat):
        config = dataclasses.replace(BLOCK, remat=remat)
        return lambda p: (decoder.Stack(config, LAYERS).apply(p, h, masks.causal, table, table)[0] ** 2).sum()

    for kept, again in zip(*(jax.tree.leaves(jax.jit(jax.grad(loss(remat)))(params)) for remat in (False, True))):
        np.testing.assert_allclose(kept, again, rtol=1e-4, atol=1e-3)
    assert [f"{jax.make_jaxpr(jax.grad(loss(remat)))(params)}".count("remat") > 0 for remat in (False, True)] == [False, True]


def test_block_against_numpy(stack):
    """The whole block, written out per head in float64: norms, grouped heads, rotary, causal softmax, SwiGLU."""
    params, h, _ = stack
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params["params"]["layers"])
    x0 = np.asarray(h[0], np.float64)
    norm = lambda x, name, n: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p[name]["scale"][n]
    turn = np.exp(1j * np.arange(6)[:, None] * 1e4 ** (-np.arange(2) / 2))

    def rope(x):
        z = (x[:, :2] + 1j * x[:, 2:]) * turn
        return np.concatenate([z.real, z.imag], -1)

    for n in range(LAYERS):
        x, heads = norm(x0, "attn_norm", n), []
        q, k, v = (x @ p[name]["kernel"][n] for name in "qkv")
        for head in range(4):
            mine, kv = slice(4 * head, 4 * head + 4), slice(4 * (head // 2), 4 * (head // 2) + 4)
            score = rope(norm(q[:, mine], "q_norm", n)) @ rope(norm(k[:, kv], "k_norm", n)).T / 2
            weight = np.exp(score) * np.tri(6)
            heads.append(weight / weight.sum(-1, keepdims=True) @ v[:, kv])
        x0 = x0 + np.concatenate(heads, -1) @ p["o"]["kernel"][n]
        x = norm(x0, "mlp_norm", n)
        gate = x @ p["gate"]["kernel"][n]
        x0 = x0 + (gate / (1 + np.exp(-gate)) * (x @ p["up"]["kernel"][n])) @ p["down"]["kernel"][n]
    np.testing.assert_allclose(run_stack(BLOCK, params, h, masks.causal, tables(2, 6))[0][0], x0, rtol=1e-4, atol=1e-4)


CONFIG = gpt.Config(vocab=7, length=8, width=16, layers=LAYERS, heads=2, mlp=24)


@pytest.fixture(scope="module")
def model():
    variables = {"params": shaken(gpt.init(CONFIG, jax.random.key(0))["params"])}
    forward = jax.jit(lambda v, *args: gpt.bind(CONFIG, v).forward(*args))
    return variables, lambda *args: forward(variables, *args)


def test_cached_equals_uncached(model):
    """A prefill of rows that are unequally long, then single tokens at unequal frontiers, and a rewind over rubbish."""
    _, forward = model
    tokens = jax.random.randint(jax.random.key(3), (2, 8), 0, 8)
    at = jnp.broadcast_to(jnp.arange(8)[None], (2, 8))
    want, nothing = forward(None, tokens, at, masks.causal)
    assert nothing is None
    functions = gpt.bind(CONFIG, model[0])
    logits, cache = forward(functions.empty_cache(2, 8), tokens[:, :4], at[:, :4], masks.causal)
    np.testing.assert_allclose(logits, want[:, :4], atol=1e-5)
    filled = jnp.array([4, 2])  # row 1 forgets two
    for _ in range(4):
        index = filled[:, None]
        here = lambda x: jnp.take_along_axis(x, index, 1)  # noqa: B023
        _, cache = forward(cache.replace(lengths_B=filled), (here(tokens) + 1) % 8, here(at), masks.causal)  # a wrong token, taken back
        logits, cache = forward(cache.replace(lengths_B=filled), here(tokens), here(at), masks.causal)
        np.testing.assert_allclose(logits, jnp.take_along_axis(want, index[:, :, None], 1), atol=1e-5)
        filled = filled + 1


def test_cache_write_touches_only_its_slots_and_drops_what_falls_beyond_the_end():
    cache = Cache.empty(2, 2, 4, 1, 2, jnp.float32).replace(lengths_B=jnp.array([1, 3]))
    rows = jnp.arange(1.0, 9.0).reshape(2, 2, 1, 2)
    after = cache.write(jnp.int32(1), rows, -rows)
    want = np.zeros((2, 2, 4, 1, 2))
    want[1, 0, 1:3], want[1, 1, 3] = rows[0], rows[1, 0]
    np.testing.assert_array_equal(after.k, want)
    np.testing.assert_array_equal(after.v, -want)
    np.testing.assert_array_equal(after.lengths_B, [1, 3])


def test_decoding_holds_no_second_cache():
    """Temporary memory of a whole decode loop stays below a fifth of the cache that it fills."""
    config = dataclasses.replace(CONFIG, length=2048, layers=8)
    variables = jax.eval_shape(lambda key: gpt.init(config, key), jax.random.key(0))
    cache = jax.eval_shape(lambda: gpt.bind(config, {}).empty_cache(8, config.length))

    def decode(variables, cache):
        functions = gpt.bind(config, variables)

        def step(state):
            cache, tokens = state
            at = cache.lengths_B[:, None]
            logits, cache = functions.forward(cache, tokens, at, masks.causal)
            return cache.replace(lengths_B=cache.lengths_B + 1), jnp.argmax(logits, -1).astype(jnp.int32)

        return lax.while_loop(lambda state: (state[0].lengths_B < config.length).any(), step, (cache, jnp.zeros((8, 1), jnp.int32)))

    memory = jax.jit(decode, donate_argnums=1).lower(variables, cache).compile().memory_analysis()
    size = sum(x.size * x.dtype.itemsize for x in (cache.k, cache.v))
    assert memory.temp_size_in_bytes < 0.2 * size
    assert memory.alias_size_in_bytes >= size


def test_bfloat16_keeps_float32_weights_and_logits():
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    variables = gpt.init(config, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(3), (2, 8), 0, 8)
    at = jnp.broadcast_to(jnp.arange(8)[None], (2, 8))
    run = lambda c: jax.jit(lambda v: gpt.bind(c, v).forward(None, tokens, at, masks.causal)[0])(variables)
    assert {str(x.dtype) for x in jax.tree.leaves(variables)} == {"float32"}
    assert run(config).dtype == jnp.float32
    error = float(jnp.abs(run(config) - run(CONFIG)).max())
    assert 1e-4 < error < 0.3  # really in bfloat16, and the same function


def test_attention_scores_are_float32_for_bfloat16():
    q, k, v = (randn(i, 1, 4, 2, 8).astype(jnp.bfloat16) for i in range(3))
    assert attention(q, k, v, masks.full).dtype == jnp.bfloat16
    jaxpr = str(jax.make_jaxpr(lambda *qkv: attention(*qkv, masks.full))(q, k, v))
    assert "preferred_element_type=float32" in jaxpr


def test_a_config_that_makes_no_model_is_a_user_error():
    with pytest.raises(UserError, match="multiple of the second"):
        dataclasses.replace(BLOCK, heads=3)
    with pytest.raises(UserError, match="float16"):
        gpt.build(dataclasses.replace(CONFIG, dtype="float16"))
    with pytest.raises(UserError, match="multiple of 2 x heads"):
        gpt.build(dataclasses.replace(CONFIG, width=18))

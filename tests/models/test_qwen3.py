"""The block-causal decoder: the equivalences that make training, cached decoding and autoregression one model; and its shapes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dllm.core.types import UserError
from dllm.models import qwen3
from dllm.ops import masks

BLOCK, MASK = 4, 8
LENGTH = 10  # the last block is shorter
LENGTHS = pytest.mark.parametrize("length", [LENGTH, 12])  # training's attention is reckoned in two parts where the blocks are whole
CONFIG = qwen3.Config(vocab=9, length=32, width=16, layers=2, heads=4, kv_heads=2, head_width=8, mlp=24, block=BLOCK, mask_id=MASK)
DOUBLE = dataclasses.replace(CONFIG, dtype="float64")


def weights(config, seed=0):
    """Fresh weights with noise on every leaf: norms start at constants that could hide a mistake."""
    leaves, tree = jax.tree.flatten(qwen3.init(config, jax.random.key(seed)))
    return jax.tree.unflatten(tree, [x + 0.3 * jax.random.normal(jax.random.key(i), x.shape) for i, x in enumerate(leaves)])


def bound(config, variables):
    functions = qwen3.bind(config, variables)
    forward = jax.jit(lambda v, *args: qwen3.bind(config, v).forward(*args))
    return functions._replace(forward=lambda *args: forward(variables, *args))


def places(tokens, first=0):
    return jnp.broadcast_to(first + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)


def texts(rows=2, length=LENGTH, seed=0):
    """Clean tokens, and the same with about half of them hidden."""
    rng = np.random.default_rng(seed)
    clean = rng.integers(0, MASK, (rows, length), np.int32)
    return jnp.asarray(clean), jnp.asarray(np.where(rng.random(clean.shape) < 0.5, MASK, clean))


def both_streams(functions, clean, noisy, block=BLOCK):
    """The training forward over [clean ; noisy]: the logits of each half."""
    rows, length = jnp.concatenate([clean, noisy], 1), clean.shape[1]
    logits, _ = functions.forward(None, rows, jnp.tile(places(clean), (1, 2)), masks.CleanNoisy(block, length))
    return logits[:, :length], logits[:, length:]


def denoised(functions, clean, noisy, keep="clean"):
    """The logits of every noisy block as decoding gets them, on a cache of the finished blocks before it."""
    cache, out, mask = functions.empty_cache(len(clean), 12), [], masks.BlockCausal(BLOCK)
    for here in (slice(a, a + BLOCK) for a in range(0, clean.shape[1], BLOCK)):
        logits, after = functions.forward(cache, noisy[:, here], places(noisy[:, here], here.start), mask)
        out.append(logits)
        if keep == "clean":  # the pass that writes a finished block
            _, after = functions.forward(cache, clean[:, here], places(clean[:, here], here.start), mask)
        cache = after.replace(lengths_B=after.lengths_B + clean[:, here].shape[1])
    return jnp.concatenate(out, 1)


def largest(a, b):
    return float(jnp.abs(a - b).max())


@LENGTHS
def test_noisy_stream_is_denoising_on_a_clean_cache(float64, length):
    """Equivalence 1. https://github.com/kuleshov-group/bd3lms/issues/26. K/V kept from the last noisy pass fail it."""
    functions, (clean, noisy) = bound(DOUBLE, weights(CONFIG)), texts(length=length)
    trained = both_streams(functions, clean, noisy)[1]
    assert largest(trained, denoised(functions, clean, noisy)) < 1e-12
    assert largest(trained, denoised(functions, clean, noisy, keep="noisy")) > 0.1


@LENGTHS
def test_clean_stream_is_the_block_causal_forward(float64, length):
    """Equivalence 2."""
    functions, (clean, noisy) = bound(DOUBLE, weights(CONFIG)), texts(length=length)
    alone, _ = functions.forward(None, clean, places(clean), masks.BlockCausal(BLOCK))
    assert largest(both_streams(functions, clean, noisy)[0], alone) < 1e-12


def test_cached_passes_are_one_pass(float64):
    """Equivalence 3, with chunks of one and of two blocks, and rows filled unequally far.

    https://github.com/InternLM/lmdeploy/pull/4012: the edges of chunks are edges of blocks; https://github.com/InternLM/lmdeploy/pull/4159.
    """
    functions, (clean, _) = bound(DOUBLE, weights(CONFIG)), texts(length=12)
    mask = masks.BlockCausal(BLOCK)
    whole, _ = functions.forward(None, clean, places(clean), mask)
    first, cache = functions.forward(functions.empty_cache(2, 16), clean[:, :8], places(clean[:, :8]), mask)
    assert largest(first, whole[:, :8]) < 1e-12
    filled = jnp.asarray([8, 4])  # row 1 goes back by a block
    at = filled[:, None] + jnp.arange(4)[None]
    second, _ = functions.forward(cache.replace(lengths_B=filled), jnp.take_along_axis(clean, at, 1), at, mask)
    assert largest(second, jnp.take_along_axis(whole, at[:, :, None], 1)) < 1e-12
    crooked, cache = functions.forward(functions.empty_cache(2, 16), clean[:, :6], places(clean[:, :6]), mask)
    assert largest(crooked[:, 4:], whole[:, 4:6]) > 1e-3


@LENGTHS
def test_block_1_is_causal_and_a_block_of_all_is_full(float64, length):
    """Equivalences 4 and 5, in both streams: at block 1 a noisy row reads clean rows before it, and itself."""
    functions, (clean, noisy) = bound(DOUBLE, weights(CONFIG)), texts(length=length)
    run = lambda tokens, mask: functions.forward(None, tokens, places(tokens), mask)[0]
    assert largest(run(clean, masks.BlockCausal(1)), run(clean, masks.causal)) < 1e-12
    assert largest(run(clean, masks.BlockCausal(length)), run(clean, masks.full)) < 1e-12
    assert largest(both_streams(functions, clean, noisy, length)[1], run(noisy, masks.full)) < 1e-12
    at_one = both_streams(functions, clean, jnp.full_like(clean, MASK), 1)[1]
    hidden = jnp.where(jnp.eye(length, dtype=bool)[None], MASK, clean[:, None]).reshape(-1, length)  # one token each
    one_by_one = run(hidden, masks.causal).reshape(2, length, length, -1)
    assert largest(at_one, jnp.diagonal(one_by_one, axis1=1, axis2=2).transpose(0, 2, 1)) < 1e-12


@pytest.mark.parametrize("before, after, exact", [(8, 12, True), (4, 10, True), (3, 10, False), (6, 10, False)])
def test_a_document_behind_another(float64, before, after, exact):
    """Packed and alone, a document that starts on a block's edge is the same; the grid under any other padding on the left is not.

    https://github.com/ML-GSAI/LLaDA/issues/90, https://github.com/ZHZisZZ/dllm/issues/15: a row of a batch is that row alone.
    """
    functions, (clean, noisy) = bound(DOUBLE, weights(CONFIG)), texts(length=after)
    other, other_noisy = texts(length=before, seed=1)
    packed = [jnp.concatenate(x, 1) for x in ((other, clean), (other_noisy, noisy))]
    rows, length = jnp.concatenate(packed, 1), before + after
    position = jnp.tile(jnp.concatenate([places(other), places(clean)], 1), (1, 2))
    segment = jnp.broadcast_to((jnp.arange(2 * length) % length >= before).astype(jnp.int32)[None], rows.shape)
    logits, _ = functions.forward(None, rows, position, masks.CleanNoisy(BLOCK, length), None, segment)
    error = max(
        largest(logits[:, before + k * length : length + k * length], x) for k, x in enumerate(both_streams(functions, clean, noisy))
    )
    assert error < 1e-12 if exact else error > 0.1


def test_a_noisy_block_reads_no_clean_token_of_its_own():
    """https://github.com/JetAstra/SDAR/issues/11, by substitution; it does read those of earlier blocks, and no later one."""
    functions, (clean, noisy) = bound(CONFIG, weights(CONFIG)), texts(1)
    base = both_streams(functions, clean, noisy)[1]
    changed = both_streams(functions, clean.at[:, 4:8].set((clean[:, 4:8] + 1) % MASK), noisy)[1]
    np.testing.assert_array_equal(changed[:, :8], base[:, :8])
    assert (jnp.abs(changed - base)[0, 8:].max(1) > 1e-3).all()


def test_fused_commit_is_the_commit_and_the_denoising(float64):
    """One forward over [finished block ; masks of the next] gives the logits of both and leaves the same clean K/V."""
    functions, (clean, _) = bound(DOUBLE, weights(CONFIG)), texts(length=8)
    mask, cache = masks.BlockCausal(BLOCK), functions.empty_cache(2, 16)
    hidden = jnp.full_like(clean[:, 4:], MASK)
    separate, one = functions.forward(cache, clean[:, :4], places(hidden), mask)
    one = one.replace(lengths_B=one.lengths_B + 4)
    after, _ = functions.forward(one, hidden, places(hidden, 4), mask)
    fused, both = functions.forward(cache, jnp.concatenate([clean[:, :4], hidden], 1), places(clean), mask)
    assert largest(fused, jnp.concatenate([separate, after], 1)) < 1e-12
    assert largest(both.k[:, :, :4], one.k[:, :, :4]) < 1e-12


def test_rows_at_are_rows_of_all():
    functions, (clean, _) = bound(CONFIG, weights(CONFIG)), texts()
    at = jnp.asarray([[9, 0, 3], [2, 2, 5]])
    all_rows, _ = functions.forward(None, clean, places(clean), masks.causal)
    some, _ = functions.forward(None, clean, places(clean), masks.causal, at)
    np.testing.assert_allclose(some, jnp.take_along_axis(all_rows, at[:, :, None], 1), atol=1e-6)


SHAPES = {
    "qwen3": CONFIG,
    "qwen3_tied": dataclasses.replace(CONFIG, tied=True, theta=1e6),
    "llama": dataclasses.replace(CONFIG, qk_norm=False, tied=True, mask_id=-1, eps=1e-5),
    "moe": dataclasses.replace(CONFIG, experts=6, experts_per_token=2, mlp=8),
}


def reference(config, params, tokens, allow):
    """The logits of one text, in numpy and float64, token by token and head by head."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    layers, K = p["stack"]["layers"], config.head_width
    norm = lambda x, scale: x / np.sqrt((x**2).mean(-1, keepdims=True) + config.eps) * scale
    silu = lambda x: x / (1 + np.exp(-x))
    turn = np.exp(1j * np.arange(len(tokens))[:, None] * config.theta ** (-np.arange(K // 2) / (K // 2)))

    def rope(x):
        z = (x[:, : K // 2] + 1j * x[:, K // 2 :]) * turn
        return np.concatenate([z.real, z.imag], -1)

    def head_norm(x, name, n):
        return norm(x, layers[name]["scale"][n]) if config.qk_norm else x

    def mlp(x, n):
        if not config.experts:
            return (silu(x @ layers["gate"]["kernel"][n]) * (x @ layers["up"]["kernel"][n])) @ layers["down"]["kernel"][n]
        moe, out = layers["moe"], np.zeros_like(x)
        for t, row in enumerate(x):
            score = np.exp(row @ moe["router"][n])
            best = np.argsort(-score)[: config.experts_per_token]
            for e in best:
                hidden = silu(row @ moe["gate"][n, e]) * (row @ moe["up"][n, e])
                out[t] += score[e] / score[best].sum() * (hidden @ moe["down"][n, e])
        return out

    h = p["embed"]["embedding"][tokens]
    for n in range(config.layers):
        x, heads = norm(h, layers["attn_norm"]["scale"][n]), []
        q, k, v = (x @ layers[name]["kernel"][n] for name in "qkv")
        for head in range(config.heads):
            group = head // (config.heads // config.kv_heads)
            mine, theirs = slice(K * head, K * head + K), slice(K * group, K * group + K)
            score = rope(head_norm(q[:, mine], "q_norm", n)) @ rope(head_norm(k[:, theirs], "k_norm", n)).T / np.sqrt(K)
            weight = np.exp(score) * allow
            heads.append(weight / weight.sum(-1, keepdims=True) @ v[:, theirs])
        h = h + np.concatenate(heads, -1) @ layers["o"]["kernel"][n]
        h = h + mlp(norm(h, layers["mlp_norm"]["scale"][n]), n)
    return norm(h, p["norm"]["scale"]) @ (p["embed"]["embedding"].T if config.tied else p["head"]["kernel"])


@pytest.mark.parametrize("name", SHAPES)
def test_against_numpy(name, float64):
    """Every shape of model that this stack serves, written out: heads in groups, norms of heads or none, tied or not, experts."""
    config = dataclasses.replace(SHAPES[name], dtype="float64")
    variables, (clean, _), mask = weights(SHAPES[name]), texts(1), masks.BlockCausal(BLOCK)
    logits, _ = bound(config, variables).forward(None, clean, places(clean), mask)
    assert ("head" in variables["params"]) != config.tied
    assert ("q_norm" in variables["params"]["stack"]["layers"]) == config.qk_norm
    allow = np.arange(LENGTH)[None] // BLOCK <= np.arange(LENGTH)[:, None] // BLOCK
    np.testing.assert_allclose(logits[0], reference(config, variables["params"], np.asarray(clean[0]), allow), atol=1e-5)  # float32 angles


def test_a_tied_head_copied_out_is_the_same_model():
    """As a tied Qwen3 becomes an SDAR model, which has a head of its own."""
    tied, (clean, _) = weights(SHAPES["qwen3_tied"]), texts()
    untied = {"params": {**tied["params"], "head": {"kernel": tied["params"]["embed"]["embedding"].T}}}
    logits = [
        bound(dataclasses.replace(SHAPES["qwen3_tied"], tied=flag), variables).forward(None, clean, places(clean), masks.causal)[0]
        for flag, variables in ((True, tied), (False, untied))
    ]
    np.testing.assert_allclose(*logits, atol=1e-5)


def test_the_two_roundings_of_norms_are_one_in_float32():
    (clean, _), mask = texts(), masks.causal
    run = lambda **kw: bound(dataclasses.replace(CONFIG, **kw), weights(CONFIG)).forward(None, clean, places(clean), mask)[0]
    np.testing.assert_array_equal(run(norm="eager"), run(norm="fused"))
    assert largest(run(norm="eager", dtype="bfloat16"), run(norm="fused", dtype="bfloat16")) > 0


def test_decoding_by_blocks_holds_no_second_cache():
    """Temporary memory of a decode loop with fused commits stays below a fifth of the cache that it fills, donated to it."""
    config = dataclasses.replace(CONFIG, length=2048, layers=8, head_width=32)  # scores, heads x rows wide, are small beside keys
    variables = jax.eval_shape(lambda key: qwen3.init(config, key), jax.random.key(0))
    cache = jax.eval_shape(lambda: qwen3.bind(config, {}).empty_cache(8, config.length))

    def decode(variables, cache):
        functions = qwen3.bind(config, variables)

        def step(state):
            cache, block_BB = state
            rows = jnp.concatenate([block_BB, jnp.full_like(block_BB, MASK)], 1)
            position = cache.lengths_B[:, None] + jnp.arange(2 * BLOCK)[None]
            at = jnp.broadcast_to(BLOCK + jnp.arange(BLOCK)[None], block_BB.shape)
            logits, cache = functions.forward(cache, rows, position, masks.BlockCausal(BLOCK), at)
            return cache.replace(lengths_B=cache.lengths_B + BLOCK), jnp.argmax(logits[:, :, :MASK], -1).astype(jnp.int32)

        more = lambda state: (state[0].lengths_B + 2 * BLOCK < config.length).any()
        return lax.while_loop(more, step, (cache, jnp.zeros((8, BLOCK), jnp.int32)))

    memory = jax.jit(decode, donate_argnums=1).lower(variables, cache).compile().memory_analysis()
    size = sum(x.size * x.dtype.itemsize for x in (cache.k, cache.v))
    assert memory.temp_size_in_bytes < 0.2 * size
    assert memory.alias_size_in_bytes >= size


def test_a_config_that_makes_no_model_is_a_user_error():
    for bad, words in [
        (dict(head_width=7), "even"),
        (dict(block=0), "model.block is 0"),
        (dict(block=33), "model.length = 32"),
        (dict(mask_id=9), "below model.vocab = 9"),
        (dict(experts=4), "experts_per_token is 0"),
        (dict(dtype="float64"), "JAX_ENABLE_X64"),
        (dict(norm="torch"), "'fused' or 'eager'"),
    ]:
        with pytest.raises(UserError, match=words):
            qwen3.build(dataclasses.replace(CONFIG, **bad))

"""The GPU kernel in interpret mode, which simulates a block's memories, barriers and loads, against ref.reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from dllm.kernels.block_attention import gpu, ref
from dllm.kernels.block_attention.tiles import visits
from dllm.ops import masks

pytestmark = pytest.mark.slow  # the interpreter takes seconds a call

RACES = plgpu.InterpretGPUParams(detect_races=True)  # raises where a thread touches what another may be writing, and hangs where one waits
MASKS = {
    "full": lambda length: masks.full,
    "causal": lambda length: masks.causal,
    "tail": lambda length: masks.tail,
    "block_causal": lambda length: masks.BlockCausal(24),
    "clean_noisy": lambda length: masks.CleanNoisy(20, length // 2),
    "clean_noisy_causal": lambda length: masks.CleanNoisy(20, length // 2, causal=True),
}


def _normal(seed: int, *shapes, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes)]


def _run(kernel, *arrays):
    """Returns the kernel's results, when they are there: interpret mode runs XLA programs in callbacks, and waits for ever once those that
    were dispatched behind it fill the queue (32 programs)."""
    return jax.block_until_ready(jax.jit(kernel)(*arrays))


def _close(got, want, rtol=1e-2):
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= rtol * np.abs(want).max()


def _check(mask, B, Q, S, H, G, K, dtype=jnp.bfloat16, **more):
    q, k, v = _normal(0, (B, Q, H, K), (B, S, G, K), (B, S, G, K), dtype=dtype)
    out, lse = _run(lambda q, k, v: gpu.forward(q, k, v, mask, scale=K**-0.5, interpret=RACES, **more), q, k, v)
    want, want_lse = ref.reference(q, k, v, mask, scale=K**-0.5, **more)
    assert out.dtype == dtype
    assert lse.dtype == jnp.float32
    _close(out, want)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-4, atol=1e-4)  # -inf where a row reads nothing
    return out, lse


@pytest.mark.parametrize("name", MASKS)
def test_forward_equals_reference(name):
    _check(MASKS[name](320), 1, 320, 320, 2, 1, 64)  # three lines of tiles, the last ragged


def test_slots_are_used_again():
    _check(masks.full, 1, 64, 128 * (gpu.TILES[64].slots * 2 + 1), 1, 1, 64)


def test_lengths_segments_and_rows_that_read_nothing():
    segments = jnp.stack([jnp.arange(200) // 70, jnp.arange(200) // 110 + 5]).astype(jnp.int32)
    lengths = jnp.array([0, 150], jnp.int32)
    out, lse = _check(masks.causal, 2, 200, 200, 2, 2, 64, segment_ids=segments, kv_lengths=lengths)
    assert (out[0] == 0).all()
    assert (lse[0] == -jnp.inf).all()
    # Row 1: the second document begins at 110, and keys end at 150; rows there read some, however late they are.
    assert jnp.isfinite(lse[1]).all()
    _check(masks.full, 3, 70, 300, 2, 1, 64, kv_lengths=jnp.array([300, 128, 129], jnp.int32))


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("width, dtype", [(64, jnp.float16), (128, jnp.bfloat16), (256, jnp.bfloat16)])
def test_forward_of_every_width_and_mask(name, width, dtype):
    _check(MASKS[name](600), 2, 600, 600, 4, 2, width, dtype)
    length = 360
    segments, lengths = (jnp.arange(2 * length).reshape(2, length) // 130).astype(jnp.int32), jnp.array([7, 350], jnp.int32)
    _check(MASKS[name](length), 2, length, length, 6, 2, width, dtype, segment_ids=segments, kv_lengths=lengths)


def test_empty_tiles_are_not_read():
    """A tile of keys that holds NaN touches the rows of those lines only that visit it, and none behind kv_lengths."""
    mask, length, tile = masks.CleanNoisy(64, 384), 768, gpu.TILES[64].keys
    q, k, v = _normal(0, (1, length, 1, 64), (1, length, 1, 64), (1, length, 1, 64))
    want, _ = ref.reference(q, k, v, mask, scale=0.125)
    poisoned = lambda x: x.at[:, 4 * tile : 5 * tile].set(jnp.nan)
    out, _ = _run(lambda q, k, v: gpu.forward(q, k, v, mask, scale=0.125, interpret=RACES), q, poisoned(k), poisoned(v))
    lines = visits(mask, length, length, 2 * gpu.ROWS, tile)
    clear = [t for t in range(6) if 4 not in lines.tile_TW[t, : lines.count_T[t]]]
    assert clear == [0, 1, 2, 3, 5]
    rows = np.concatenate([np.arange(2 * gpu.ROWS) + t * 2 * gpu.ROWS for t in clear])
    _close(out[:, rows], want[:, rows])
    assert jnp.isnan(out[:, 4 * 128 : 5 * 128].astype(jnp.float32)).all()  # this check can fail

    short = jnp.array([4 * tile], jnp.int32)
    want, _ = ref.reference(q, k, v, masks.full, scale=0.125, kv_lengths=short)
    kernel = lambda q, k, v: gpu.forward(q, k, v, masks.full, scale=0.125, kv_lengths=short, interpret=RACES)[0]
    _close(_run(kernel, q, poisoned(k), poisoned(v)), want)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("tile_k", [64, 128])
def test_whole_tiles_are_those_that_the_mask_leaves_whole(name, tile_k):
    length = 640
    mask = MASKS[name](length)
    dense = np.asarray(mask.dense(length, length)).reshape(length // 128, 128, length // tile_k, tile_k)
    line_T, code_TW, count_T = gpu._schedule(mask, length, length, 128, tile_k)
    assert sorted(line_T) == [*range(length // 128)]
    assert (np.diff(count_T) <= 0).all()
    for line, codes, count in zip(line_T, code_TW, count_T):
        tiles, whole = codes[:count] // 2, codes[:count] % 2
        np.testing.assert_array_equal(tiles, np.flatnonzero(dense[line].any((0, 2))))
        np.testing.assert_array_equal(whole, dense[line].all((0, 2))[tiles])


def _tree(batch: int, nodes: int):
    below = jax.random.bernoulli(jax.random.key(3), 0.4, (batch, nodes, nodes)) & jnp.tri(nodes, k=-1, dtype=bool)[None]
    return masks.Ancestors(below | jnp.eye(nodes, dtype=bool)[None])


DECODE = {
    "full": (5, lambda rows: masks.full, (0, 290)),
    "causal": (5, lambda rows: masks.causal, (3, 290)),
    "tail": (5, lambda rows: masks.tail, (0, 125)),
    "fused_commit": (16, lambda rows: masks.BlockCausal(rows // 2), (8, 256)),
    "clean_noisy": (16, lambda rows: masks.CleanNoisy(4, rows // 2), (8, 252)),
    "ancestors": (40, lambda rows: _tree(2, rows), (3, 250)),  # more than one word of bits, and more than one warpgroup
}


def _check_decode(mask, rows, lengths, S=300, H=4, G=2, K=64, dtype=jnp.bfloat16):
    B, layer = len(lengths), jnp.int32(1)
    q, k, v = _normal(1, (B, rows, H, K), (2, B, S, G, K), (2, B, S, G, K), dtype=dtype)
    lengths_B = jnp.array(lengths, jnp.int32)
    # Not a number where nothing is to be read: the other layer, and the tiles behind each row's last.
    tile_S = np.arange(S, dtype=np.int32) // gpu.TILES[K].keys
    behind_BS = tile_S[None] > (np.array(lengths)[:, None] + rows - 1) // gpu.TILES[K].keys
    hide = lambda x: x.at[0].set(jnp.nan).at[1].set(jnp.where(behind_BS[:, :, None, None], jnp.nan, x[1]))
    kernel = lambda q, k, v, layer, lengths: gpu.decode(q, k, v, layer, lengths, mask, scale=K**-0.5, interpret=RACES)
    got = _run(kernel, q, hide(k), hide(v), layer, lengths_B)
    want, _ = ref.reference(q, k[1], v[1], mask, scale=K**-0.5, kv_lengths=lengths_B + rows, start=lengths_B)
    assert got.dtype == dtype
    _close(got, want)


@pytest.mark.parametrize("name", DECODE)
def test_decode_equals_reference(name):
    rows, make, lengths = DECODE[name]
    _check_decode(make(rows), rows, lengths)


def test_decode_in_one_part(monkeypatch):
    monkeypatch.setattr(gpu, "PROCESSORS", 1)
    _check_decode(masks.causal, 5, (3, 290))


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODE)
@pytest.mark.parametrize("width, dtype", [(64, jnp.float16), (128, jnp.bfloat16), (256, jnp.bfloat16)])
def test_decode_of_every_width_and_mask(name, width, dtype):
    rows, make, _ = DECODE[name]
    for slots, lengths in ((1024, (960, 0)), (700, (640, 64))):  # parts that no key falls to; a cache that isn't whole tiles
        _check_decode(make(rows), rows, lengths, S=slots, H=6, K=width, dtype=dtype)


def test_what_is_not_served():
    half = jnp.zeros((1, 64, 2, 64), jnp.bfloat16)
    forward = lambda q, mask=masks.causal, scale=0.1: gpu.forward(q, q, q, mask, scale=scale)
    for call, why in (
        (lambda: forward(half.astype(jnp.float32)), "multiplies bfloat16 or float16; q, k, v are float32"),
        (lambda: forward(half[..., :32]), "serves head widths 64, 128, 256; this one is 32"),
        (lambda: forward(half, _tree(1, 64)), "a tree's mask in its decode form only"),
        (lambda: forward(half, scale=0.0), "wants a positive scale; it is 0.0"),
        (lambda: gpu.decode(half, half[None], half[None], jnp.int32(0), jnp.zeros((1,), jnp.int32), masks.causal, scale=0.1), "has 64"),
    ):
        with pytest.raises(NotImplementedError, match=why):
            call()

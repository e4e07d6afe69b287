"""The TPU kernels in interpret mode against ref.reference. It fills outputs, scratch memory, and blocks beyond an array's end with NaN."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dllm.core.types import UserError
from dllm.kernels.block_attention import arg_specs, block_attention, ref, tpu
from dllm.kernels.block_attention.tiles import visits
from dllm.models.attention import attention
from dllm.ops import masks

RACES = pltpu.InterpretParams(detect_races=True)  # simulates memories and copies, and raises on a race
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
SMALLEST = tpu.Tiles(128, 128)


def dtypes(specs, quick, slow=()):
    """Returns each spec in float32 and bfloat16; the second in the slow suite unless `quick` names it, and so is what `slow` names."""
    both = [pytest.param(spec, id=f"{spec.name}-float32", marks=[pytest.mark.slow] * (spec.name in slow)) for spec in specs]
    for spec in specs:
        marks = () if spec.name in quick else pytest.mark.slow
        both.append(pytest.param(dataclasses.replace(spec, dtype="bfloat16"), id=f"{spec.name}-bfloat16", marks=marks))
    return both


def close(got, want, dtype, what=""):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want), err_msg=what)  # the log-sum-exp of nothing is -inf
    finite = np.isfinite(want)
    error, size = np.linalg.norm(got[finite] - want[finite]), np.linalg.norm(want[finite])
    assert error <= TOLERANCE[dtype] * size, f"{what}: relative error {error / size:.1e}"


def wanted(spec, arrays):
    """Returns the reference's (out, lse) and gradients, and the gradients given to both."""
    q, k, v, *_ = arrays.values()
    more = {name: arrays[name] for name in ("segment_ids", "kv_lengths") if name in arrays}
    d_out = jax.random.normal(jax.random.key(7), q.shape, q.dtype)
    d_lse = jax.random.normal(jax.random.key(8), (spec.batch, spec.heads, spec.queries))

    @jax.jit
    def run(q, k, v):
        out, vjp = jax.vjp(lambda q, k, v: ref.reference(q, k, v, spec.mask, scale=spec.scale, **more), q, k, v)
        empty = out[1] == -jnp.inf  # there the reference's own derivative is NaN
        return out, vjp((d_out, jnp.where(empty, 0, d_lse)))

    return *run(q, k, v), (d_out, d_lse)


def check(spec, **how):
    arrays = spec.arrays()
    q, k, v, *_ = arrays.values()
    more = {name: arrays[name] for name in ("segment_ids", "kv_lengths") if name in arrays} | how | dict(scale=spec.scale)
    (out, lse), gradients, given = wanted(spec, arrays)

    @jax.jit
    def run(q, k, v, given):
        got = tpu.forward(q, k, v, spec.mask, **more)
        return got, tpu.backward(q, k, v, spec.mask, *got, *given, **more)

    got, mine = run(q, k, v, given)
    assert got[0].dtype == q.dtype
    assert got[1].dtype == jnp.float32
    close(got[0], out, spec.dtype, "out")
    close(got[1], lse, spec.dtype, "lse")
    for name, x, want in zip("qkv", mine, gradients, strict=True):
        assert x.dtype == want.dtype
        close(x, want, spec.dtype, f"gradient of {name}")
    return got, mine


@pytest.mark.parametrize("spec", dtypes(arg_specs.SMALL, quick=("clean_noisy_documents", "causal")))
def test_forward_and_gradients_equal_the_reference(spec):
    check(spec, interpret=True, tiles=SMALLEST)


OTHERS = ("decode_causal", "decode_full", "decode_tail", "decode_clean_noisy")


@pytest.mark.parametrize("spec", dtypes(arg_specs.SMALL_DECODE, ("decode_fused_commit", "decode_causal_one_key_head"), slow=OTHERS))
def test_decode_equals_the_reference(spec):
    arrays = spec.arrays()
    out = jax.jit(lambda a: tpu.decode(**a, mask=spec.mask, scale=spec.scale, tile=128, interpret=True))(arrays)
    close(out, decoded(spec, arrays), spec.dtype)


def decoded(spec, arrays):
    k, v = (arrays[name][arrays["layer"]] for name in ("k_NBSGK", "v_NBSGK"))
    start = arrays["lengths_B"]
    return ref.reference(arrays["q_BQHK"], k, v, spec.mask, scale=spec.scale, start=start, kv_lengths=start + spec.queries)[0]


def test_interpret_mode_poisons():
    """The control: a kernel that writes nothing gives NaN, and so does what it reads beyond an array's end."""
    block = pl.BlockSpec((16, 128), lambda n: (0, 0))

    def kernel(x_ref, nothing_ref, rows_ref):
        rows_ref[...] = x_ref[...]

    shapes = [jax.ShapeDtypeStruct((16, 128), jnp.float32)] * 2
    run = pl.pallas_call(kernel, shapes, grid=(1,), in_specs=[block], out_specs=[block, block], interpret=True)
    nothing, rows = run(jnp.ones((9, 128)))
    assert jnp.isnan(nothing).all()
    assert jnp.isnan(rows).any(1).tolist() == [False] * 9 + [True] * 7


@pytest.mark.parametrize("name", ["clean_noisy_documents", pytest.param("full_over_more_keys", marks=pytest.mark.slow)])
def test_no_races(name):
    check(next(spec for spec in arg_specs.SMALL if spec.name == name), interpret=RACES, tiles=SMALLEST)


def test_no_races_in_decode():
    spec = next(spec for spec in arg_specs.SMALL_DECODE if spec.name == "decode_tree")
    arrays = spec.arrays()
    out = tpu.decode(**arrays, mask=spec.mask, scale=spec.scale, tile=128, interpret=RACES)
    close(out, decoded(spec, arrays), spec.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [tpu.Tiles(128, 256), tpu.Tiles(256, 128), tpu.Tiles(512, 512)], ids=str)
def test_tiles_of_any_shape(tiles):
    for name in ("clean_noisy_documents", "full_over_more_keys", "clean_noisy_frozen"):
        check(next(spec for spec in arg_specs.SMALL if spec.name == name), interpret=True, tiles=tiles)


def test_rows_that_read_nothing_give_zeros():
    spec = next(spec for spec in arg_specs.SMALL if spec.name == "clean_noisy_documents")  # its first row has no keys
    ((out, lse), gradients) = check(spec, interpret=True, tiles=SMALLEST)
    assert (out[0] == 0).all()
    assert (lse[0] == -jnp.inf).all()
    assert all((x[0] == 0).all() for x in gradients)


def test_frozen_clean_rows_get_no_gradient():
    spec = next(spec for spec in arg_specs.SMALL if spec.name == "clean_noisy_frozen")
    _, gradients = check(spec, interpret=True, tiles=SMALLEST)
    assert all((x[:, : spec.mask.length] == 0).all() and (x[:, spec.mask.length :] != 0).any() for x in gradients)


def test_frozen_is_what_the_call_site_does_without_a_kernel():
    spec = next(spec for spec in arg_specs.SMALL if spec.name == "clean_noisy_frozen")
    q, k, v = spec.arrays().values()
    weights = jax.random.normal(jax.random.key(3), q.shape)
    gradients = lambda attend: jax.jit(jax.grad(lambda *a: (attend(*a) * weights).sum(), (0, 1, 2)))(q, k, v)
    got = gradients(lambda q, k, v: block_attention(q, k, v, spec.mask, scale=spec.scale, implementation="mosaic_tpu", interpret=True))
    for name, a, b in zip("qkv", got, gradients(lambda q, k, v: attention(q, k, v, spec.mask)), strict=True):
        close(a, b, "float32", name)


def test_empty_tiles_are_neither_loaded_nor_computed():
    """NaN in a tile of keys reaches the lines that visit it and no other; behind kv_lengths it reaches none."""
    mask, tile = masks.CleanNoisy(128, 256), 128
    spec = arg_specs.ArgSpec("", mask, 1, 512, 512, 2, 1, 16)
    q, k, v = spec.arrays().values()
    run = jax.jit(lambda q, k, v, **more: tpu.forward(q, k, v, mask, scale=0.25, tiles=SMALLEST, interpret=True, **more)[0])
    some = visits(mask, 512, 512, tile, tile)
    for column in range(4):
        out = run(q, k.at[:, column * tile : (column + 1) * tile].set(jnp.nan), v)
        touched = [bool(jnp.isnan(out[:, line * tile : (line + 1) * tile]).any()) for line in range(4)]
        assert touched == [column in line[:count] for line, count in zip(some.tile_TW, some.count_T, strict=True)]
    end = jnp.asarray([200], jnp.int32)
    behind = jnp.arange(512)[None, :, None, None] >= 256
    np.testing.assert_array_equal(
        run(q, jnp.where(behind, jnp.nan, k), jnp.where(behind, jnp.nan, v), kv_lengths=end), run(q, k, v, kv_lengths=end)
    )


def test_decode_reads_a_row_as_far_as_it_is_filled():
    """NaN in the tiles behind a row's own end, in the rest of the layer, and in other layers: none of it is read."""
    spec = next(spec for spec in arg_specs.SMALL_DECODE if spec.name == "decode_fused_commit")
    arrays = spec.arrays()
    ends = (arrays["lengths_B"] + spec.queries + 127) // 128 * 128
    assert ends.tolist() == [128, 256, 384, 512]
    other = jnp.arange(spec.layers)[:, None, None, None, None] != arrays["layer"]
    unread = (jnp.arange(spec.slots)[None, None, :, None, None] >= ends[None, :, None, None, None]) | other
    poisoned = arrays | {name: jnp.where(unread, jnp.nan, arrays[name]) for name in ("k_NBSGK", "v_NBSGK")}
    run = jax.jit(lambda a: tpu.decode(**a, mask=spec.mask, scale=spec.scale, tile=128, interpret=True))
    np.testing.assert_array_equal(run(poisoned), run(arrays))


def test_many_rows_are_cut_into_lines(monkeypatch):
    monkeypatch.setattr(tpu, "ROWS", 64)  # 8 queries of 8 heads
    spec = arg_specs.ArgSpec("", arg_specs.tree(2, 20), 2, 20, 0, 8, 2, 16, slots=300)
    arrays = spec.arrays()
    close(tpu.decode(**arrays, mask=spec.mask, scale=spec.scale, tile=128, interpret=True), decoded(spec, arrays), "float32")


def test_what_is_not_served_says_so():
    spec = arg_specs.SMALL[0]
    q, k, v, *_ = spec.arrays().values()
    call = lambda q, k, v: tpu.forward(q, k, v, masks.full, scale=1.0, interpret=True)
    with pytest.raises(NotImplementedError, match="multiplies bfloat16 or float32; q, k, v are float16"):
        call(*(x.astype(jnp.float16) for x in (q, k, v)))
    with pytest.raises(NotImplementedError, match="float32, bfloat16, bfloat16"):
        call(q, k.astype(jnp.bfloat16), v.astype(jnp.bfloat16))
    with pytest.raises(NotImplementedError, match="up to 256 wide; these are 512"):
        call(*(jnp.ones((1, 8, 1, 512)),) * 3)
    with pytest.raises(NotImplementedError, match="32 query heads to a key head, 256 wide, of 4 bytes, don't fit"):
        call(jnp.ones((1, 8, 32, 256)), *(jnp.ones((1, 8, 1, 256)),) * 2)
    with pytest.raises(UserError, match="tiles of 128 x 100; make both a multiple of 128"):
        tpu.Tiles(128, 100)


@pytest.mark.parametrize("length, group, width, itemsize, want", [
    (8192, 4, 128, 2, (512, 512)), (8192, 1, 64, 4, (512, 512)), (2048, 4, 128, 2, (256, 256)), (300, 1, 16, 4, (128, 128)),
    (8192, 16, 256, 4, (128, 512)),
])  # fmt: skip
def test_choice_of_tiles(length, group, width, itemsize, want):
    assert dataclasses.astuple(tpu.choose(length, length, group, width, itemsize)) == want


def test_cost_is_that_of_the_visited_tiles():
    spec = next(spec for spec in arg_specs.TRAINING if spec.name == "sdar_4k_b4")
    shape = lambda heads: jax.ShapeDtypeStruct((spec.batch, spec.queries, heads, spec.head_width), jnp.bfloat16)
    run = lambda q, k, v: tpu.forward(q, k, v, spec.mask, scale=spec.scale)
    equations = jax.make_jaxpr(run)(shape(spec.heads), shape(spec.kv_heads), shape(spec.kv_heads)).eqns
    (cost,) = (e.params["cost_estimate"] for e in equations if e.primitive.name == "pallas_call")
    area = spec.batch * spec.heads * 80 * 512**2
    assert (cost.flops, cost.transcendentals) == (4 * area * 128, area)
    keys, queries = 2 * 80 * 512 * 8 * 128 * 2, 2 * 8192 * 32 * 128 * 2 + 8192 * 32 * 4
    assert cost.bytes_accessed == spec.batch * (keys + queries)

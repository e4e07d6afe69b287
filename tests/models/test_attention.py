import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from dllm.kernels.block_attention import ref
from dllm.models import attention as attention_module
from dllm.models.attention import attention, cached_attention
from dllm.models.cache import Cache
from dllm.ops import masks, mesh
from dllm.train.sharding import MeshConfig, make_mesh

B, L, H, G, K, BLOCK = 2, 12, 4, 2, 8, 4


def dense(q, k, v, mask, segment=None):
    """The definition, head by head, with the whole 2L x 2L square."""
    allow = jnp.broadcast_to(mask.dense(2 * L, 2 * L)[None], (B, 2 * L, 2 * L))
    if segment is not None:
        allow &= segment[:, :, None] == segment[:, None]
    k, v = (jnp.repeat(x, H // G, 2) for x in (k, v))
    score = jnp.where(allow[:, None], jnp.einsum("bqhk,bshk->bhqs", q, k) / K**0.5, -jnp.inf)
    return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(score), v)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_clean_noisy_in_two_parts_is_the_whole_square(causal, packed, float64):
    """Values and gradients. Without a prefix (a document's first block) only the own block counts."""
    mask = masks.CleanNoisy(BLOCK, L, causal)
    rows = jnp.array([[1] * 4 + [2] * 8, [1] * 8 + [0] * 4])
    segment = jnp.concatenate([rows, rows], 1) if packed else None
    qkv = [jax.random.normal(jax.random.key(i), (B, 2 * L, heads, K), jnp.float64) for i, heads in enumerate((H, G, G))]
    scored = lambda f: jax.jit(jax.value_and_grad(lambda qkv: jnp.sin(f(*qkv)).sum()))(qkv)
    ours = scored(lambda q, k, v: attention(q, k, v, mask, segment_BL=segment))
    for mine, theirs in zip(jax.tree.leaves(ours), jax.tree.leaves(scored(lambda q, k, v: dense(q, k, v, mask, segment))), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-12)


def test_frozen_clean_rows_have_no_gradient_and_leave_the_noisy_rows_theirs(float64):
    """Where the clean rows are a constant of what is trained, the gradient of the noisy rows is the whole one."""
    clean, noisy = ([jax.random.normal(jax.random.key(i + n), (B, L, h, K), jnp.float64) for i, h in enumerate((H, G, G))] for n in (0, 9))

    def loss(clean, noisy, frozen):
        q, k, v = (jnp.concatenate(pair, 1) for pair in zip(clean, noisy, strict=True))
        return jnp.sin(attention(q, k, v, masks.CleanNoisy(BLOCK, L, True, frozen))).sum()

    whole, frozen = (jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)(clean, noisy, frozen) for frozen in (False, True))
    np.testing.assert_allclose(frozen[0], whole[0], atol=1e-12)
    for mine, theirs in zip(frozen[1][1], whole[1][1], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-12)
    assert all(not x.any() for x in frozen[1][0])
    assert all(x.any() for x in whole[1][0])


def test_clean_noisy_holds_no_whole_square():
    length = 512
    shapes = [jax.ShapeDtypeStruct((1, 2 * length, heads, K), jnp.float32) for heads in (1, 1, 1)]
    memory = jax.jit(lambda q, k, v: attention(q, k, v, masks.CleanNoisy(BLOCK, length))).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1.2 * 4 * (2 * length) ** 2  # two copies of half a square, scores and weights


def test_bfloat16_follows_float32():
    mask, qkv = masks.CleanNoisy(BLOCK, L), [jax.random.normal(jax.random.key(i), (B, 2 * L, h, K)) for i, h in enumerate((H, G, G))]
    half = attention(*(x.astype(jnp.bfloat16) for x in qkv), mask)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), attention(*qkv, mask), atol=0.05)


@pytest.mark.parametrize(
    "mask", [masks.causal, masks.tail, masks.BlockCausal(4), masks.CleanNoisy(1, 2)], ids=lambda mask: type(mask).__name__
)
def test_a_long_cache_is_read_in_chunks_to_the_same_numbers(mask, monkeypatch, float64):
    """21 slots in chunks of 8: the last overlaps the one before. Slots that aren't filled hold numbers that would show."""
    slots, Q = 21, 4
    keys, values = (50 * jax.random.normal(jax.random.key(i), (3, 4, slots, G, K), jnp.float64) for i in (1, 2))
    q = jax.random.normal(jax.random.key(0), (4, Q, H, K), jnp.float64)
    cache = Cache(keys, values, jnp.array([0, 4, 8, 17], jnp.int32))
    run = lambda rows: jax.jit(lambda q, cache: cached_attention(q, cache, jnp.int32(1), mask))(q[rows], jax.tree.map(rows_of(rows), cache))
    rows_of = lambda rows: lambda x: x[:, rows] if x.ndim == 5 else x[rows]
    whole = run(slice(0, 4))
    monkeypatch.setattr(attention_module, "CHUNK", 8)
    chunked = run(slice(0, 4))
    np.testing.assert_allclose(chunked, whole, atol=1e-12)
    for b in range(4):  # a row's numbers don't hang on how far its neighbours are
        np.testing.assert_array_equal(run(slice(b, b + 1)), chunked[b : b + 1])


def test_a_long_cache_is_not_copied():
    slots = 8192
    cache = jax.eval_shape(lambda: Cache.empty(2, 1, slots, 2, 64, jnp.float32))
    q = jax.ShapeDtypeStruct((1, 4, 4, 64), jnp.float32)
    memory = jax.jit(lambda q, cache: cached_attention(q, cache, jnp.int32(1), masks.causal)).lower(q, cache).compile().memory_analysis()
    layer = 2 * slots * 2 * 64 * 4
    assert memory.temp_size_in_bytes < 0.2 * layer


def over_mesh(run, *arrays, sizes=None):
    """Returns what `run` gives, jitted, with a mesh of these (data, fsdp, tensor) set."""
    if sizes is None:
        return jax.jit(run)(*arrays)
    with jax.set_mesh(make_mesh(MeshConfig(*sizes))):
        return jax.device_get(jax.jit(run)(*arrays))


def kernel_on_cpu(monkeypatch):
    """Has the call sites take the TPU kernels, interpreted."""
    monkeypatch.setattr(attention_module, "platform", lambda: "tpu")
    for name in ("block_attention", "decode_attention"):
        kernel = functools.partial(getattr(attention_module, name), implementation="mosaic_tpu", interpret=True)
        monkeypatch.setattr(attention_module, name, kernel)


MESHES = [(2, 1, 2), (1, 1, 4), (4, 1, 1)]  # heads over tensor, fewer key heads than that, and a batch that `data` doesn't divide


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("sizes", MESHES)
def test_a_mesh_gives_the_numbers_of_one_device(sizes, kernel, monkeypatch):
    """Values and gradients of packed rows, by XLA and by the kernel, each device with its own rows and heads."""
    if kernel:
        kernel_on_cpu(monkeypatch)
    qkv = [jax.random.normal(jax.random.key(i), (B, 2 * L, heads, K)) for i, heads in enumerate((H, G, G))]
    rows = jnp.array([[1] * 4 + [2] * 8, [1] * 8 + [0] * 4])
    loss = lambda q, k, v, segment: jnp.sin(attention(q, k, v, masks.CleanNoisy(BLOCK, L), segment_BL=segment)).sum()
    run = lambda *arrays: jax.value_and_grad(loss, (0, 1, 2))(*arrays)
    arrays = *qkv, jnp.concatenate([rows, rows], 1)
    many, one = over_mesh(run, *arrays, sizes=sizes), over_mesh(run, *arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), many, one)


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("tree", [False, True])
def test_a_mesh_reads_the_cache_as_one_device_does(tree, sizes, kernel, monkeypatch):
    if kernel:
        kernel_on_cpu(monkeypatch)
    Q, slots = 4, 32
    arrays = [jax.random.normal(jax.random.key(i), (B, Q, heads, K)) for i, heads in enumerate((H, G, G))]
    before = [jax.random.normal(jax.random.key(i), (2, B, slots, G, K)) for i in (3, 4)]
    mask = masks.Ancestors(jnp.tril(jnp.ones((B, Q, Q), bool)).at[1, 3, 1].set(False)) if tree else masks.causal

    def run(q, k, v, keys, values, lengths, mask):
        heads = mesh.spread_heads(H, G)
        spread = lambda x: jnp.repeat(x, heads // G, -2)
        cache = Cache(spread(keys), spread(values), lengths).write(jnp.int32(1), spread(k), spread(v))
        return cached_attention(q, cache, jnp.int32(1), mask)

    arrays = *arrays, *before, jnp.array([3, 17], jnp.int32), mask
    np.testing.assert_allclose(over_mesh(run, *arrays, sizes=sizes), over_mesh(run, *arrays), atol=2e-6)


@pytest.mark.parametrize(
    "platform, dtype, said", [("tpu", "bfloat16", ""), ("tpu", "float32", ""), ("gpu", "float32", "bfloat16 or float16")]
)
def test_the_kernel_is_taken_where_it_serves_and_the_log_says_where_not(platform, dtype, said, caplog):
    attention_module._say_once.cache_clear()
    cache = Cache.empty(2, 1, 256, 2, 64, dtype)
    q, k = jnp.zeros((1, 128, 4, 64), dtype), jnp.zeros((1, 128, 2, 64), dtype)
    here = AbstractMesh((1,), ("data",), abstract_device=AbstractDevice("chip", None, platform))
    with jax.sharding.use_abstract_mesh(here):
        square = jax.make_jaxpr(lambda q, k: attention(q, k, k, masks.causal))(q, k)
        cached = jax.make_jaxpr(lambda q, cache: cached_attention(q, cache, jnp.int32(0), masks.causal))(q, cache)
    assert ("block_attention_forward" in str(square)) != bool(said)
    assert ("block_attention_decode" in str(cached)) != bool(said)
    assert len(caplog.records) == bool(said)
    assert said in caplog.text


def test_long_rows_have_no_square_of_scores():
    """Above SQUARE rows attention goes from tile to tile, with the numbers of the square."""
    rows = attention_module.SQUARE + 64
    q, k = (jax.random.normal(jax.random.key(i), (1, rows, heads, K)) for i, heads in enumerate((2, 1)))
    for mask in (masks.causal, masks.CleanNoisy(4, rows // 2)):
        run = jax.jit(lambda q, k, mask=mask: attention(q, k, k, mask))
        assert f"{rows},{rows}]" not in run.lower(q, k).compile().as_text()
        want = ref.reference(q, k, k, mask, scale=K**-0.5)[0]
        np.testing.assert_allclose(run(q, k), want, atol=2e-6)

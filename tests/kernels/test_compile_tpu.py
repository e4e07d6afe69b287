"""The TPU kernels through the real compiler, for chips that aren't here: what the interpreter runs may not lower, or not fit."""

import json

import pytest

from tests import aot

pytestmark = [pytest.mark.slow, aot.needs_compilers]
CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
SETUP = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from dllm.kernels.block_attention import arg_specs, block_attention, decode_attention, tpu
from dllm.ops import masks

devices = topologies.get_topology_desc(platform="tpu", topology_name=sys.argv[1]).devices[:1]
mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
B, L, H, G, K = 1, 8192, 32, 8, 128


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def compiled(run, *arrays):
    with jax.set_mesh(mesh):
        return jax.jit(run).lower(*arrays).compile()


def square(length, heads=H, kv_heads=G, width=K, dtype=jnp.bfloat16):
    return [array(B, length, n, width, dtype=dtype) for n in (heads, kv_heads, kv_heads)]


def gradients(mask, **more):
    loss = lambda q, k, v: block_attention(q, k, v, mask, scale=0.1, **more).astype(jnp.float32).sum()
    return jax.value_and_grad(loss, (0, 1, 2))


def report(name, done):
    calls, temporary = done.as_text().count('custom_call_target="tpu_custom_call"'), done.memory_analysis().temp_size_in_bytes
    print(json.dumps([name, calls, temporary]), flush=True)
"""
KERNELS = """
half = L // 2
MASKS = dict(
    full=masks.full, causal=masks.causal, tail=masks.tail, block_causal=masks.BlockCausal(4), clean_noisy=masks.CleanNoisy(4, half),
    clean_noisy_causal=masks.CleanNoisy(8, half, causal=True), clean_noisy_frozen=masks.CleanNoisy(8, half, causal=True, frozen=True),
)
for name, mask in MASKS.items():
    report(name, compiled(gradients(mask), *square(L)))


def with_all(q, k, v, segment_ids, kv_lengths):
    return gradients(masks.CleanNoisy(4, half - 36), segment_ids=segment_ids, kv_lengths=kv_lengths)(q, k, v)


ragged = 2 * (half - 36)
report("ragged_documents_lengths", compiled(with_all, *square(ragged), array(B, ragged, dtype=jnp.int32), array(B, dtype=jnp.int32)))
report("tree", compiled(gradients(arg_specs.tree(B, 20)), *square(20)))
for width, dtype in ((8, jnp.float32), (16, jnp.bfloat16), (64, jnp.bfloat16), (256, jnp.bfloat16), (128, jnp.float32), (256, jnp.float32)):
    report(f"width_{width}_{dtype.__name__}", compiled(gradients(masks.CleanNoisy(4, 500)), *square(1000, 4, 2, width, dtype)))
for length in (16, 100):
    report(f"length_{length}", compiled(gradients(masks.causal), *square(length, 4, 4, 32, jnp.float32)))

N, B, S = 3, 4, 8192
DECODE = dict(
    causal=(1, masks.causal), full=(4, masks.full), fused_commit=(8, masks.BlockCausal(4)), tail=(9, masks.tail),
    clean_noisy=(16, masks.CleanNoisy(1, 8)), tree=(20, arg_specs.tree(B, 20)), many=(500, masks.causal),
)
for name, (queries, mask) in DECODE.items():
    for kv_heads in (8, 4, 2, 1) if name == "causal" else (8,):
        run = lambda q, k, v, layer, lengths: decode_attention(q, k, v, layer, lengths, mask, scale=0.1)
        cache = array(N, B, S, kv_heads, K)
        whole = array(B, queries, H, K), cache, cache, array(dtype=jnp.int32), array(B, dtype=jnp.int32)
        report(f"decode_{name}_{kv_heads}", compiled(run, *whole))
"""
TOO_LARGE = """
try:
    run = lambda q, k, v: block_attention(q, k, v, masks.causal, scale=0.1, tiles=tpu.Tiles(4096, 1024))
    compiled(run, *square(L, 8, 8, 256, jnp.float32))
except jax.errors.JaxRuntimeError as error:
    print(error)
else:
    print("compiled")
"""
LINEAR = """
for length in (8192, 16384, 32768):
    mask = masks.CleanNoisy(4, length // 2)
    report(str(length), compiled(gradients(mask), *square(length)))
"""
SHARDED = """
from dllm.models import decoder
from dllm.models.attention import attention, cached_attention

four = topologies.get_topology_desc(platform="tpu", topology_name=sys.argv[1]).devices[:4]
mesh = Mesh(np.array(four).reshape(1, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
rows = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
mask, config = masks.CleanNoisy(4, 1024), decoder.BlockConfig(256, 8, 1, 128, 512, dtype="bfloat16")
loss = lambda q, k, v: attention(q, k, v, mask).astype(jnp.float32).sum()
report("square", compiled(jax.value_and_grad(loss, (0, 1, 2)), rows(4, 2048, 8, 128), *[rows(4, 2048, 1, 128)] * 2))


def decode(q, k, v):
    cache = decoder.empty_cache(config, 2, 4, 2048)
    assert cache.k.shape[3] == 2  # one key head for each slice of `tensor`
    cache = cache.write(jnp.int32(1), *(jnp.repeat(x, 2, 2) for x in (k, v)))
    return cached_attention(q, cache, jnp.int32(1), masks.causal)


report("cached", compiled(decode, rows(4, 8, 8, 128), *[rows(4, 8, 1, 128)] * 2))
"""
LOOP = """
from jax import lax
from dllm.models import qwen3
from dllm.train import sharding

config = qwen3.Config(
    vocab=256, length=8192, width=256, layers=4, heads=4, kv_heads=4, head_width=128, mlp=256, mask_id=-1, dtype="bfloat16"
)


def decode(variables, tokens):
    functions = qwen3.bind(config, variables)

    def turn(state):
        cache, tokens, logits = state
        rows = cache.lengths_B[:, None] + jnp.arange(8, dtype=jnp.int32)[None]
        logits, cache = functions.forward(cache, tokens, rows, masks.causal)
        cache = cache.replace(lengths_B=cache.lengths_B + 8).keep(rows * 0, cache.lengths_B * 0)  # trees keep some rows
        return cache, logits.argmax(-1).astype(jnp.int32), logits

    start = functions.empty_cache(8, 8192), tokens, jnp.zeros((8, 8, 256))
    return lax.while_loop(lambda state: (state[0].lengths_B < 8000).any(), turn, start)[1:]


four = topologies.get_topology_desc(platform="tpu", topology_name=sys.argv[1]).devices[:4]
for tensor in (1, 2, 4):
    mesh = Mesh(np.array(four[:tensor]).reshape(1, 1, tensor), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    like = jax.eval_shape(lambda: qwen3.init(config, jax.random.key(0)))
    put = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    variables = jax.tree.map(put, like, sharding.shardings(like, qwen3.RULES, mesh))
    report(str(tensor), compiled(decode, variables, array(8, 8, dtype=jnp.int32)))
"""


def reports(printed):
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith('["')]
    return {name: (calls, temporary) for name, calls, temporary in rows}


@pytest.mark.parametrize("chip", CHIPS)
def test_every_kernel_compiles(chip):
    found = reports(aot.run(SETUP + KERNELS, CHIPS[chip]))
    assert len(found) == 7 + 2 + 6 + 2 + 10
    for name, (calls, temporary) in found.items():
        decode = name.startswith("decode")
        assert calls == (1 if decode else 3), name  # forward, and the gradients of queries and of keys
        if decode and "many" not in name:
            kv_heads = int(name.split("_")[-1])
            assert temporary < 0.1 * (2 * 3 * 4 * 8192 * kv_heads * 128 * 2), name  # of the cache, no copy


def test_a_tile_that_is_too_large_is_refused():
    printed = aot.run(SETUP + TOO_LARGE, CHIPS["v5e"])
    assert "vmem" in printed
    assert "exceeded" in printed


def test_memory_is_linear_in_length():
    """Forward and backward under the training mask: no array of scores, of which twice the rows would have four times as many."""
    found = reports(aot.run(SETUP + LINEAR, CHIPS["v5e"]))
    sizes = [found[name][1] for name in ("8192", "16384", "32768")]
    assert 0 < sizes[0] < sizes[1] < sizes[2]
    assert sizes[1] < 2.5 * sizes[0]
    assert sizes[2] < 2.5 * sizes[1]


def test_the_call_sites_compile_for_a_mesh():
    """Heads over two devices that share one key head, rows over two: XLA can't divide a kernel, so each device runs its own."""
    found = reports(aot.run(SETUP + SHARDED, CHIPS["v5e"]))
    assert {name: calls for name, (calls, _) in found.items()} == {"square": 3, "cached": 1}


def test_a_decode_loop_copies_no_cache():
    """With four key heads on a device, two, and one, which XLA lays out otherwise."""
    found = reports(aot.run(SETUP + LOOP, CHIPS["v5e"]))
    for tensor, (calls, temporary) in found.items():
        cache = 2 * 4 * 8 * 8192 * 4 * 128 * 2 // int(tensor)  # the loop's own, a temporary too
        assert calls == 1
        assert temporary < 1.2 * cache, tensor

"""The GPU kernels through the real compiler, for an H200 that isn't here: what the interpreter runs may not lower, or not fit."""

import json

import pytest

from tests import aot

pytestmark = [pytest.mark.slow, aot.needs_compilers]
SETUP = """
import json
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec
from dllm.kernels.block_attention import gpu
from dllm.models.cache import Cache
from dllm.ops import masks

config = Path("experiments/devices/h200.txtpb").read_text()
topology = topologies.get_topology_desc(topology_name="h200", platform="cuda", target_config=config, topology="1x1x1")
sharding = NamedSharding(Mesh(np.array(topology.devices), ("data",)), PartitionSpec())
here = AbstractMesh((), (), abstract_device=AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu"))
B, L, H, G, N, Q = 2, 8192, 8, 2, 3, 16


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def compiled(run, *arrays, **options):
    with jax.sharding.use_abstract_mesh(here):
        return jax.jit(run, **options).lower(*arrays).compile()


def report(name, done):
    calls, temporary = done.as_text().count('custom_call_target="mosaic_gpu'), done.memory_analysis().temp_size_in_bytes
    print(json.dumps([name, calls, temporary]), flush=True)


def square(width=128):
    return [array(B, L, n, width) for n in (H, G, G)]


def cached(width=128, rows=Q):
    return [array(B, rows, H, width), *[array(N, B, L, G, width)] * 2, array(dtype=jnp.int32), array(B, dtype=jnp.int32)]


MASKS = dict(
    full=masks.full, causal=masks.causal, tail=masks.tail, block_causal=masks.BlockCausal(24), clean_noisy=masks.CleanNoisy(24, L // 2),
    clean_noisy_causal=masks.CleanNoisy(24, L // 2, causal=True),
)
"""
FORWARD = """
for name, mask in MASKS.items():
    report(name, compiled(lambda q, k, v: gpu.forward(q, k, v, mask, scale=0.1), *square()))
for width in (64, 256):
    report(f"width {width}", compiled(lambda q, k, v: gpu.forward(q, k, v, masks.causal, scale=0.1), *square(width)))
more = array(B, L, dtype=jnp.int32), array(B, dtype=jnp.int32)
run = lambda q, k, v, segments, lengths: gpu.forward(q, k, v, masks.causal, scale=0.1, segment_ids=segments, kv_lengths=lengths)
report("segments and lengths", compiled(run, *square(), *more))
"""
DECODE = """
short = dict(clean_noisy=masks.CleanNoisy(4, Q // 2), clean_noisy_causal=masks.CleanNoisy(4, Q // 2, causal=True))
for name, mask in (MASKS | short).items():
    report(name, compiled(lambda q, k, v, layer, n: gpu.decode(q, k, v, layer, n, mask, scale=0.1), *cached()))
for width in (64, 256):
    report(f"width {width}", compiled(lambda q, k, v, layer, n: gpu.decode(q, k, v, layer, n, masks.causal, scale=0.1), *cached(width)))
run = lambda q, k, v, layer, n, tree: gpu.decode(q, k, v, layer, n, masks.Ancestors(tree), scale=0.1)
report("ancestors", compiled(run, *cached(rows=40), array(B, 40, 40, dtype=jnp.bool)))


def layers(q, cache):
    def layer(carry, index):
        q, cache = carry
        cache = cache.write(index, q[:, :, :G], q[:, :, :G])
        return (gpu.decode(q, cache.k, cache.v, index, cache.lengths_B, masks.causal, scale=0.1), cache), None

    return lax.scan(layer, (q, cache), jnp.arange(N, dtype=jnp.int32))[0]


q, k, v, _, lengths = cached()
report("layers", compiled(layers, q, Cache(k, v, lengths), donate_argnums=1))
print(json.dumps(["cache", 1, 2 * N * B * L * G * 128 * 2]))
"""
LARGE = """
gpu.TILES[128] = gpu.Tile(512, 2)
try:
    compiled(lambda q, k, v: gpu.forward(q, k, v, masks.causal, scale=0.1), *square())
except ValueError as error:
    print(error)
"""
SHARDED = """
from jax.sharding import AxisType
from dllm.models import decoder
from dllm.models.attention import attention, cached_attention

devices = topologies.get_topology_desc(topology_name="h200", platform="cuda", target_config=config, topology="1x1x4").devices
mesh = Mesh(np.array(devices).reshape(1, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
rows = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
mask, block = masks.CleanNoisy(4, 1024), decoder.BlockConfig(256, 8, 1, 128, 512, dtype="bfloat16")
loss = lambda q, k, v: attention(q, k, v, mask).astype(jnp.float32).sum()


def decode(q, k, v):
    cache = decoder.empty_cache(block, 2, 4, 2048)
    assert cache.k.shape[3] == 2  # one key head for each slice of `tensor`
    cache = cache.write(jnp.int32(1), *(jnp.repeat(x, 2, 2) for x in (k, v)))
    return cached_attention(q, cache, jnp.int32(1), masks.causal)


with jax.set_mesh(mesh):
    square = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(rows(4, 2048, 8, 128), *[rows(4, 2048, 1, 128)] * 2).compile()
    report("square", square)
    report("cached", jax.jit(decode).lower(rows(4, 8, 8, 128), *[rows(4, 8, 1, 128)] * 2).compile())
"""


def _reports(code: str) -> dict:
    lines = [json.loads(line) for line in aot.run(SETUP + code).splitlines()]
    assert all(calls == 1 for _, calls, _ in lines)
    return {name: temporary for name, _, temporary in lines}


def test_forward_compiles_for_h200():
    temporary = _reports(FORWARD)
    assert len(temporary) == 9
    assert max(temporary.values()) < 2**20  # no copy of queries, keys or values, and no square of scores


def test_decode_compiles_for_h200_and_copies_no_cache():
    temporary = _reports(DECODE)
    assert len(temporary) == 11
    assert temporary.pop("layers") < 0.2 * temporary.pop("cache")
    assert max(temporary.values()) < 2**24


def test_too_large_a_tile_does_not_fit():
    assert "exceeds available shared memory" in aot.run(SETUP + LARGE)


def test_the_call_sites_compile_for_a_mesh():
    """Heads over two devices that share one key head, rows over two: XLA can't divide a kernel, so each device runs its own."""
    assert set(_reports(SHARDED)) == {"square", "cached"}

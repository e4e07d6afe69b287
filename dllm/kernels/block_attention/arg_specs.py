"""The shapes at which attention is tested and timed, by name: the same for both, so that what is fast is what is right."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dllm.ops import masks
from dllm.ops.masks import Ancestors, Mask


@dataclasses.dataclass(frozen=True)
class ArgSpec:
    """One call of block_attention; with `slots`, of decode_attention over a cache of that length.

    documents  in each packed row; 0: no segment ids
    ragged     rows of different kv_lengths, the first 0. (With a cache rows always differ.)
    layers     of the cache
    """

    name: str
    mask: Mask
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_width: int
    dtype: str = "float32"
    documents: int = 0
    ragged: bool = False
    slots: int = 0
    layers: int = 2

    @property
    def scale(self) -> float:
        return self.head_width**-0.5

    def arrays(self, seed: int = 0) -> dict[str, Any]:
        """Returns the call's arrays by argument name: block_attention's, or decode_attention's (with `layer` the last)."""
        rng = jax.random.split(jax.random.key(seed), 3)
        B, Q, S, H, G, K = self.batch, self.queries, self.keys, self.heads, self.kv_heads, self.head_width
        normal = lambda key, *shape: jax.random.normal(key, shape, self.dtype)
        if self.slots:
            cache = self.layers, B, self.slots, G, K
            lengths_B = jnp.linspace(0, self.slots - Q, B).astype(jnp.int32)
            if isinstance(self.mask, masks.BlockCausal):  # its cache ends on a block's edge
                lengths_B -= lengths_B % self.mask.block
            return dict(
                q_BQHK=normal(rng[0], B, Q, H, K),
                k_NBSGK=normal(rng[1], *cache),
                v_NBSGK=normal(rng[2], *cache),
                layer=jnp.int32(self.layers - 1),
                lengths_B=lengths_B,
            )
        arrays = dict(q=normal(rng[0], B, Q, H, K), k=normal(rng[1], B, S, G, K), v=normal(rng[2], B, S, G, K))
        if self.documents:
            edges = np.random.default_rng(seed).integers(1, max(Q, S), (B, self.documents - 1))
            arrays["segment_ids"] = jnp.asarray((np.arange(max(Q, S)) >= edges[:, :, None]).sum(1), jnp.int32)
        if self.ragged:
            arrays["kv_lengths"] = jnp.linspace(0, S, B).astype(jnp.int32)
        return arrays


def tree(batch: int, nodes: int, seed: int = 0) -> Ancestors:
    """Returns the mask of random trees: each node's parent is one of the nodes before it."""
    rng, own_BNN = np.random.default_rng(seed), np.broadcast_to(np.eye(nodes, dtype=bool), (batch, nodes, nodes)).copy()
    for b in range(batch):
        for n in range(1, nodes):
            own_BNN[b, n] |= own_BNN[b, rng.integers(n)]
    return Ancestors(own_BNN)


# Lengths are no multiples of 128, and span two tiles or three; heads are 1, 2 or 4 to a key head.
SMALL = (
    ArgSpec("full", masks.full, 2, 150, 150, 2, 2, 64),
    ArgSpec("full_over_more_keys", masks.full, 3, 20, 300, 4, 1, 32, ragged=True),
    ArgSpec("causal", masks.causal, 2, 256, 256, 4, 2, 16),
    ArgSpec("causal_documents", masks.causal, 2, 200, 200, 2, 1, 8, documents=3, ragged=True),
    ArgSpec("block_causal", masks.BlockCausal(4), 2, 270, 270, 4, 2, 32),
    ArgSpec("block_causal_documents", masks.BlockCausal(16), 2, 140, 140, 2, 2, 128, documents=2),
    ArgSpec("clean_noisy", masks.CleanNoisy(4, 128), 2, 256, 256, 4, 2, 16),
    ArgSpec("clean_noisy_ragged", masks.CleanNoisy(16, 100), 2, 200, 200, 2, 1, 64),
    ArgSpec("clean_noisy_documents", masks.CleanNoisy(4, 140), 2, 280, 280, 2, 1, 16, documents=3, ragged=True),
    ArgSpec("clean_noisy_causal", masks.CleanNoisy(8, 132, causal=True), 2, 264, 264, 2, 2, 24),
    ArgSpec("clean_noisy_frozen", masks.CleanNoisy(8, 144, causal=True, frozen=True), 2, 288, 288, 4, 2, 16),
    ArgSpec("tail", masks.tail, 2, 130, 130, 2, 1, 16),
    ArgSpec("tree", tree(2, 20), 2, 20, 20, 4, 2, 16),
)
SMALL_DECODE = (
    ArgSpec("decode_causal", masks.causal, 3, 1, 0, 4, 2, 16, slots=300),
    ArgSpec("decode_causal_one_key_head", masks.causal, 3, 5, 0, 4, 1, 64, slots=256),
    ArgSpec("decode_full", masks.full, 3, 8, 0, 2, 2, 128, slots=300),
    ArgSpec("decode_fused_commit", masks.BlockCausal(4), 4, 8, 0, 8, 2, 32, slots=400),
    ArgSpec("decode_tail", masks.tail, 3, 9, 0, 4, 4, 16, slots=64),
    ArgSpec("decode_clean_noisy", masks.CleanNoisy(1, 4), 3, 8, 0, 4, 2, 16, slots=300),
    ArgSpec("decode_tree", tree(3, 13), 3, 13, 0, 4, 2, 16, slots=300),
)


def _training(length: int, batch: int, mask: Mask, kind: str) -> ArgSpec:
    name = f"{kind}_{length // 1024}k_b{batch}"
    return ArgSpec(name, mask, batch, 2 * length, 2 * length, 32, 8, 128, "bfloat16")


# A Qwen3-8B's attention: rows [clean ; noisy] of twice `length`; and passes of 1 to 16 rows over a cache.
TRAINING = tuple(
    _training(length, batch, mask, kind)
    for length in (2048, 4096, 8192)
    for batch in (4, 16)
    for kind, mask in (("sdar", masks.CleanNoisy(4, length)), ("uno", masks.CleanNoisy(8, length, causal=True, frozen=True)))
)
DECODE = tuple(
    ArgSpec(f"{name}_b{batch}", mask, batch, queries, 0, 32, 8, 128, "bfloat16", slots=8192)
    for batch in (4, 64)
    for name, queries, mask in (
        ("decode_one", 1, masks.causal),
        ("decode_block", 4, masks.full),
        ("decode_fused_commit", 8, masks.BlockCausal(4)),
        ("decode_draft", 16, masks.causal),
        ("decode_tree", 16, tree(batch, 16)),
    )
)

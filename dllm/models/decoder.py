"""The transformer block, a scanned stack of it, and the plain decoder; pure functions of (variables, arrays).

Pre-norm, RMSNorm, grouped-query attention with a norm on each head's queries and keys, rotate-half rotary, SwiGLU, no biases: the
shape of Qwen3; without the heads' norms that of Llama. With LayerNorm, biases and GELU that of ESM-2, and, without rotary, of GPT-2.
Masks, rotary tables and the cache are call arguments; the cache is also a result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from dllm.core.types import UserError
from dllm.models import moe
from dllm.models.attention import attention, cached_attention
from dllm.models.cache import Cache
from dllm.ops import masks, mesh
from dllm.ops.layers import Dense, LayerNorm, Lora, RMSNorm
from dllm.ops.masks import Mask
from dllm.ops.rotary import Table, rotary_table, rotate

# Partition specs by parameter path, the first match wins. A rule names an array's last axes, so that it serves a scanned stack's
# leading N and the optimizer's moments too. Vocabulary axes stay whole: 27 symbols, or 50,257, divide by nothing.
RULES = (
    (r"embed/embedding$", (None, "fsdp")),
    (r"head/kernel$", ("fsdp", None)),
    (r"(q|k|v|gate|up)/kernel$", ("fsdp", "tensor")),
    (r"(o|down)/kernel$", ("tensor", "fsdp")),
    (r"lora/.*(q|k|v|gate|up)/a$", ("fsdp", None)),
    (r"lora/.*(q|k|v|gate|up)/b$", (None, "tensor")),
    (r"lora/.*(o|down)/a$", ("tensor", None)),
    (r"lora/.*(o|down)/b$", (None, "fsdp")),
    *moe.RULES,
    (r"(scale|bias)$", ()),
)


DTYPES = ("float32", "bfloat16", "float64")
MLP_FORMS = ("swiglu", "gelu", "gelu_tanh")


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """The shape of one block. `dtype` is that of the activations, `param_dtype` that of the parameters.

    experts, experts_per_token  of a sparse MLP (models/moe.py), each of width `mlp`; 0: one dense MLP
    lora   an adapter of the products named in it, on the rows whose gate is open (ops/layers.py)
    norm   RMSNorm by its rounding, "fused" or "eager" (ops/layers.py), or LayerNorm, "layer"
    mlp_form  "swiglu"; or one product, then GELU, "gelu" by the error function, "gelu_tanh" by its approximation
    bias   products have one
    remat  recompute a block's inside in the backward pass: a fifth of the memory. Even of time on CPU, where touching the memory of
           saved activations costs as much as the products (a step of the hybrid's `mini`: 0.95 against 1.3 core seconds).
    """

    width: int
    heads: int
    kv_heads: int
    head_width: int
    mlp: int
    dtype: str = "float32"
    remat: bool = False
    qk_norm: bool = True
    eps: float = 1e-6
    norm: str = "fused"
    experts: int = 0
    experts_per_token: int = 0
    param_dtype: str = "float32"
    lora: Lora | None = None
    mlp_form: str = "swiglu"
    bias: bool = False

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise UserError(f"model has {self.heads} heads and {self.kv_heads} kv_heads; make the first a multiple of the second")
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise UserError(f"model.experts_per_token is {self.experts_per_token}; make it 1 to experts = {self.experts}")
        for key, choices in (("dtype", DTYPES), ("param_dtype", DTYPES), ("norm", ("fused", "eager", "layer")), ("mlp_form", MLP_FORMS)):
            if getattr(self, key) not in choices:
                raise UserError(f"model.{key} is {getattr(self, key)!r}; it can be {' or '.join(map(repr, choices))}")
        if "float64" in (self.dtype, self.param_dtype) and not jax.config.jax_enable_x64:
            raise UserError("a model in float64 wants JAX_ENABLE_X64=1 in the environment")


def constrain(h_BLD: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
    """Returns h with its rows laid over (data, fsdp) where a mesh is set. Left alone, XLA may gather activations in place of weights."""
    return mesh.constrain(h_BLD, PartitionSpec(mesh.axes(h_BLD.shape[0], 1)[0]))


def empty_cache(config: BlockConfig, layers: int, batch: int, slots: int) -> Cache:
    """Returns a cache of which no row is filled. Where a mesh is set its rows lie over (data, fsdp) and its heads over `tensor`, repeated
    if they are fewer, so that no device has more than it reads."""
    kv_heads = mesh.spread_heads(config.heads, config.kv_heads)
    cache, (rows, heads) = Cache.empty(layers, batch, slots, kv_heads, config.head_width, config.dtype), mesh.axes(batch, kv_heads)
    put = lambda x: mesh.constrain(x, PartitionSpec(None, rows, None, heads))
    return Cache(put(cache.k), put(cache.v), mesh.constrain(cache.lengths_B, PartitionSpec(rows)))


def norm_layer(config: BlockConfig, name: str | None = None) -> nn.Module:
    """Returns a norm of the config's kind."""
    if config.norm == "layer":
        return LayerNorm(config.eps, config.param_dtype, name=name)
    return RMSNorm(config.eps, config.norm, config.param_dtype, name=name)


class Block(nn.Module):
    """h + attention(norm(h)), then h + mlp(norm(h)). The carry (h, cache) and the scanned layer index are nn.scan's signature."""

    config: BlockConfig
    depth: int  # of the stack; the branches' last products start smaller by sqrt(2 depth), so that their sum doesn't grow with it

    @nn.compact
    def __call__(
        self,
        carry: tuple[Float[Array, "B L D"], Cache | None],
        layer: Int[Array, ""],
        mask: Mask,
        query_table: Table | None,
        key_table: Table | None,
        segment_BL: Int[Array, "B L"] | None = None,
        gate_BL: Bool[Array, "B L"] | None = None,
    ) -> tuple[tuple[Float[Array, "B L D"], Cache | None], None]:
        cfg, (h_BLD, cache) = self.config, carry
        B, L, D = h_BLD.shape
        quiet = (2 * self.depth) ** -0.5
        dense = lambda name, features, x, gain=1.0: Dense(features, gain, cfg.param_dtype, cfg.lora, cfg.bias, name=name)(x, gate_BL)
        norm = lambda name: norm_layer(cfg, name)

        x_BLD = norm("attn_norm")(h_BLD)
        q_BLHK = dense("q", cfg.heads * cfg.head_width, x_BLD).reshape(B, L, cfg.heads, cfg.head_width)
        k_BLGK = dense("k", cfg.kv_heads * cfg.head_width, x_BLD).reshape(B, L, cfg.kv_heads, cfg.head_width)
        v_BLGK = dense("v", cfg.kv_heads * cfg.head_width, x_BLD).reshape(B, L, cfg.kv_heads, cfg.head_width)
        if cfg.qk_norm:
            q_BLHK, k_BLGK = norm("q_norm")(q_BLHK), norm("k_norm")(k_BLGK)
        if query_table is not None:
            q_BLHK, k_BLGK = rotate(q_BLHK, query_table), rotate(k_BLGK, key_table)
        if cache is None:
            mixed_BLHK = attention(q_BLHK, k_BLGK, v_BLGK, mask, segment_BL=segment_BL)
        else:
            repeats = cache.k.shape[3] // cfg.kv_heads  # `empty_cache`
            cache = cache.write(layer, *(jnp.repeat(x, repeats, 2) for x in (k_BLGK, v_BLGK)))
            mixed_BLHK = cached_attention(q_BLHK, cache, layer, mask)
        h_BLD = h_BLD + dense("o", D, mixed_BLHK.reshape(B, L, -1), quiet)

        x_BLD = norm("mlp_norm")(h_BLD)
        if cfg.experts:
            h_BLD = h_BLD + moe.SparseMLP(cfg.experts, cfg.experts_per_token, cfg.mlp, quiet, cfg.param_dtype, name="moe")(x_BLD)
        else:
            if cfg.mlp_form == "swiglu":
                x_BLF = nn.silu(dense("gate", cfg.mlp, x_BLD)) * dense("up", cfg.mlp, x_BLD)
            else:
                x_BLF = nn.gelu(dense("up", cfg.mlp, x_BLD), approximate=cfg.mlp_form == "gelu_tanh")
            h_BLD = h_BLD + dense("down", D, x_BLF, quiet)
        return (constrain(h_BLD), cache), None


class Stack(nn.Module):
    """Blocks in a row, scanned, their parameters stacked on a leading axis N: compile time doesn't grow with depth."""

    config: BlockConfig
    layers: int

    @nn.compact
    def __call__(
        self,
        h_BLD: Float[Array, "B L D"],
        mask: Mask,
        query_table: Table | None,
        key_table: Table | None,
        cache: Cache | None = None,
        segment_BL: Int[Array, "B L"] | None = None,
        gate_BL: Bool[Array, "B L"] | None = None,
    ) -> tuple[Float[Array, "B L D"], Cache | None]:
        """Returns (h, cache): the last block's output, and the cache with this call's keys and values written (None without one).

        Without tables nothing is turned: positions are then the caller's to embed.

        The cache is the scan's carry, the layer its scanned input: passed as scanned inputs and outputs it would be copied whole.
        """
        block = nn.remat(Block, prevent_cse=False) if self.config.remat and cache is None else Block
        scanned = nn.scan(
            block,
            variable_axes={"params": 0, "lora": 0},
            split_rngs={"params": True, "lora": True},
            length=self.layers,
            in_axes=(0, *[nn.broadcast] * 5),
            check_constancy_invariants=False,  # spares one of the two traces
        )
        layer = jnp.arange(self.layers, dtype=jnp.int32)
        # nn.scan drops keyword arguments, so all are positional.
        arguments = layer, mask, query_table, key_table, segment_BL, gate_BL
        carry, _ = scanned(self.config, self.layers, name="layers")((constrain(h_BLD), cache), *arguments)
        return carry


class Decoder(nn.Module):
    """Tokens in, logits of the same rows out, float32 or wider. Ids vocab and above may be read (masks, BOS), never written.

    tied       the head is the embedding, transposed (which then starts small, so that logits do)
    positions  > 0: so many learned embeddings of positions, added to the tokens', and no rotary
    """

    config: BlockConfig
    layers: int
    vocab: int
    extra: int  # ids that may be read only
    theta: float
    tied: bool = False
    positions: int = 0

    def setup(self):
        cfg = self.config
        start = nn.initializers.normal(cfg.width**-0.5 if self.tied else 1.0)
        self.embed = nn.Embed(self.vocab + self.extra, cfg.width, dtype=cfg.dtype, param_dtype=cfg.param_dtype, embedding_init=start)
        if self.positions:
            half = nn.initializers.normal(0.5 * cfg.width**-0.5 if self.tied else 0.5)
            self.position_embed = nn.Embed(self.positions, cfg.width, dtype=cfg.dtype, param_dtype=cfg.param_dtype, embedding_init=half)
        self.stack = Stack(cfg, self.layers)
        self.norm = norm_layer(cfg)
        if not self.tied:
            self.head = Dense(self.vocab, param_dtype=cfg.param_dtype)

    def __call__(
        self,
        cache: Cache | None,
        tokens_BQ: Int[Array, "B Q"],
        positions_BQ: Int[Array, "B Q"],
        mask: Mask,
        at_BW: Int[Array, "B W"] | None = None,
        segment_BQ: Int[Array, "B Q"] | None = None,
        gate_BQ: Bool[Array, "B Q"] | None = None,
    ) -> tuple[Float[Array, "B W V"], Cache | None]:
        """Returns (logits, cache). Rotary positions are given; the mask compares sequence indices, cache length + row.

        at       the rows whose logits are wanted; all by default. The head is most of a small model's pass
        segment  the document that each row belongs to, where a row holds several; without a cache only
        gate     rows that the adapter acts on, if there is one
        """
        h_BQD, cache = self.hidden(cache, tokens_BQ, positions_BQ, mask, segment_BQ, gate_BQ)
        if at_BW is not None:
            h_BQD = jnp.take_along_axis(h_BQD, at_BW[:, :, None], 1)
        return self.logits(h_BQD), cache

    def hidden(
        self,
        cache: Cache | None,
        tokens_BQ: Int[Array, "B Q"],
        positions_BQ: Int[Array, "B Q"],
        mask: Mask,
        segment_BQ: Int[Array, "B Q"] | None = None,
        gate_BQ: Bool[Array, "B Q"] | None = None,
    ) -> tuple[Float[Array, "B Q D"], Cache | None]:
        """Returns (the last block's output, cache): what `logits` takes."""
        if self.positions:
            # Rows behind a text's end may stand anywhere. They aren't read, but a NaN would be: nought times NaN.
            h_BQD, table = self.embed(tokens_BQ) + self.position_embed(jnp.minimum(positions_BQ, self.positions - 1)), None
        else:
            h_BQD, table = self.embed(tokens_BQ), rotary_table(positions_BQ[:, :, None], self.config.head_width, self.theta)
        return self.stack(h_BQD, mask, table, table, cache, segment_BQ, gate_BQ)

    def logits(self, h_BWD: Float[Array, "B W D"]) -> Float[Array, "B W V"]:
        """Returns the logits of any rows."""
        h_BWD = self.norm(h_BWD)
        logits_BWV = self.embed.attend(h_BWD)[:, :, : self.vocab] if self.tied else self.head(h_BWD)
        return logits_BWV.astype(jnp.promote_types(logits_BWV.dtype, jnp.float32))


def init(module: Decoder, key: jax.Array) -> dict[str, Any]:
    """Returns fresh variables {"params": ...} of a decoder without adapter."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    return jax.jit(lambda key: module.init(key, None, tokens, tokens, masks.causal))(key)


def bind(module: Decoder, variables: Any) -> tuple[Callable[..., Any], Callable[[int, int], Cache]]:
    """Returns (forward, empty_cache) of a decoder without adapter, as models/qwen3.py's Functions has them."""

    def forward(cache, tokens_BQ, positions_BQ, mask, at_BW=None, segment_BQ=None):
        return module.apply(variables, cache, tokens_BQ, positions_BQ, mask, at_BW, segment_BQ)

    def empty(batch, slots):
        return empty_cache(module.config, module.layers, batch, slots)

    return forward, empty

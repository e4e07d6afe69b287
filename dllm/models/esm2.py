"""ESM-2 (Lin et al. 2023), a masked language model of proteins, with or without a causal tail that verifies what it drafts.

With n_causal = 0 it is what the public checkpoints hold: ESM-2's, and those of DPLM (Wang et al. 2024, arXiv 2402.18567), masked diffusion
in the same shape. With n_causal > 0 it is the hybrid of models/hybrid.py on that backbone, which stays frozen (arXiv 2510.03929, section
5.3): train.init_from brings the weights of an esm2 without a tail in, and optim.train_only="^(join|causal|gain)" trains the rest.

A sequence is <cls>, residues, <eos>, each at its position; padding behind it. MASK is an id of the vocabulary. Embeddings aren't scaled by
the share of MASK tokens ("token dropout"), as in DPLM: a masked-diffusion model sees all shares.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dllm.core.types import UserError
from dllm.models import decoder, hybrid
from dllm.models.hybrid import Functions
from dllm.ops import masks
from dllm.ops.layers import Dense, LayerNorm, RMSNorm

# The head's inner product is square: its columns lie over no axis, as its norm wants whole rows.
RULES = ((r"head/dense/kernel$", ("fsdp", None)), *hybrid.RULES)


@dataclasses.dataclass(frozen=True)
class Config:
    """The backbone has `n_noncausal` layers; the causal tail's fields are those of hybrid.Config, and so is its form.

    `length` counts <cls> and <eos>, and padding. mask_id and pad_id are ids of the vocabulary, which has 33 tokens.
    """

    vocab: int = 33
    length: int = 1024
    width: int = 640
    n_noncausal: int = 30
    n_causal: int = 0
    heads: int = 20
    mlp: int = 2560
    causal_heads: int = 0
    causal_mlp: int = 0
    theta: float = 1e4
    eps: float = 1e-5
    residual: bool = True
    gain: float = 0.1
    pairing: str = "crossed"
    mask_id: int = 32
    pad_id: int = 1
    dtype: str = "float32"
    remat: bool = True


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": dict(length=64, width=64, n_noncausal=2, heads=4, mlp=256),
    "t6_8m": dict(width=320, n_noncausal=6, heads=20, mlp=1280),
    "t12_35m": dict(width=480, n_noncausal=12, heads=20, mlp=1920),
    "t30_150m": dict(width=640, n_noncausal=30, heads=20, mlp=2560),
    "t33_650m": dict(width=1280, n_noncausal=33, heads=20, mlp=5120),
}


class Head(nn.Module):
    """ESM-2's: a product, GELU, LayerNorm, then the embedding, transposed, and a bias."""

    width: int
    vocab: int
    eps: float

    @nn.compact
    def __call__(self, h: Float[Array, "B L D"], embedding_VD: Float[Array, "V D"]) -> Float[Array, "B L V"]:
        h = LayerNorm(self.eps, name="norm")(nn.gelu(Dense(self.width, bias=True, name="dense")(h), approximate=False))
        bias_V = self.param("bias", nn.initializers.zeros, (self.vocab,), jnp.float32)
        return h @ embedding_VD.T.astype(h.dtype) + bias_V[None, None].astype(h.dtype)


class Esm2(hybrid.Hybrid):
    """The hybrid with ESM-2 as its backbone, whose hidden states are those behind its last LayerNorm."""

    def setup(self):
        cfg = self.config
        self.mask = cfg.mask_id
        start = nn.initializers.normal(cfg.width**-0.5)  # it is the head's too
        self.embed = nn.Embed(cfg.vocab, cfg.width, dtype=cfg.dtype, embedding_init=start)
        self.stack = decoder.Stack(_block(cfg), cfg.n_noncausal)
        self.norm = LayerNorm(cfg.eps)
        self.head = Head(cfg.width, cfg.vocab, cfg.eps)
        self._setup_causal()
        if cfg.n_causal:
            self.join_read = RMSNorm()  # its embedding is of any size

    def _backbone(self, tokens_BL, table, segment_BL):
        return self.norm(self.stack(self.embed(tokens_BL), masks.full, table, table, None, segment_BL)[0])

    def _read(self, tokens):
        return self.join_read(self.embed(tokens))

    def _logits(self, h):
        logits = self.head(h, self.embed.embedding)
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def _block(config: Config) -> decoder.BlockConfig:
    return decoder.BlockConfig(
        width=config.width,
        heads=config.heads,
        kv_heads=config.heads,
        head_width=config.width // config.heads,
        mlp=config.mlp,
        dtype=config.dtype,
        remat=config.remat,
        qk_norm=False,
        eps=config.eps,
        norm="layer",
        mlp_form="gelu",
        bias=True,
    )


def build(config: Config) -> Esm2:
    """Returns the module. Raises UserError where the config makes no model."""
    hybrid.check(config)
    for key in ("mask_id", "pad_id"):
        if not 0 <= getattr(config, key) < config.vocab:
            raise UserError(f"model.{key} is {getattr(config, key)}; make it an id below model.vocab = {config.vocab}")
    _block(config)
    return Esm2(config)


def init(config: Config, key: jax.Array) -> dict[str, Any]:
    """Returns fresh variables {"params": ...}."""
    return hybrid.fresh(build(config), key)


def bind(config: Config, variables: Any) -> Functions:
    """Returns the model as plain functions, those of a hybrid. Call it inside the jitted function that uses them."""
    return hybrid.bound(build(config), variables)

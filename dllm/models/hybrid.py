"""The hybrid of self-speculative masked diffusion (Campbell et al. 2026, arXiv 2510.03929): one pass drafts, its causal tail verifies.

Everything runs in *rank order*: row d of every array is position order[d] of the text, the d-th to be revealed. Attention doesn't mind
the order of its rows as long as the rotary positions say where each one stands, so sigma costs no gathers.

    draft  row d:  sees the tokens of ranks < revealed (the rest are MASK) and predicts the token of rank d >= revealed
    target row d:  in addition reads the tokens of ranks < d, causally, and predicts the token of rank d

Row d of the causal tail is the paper's track d - 1: it stands at order[d - 1], whose token it reads, and looks at order[d], whose token it
predicts. Row 0 has nothing to read (it gets the MASK embedding) and its output means nothing: there the target is the draft by definition.

A row d < revealed of the non-causal part has seen its own token. Such rows feed the causal tail, but their outputs must not be used.

Sequences of several lengths are padded: padding is among the revealed ranks, and nobody reads it. Inside, its rows are moved behind the
text's, where causality hides them from the tail: a text computes what it would without padding.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dllm.core.types import UserError
from dllm.models import decoder
from dllm.models.cache import Cache
from dllm.ops import masks
from dllm.ops.layers import Dense, RMSNorm
from dllm.ops.rotary import rotary_table

RULES = ((r"join/kernel$", ("fsdp", "tensor")), (r"(^|/)gain$", ()), *decoder.RULES)


@dataclasses.dataclass(frozen=True)
class Config:
    """`n_noncausal` + `n_causal` layers; n_causal = 0 is a plain masked-diffusion model, without the causal part's parameters.

    residual  add the draft's hidden state to the causal output before the head (paper; False is its ablation)
    gain      where the learned factor on the causal output starts: small, so that the target starts as the draft; not 0, a saddle
    pairing   "crossed": queries turn by the position to be predicted, keys by where their token stands. "paired": both sides by the
              token's own position, so that no query ever sees its distance to a key's token, and the head learns nothing (ablation)
    causal_heads, causal_mlp  heads and MLP width of the causal layers; 0: those of the others
    pad_id  the id of padding; -1: there is none
    """

    vocab: int = 27
    length: int = 64
    width: int = 128
    n_noncausal: int = 5
    n_causal: int = 1
    heads: int = 4
    mlp: int = 384
    causal_heads: int = 0
    causal_mlp: int = 0
    theta: float = 1e4
    residual: bool = True
    gain: float = 0.1
    pairing: str = "crossed"
    dtype: str = "float32"
    remat: bool = True
    pad_id: int = -1


_PAPER = dict(length=256, width=768, heads=12, mlp=2048, dtype="bfloat16", remat=True)
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": dict(length=32, width=64, n_noncausal=2, n_causal=1, heads=2, mlp=192, remat=True),
    "mini": dict(length=64, width=128, n_noncausal=5, n_causal=1, heads=4, mlp=384, remat=True),
    "paper": dict(n_noncausal=11, n_causal=1, **_PAPER),
    "paper_10_2": dict(n_noncausal=10, n_causal=2, **_PAPER),
    "paper_no_residual": dict(n_noncausal=11, n_causal=1, residual=False, **_PAPER),
}


class Functions(NamedTuple):
    """What a bound model offers. Tokens are in rank order; those of ranks < revealed_B are read, the others are MASK to the draft.

    both(tokens_BL, order_BL, revealed_B) -> (draft_BLV, target_BLV or None)      training, one forward; all tokens must be real
    draft(tokens_BL, order_BL, revealed_B, window) -> (draft_BWV, hidden)         draft logits of ranks revealed..revealed + window - 1
    verify(hidden, tokens_BL, order_BL, start_B, window) -> target_BWV            target logits of ranks start..start + window - 1

    Where the model has a pad_id, revealed ranks may hold that: the row's padding, which isn't read.

    `window` is static. Rows beyond rank L - 1 hold anything, and so does the target of rank 0. verify reads tokens of ranks
    start - 1..start + window - 2; those of ranks < start - 1 it takes from `hidden`, so draft must have been given them.
    """

    both: Callable[..., Any]
    draft: Callable[..., Any]
    verify: Callable[..., Any]
    vocab: int
    length: int


class Padding(NamedTuple):
    """The ranks with those of the text first, in their order, and how many are padding."""

    rows_BL: Int[Array, "B L"]
    count_B: Int[Array, "B"]


class Hybrid(nn.Module):
    """See the module's head. Embedding, final norm and output head are one for draft and target.

    models/esm2.py puts another backbone in: `setup`, `_read`, `_backbone` and `_logits` are its to say.
    """

    config: Any

    def setup(self):
        cfg = self.config
        self.mask = cfg.vocab  # the id of MASK
        self.embed = nn.Embed(cfg.vocab + 1, cfg.width, dtype=cfg.dtype, embedding_init=nn.initializers.normal(1.0))
        self.stack = decoder.Stack(_block(cfg, cfg.heads, cfg.mlp), cfg.n_noncausal)
        self.norm = RMSNorm()
        self.head = Dense(cfg.vocab)
        self._setup_causal()

    def _setup_causal(self):
        cfg = self.config
        if cfg.n_causal:
            self.join_norm = RMSNorm()
            self.join = Dense(cfg.width)
            self.causal = decoder.Stack(_causal_block(cfg), cfg.n_causal)
            self.gain = self.param("gain", nn.initializers.constant(cfg.gain), (cfg.width,), jnp.float32)

    def both(
        self, tokens_BL: Int[Array, "B L"], order_BL: Int[Array, "B L"], revealed_B: Int[Array, "B"]
    ) -> tuple[Float[Array, "B L V"], Float[Array, "B L V"] | None]:
        """Returns (draft logits, target logits) of all ranks, the target given the real tokens of all earlier ranks."""
        padding = self._padding(tokens_BL, revealed_B)
        tokens_BL, order_BL, revealed_B = _text_first(padding, tokens_BL, order_BL, revealed_B)
        h_BLD = self._noncausal(tokens_BL, order_BL, revealed_B, padding)
        back = lambda logits_BLV: logits_BLV if padding is None else _rows(logits_BLV, jnp.argsort(padding.rows_BL))
        if not self.config.n_causal:
            return back(self._logits(h_BLD)), None
        causal_BLD, _ = self._causal_all(h_BLD, tokens_BL, order_BL, None)
        return back(self._logits(h_BLD)), back(self._target(causal_BLD, h_BLD))

    def draft(
        self, tokens_BL: Int[Array, "B L"], order_BL: Int[Array, "B L"], revealed_B: Int[Array, "B"], window: int
    ) -> tuple[Float[Array, "B W V"], tuple[Float[Array, "B L D"], Cache | None, Padding | None]]:
        """Returns (draft logits of ranks [revealed, revealed + window), hidden).

        hidden: the hidden states, the causal tail's keys and values of every row, and where the padding is. The rest of the tail's last
        layer feeds nothing here, and XLA drops it.
        """
        padding = self._padding(tokens_BL, revealed_B)
        tokens_BL, order_BL, revealed_B = _text_first(padding, tokens_BL, order_BL, revealed_B)
        h_BLD, cache = self._noncausal(tokens_BL, order_BL, revealed_B, padding), None
        if self.config.n_causal:
            block, (B, L) = _causal_block(self.config), tokens_BL.shape
            empty = decoder.empty_cache(block, self.config.n_causal, B, L)
            _, cache = self._causal_all(h_BLD, tokens_BL, order_BL, empty)
        return self._logits(_rows(h_BLD, _ranks(revealed_B, window))), (h_BLD, cache, padding)

    def verify(
        self,
        hidden: tuple[Float[Array, "B L D"], Cache | None, Padding | None],
        tokens_BL: Int[Array, "B L"],
        order_BL: Int[Array, "B L"],
        start_B: Int[Array, "B"],
        window: int,
    ) -> Float[Array, "B W V"]:
        """Returns the target logits of ranks [start, start + window), equal to those rows of `both`'s. Only these rows are computed."""
        h_BLD, cache, padding = hidden
        if cache is None:
            raise UserError("the model has n_causal=0, so nothing in it can verify; sample it with ancestral or confidence")
        tokens_BL, order_BL, start_B = _text_first(padding, tokens_BL, order_BL, start_B)
        rank_BW = _ranks(start_B, window)
        first_BW, h_next_BWD = rank_BW == 0, _rows(h_BLD, rank_BW)
        causal_BWD, _ = self._causal(
            jnp.where(first_BW[:, :, None], 0, _rows(h_BLD, rank_BW - 1)),
            h_next_BWD,
            jnp.where(first_BW, self.mask, _rows(tokens_BL, rank_BW - 1)),
            _rows(order_BL, rank_BW - 1),
            _rows(order_BL, rank_BW),
            cache.replace(lengths_B=start_B),
        )
        return self._target(causal_BWD, h_next_BWD)

    def _padding(self, tokens_BL, revealed_B):
        if self.config.pad_id < 0:
            return None
        padding_BL = (tokens_BL == self.config.pad_id) & (jnp.arange(tokens_BL.shape[1])[None] < revealed_B[:, None])
        return Padding(jnp.argsort(padding_BL, stable=True), padding_BL.sum(1, dtype=jnp.int32))

    def _noncausal(self, tokens_BL, order_BL, revealed_B, padding):
        """Returns the hidden states of rows with the text first."""
        cfg, (_, L) = self.config, tokens_BL.shape
        text_BL = None if padding is None else (jnp.arange(L)[None] < L - padding.count_B[:, None]).astype(jnp.int32)
        seen_BL = jnp.arange(L)[None] < revealed_B[:, None]
        table = rotary_table(order_BL[:, :, None], cfg.width // cfg.heads, cfg.theta)
        return self._backbone(jnp.where(seen_BL, tokens_BL, self.mask), table, text_BL)

    def _backbone(self, tokens_BL, table, segment_BL):
        return self.stack(self.embed(tokens_BL), masks.full, table, table, None, segment_BL)[0]

    def _read(self, tokens):
        """Returns the embedding that the causal tail reads a token by."""
        return self.embed(tokens)

    def _causal_all(self, h_BLD, tokens_BL, order_BL, cache):
        """Row d reads what stands one rank earlier: the inputs shifted by one, with nothing known before rank 0."""

        def shift(x, first):
            return jnp.concatenate([first, x[:, :-1]], 1)

        h_current_BLD = shift(h_BLD, jnp.zeros_like(h_BLD[:, :1]))
        read_BL = shift(tokens_BL, jnp.full_like(tokens_BL[:, :1], self.mask))
        current_BL = shift(order_BL, order_BL[:, :1])
        return self._causal(h_current_BLD, h_BLD, read_BL, current_BL, order_BL, cache)

    def _causal(self, h_current, h_next, tokens, current, next_, cache):
        """Returns (causal output, cache) for rows given by the token read, the two hidden states and the two positions."""
        cfg = self.config
        parts = [self.join_norm(h_current), self.join_norm(h_next), self._read(tokens)]  # normed: all three at the embedding's scale
        both_next, current_next = jnp.stack([next_, next_], -1), jnp.stack([current, next_], -1)
        width = _causal_block(cfg).head_width
        key_table = rotary_table(current_next, width, cfg.theta)
        query_table = rotary_table(both_next, width, cfg.theta) if cfg.pairing == "crossed" else key_table
        return self.causal(self.join(jnp.concatenate(parts, -1)), masks.causal, query_table, key_table, cache)

    def _target(self, causal, h_next):
        causal = causal * self.gain.astype(causal.dtype)[None, None]
        return self._logits(causal + h_next if self.config.residual else causal)

    def _logits(self, h):
        logits = self.head(self.norm(h))
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def _ranks(start_B: Int[Array, "B"], window: int) -> Int[Array, "B W"]:
    return start_B[:, None] + jnp.arange(window, dtype=jnp.int32)[None]


def _rows(x: Array, rank_BW: Int[Array, "B W"]) -> Array:
    """Returns x[b, rank]; a rank outside gives the nearest row."""
    at_BW = jnp.clip(rank_BW, 0, x.shape[1] - 1)
    return jnp.take_along_axis(x, at_BW.reshape(*at_BW.shape, *(1,) * (x.ndim - 2)), axis=1)


def _text_first(
    padding: Padding | None, tokens_BL: Int[Array, "B L"], order_BL: Int[Array, "B L"], rank_B: Int[Array, "B"]
) -> tuple[Int[Array, "B L"], Int[Array, "B L"], Int[Array, "B"]]:
    """Returns tokens and order with the padding behind the text, and the row of a rank that isn't before the padding."""
    if padding is None:
        return tokens_BL, order_BL, rank_B
    return _rows(tokens_BL, padding.rows_BL), _rows(order_BL, padding.rows_BL), rank_B - padding.count_B


def _causal_block(config: Any) -> decoder.BlockConfig:
    return _block(config, config.causal_heads or config.heads, config.causal_mlp or config.mlp)


def _block(config: Any, heads: int, mlp: int) -> decoder.BlockConfig:
    return decoder.BlockConfig(
        width=config.width,
        heads=heads,
        kv_heads=heads,
        head_width=config.width // heads,
        mlp=mlp,
        dtype=config.dtype,
        remat=config.remat,
    )


def build(config: Config) -> Hybrid:
    """Returns the module. Raises UserError where the config makes no model."""
    check(config)
    if not -1 <= config.pad_id < config.vocab:
        raise UserError(f"model.pad_id is {config.pad_id}; make it an id below model.vocab = {config.vocab}, or -1 for none")
    _block(config, config.heads, config.mlp)
    return Hybrid(config)


def check(config: Any) -> None:
    """Returns None if the config's layers can be. Raises UserError otherwise."""
    for key, heads in (("heads", config.heads), ("causal_heads", config.causal_heads or config.heads)):
        if heads < 1 or config.width % (4 * heads):
            raise UserError(f"model.width is {config.width}; it must be a multiple of 4 x {key} = {4 * heads}, for two rotary groups")
    if config.pairing not in ("crossed", "paired"):
        raise UserError(f"model.pairing is {config.pairing!r}; it can be 'crossed' or 'paired'")
    if config.n_noncausal < 1 or config.n_causal < 0:
        raise UserError(f"model has n_noncausal={config.n_noncausal}, n_causal={config.n_causal}; at least 1 and 0 are needed")
    _causal_block(config)


def init(config: Config, key: jax.Array) -> dict[str, Any]:
    """Returns fresh variables {"params": ...}."""
    return fresh(build(config), key)


def bind(config: Config, variables: Any) -> Functions:
    """Returns the model as plain functions. Call it inside the jitted function that uses them."""
    return bound(build(config), variables)


def fresh(module: Hybrid, key: jax.Array) -> dict[str, Any]:
    """Returns fresh variables {"params": ...} of a hybrid of any backbone."""
    row = jnp.zeros((1, module.config.length), jnp.int32)
    return jax.jit(lambda key: module.init(key, row, row, row[:, 0], method="both"))(key)


def bound(module: Hybrid, variables: Any) -> Functions:
    """Returns a hybrid of any backbone as plain functions."""
    methods = (functools.partial(module.apply, variables, method=name) for name in ("both", "draft", "verify"))
    return Functions(*methods, module.config.vocab, module.config.length)

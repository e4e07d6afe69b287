"""The objective of block diffusion: the masked tokens' cross-entropy, each block noised at a rate of its own and read on clean ones.

    loss = 1/n sum over blocks b  E_t 1/t sum_{l in b masked} -log p(x_l | noisy block, clean blocks before it),   t ~ U[low, high]

(BD3-LM, arXiv 2503.09573, eq. 8, with alpha_t = 1 - t.) With t ~ U[0, 1] it is a bound of -log p(x) a token; on another interval it is a
loss to train with, of less variance, and no bound. A block of one token with t = 1 gives -log p(x) itself, of the autoregressive model that
reads its predictions at MASK rows; a block as long as the sequence gives masked diffusion with full attention (LLaDA).

n counts the trained tokens of the batch, and is the metric `tokens`. So a document weighs the same whatever row it is packed in, and the
gradient of a batch is that of its micro-batches, weighted by their `tokens`. `parts` makes those, with the noise of the whole batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dllm.core.types import UserError
from dllm.ops import masks

MODEL = "block"  # what it goes with, as samplers.loop.kind says it
LOWEST = 1e-3  # t of an interval that means [0, 1]: a weight of 1/t stays below 1000
TRIES = 10  # draws of a row's noise in the released code, for one that masks something


@dataclasses.dataclass(frozen=True)
class Config:
    """How the noise is drawn and weighed.

    low, high      t, the chance that a token is masked, is uniform between them: one draw a block, stratified over all blocks of the batch.
                   The defaults give the bound; 1, 1 masks every token
    weight         of a masked token: "time", 1/t; or "realised", 1 over the share of its block's trained tokens that came out masked
                   (SDAR-VL, arXiv 2512.14068), of less variance; on [0, 1] its mean is b/(b+1) of the other's in a block of b tokens
    complementary  every block is trained twice, with a mask and with its complement (Fast-dLLM v2, arXiv 2509.26328). low + high must be 1
    sdar_public    the noise of SDAR's released training code: one t for all blocks of a document, at most TRIES draws for a row that masks
                   something, then one token by force; weights 1/t
    parts          micro-batches that the rows are forwarded in, one after the other, each computed again in the backward pass: memory for
                   time. It changes neither noise nor gradient
    """

    low: float = LOWEST
    high: float = 1.0
    weight: Literal["time", "realised"] = "time"
    complementary: bool = False
    sdar_public: bool = False
    parts: int = 1

    def __post_init__(self):
        if not 0 < self.low <= self.high <= 1:
            raise UserError(f"objective.low and high are {self.low} and {self.high}; make them 0 < low <= high <= 1")
        if self.complementary and not (abs(self.low + self.high - 1) < 1e-6 and self.high < 1):
            raise UserError(f"objective.complementary masks at t and 1 - t, so low + high must be 1, not {self.low} + {self.high}")
        own = (self.low, self.high, self.weight, self.complementary)
        if self.sdar_public and own != (LOWEST, 1.0, "time", False):
            raise UserError(f"objective.sdar_public settles low={LOWEST}, high=1.0, weight=time and complementary=False; leave them so")
        if self.parts < 1:
            raise UserError(f"objective.parts is {self.parts}; make it 1 or more")


class Noise(NamedTuple):
    """What of a batch is masked, and what a masked token weighs in the loss; 0 elsewhere."""

    masked_BL: Any
    weight_BL: Any


def loss(
    functions: Any,
    tokens_BL: Int[Array, "B L"],
    key: jax.Array,
    config: Config,
    *,
    segment_BL: Int[Array, "B L"] | None = None,
    trained_BL: Bool[Array, "B L"] | None = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Returns (loss in nats a trained token, metrics); see the module's head for the normaliser.

    `segment` numbers the documents of packed rows from 1, each starting at a multiple of the block; 0 is the rows' padding. `trained`: the
    tokens that may be masked; others, such as a prompt, are read. All are trained by default, but the padding.

    Metrics: `loss`; `ce`, nats a masked token, unweighted; `masked`, the share of the trained tokens; `tokens`, how many these are.
    Raises UserError on a model without a MASK id, and where the batch can't be shared out over `parts`.
    """
    if functions.mask_id < 0:
        raise UserError(
            "the objective block_diffusion needs a model with a MASK token; set model.mask_id, or use objective.name=next_token"
        )
    if trained_BL is None:
        trained_BL = jnp.ones_like(tokens_BL, bool) if segment_BL is None else segment_BL > 0
    masked_BL, weight_BL = corrupt(key, trained_BL, functions.block, config, segment_BL)
    copies = len(masked_BL) // len(tokens_BL)
    twice = lambda x_BL: None if x_BL is None else jnp.concatenate([x_BL] * copies)
    hidden_BL = masked_BL if config.sdar_public else masked_BL | twice(unknown(trained_BL, functions.block))
    batch = (twice(tokens_BL), jnp.where(hidden_BL, functions.mask_id, twice(tokens_BL)), masked_BL, weight_BL, twice(segment_BL))

    def sums(part: tuple[Array | None, ...]) -> tuple[Array, Array]:
        tokens_BL, noisy_BL, masked_BL, weight_BL, segment_BL = part
        nats_BL = denoising_nats(functions, tokens_BL, noisy_BL, segment_BL)
        total = lambda weight_BL: jnp.sum(jnp.where(masked_BL, weight_BL * nats_BL, 0.0))
        return total(weight_BL), total(jnp.ones_like(weight_BL))

    weighted, plain = sums(batch) if config.parts == 1 else _in_parts(sums, batch, config.parts)
    tokens, masked = jnp.sum(trained_BL, dtype=weighted.dtype), jnp.sum(masked_BL, dtype=weighted.dtype)
    total = weighted / jnp.maximum(copies * tokens, 1)
    metrics = {"ce": plain / jnp.maximum(masked, 1), "masked": masked / jnp.maximum(copies * tokens, 1), "tokens": tokens}
    return total, {"loss": total, **metrics}


def denoising_nats(
    functions: Any, tokens_BL: Int[Array, "B L"], noisy_BL: Int[Array, "B L"], segment_BL: Int[Array, "B L"] | None = None
) -> Float[Array, "B L"]:
    """Returns -log p(token l | the noisy block that l lies in, the clean blocks before it), in nats, at every l: one forward.

    The rows are [clean ; noisy]; logits are taken at noisy ones, and MASK is never predicted. A single block needs no clean rows.
    """
    B, L = tokens_BL.shape
    positions_BL = document_positions(tokens_BL, segment_BL)
    if functions.block >= L:
        logits_BLV, _ = functions.forward(None, noisy_BL, positions_BL, masks.full, None, segment_BL)
    else:
        both = lambda a_BL, b_BL: jnp.concatenate([a_BL, b_BL], 1)
        at_BL = jnp.broadcast_to(L + jnp.arange(L, dtype=jnp.int32)[None], (B, L))
        segment_BR = None if segment_BL is None else both(segment_BL, segment_BL)
        mask = masks.CleanNoisy(functions.block, L)
        logits_BLV, _ = functions.forward(None, both(tokens_BL, noisy_BL), both(positions_BL, positions_BL), mask, at_BL, segment_BR)
    is_mask_V = jnp.arange(logits_BLV.shape[-1]) == functions.mask_id
    logits_BLV = jnp.where(is_mask_V[None, None], -jnp.inf, logits_BLV)
    # By logsumexp, not log_softmax: 3 arrays of the logits' size in the backward pass instead of 5 (XLA:CPU), and a quarter faster.
    return jax.nn.logsumexp(logits_BLV, -1) - jnp.take_along_axis(logits_BLV, tokens_BL[:, :, None], -1)[:, :, 0]


def corrupt(
    key: jax.Array, trained_BL: Bool[Array, "B L"], block: int, config: Config, segment_BL: Int[Array, "B L"] | None = None
) -> Noise:
    """Returns the Noise of a batch: trained tokens only, each masked with its block's t, weighed by `config.weight`.

    With `config.complementary` it has 2 B rows, the second half masked where the first is not.
    """
    B, L = trained_BL.shape
    if config.sdar_public:
        return _sdar_public(key, trained_BL, segment_BL)
    rate_key, mask_key = jax.random.split(key)
    rate_BL = jnp.repeat(stratified(rate_key, (B, -(-L // block)), config.low, config.high), block, axis=1)[:, :L]
    masked_BL = trained_BL & (jax.random.uniform(mask_key, (B, L)) < rate_BL)
    if config.complementary:
        masked_BL, rate_BL = jnp.concatenate([masked_BL, trained_BL & ~masked_BL]), jnp.concatenate([rate_BL, 1.0 - rate_BL])
        trained_BL = jnp.concatenate([trained_BL, trained_BL])
    if config.weight == "realised":
        count = lambda x_BL: by_block(x_BL, block, lambda x, axis: jnp.sum(x, axis, keepdims=True))
        rate_BL = count(masked_BL) / jnp.maximum(count(trained_BL), 1)
    return Noise(masked_BL, _inverse(rate_BL, masked_BL))


def stratified(key: jax.Array, shape: tuple[int, int], low: float | Array, high: float | Array) -> Float[Array, "B N"]:
    """Returns uniform draws from [low, high]: one in each of B x N equal strata, which fall to the places at random.

    (BD3-LM deals the strata out in order, so that in a batch of one row the last block is always the noisiest.)
    """
    place_key, jitter_key = jax.random.split(key)
    count = shape[0] * shape[1]
    unit = (jax.random.permutation(place_key, count) + jax.random.uniform(jitter_key, (count,))) / count
    return (low + (high - low) * unit).reshape(shape)


def unknown(trained_BL: Bool[Array, "B L"], block: int) -> Bool[Array, "B L"]:
    """Returns which untrained tokens follow a trained one of their block: untrained padding behind the end of a document.

    A decoder that fills the block has MASK there. Shown the padding, the model would read off where the text ends.

    trained  . x x . | . . . .        a prompt of one token, padding at the block's end; untrained blocks
    unknown  . . . x | . . . .
    """
    return ~trained_BL & (by_block(trained_BL, block, jnp.cumsum) > 0)


def document_positions(tokens_BL: Int[Array, "B L"], segment_BL: Int[Array, "B L"] | None = None) -> Int[Array, "B L"]:
    """Returns rotary positions, from 0 at the start of every document; whole rows are documents without `segment`."""
    index_BL = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1], dtype=jnp.int32)[None], tokens_BL.shape)
    return index_BL if segment_BL is None else index_BL - _starts(segment_BL)


def _starts(segment_BL: Int[Array, "B L"]) -> Int[Array, "B L"]:
    """Returns the index at which each token's document starts."""
    index_1L = jnp.arange(segment_BL.shape[1], dtype=jnp.int32)[None]
    new_BL = jnp.concatenate([jnp.ones_like(segment_BL[:, :1], bool), segment_BL[:, 1:] != segment_BL[:, :-1]], 1)
    return lax.cummax(jnp.where(new_BL, index_1L, 0), axis=1)


def by_block(x_BL: Array, block: int, along: Any) -> Array:
    """Returns `along(x, axis)` applied within each block, as int32 in x's shape; the last block may be shorter."""
    B, L = x_BL.shape
    x_BNK = jnp.pad(x_BL.astype(jnp.int32), ((0, 0), (0, -L % block))).reshape(B, -1, block)
    return jnp.broadcast_to(along(x_BNK, axis=2), x_BNK.shape).reshape(B, -1)[:, :L]


def _inverse(rate_BL: Array, masked_BL: Array) -> Array:
    return jnp.where(masked_BL, 1.0 / jnp.where(masked_BL, rate_BL, 1.0), 0.0)


def _sdar_public(key: jax.Array, trained_BL: Array, segment_BL: Array | None) -> Noise:
    """Returns Noise as `forward_add_noise_packed` of the released modeling_sdar.py draws it: a row's documents are drawn again together."""
    starts_BL = jnp.zeros_like(trained_BL, jnp.int32) if segment_BL is None else _starts(segment_BL)

    def draw(number: Array, noise: tuple[Array, Array]) -> tuple[Array, Array]:
        rate_key, mask_key = jax.random.split(jax.random.fold_in(key, number))
        unit_BL = jnp.take_along_axis(jax.random.uniform(rate_key, trained_BL.shape), starts_BL, 1)  # one a document
        rate_BL = (1 - LOWEST) * unit_BL + LOWEST
        masked_BL = trained_BL & (jax.random.uniform(mask_key, trained_BL.shape) < rate_BL)
        done_B1 = jnp.any(noise[0], 1, keepdims=True)
        return jnp.where(done_B1, noise[0], masked_BL), jnp.where(done_B1, noise[1], rate_BL)

    first = draw(jnp.int32(0), (jnp.zeros_like(trained_BL), jnp.zeros(trained_BL.shape)))
    masked_BL, rate_BL = lax.fori_loop(1, TRIES, draw, first)
    noise_BL = jax.random.uniform(jax.random.fold_in(key, TRIES), trained_BL.shape)
    forced_B1 = jnp.argmax(jnp.where(trained_BL, noise_BL, -1.0), 1)[:, None]
    is_forced_BL = trained_BL & (jnp.arange(trained_BL.shape[1])[None] == forced_B1)
    masked_BL = jnp.where(jnp.any(masked_BL, 1, keepdims=True), masked_BL, is_forced_BL)
    return Noise(masked_BL, _inverse(rate_BL, masked_BL))


def _in_parts(sums: Any, batch: tuple[Array | None, ...], parts: int) -> tuple[Array, Array]:
    """Returns the sums over all rows, every `parts`-th row in one part, so that a part has rows of every device."""
    if len(batch[0]) % parts:
        raise UserError(f"the batch of {len(batch[0])} rows can't be shared out over objective.parts={parts}; make it a multiple")
    split = jax.tree.map(lambda x_BL: x_BL.reshape(-1, parts, x_BL.shape[1]).swapaxes(0, 1), batch)
    return jax.tree.map(jnp.sum, lax.map(jax.checkpoint(sums), split))

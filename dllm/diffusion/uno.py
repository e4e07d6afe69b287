r"""The objective of a drafter: the adapter's rows, which read noise, learn what the frozen rows beside them predict (arXiv 2609.04010).

One forward over [clean ; noisy] gives both. A clean row reads a text's tokens up to its own, as the frozen model does, and predicts the
next: the *target*. The noisy row at the same place reads the clean tokens of earlier blocks, and of its own block noise where tokens
aren't known yet, and predicts that same next token: the *draft*. (The paper writes the halves the other way round.) A document of six
tokens a..f in blocks of 3, and what each noisy row reads; z is noise:

    row       0    1    2    |  3      4      5
    reads     a    a z  a zz |  abc z  abc zz abc zzz
    predicts  -    c    d    |  e      f      -

So the rows of a block are the noise rows of one draft pass: the text before it in the cache, its last token as the seed, in a row of the
frozen model, and `block` noise rows behind that: the pass of L = block + 1 rows. The seed's row predicts the clean token, for which the
first noise row stands; that row predicts the token behind it, and is the draft of depth 1. A pass of fewer rows uses the first L - 1.

What is known when a draft begins stays as it is in the noisy half, in rows of the frozen model: untrained tokens (a prompt), and the first
row of a document. So behind a prompt, and in block 0, there is a draft pass too, of the noise rows that are left, and no row reads noise
alone. (In the released code a prompt's rows in the noisy half have the adapter, and without a prompt block 0 drafts from nothing.)

With the laws q of a draft row and p of the target row beside it, both softmaxes at temperature 1, and n drafts that are scored in a batch:

    tv    1/n sum  sum_v |q(v) - p(v)|             2 TV; the chance that a draft is accepted is 1 - TV (arXiv 2211.17192, corollary 3.6)
    kl    1/n sum  sum_v q(v) log(q(v) / p(v))     reverse, KL(draft || target): with tv the paper's eq. 3
    ce    1/n sum  -log q(y)                       y = argmax p, or the text's token: the released code's third term

A draft counts only if all before it are accepted. Let S_i be the product of min(1, q_j(x_j) / p_j(x_j)) over the drafts j <= i of a block,
x being the text. If it is a sample of the target, the number A of drafts that a pass has accepted has the mean

    E[A] = sum_i sum_(x_1..x_i) prod_(j <= i) min(q_j(x_j), p_j(x_j)) = E_x sum_i S_(i-1) (1 - TV_i)

and `tv` may become

    prefix   1/n sum  S_(i-1) sum_v |q - p|, S without a gradient: the weight of being reached. It leaves out what a draft does for those
             behind it, so it isn't the gradient of E[A]
    length   -1/n sum  S_(i-1) (1 - TV_i), S with its gradient: that is an unbiased estimate of the gradient of -E[A]

n is the metric `tokens`. So a document weighs the same whatever row it is packed in, and the gradient of a batch is that of its
micro-batches, weighted by their `tokens`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dllm.core.types import UserError
from dllm.diffusion.block_diffusion import document_positions
from dllm.ops import masks

MODEL = "uno"  # what it goes with, as samplers.loop.kind says it


@dataclasses.dataclass(frozen=True)
class Config:
    """Weights of the terms, and

    ce_target  the token y of ce: the target's likeliest ("teacher"), or the text's own ("data")
    survival   how `tv` weighs a draft by what is before it in its block: "none", "prefix" or "length"
    blocks     a curriculum: "2,4,8" trains blocks of 2, of 4, and, the model's own, of 8, for equal shares of the steps; "": that alone
    chunk      columns of the batch whose logits are made at a time, and again in the backward pass; 0: all at once. Chunks of columns,
               not of the vocabulary: a row's softmax stays whole, and what is kept of a row is a few numbers
    """

    tv: float = 1.0
    kl: float = 0.0
    ce: float = 0.0
    ce_target: Literal["teacher", "data"] = "teacher"
    survival: Literal["none", "prefix", "length"] = "none"
    blocks: str = ""
    chunk: int = 64

    def __post_init__(self):
        weights = (self.tv, self.kl, self.ce)
        if not all(math.isfinite(w) and w >= 0 for w in weights) or not any(weights):
            raise UserError(f"objective.tv, kl and ce are the weights {self.tv}, {self.kl} and {self.ce}; make them 0 or more, not all 0")
        if self.survival != "none" and not self.tv:
            raise UserError(f"objective.survival={self.survival} weighs the term tv, and objective.tv is 0; make it more, or survival=none")
        if self.chunk < 0:
            raise UserError(f"objective.chunk is {self.chunk}; make it 0 or more")
        if self.blocks and not all(block.strip().isdecimal() and int(block) for block in self.blocks.split(",")):
            raise UserError(f"objective.blocks is {self.blocks!r}; write lengths with commas between them, such as 2,4,8")


def stages(config: Config, block: int, steps: int) -> tuple[tuple[int, int], ...]:
    """Returns (updates done where it begins, block) of each stage of a training of `steps` updates of a model of `block`.

    Raises UserError unless the last stage is of the model's block.
    """
    blocks = [int(b) for b in config.blocks.split(",")] if config.blocks else [block]
    if blocks[-1] != block:
        raise UserError(f"objective.blocks={config.blocks} ends with {blocks[-1]}, and model.block is {block}; make them equal")
    return tuple((i * steps // len(blocks), b) for i, b in enumerate(blocks))


class Layout(NamedTuple):
    """What the rows of each half are; R is L, rounded up to whole blocks with rows that nobody reads."""

    held_BR: Any  # the token that a row stands for
    next_BR: Any  # the token that it predicts
    position_BR: Any  # rotary
    segment_BR: Any  # None without documents
    noise_BR: Any  # bool, its token isn't known in the noisy half: it holds noise, and the gate is open
    scored_BR: Any  # bool, it is a draft, and what it predicts is trained
    first_BR: Any  # where the row's block begins, or its document if that is later
    depth_BR: Any  # of a draft in its block, from 1


def loss(
    functions: Any,
    tokens_BL: Int[Array, "B L"],
    key: jax.Array,
    config: Config,
    *,
    segment_BL: Int[Array, "B L"] | None = None,
    trained_BL: Bool[Array, "B L"] | None = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Returns (loss, metrics); see the module's head.

    `segment` numbers the documents of packed rows from 1; 0 is the rows' padding. `trained`: the tokens that may be unknown and are
    predicted; others, such as a prompt, are read. All are trained by default, but the padding.

    Metrics, whatever the weights: `tv`, `kl`, `ce_teacher` and `ce_data`, the terms above without survival; `accept_1`, `accept_2`,
    `accept_4`, .. and that of the block's last, the mean of 1 - TV over the drafts of that depth; `accepted`, the estimate of E[A] for a
    pass that drafts a whole block (each depth's mean is over the blocks that have it); `tokens`, the scored drafts.
    """
    rows = layout(tokens_BL, functions.block, functions.lead, functions.vocab, segment_BL, trained_BL)
    ids_BR = jax.random.randint(key, rows.held_BR.shape, 0, functions.noise_range, jnp.int32)
    noisy_BR = jnp.where(rows.noise_BR, functions.make_noise(ids_BR), rows.held_BR)
    draft_BRD, target_BRD = both_halves(functions, rows, noisy_BR)
    terms = compare(functions.logits, draft_BRD, target_BRD, rows.next_BR, config)

    count = jnp.sum(rows.scored_BR, dtype=terms.tv_BR.dtype)
    mean = lambda x_BR: jnp.sum(jnp.where(rows.scored_BR, x_BR, 0)) / jnp.maximum(count, 1)
    reached_BR = jnp.exp(before(jnp.where(rows.scored_BR, terms.ratio_BR, 0), rows.first_BR, functions.block))  # S_(i-1)
    accept_BR = 1 - terms.tv_BR / 2
    if config.survival == "none":
        tv = mean(terms.tv_BR)
    elif config.survival == "prefix":
        tv = mean(lax.stop_gradient(reached_BR) * terms.tv_BR)
    else:
        tv = -mean(reached_BR * accept_BR)
    ce = terms.ce_teacher_BR if config.ce_target == "teacher" else terms.ce_data_BR
    weighted = ((config.tv, tv), (config.kl, mean(terms.kl_BR)), (config.ce, mean(ce)))
    total = sum(weight * term for weight, term in weighted if weight)

    deep_BRJ = rows.scored_BR[:, :, None] & (rows.depth_BR[:, :, None] == jnp.arange(1, functions.block + 1)[None, None])
    by_depth = lambda x_BR: jnp.sum(jnp.where(deep_BRJ, x_BR[:, :, None], 0), (0, 1)) / jnp.maximum(jnp.sum(deep_BRJ, (0, 1)), 1)
    accept_J, accepted = by_depth(accept_BR), jnp.sum(by_depth(reached_BR * accept_BR))
    depths = sorted({functions.block, *(2**i for i in range(functions.block.bit_length()))})
    metrics = {name.removesuffix("_BR"): mean(x_BR) for name, x_BR in terms._asdict().items() if name != "ratio_BR"}
    metrics |= {f"accept_{depth}": accept_J[depth - 1] for depth in depths}
    return total, {"loss": total, **metrics, "accepted": accepted, "tokens": count}


def layout(
    tokens_BL: Int[Array, "B L"],
    block: int,
    lead: int,
    begin: int,
    segment_BL: Int[Array, "B L"] | None = None,
    trained_BL: Bool[Array, "B L"] | None = None,
) -> Layout:
    """Returns the Layout of a batch. With `lead` = 1 a document's first row holds the id `begin`, and row i predicts its token i."""
    whole_BL = jnp.ones_like(tokens_BL) if segment_BL is None else segment_BL
    trained_BL = whole_BL > 0 if trained_BL is None else trained_BL & (whole_BL > 0)
    position_BL = document_positions(tokens_BL, segment_BL)
    opens_BL, index_BL = position_BL == 0, document_positions(tokens_BL)
    if lead:
        earlier = lambda x_BL: jnp.roll(x_BL, 1, 1)
        held_BL, next_BL = jnp.where(opens_BL, begin, earlier(tokens_BL)), tokens_BL
        noise_BL, predicts_BL = ~opens_BL & earlier(trained_BL), trained_BL
    else:
        later = lambda x_BL: jnp.roll(x_BL, -1, 1)
        held_BL, next_BL = tokens_BL, later(tokens_BL)
        noise_BL, predicts_BL = ~opens_BL & trained_BL, later(trained_BL & ~opens_BL)

    pad = lambda x_BL: jnp.pad(x_BL, ((0, 0), (0, -x_BL.shape[1] % block)))
    index_BR, noise_BR = document_positions(pad(tokens_BL)), pad(noise_BL)
    first_BR = jnp.maximum(index_BR // block * block, pad(index_BL - position_BL))
    depth_BR = 1 + before(noise_BR.astype(jnp.int32), first_BR, block)
    # Rows behind a prompt that noise goes before in the same block (a chat's next turn) have read what no draft pass reads.
    late_BR = before((~noise_BR & (depth_BR > 1)).astype(jnp.int32), first_BR, block) > 0
    scored_BR = noise_BR & pad(predicts_BL) & ~late_BR
    segment_BR = None if segment_BL is None else pad(segment_BL)
    position_BR = index_BR if segment_BL is None else pad(position_BL)
    return Layout(pad(held_BL), pad(next_BL), position_BR, segment_BR, noise_BR, scored_BR, first_BR, depth_BR)


def both_halves(functions: Any, rows: Layout, noisy_BR: Int[Array, "B R"]) -> tuple[Float[Array, "B R D"], Float[Array, "B R D"]]:
    """Returns (hidden states of the noisy rows, of the clean rows), what `functions.logits` takes: one forward."""
    R = noisy_BR.shape[1]
    twice = lambda x_BR: None if x_BR is None else jnp.concatenate([x_BR, x_BR], 1)
    tokens_BQ = jnp.concatenate([rows.held_BR, noisy_BR], 1)
    gate_BQ = jnp.concatenate([jnp.zeros_like(rows.noise_BR), rows.noise_BR], 1)
    mask = masks.CleanNoisy(functions.block, R, causal=True, frozen=True)
    h_BQD, _ = functions.hidden(None, tokens_BQ, twice(rows.position_BR), mask, twice(rows.segment_BR), gate_BQ)
    return h_BQD[:, R:], h_BQD[:, :R]


class Terms(NamedTuple):
    """Of each row, float32 or wider."""

    tv_BR: Any  # sum |q - p|
    kl_BR: Any
    ce_teacher_BR: Any
    ce_data_BR: Any
    ratio_BR: Any  # log min(1, q / p) of the next token


def compare(
    logits: Callable[[Array], Array],
    draft_BRD: Float[Array, "B R D"],
    target_BRD: Float[Array, "B R D"],
    next_BR: Int[Array, "B R"],
    config: Config,
) -> Terms:
    """Returns the Terms of each pair of rows; `logits` makes the laws' from hidden states. The target has no gradient, nor have terms that
    the loss doesn't use. Logits are there for `config.chunk` columns at a time."""
    used = lambda use, x_BC: x_BC if use else lax.stop_gradient(x_BC)

    def terms(part: tuple[Array, Array, Array]) -> Terms:
        draft_BCD, target_BCD, next_BC = part
        draft_BCV = jax.nn.log_softmax(logits(draft_BCD))
        target_BCV = lax.stop_gradient(jax.nn.log_softmax(logits(target_BCD)))
        law_BCV = jnp.exp(draft_BCV)
        at = lambda logp_BCV, token_BC: jnp.take_along_axis(logp_BCV, token_BC[:, :, None], 2)[:, :, 0]
        return Terms(
            used(config.tv, jnp.sum(jnp.abs(law_BCV - jnp.exp(target_BCV)), -1)),
            used(config.kl, jnp.sum(law_BCV * (draft_BCV - target_BCV), -1)),
            used(config.ce and config.ce_target == "teacher", -at(draft_BCV, jnp.argmax(target_BCV, -1))),
            used(config.ce and config.ce_target == "data", -at(draft_BCV, next_BC)),
            used(config.survival == "length", jnp.minimum(at(draft_BCV, next_BC) - at(target_BCV, next_BC), 0)),
        )

    rows = (draft_BRD, target_BRD, next_BR)
    R, width = next_BR.shape[1], config.chunk
    if not 0 < width < R:
        return terms(rows)
    # Columns, not rows of the batch: these may lie on many devices.
    split = lambda x: (
        jnp.pad(x, ((0, 0), (0, -R % width), *[(0, 0)] * (x.ndim - 2))).reshape(len(x), -1, width, *x.shape[2:]).swapaxes(0, 1)
    )
    join = lambda x_NBC: x_NBC.swapaxes(0, 1).reshape(x_NBC.shape[1], -1)[:, :R]
    return jax.tree.map(join, lax.map(jax.checkpoint(terms), jax.tree.map(split, rows)))


def before(x_BR: Array, first_BR: Int[Array, "B R"], block: int) -> Array:
    """Returns, at each row, the sum of x over the rows before it in its block, from the row `first` on."""
    B, R = x_BR.shape
    x_BNK = x_BR.reshape(B, R // block, block)
    sum_BR = (jnp.cumsum(x_BNK, 2) - x_BNK).reshape(B, R)
    return sum_BR - jnp.take_along_axis(sum_BR, first_BR, 1)

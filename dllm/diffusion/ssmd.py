"""The objective of self-speculative masked diffusion: draft and target cross-entropy on the masked tokens, from one forward.

    loss = E 1/(L - i) sum_{d >= i} [ CE(draft_d) + CE(target_d) ]      order uniform, i uniform over 0..L-1     (paper eq. 7, per token)

Two terms may be added, answers to what the paper leaves open:

    tv    mean_{d >= i} S_d TV(draft_d, target_d), S_d = prod_{i <= e < d} (1 - TV_e) without a gradient: the chance that a chain of
          accepted tokens gets as far as d. The target is held fixed. Without S, ranks that are rarely reached would count too much
    elbo  -log p(x | sigma) of a self-speculative sampler that drafts anew at `prefixes` ranks i_1 < i_2 < .. only (`sparse_elbo`)

The draft's half is the masked-diffusion (any-order autoregressive) bound, so E[draft half] / ln 2 bounds the bits a character
(Hoogeboom et al. 2022). The target's half with the same weight is a design choice, no likelihood.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm.core.types import UserError
from dllm.diffusion.corruption import any_order
from dllm.diffusion.likelihood import ZERO, accept_replace

MODEL = "hybrid"  # what it goes with, as samplers.loop.kind says it


@dataclasses.dataclass(frozen=True)
class Config:
    """Weights of the terms that are added to the cross-entropies.

    prefixes: rows of a batch that share their text and order, for `elbo`; their i are stratified. 1: every row has its own.
    """

    tv: float = 0.0
    elbo: float = 0.0
    prefixes: int = 1

    def __post_init__(self):
        if not (self.tv >= 0 and self.elbo >= 0):
            raise UserError(f"objective.tv and objective.elbo are weights, 0 or more, not {self.tv} and {self.elbo}")
        if self.prefixes < 1 or (self.elbo and self.prefixes < 2):
            raise UserError(f"objective.prefixes is {self.prefixes}; it must be at least {2 if self.elbo else 1}")


def loss(
    functions: Any, tokens_BL: Int[Array, "B L"], key: jax.Array, config: Config, given_BL: Bool[Array, "B L"] | None = None
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Returns (loss in nats a masked token, metrics). Tokens are in sequence order.

    Positions that are `given`, a prompt, special tokens, padding, are never in the loss, and no part of a row's length: that is D, its
    other positions, and a row counts by it. At rank 0 the target is the draft by definition; its cross-entropy is counted there, without
    a gradient.

    Metrics in bits: `draft_bpc`, the bound a character that isn't given. `draft_ce` and `causal_ce` average over
    the same tokens with the same weights, those where the model has a target of its own: masked, and not of rank 0. `agreement` is the
    mean of 1 - TV(draft, target) over these. `tv` and `elbo` (nats a masked token) are the terms of the module's head, without their
    weights, and there only if these are not 0. Without causal layers `draft_bpc` and `draft_ce` are all.
    """
    B, L = tokens_BL.shape
    order_BL, revealed_B = any_order(key, B, L, given_BL)
    if config.prefixes > 1:
        tokens_BL, order_BL, revealed_B = _share(tokens_BL, order_BL, revealed_B, given_BL, config.prefixes)
    ranked_BL = jnp.take_along_axis(tokens_BL, order_BL, 1)
    draft_BLV, target_BLV = functions.both(ranked_BL, order_BL, revealed_B)

    rank_BL = jnp.broadcast_to(jnp.arange(L)[None], (B, L))
    weight_BL = jnp.where(rank_BL >= revealed_B[:, None], 1.0 / (L - revealed_B)[:, None], 0.0)  # each row sums to 1
    if given_BL is not None:
        D_B = L - given_BL.sum(1)
        weight_BL = weight_BL * (D_B / jnp.mean(D_B))[:, None]
    own_BL = jnp.where(rank_BL > 0, weight_BL, 0.0)

    def own_bits(x_BL):
        return jnp.sum(own_BL * x_BL) / jnp.sum(own_BL) / jnp.log(2.0)

    draft_BLV = jax.nn.log_softmax(draft_BLV)
    draft_BL = cross_entropy(draft_BLV, ranked_BL)
    draft = jnp.sum(weight_BL * draft_BL) / B
    metrics = {"draft_bpc": draft / jnp.log(2.0), "draft_ce": own_bits(draft_BL)}
    if given_BL is not None:
        metrics["tokens"] = jnp.sum(D_B).astype(jnp.float32)
    if target_BLV is None:
        return draft, {"loss": draft, **metrics}

    target_BLV = jax.nn.log_softmax(target_BLV)
    target_BL = jnp.where(rank_BL > 0, cross_entropy(target_BLV, ranked_BL), jax.lax.stop_gradient(draft_BL))
    total = draft + jnp.sum(weight_BL * target_BL) / B
    overlap_BL = jnp.sum(jnp.exp(jnp.minimum(draft_BLV, jax.lax.stop_gradient(target_BLV))), -1)  # 1 - TV
    agreement = jnp.sum(own_BL * overlap_BL) / jnp.sum(own_BL)
    metrics |= {"causal_ce": own_bits(target_BL), "agreement": agreement}
    if config.tv:
        passed_BL = jnp.where(own_BL > 0, overlap_BL, 1.0)  # at rank 0 draft and target are one
        survival_BL = jnp.concatenate([jnp.ones((B, 1)), jnp.cumprod(jax.lax.stop_gradient(passed_BL), 1)[:, :-1]], 1)
        metrics["tv"] = jnp.sum(weight_BL * survival_BL * (1.0 - passed_BL)) / B
        total = total + config.tv * metrics["tv"]
    if config.elbo:
        group = lambda x: x.reshape(B // config.prefixes, config.prefixes, *x.shape[1:])
        start_GI = group(revealed_B)
        logp_G = jax.vmap(sparse_elbo)(group(-draft_BL), group(-target_BL), start_GI)
        metrics["elbo"] = -jnp.mean(logp_G / (L - start_GI[:, 0]))
        total = total + config.elbo * metrics["elbo"]
    return total, {"loss": total, **metrics}


def _share(tokens_BL, order_BL, revealed_B, given_BL, prefixes: int) -> tuple[Array, Array, Array]:
    """Returns a batch of B / prefixes texts and orders, each in `prefixes` adjacent rows whose i are stratified and rise."""
    B, L = tokens_BL.shape
    if given_BL is not None:
        raise UserError("objective.prefixes > 1 doesn't go with given positions; set it to 1")
    if B % prefixes:
        raise UserError(f"the batch of {B} rows can't be shared out over objective.prefixes={prefixes}; make it a multiple")
    first = lambda x_BL: jnp.repeat(x_BL[::prefixes], prefixes, 0)
    part_B = (first(revealed_B) / L + jnp.arange(B) % prefixes) / prefixes
    return first(tokens_BL), first(order_BL), jnp.minimum(jnp.floor(part_B * L).astype(jnp.int32), L - 1)


def sparse_elbo(draft_IL: Float[Array, "I L"], target_IL: Float[Array, "I L"], start_I: Int[Array, "I"]) -> Float[Array, ""]:
    """Returns log p(x of ranks >= start_0 | sigma, ranks < start_0), in nats, of a sampler that drafts at the ranks start_I only.

    The inputs are log probabilities of the true tokens given start_I revealed. From start_k all ranks are drafted and judged; the chain
    ends at the first rejection, at rank j. Up to the next start behind j tokens are then drawn from the target of the last start before j;
    there a new draft begins. With all ranks as starts this is the recursion of the basic sampler (arXiv 2510.03929, section 3.4), with
    start_0 alone the product of the target.

        G(start_k) = log [ prod_d a_k(d) + sum_j prod_{d < j} a_k(d) r_k(j) exp G(j + 1) ],   a = min(draft, target),  r = target - a
        G(j) = sum_{j <= d < start_l} log target_{l-1}(d) + G(start_l)     start_{l-1} < j <= start_l, and G(L) = 0
    """
    I, L = draft_IL.shape
    accept_IL, reject_IL = accept_replace(draft_IL, target_IL)
    rank_L = jnp.arange(L)
    after_L = jnp.zeros((L,))  # G(j + 1) at column j
    begin = jnp.zeros(())  # G(start_k), once it is known
    stop = jnp.asarray(L)
    for k in reversed(range(I)):
        own_L = (rank_L >= start_I[k]) & (rank_L < stop)
        product_L = jnp.cumsum(jnp.where(own_L, target_IL[k], 0.0)[::-1])[::-1]  # sum_{d >= j} log target, within this stretch
        after_L = jnp.where(own_L, jnp.append(product_L[1:], 0.0) + begin, after_L)
        drafted_L = rank_L >= start_I[k]
        chain_L = jnp.cumsum(jnp.where(drafted_L, accept_IL[k], 0.0))
        before_L = chain_L - jnp.where(drafted_L, accept_IL[k], 0.0)
        terms_L = jnp.where(drafted_L, before_L + reject_IL[k] + after_L, ZERO)
        begin, stop = jax.scipy.special.logsumexp(jnp.append(terms_L, chain_L[-1])), start_I[k]
    return begin


def cross_entropy(logprobs_BLV: Float[Array, "B L V"], tokens_BL: Int[Array, "B L"]) -> Float[Array, "B L"]:
    """Returns -log p(token), in nats."""
    return -jnp.take_along_axis(logprobs_BLV, tokens_BL[:, :, None], -1)[:, :, 0]

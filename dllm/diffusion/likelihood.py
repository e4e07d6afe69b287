"""The self-speculative sampler's own likelihood: log p(x | sigma) of what the windowed sampler with N chain verifications draws.

With everything in rank order, let draft_i(d) and target_i(d) be the probabilities of the true token of rank d once i ranks are revealed.
One verification settles rank d as in x in one of two ways, and their sum is the target:

    a_i(d) = min(draft, target)         the draft is x_d, and is accepted
    r_i(d) = max(0, target - draft)     the draft, whatever it is, is rejected, and x_d takes its place (the residual's norm cancels)

The recursion over where a pass starts ("Self-Speculative Masked Diffusions", arXiv 2510.03929, section 3.4, for one verification and no
window) extends to windows W(i) and N verifications. With e = i + W(i), and g_k(m) the mass of "ranks i..k-1 settled, with m rejections":

    g_i = (1, 0, ..., 0)     g_{k+1}(m) = g_k(m) a_i(k) + g_k(m-1) r_i(k)     m < N
    F(D) = 1                 F(i) = sum_{k < e-1} g_k(N-1) r_i(k) F(k+1)  +  sum_m g_{e-1}(m) target_i(e-1) F(e)
    p(x | sigma) = F(0)

A non-causal pass that ends at an N-th rejection took N causal ones. One that reaches e took one more than there were rejections before
rank e - 1: whether that last rank is accepted or replaced, nothing is left to verify.

N = 1, W = D is the basic algorithm; W = 1 gives the any-order autoregressive product of targets, draft = target that of drafts. Block
verification has another law, which is not computed here.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.nn import logsumexp
from jaxtyping import Array, Float, Int, Integer

# Stands for log 0: far below any log-probability, and finite, so that neither values nor gradients meet inf - inf.
ZERO = -1e30


class Likelihood(NamedTuple):
    log_p: Float[Array, ""]  # log p(x | sigma) in nats; -inf if the sampler cannot draw x
    noncausal: Float[Array, ""]  # expected passes of the sampler, given that it drew x; nan if it cannot
    causal: Float[Array, ""]


def likelihood(
    log_draft_DD: Float[Array, "D D"],
    log_target_DD: Float[Array, "D D"],
    table: Integer[np.ndarray | Array, "D"],
    n_verify: int,
    first: int | Int[Array, ""] = 0,
    widest: int = 0,
) -> Likelihood:
    """Returns log p(x | sigma) and the expected passes given x, of one text in one order: `vmap` it over more.

    Row i of the inputs holds the log-probabilities of the true tokens with i ranks revealed, column d those of rank d >= i (the rest is not
    read), the target's given the true tokens of ranks < d. At rank 0 the target is the draft, whatever it says. `table` is W(i), between 1
    and D - i, as `window_table` returns it (else ValueError); it and `n_verify` are static. A table that is none, for texts of several
    lengths, comes with the `widest` window, which is; it isn't checked.

    The ranks before `first` are given: then it is log p of the others, given these.

    All in log space and in the precision of the inputs. O(D W N) operations for the widest W, in W + D sequential steps. Gradients are
    finite everywhere, also where an input is -inf.
    """
    D, W, rank_D = len(table), widest or int(np.max(table)), np.arange(len(table))
    if n_verify < 1 or not (widest or ((table >= 1) & (table <= D - rank_D)).all()):
        raise ValueError("windows must lie between 1 and D - i, and n_verify be 1 or more")
    first_DD = (rank_D[:, None] == 0) & (rank_D[None] == 0)
    log_target_DD = jnp.where(first_DD, log_draft_DD, log_target_DD)
    column_DW = np.minimum(rank_D[:, None] + np.arange(W)[None], D - 1)
    take = lambda x_DD: x_DD[rank_D[:, None], column_DW]
    log_end_DW, log_causal_DW = outer_step(take(log_draft_DD), take(log_target_DD), jnp.asarray(table), n_verify)

    def back(ahead, step):
        """From F(i+1..i+W), and the sums of F weighted by passes, to those of i..i+W-1."""
        (f_W, noncausal_W, causal_W), (end_W, cost_W) = ahead, step
        f = logsumexp(end_W + f_W)
        noncausal = jnp.logaddexp(f, logsumexp(end_W + noncausal_W))
        causal = jnp.logaddexp(logsumexp(cost_W + f_W), logsumexp(end_W + causal_W))
        push = lambda x, x_W: jnp.concatenate([x[None], x_W[:-1]])
        return (push(f, f_W), push(noncausal, noncausal_W), push(causal, causal_W)), (f, noncausal, causal)

    one_W, none_W = jnp.zeros_like(log_end_DW[0]), jnp.full_like(log_end_DW[0], ZERO)
    _, found_D = lax.scan(back, (one_W, none_W, none_W), (log_end_DW, log_causal_DW), reverse=True)
    f, noncausal, causal = (x_D[first] for x_D in found_D)
    possible = f > ZERO / 2
    mean = lambda log_sum: jnp.where(possible, jnp.exp(jnp.where(possible, log_sum - f, 0)), jnp.nan)
    return Likelihood(jnp.where(possible, f, -jnp.inf), mean(noncausal), mean(causal))


def outer_step(
    log_draft_IW: Float[Array, "I W"], log_target_IW: Float[Array, "I W"], width_I: Int[Array, "I"], n_verify: int
) -> tuple[Float[Array, "I W"], Float[Array, "I W"]]:
    """Returns the log of (P(a non-causal pass settles columns 0..w as in x, and no more), its causal passes times that).

    Each row is one non-causal pass, whose window is its first `width` columns; the inputs hold log-probabilities of the true tokens. The
    rows don't know of each other, so they may be any prefixes of any texts. ZERO stands for log 0.
    """
    W = log_draft_IW.shape[1]
    n_verify = min(n_verify, W)  # a window ends before it can hold more rejections
    log_passes_1N = jnp.log(jnp.arange(1, n_verify + 1, dtype=log_draft_IW.dtype))[None]
    log_accept_IW, log_replace_IW = accept_replace(log_draft_IW, log_target_IW)
    last_I = width_I - 1

    def column(log_g_IN, inputs):
        w, accept_I, replace_I, target_I = inputs
        nth_I = jnp.where(w < last_I, log_g_IN[:, -1] + replace_I, ZERO)
        log_end_I = jnp.where(w == last_I, logsumexp(log_g_IN, 1) + target_I, nth_I)
        log_causal_I = jnp.where(w == last_I, logsumexp(log_g_IN + log_passes_1N, 1) + target_I, nth_I + log_passes_1N[:, -1])
        one_less_IN = jnp.pad(log_g_IN[:, :-1], ((0, 0), (1, 0)), constant_values=ZERO)
        log_g_IN = jnp.logaddexp(log_g_IN + accept_I[:, None], one_less_IN + replace_I[:, None])
        return log_g_IN, (log_end_I, log_causal_I)

    start_IN = jnp.where(jnp.arange(n_verify)[None] == 0, 0.0, jnp.full((len(last_I), n_verify), ZERO, log_draft_IW.dtype))
    inputs = (jnp.arange(W), log_accept_IW.T, log_replace_IW.T, jnp.maximum(log_target_IW, ZERO).T)
    _, (log_end_WI, log_causal_WI) = lax.scan(column, start_IN, inputs)
    return log_end_WI.T, log_causal_WI.T


def accept_replace(log_draft: Float[Array, "*S"], log_target: Float[Array, "*S"]) -> tuple[Float[Array, "*S"], Float[Array, "*S"]]:
    """Returns (log a, log r) of the module's head, with ZERO for log 0. Their gradients are finite, equal inputs included."""
    log_draft, log_target = jnp.maximum(log_draft, ZERO), jnp.maximum(log_target, ZERO)
    more = log_target > log_draft
    gap = jnp.where(more, log_draft - log_target, -1.0)  # the unused branch must be finite too: its gradient is multiplied by 0
    return jnp.minimum(log_draft, log_target), jnp.where(more, log_target + jnp.log(-jnp.expm1(gap)), ZERO)

"""What all samplers share: prompts, results, and the way into and out of rank order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Integer

from dllm.core.types import UserError
from dllm.ops import masks, mesh
from dllm.ops.draws import Draws, KeyedDraws, permutation
from dllm.ops.passes import KINDS, Passes, count, no_passes
from dllm.ops.settings import Settings
from dllm.ops.windows import window_table, window_tables

PREFILL = 256  # prompt tokens a pass: it bounds the memory of scores


@struct.dataclass
class Prompt:
    """Sequences of which some tokens are given: none, a prefix, or any set of positions (infilling)."""

    tokens: Any  # [B L] int32, sequence order; read where given
    given: Any  # [B L] bool
    outside: Any = None  # [B L] bool, given, and no part of the text: special tokens and padding of a batch of mixed lengths; None: nothing


@struct.dataclass
class Samples:
    tokens: Any  # [B L] int32, sequence order
    lengths: Any  # [B] int32, tokens of the sequence that count; L unless a left-to-right sampler stopped earlier
    logprobs: Any  # [B L] of each token when it was settled, under the law that it was drawn from or verified against; 0 where given
    passes: Passes
    proposed: Any  # [B] int32, drafted tokens that were judged
    accepted: Any  # [B] int32, of these, accepted
    draws: Any  # the door after the run


def empty_prompt(batch: int, length: int) -> Prompt:
    """Returns a prompt that gives nothing."""
    return Prompt(jnp.zeros((batch, length), jnp.int32), jnp.zeros((batch, length), bool))


def make_prompt(rows: list[list[int | None]], length: int) -> Prompt:
    """Returns a prompt from rows of ids, None at open positions; what a row lacks at its end is open.

    Raises UserError when a row is longer than the model's context.
    """
    tokens, given = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), bool)
    for b, row in enumerate(rows):
        if len(row) > length:
            which = f"prompt {b}" if len(rows) > 1 and len({*map(len, rows)}) > 1 else "the prompt"
            raise UserError(f"{which} has {len(row)} tokens, and the model's context is {length}: shorten it")
        for position, token in enumerate(row):
            if token is not None:
                tokens[b, position], given[b, position] = token, True
    return Prompt(jnp.asarray(tokens), jnp.asarray(given))


def frame(rows: Sequence[Sequence[int | None]], length: int, forbidden: Sequence[int], pad: int) -> Prompt:
    """Returns a prompt of texts that have lengths of their own: whole rows, specials included, None at open positions; behind them is
    padding. What no model writes, `forbidden` ids, lies outside the text."""
    prompt = make_prompt([[*row, *[pad] * (length - len(row))] for row in rows], length)
    return prompt.replace(outside=prompt.given & jnp.isin(prompt.tokens, jnp.asarray(forbidden, jnp.int32)))


def hide(texts_BL: Integer[np.ndarray, "B L"], forbidden: Sequence[int]) -> list[list[int | None]]:
    """Returns rows of `frame` that are as long as these texts and have all of them to be written."""
    return [[token if token in forbidden else None for token in text_L] for text_L in np.asarray(texts_BL).tolist()]


def require_prefix(prompt: Prompt) -> None:
    """Raises UserError unless the given tokens of every row are a prefix: what a left-to-right sampler can use."""
    given = np.asarray(prompt.given)
    if (given[:, 1:] & ~given[:, :-1]).any():
        raise UserError("a left-to-right sampler takes a prefix as prompt; this one gives tokens behind open positions")


def kind(model: ModuleType, config: Any) -> str:
    """Returns what a model is to samplers and objectives: "hybrid", "block" (block diffusion: it has a MASK id), "autoregressive", or
    "uno", that with an adapter which drafts."""
    if not hasattr(model.Functions, "forward"):
        return "hybrid"
    if hasattr(model.Functions, "make_noise"):
        return "uno"
    return "block" if getattr(config, "mask_id", -1) >= 0 else "autoregressive"


def lead(config: Any) -> int:
    """Returns how many rows an autoregressive model reads before that of the first token: 1, a BOS of its own, or 0."""
    return int(getattr(config, "begins", not hasattr(config, "mask_id")))


def require_fit(sampler: ModuleType, model: ModuleType, config: Any = None) -> None:
    """Raises UserError unless the sampler goes with the model: with what it says in MODEL, else with block diffusion if it is
    LEFT_TO_RIGHT, and with hybrids if not.

    Without the model's config nothing is known of its MASK: then a model that may have one goes with either.
    """
    wanted = getattr(sampler, "MODEL", ("block",) if getattr(sampler, "LEFT_TO_RIGHT", False) else ("hybrid",))
    have = kind(model, config)
    unknown = config is None and hasattr(model.Functions, "mask_id") and wanted not in (("hybrid",), ("uno",))
    if have not in wanted and not unknown:
        names = [module.__name__.rpartition(".")[2] for module in (sampler, model)]
        mask = f" of mask_id={config.mask_id}" if hasattr(config, "mask_id") else ""
        raise UserError(
            f"the sampler {names[0]} doesn't go with the model {names[1]}{mask}: autoregressive and prompt_lookup are for "
            "gpt, uno, and qwen3 with mask_id=-1; psi_spec is for uno; block_diffusion and self_verified are for qwen3 with a mask_id; all "
            "others are for hybrid"
        )


def opening(model: ModuleType, config: Any, tokenizer: Any) -> list[int]:
    """Returns the ids that a prompt without text holds: the tokenizer's BOS where its texts begin with that, or where the model reads
    a token before it writes one (autoregressive, and no BOS of its own as a gpt has).

    Raises UserError where such a model's tokenizer has none.
    """
    reads = kind(model, config) in ("autoregressive", "uno") and not lead(config)
    if reads and tokenizer.bos is None:
        raise UserError("the model predicts what follows a token, and its tokenizer has none that begins a text: give a prompt")
    return [tokenizer.bos] if reads or tokenizer.begins else []


def compile_sampler(sampler: ModuleType, model: ModuleType, config: Any, options: Any) -> Callable[..., Samples]:
    """Returns a jitted run(variables, settings, draws, prompt) -> Samples: one program, compiled once for each shape of its arguments.

    On a mesh of `data` alone each device holds the whole model, and its loop ends with its own slowest row. Where parameters lie in
    slices their collectives need all devices in step: then one loop runs to the slowest row of all.
    Raises UserError if the sampler doesn't go with the model.
    """
    require_fit(sampler, model, config)

    def sample(variables: Any, settings: Settings, draws: Draws, prompt: Prompt) -> Samples:
        return sampler.sample(model.bind(config, variables), options, settings, draws, prompt)

    def run(variables: Any, settings: Settings, draws: Draws, prompt: Prompt) -> Samples:
        devices = mesh.sizes()
        copies = devices.get("data", 1)
        if copies == 1 or math.prod(devices.values()) > copies or len(prompt.tokens) % copies:
            return sample(variables, settings, draws, prompt)
        all_of_it, rows = PartitionSpec(), PartitionSpec("data")
        keys = KeyedDraws(all_of_it, rows)
        samples = Samples(rows, rows, rows, Passes(*[rows] * len(KINDS)), rows, rows, keys)
        return mesh.divided(sample, (all_of_it, rows, keys, rows), samples)(variables, settings, draws, prompt)

    return jax.jit(run)


def prefill(
    functions: Any, cache: Any, inputs_BL: Int[Array, "B L"], rows_B: Int[Array, "B"], wanted_B: Bool[Array, "B"], mask: Any, block: int = 1
) -> tuple[Any, Passes]:
    """Returns the cache, filled with each row's first `rows` inputs, and the passes that took: over PREFILL rows or fewer, in whole
    blocks, since no block may see half of itself. No row wants it: no pass.

    What a shorter row gets behind its own is overwritten before it is read.
    """
    batch, length = inputs_BL.shape
    blocks = lambda rows: -(-rows // block) * block
    chunk = min(blocks(length), blocks(PREFILL))
    padded = jnp.pad(inputs_BL, ((0, 0), (0, -(-length // chunk) * chunk - length)))

    def read(state):
        start, cache, passes = state
        inputs_BQ = lax.dynamic_slice_in_dim(padded, start, chunk, 1)
        position_BQ = jnp.broadcast_to(start + jnp.arange(chunk, dtype=jnp.int32)[None], (batch, chunk))
        cache = functions.forward(cache.replace(lengths_B=jnp.full((batch,), start)), inputs_BQ, position_BQ, mask)[1]
        return start + chunk, cache, count(passes, "prefill", wanted_B & (rows_B > start), chunk)

    state = lax.while_loop(lambda state: (wanted_B & (rows_B > state[0])).any(), read, (jnp.int32(0), cache, no_passes(batch)))
    return state[1].replace(lengths_B=rows_B), state[2]


def read_prompt(functions: Any, settings: Settings, prompt: Prompt, room: int) -> tuple[Int[Array, "B"], Int[Array, "B"], Any, Passes]:
    """Returns (tokens given, tokens of the whole text, cache, passes) as an autoregressive run begins: all rows but that of the last given
    token, the seed, are in the cache, which has slots for the text and for `room` more rows."""
    batch, length = prompt.tokens.shape
    given_B = prompt.given.sum(1, dtype=jnp.int32)
    end_B = jnp.minimum(length, jnp.where(settings.max_new < length, given_B + settings.max_new, length))
    begin_B1 = jnp.full((batch, 1), functions.vocab, jnp.int32)
    inputs_BL = jnp.concatenate([begin_B1, prompt.tokens[:, :-1]], 1) if functions.lead else prompt.tokens
    cache = functions.empty_cache(batch, length + room)
    cache, passes = prefill(functions, cache, inputs_BL, given_B - 1 + functions.lead, end_B > given_B, masks.causal)
    return given_B, end_B, cache, passes


def seed(functions: Any, tokens_BL: Int[Array, "B L"], settled_B: Int[Array, "B"]) -> Int[Array, "B 1"]:
    """Returns the last settled token, or where there is none the id that begins a sequence, if the model has such an id."""
    last_B1 = pick(tokens_BL, jnp.maximum(settled_B - 1, 0)[:, None])
    return jnp.where(settled_B[:, None] == 0, functions.vocab, last_B1) if functions.lead else last_B1


def to_ranks(
    prompt: Prompt, draws: Draws, order_BL: Int[Array, "B L"] | None
) -> tuple[Int[Array, "B L"], Int[Array, "B L"], Int[Array, "B"]]:
    """Returns (order, tokens in rank order, number revealed): uniform order, or the one handed in; given positions are ranked first, of
    these the ones outside."""
    order_BL = permutation(draws, prompt.tokens.shape[1]) if order_BL is None else order_BL
    open_BL = 1 - prompt.given.astype(jnp.int32) - (0 if prompt.outside is None else prompt.outside)
    first = jnp.argsort(jnp.take_along_axis(open_BL, order_BL, 1), axis=1, stable=True)
    order_BL = jnp.take_along_axis(order_BL, first, 1).astype(jnp.int32)
    return order_BL, jnp.take_along_axis(prompt.tokens, order_BL, 1), prompt.given.sum(1, dtype=jnp.int32)


def make_windows(shape: str, rate: float, prompt: Prompt) -> tuple[Callable[[Int[Array, "B"]], Int[Array, "B"]], int]:
    """Returns (W, the widest window): W(revealed_B) ranks may be revealed next, for D the row's own length, what lies outside left out."""
    length = prompt.tokens.shape[1]
    if prompt.outside is None:
        table = window_table(shape, length, rate)
        return (lambda revealed_B: jnp.asarray(table)[jnp.minimum(revealed_B, length - 1)]), int(table.max())
    tables = window_tables(shape, length, rate)
    outside_B = prompt.outside.sum(1, dtype=jnp.int32)
    return (lambda revealed_B: jnp.asarray(tables)[length - outside_B, jnp.minimum(revealed_B - outside_B, length - 1)]), int(tables.max())


def to_sequence(x_BL: Array, order_BL: Int[Array, "B L"]) -> Array:
    """Returns x in sequence order, from rank order."""
    return jax.vmap(lambda x, order: jnp.zeros_like(x).at[order].set(x, unique_indices=True))(x_BL, order_BL)


def put(row_BL: Array, rank_BW: Int[Array, "B W"], value_BW: Array, where_BW: Bool[Array, "B W"]) -> Array:
    """Returns row with value at the ranks where `where` holds."""
    at_BW = jnp.where(where_BW, rank_BW, row_BL.shape[1])
    return jax.vmap(lambda row, at, value: row.at[at].set(value, mode="drop"))(row_BL, at_BW, value_BW)


def pick(row_BL: Array, rank_BW: Int[Array, "B W"]) -> Array:
    """Returns row at the ranks; the last one for a rank beyond the end."""
    return jnp.take_along_axis(row_BL, jnp.minimum(rank_BW, row_BL.shape[1] - 1), 1)


def chosen(logp_BWV: Float[Array, "B W V"], token_BW: Int[Array, "B W"]) -> Float[Array, "B W"]:
    """Returns the log-probability of each token."""
    return jnp.take_along_axis(logp_BWV, token_BW[:, :, None], 2)[:, :, 0]

"""How good written proteins are: by ESMFold, by a held-out masked model, and by what any sequence shows.

    plddt              mean pLDDT of ESMFold, 0 to 100, by an external command (`fold`)
    pseudo_nll         nats a residue of a held-out masked model (`judge`): -log p(x_i | all other residues), at up to POSITIONS positions
                       of a sequence, each as likely: unbiased. pseudo_perplexity is its exponential (Lin et al. 2023)
    composition_js     Jensen-Shannon divergence, in nats, of the frequencies of residues from those of held-out sequences
    kmer_js            the same of KMER residues in a row
    repeats            the share of residues in stretches that repeat 1 to PERIOD residues three times or more, of 4 residues at least
    residues           of a sequence

The divergences are those of the frequencies that were seen: of few sequences they are too large (by about (K - 1) / 8 n for K kinds and n
residues), so compare them with those of as many held-out sequences. Their stderr takes the held-out frequencies as given.
"""

from __future__ import annotations

import csv
import functools
import math
import re
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer

from dllm.core.types import UserError
from dllm.evals.stats import Context, Metric, exp_metric, mean_metric
from dllm.samplers.loop import kind

NEEDS = ("tokenizer", "held_out")  # of the Context; judge and fold if they are there
LETTERS = "ACDEFGHIKLMNPQRSTVWY"  # any other is counted as one more
KMER = 3
PERIOD = 6
POSITIONS = 32  # forwards of a sequence
TOKENS = 2**14  # of a forward
WIDTH = 64  # sequences are padded to a multiple of it

_PLACES = np.full(256, len(LETTERS))
_PLACES[[ord(letter) for letter in LETTERS]] = range(len(LETTERS))


def evaluate(tokens_BL: Integer[np.ndarray, "B L"], lengths_B: Integer[np.ndarray, "B"], context: Context) -> dict[str, Metric]:
    """Returns the metrics of the module's head; `plddt` if there is a command that folds, `pseudo_*` if there is a judge.

    Sequences may differ in length; the sampling unit is the sequence. Raises UserError for a judge that is no masked model of proteins, and
    where folding fails.
    """
    own, real_BL = context.need("tokenizer", "protein"), context.need("held_out", "protein")
    sequences = [residues(own.decode(row[:length].tolist())) for row, length in zip(np.asarray(tokens_BL), lengths_B)]
    real = [residues(own.decode(row.tolist())) for row in real_BL]
    count_B = np.array([len(sequence) for sequence in sequences], np.float64)
    found: dict[str, Metric] = {}
    if context.fold:
        plddt_B = fold(context.fold, sequences)
        found["plddt"] = Metric(np.nan_to_num(plddt_B), (~np.isnan(plddt_B)).astype(np.float64))
    if context.judge is not None:
        nats_B = pseudo_nats(context.judge, sequences, context.seed)
        found["pseudo_nll"] = Metric(nats_B, count_B)
        found["pseudo_perplexity"] = exp_metric(found["pseudo_nll"])
    found["composition_js"] = divergence(sequences, real, 1)
    found["kmer_js"] = divergence(sequences, real, KMER)
    found["repeats"] = Metric(np.array([repeated(sequence).sum() for sequence in sequences], np.float64), count_B)
    return found | {"residues": mean_metric(count_B)}


def residues(text: str) -> str:
    """Returns a sequence's letters, without specials spelt <so>."""
    return re.sub(r"<\w+>", "", text)


def divergence(sequences: Sequence[str], real: Sequence[str], k: int) -> Metric:
    """Returns the Jensen-Shannon divergence of the k-mers of `sequences`, f, from those of `real`, g, with m = (f + g) / 2:
    JS = 1/2 sum f log(f / m) + 1/2 sum g log(g / m).

    As dJS = 1/2 sum log(f_v / m_v) df_v, it is written as a ratio of sums over sequences of scores that k-mers have, whose delta-method
    stderr is the divergence's. Raises UserError if no held-out sequence has k residues.
    """
    counts_BV = np.stack([_kmers(sequence, k) for sequence in sequences])
    real_V = sum(_kmers(sequence, k) for sequence in real)
    if not np.sum(real_V):
        raise UserError(f"no held-out sequence has {k} residues; give the eval protein real ones")
    total_B = counts_BV.sum(1)
    f_V, g_V = counts_BV.sum(0) / max(total_B.sum(), 1), real_V / real_V.sum()
    m_V = np.maximum((f_V + g_V) / 2, 1e-300)
    slope_V = np.where(f_V > 0, 0.5 * np.log(np.maximum(f_V, 1e-300) / m_V), 0.0)
    rest = 0.5 * np.sum(np.where(g_V > 0, g_V * np.log(np.maximum(g_V, 1e-300) / m_V), 0.0))
    return Metric(counts_BV @ slope_V + rest * total_B, total_B)


def _kmers(sequence: str, k: int) -> Float[np.ndarray, "V"]:
    """Returns how often each k-mer occurs."""
    kinds = len(LETTERS) + 1
    letter_L = _PLACES[np.frombuffer(sequence.encode("latin-1", "replace"), np.uint8)]
    places = max(len(letter_L) - k + 1, 0)
    code = sum(letter_L[i : i + places] * kinds**i for i in range(k))
    return np.bincount(code, minlength=kinds**k).astype(np.float64)


def repeated(sequence: str) -> Bool[np.ndarray, "L"]:
    """Returns whether each residue lies in a stretch of 4 residues or more that has a period p of 1 to PERIOD and is 3 p long or more."""
    letters_L = np.frombuffer(sequence.encode("latin-1", "replace"), np.uint8)
    inside_L = np.zeros(len(letters_L), bool)
    for p in range(1, PERIOD + 1):
        equal_L = np.concatenate([[False], letters_L[p:] == letters_L[:-p], [False]])
        starts, ends = (np.flatnonzero(equal_L[1:] & ~equal_L[:-1]), np.flatnonzero(~equal_L[1:] & equal_L[:-1]))
        for start, end in zip(starts, ends):  # x_i = x_(i + p) for i from start to end - 1
            if end + p - start >= max(4, 3 * p):
                inside_L[start : end + p] = True
    return inside_L


# -- the masked model


def pseudo_nats(judge: Any, sequences: Sequence[str], seed: int) -> Float[np.ndarray, "B"]:
    """Returns -sum_i log p(x_i | all other residues) of each sequence in nats, estimated from POSITIONS of its positions.

    The judge reads <cls>, the residues, <eos>. Raises UserError for a judge that isn't a masked model with padding, and for a sequence that
    is longer than it reads.
    """
    config = judge.model_config
    if kind(judge.model_module, config) != "hybrid" or getattr(config, "pad_id", -1) < 0:
        raise UserError("the judge of protein must be a masked model of proteins, with padding: set `judge` to an esm2's workdir")
    longest = max(map(len, sequences), default=0)
    if longest + 2 > config.length:
        raise UserError(f"the judge reads {config.length - 2} residues, a sequence has {longest}: use a longer judge")
    tokenizer = judge.tokenizer
    ids = [[tokenizer.bos, *tokenizer.encode(sequence, "a sample"), tokenizer.eos] for sequence in sequences]
    places = [_strata(len(sequence), np.random.default_rng((seed, b))) for b, sequence in enumerate(sequences)]
    pairs = [(b, at + 1) for b, some in enumerate(places) for at in some]
    width = lambda b: min(config.length, -(-len(ids[b]) // WIDTH) * WIDTH)
    nats_B = np.zeros(len(sequences))
    for size in sorted({width(b) for b, _ in pairs}):
        mine = [(b, at) for b, at in pairs if width(b) == size]
        step = max(1, min(TOKENS // size, len(mine)))
        for start in range(0, len(mine), step):
            some = mine[start : start + step]
            rows_BL, at_B = np.full((step, size), config.pad_id, np.int32), np.zeros(step, np.int32)
            for row_L, place, (b, at) in zip(rows_BL, range(step), some):
                row_L[: len(ids[b])], at_B[place] = ids[b], at
            nats = jax.device_get(_masked_nats(judge.model_module, config, judge.variables, rows_BL, at_B)).astype(np.float64)
            np.add.at(nats_B, [b for b, _ in some], nats[: len(some)])
    return nats_B * np.array([len(sequence) / max(len(some), 1) for sequence, some in zip(sequences, places)])


def _strata(length: int, rng: np.random.Generator) -> np.ndarray:
    """Returns positions of a sequence: all, or POSITIONS of them, evenly spread from a random start: each is as likely."""
    if length <= POSITIONS:
        return np.arange(length)
    turned = (rng.random() + np.arange(POSITIONS)) * (length / POSITIONS)
    return np.floor(turned).astype(int) % length


@functools.partial(jax.jit, static_argnums=(0, 1))
def _masked_nats(module: Any, config: Any, variables: Any, tokens_BL: Int[Array, "B L"], at_B: Int[Array, "B"]) -> Float[Array, "B"]:
    """Returns -log p of the token at one position of each row, in nats, all others given: that position is ranked last."""
    L = tokens_BL.shape[1]
    order_BL = (at_B[:, None] + 1 + jnp.arange(L, dtype=jnp.int32)[None]) % L
    ranked_BL = jnp.take_along_axis(tokens_BL, order_BL, 1)
    logits_B1V, _ = module.bind(config, variables).draft(ranked_BL, order_BL, jnp.full_like(at_B, L - 1), 1)
    logp_BV = jax.nn.log_softmax(logits_B1V[:, 0])
    return -jnp.take_along_axis(logp_BV, ranked_BL[:, -1:], 1)[:, 0]


# -- the external command


def fold(command: str, sequences: Sequence[str]) -> Float[np.ndarray, "B"]:
    """Returns the mean pLDDT of each sequence, 0 to 100; nan for an empty one. `command` runs with {fasta} and {csv} filled in: it reads
    the first, ids and sequences, and writes the second, with the columns id and plddt. external/esmfold.py is such a program.

    Raises UserError if the command fails, or its file isn't what it should be.
    """
    if "{fasta}" not in command or "{csv}" not in command:
        raise UserError(f"the folding command {command!r} lacks {{fasta}} or {{csv}}: put both where it takes the names of its files")
    names = {f"s{number}": number for number, sequence in enumerate(sequences) if sequence}
    if not names:
        return np.full(len(sequences), np.nan)
    with tempfile.TemporaryDirectory() as folder:
        fasta, out = Path(folder) / "sequences.fasta", Path(folder) / "plddt.csv"
        fasta.write_text("".join(f">{name}\n{sequences[number]}\n" for name, number in names.items()))
        words = [word.format(fasta=fasta, csv=out) for word in shlex.split(command)]
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False)
        except OSError as e:
            raise UserError(f"cannot run the folding command {words[0]}: {e.strerror}") from None
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip() or "it says nothing").splitlines()[-1][:200]
            raise UserError(f"the folding command {words[0]} ended with {done.returncode}: {last}")
        found = _read_csv(out, words[0])
    plddt_B = np.full(len(sequences), np.nan)
    for name, number in names.items():
        if name not in found:
            raise UserError(f"the folding command {words[0]} left {name} out, of {len(names)} sequences; see what it does with long ones")
        plddt_B[number] = found[name]
    if unknown := [name for name in found if name not in names]:
        raise UserError(f"the folding command {words[0]} tells of {unknown[0]}, which it was not given")
    if max(found.values()) <= 1:
        raise UserError(
            f"the folding command {words[0]} gives pLDDT up to {max(found.values()):.3f}; multiply by 100, its scale ends there"
        )
    return plddt_B


def _read_csv(path: Path, command: str) -> dict[str, float]:
    """Returns {id: pLDDT} of the command's file."""
    try:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise UserError(f"the folding command {command} wrote no CSV that can be read ({e})") from None
    found: dict[str, float] = {}
    for line, row in enumerate(rows, 2):
        if not row.get("id") or row.get("plddt") is None:
            raise UserError(f"line {line} of the folding command's CSV has no id and plddt; the columns must be called so")
        try:
            value = float(row["plddt"])
        except ValueError:
            value = math.nan
        if not 0 <= value <= 100:
            raise UserError(f"line {line} of the folding command's CSV gives {row['id']} a pLDDT of {row['plddt']}; it must be 0 to 100")
        if row["id"] in found:
            raise UserError(f"line {line} of the folding command's CSV has {row['id']} again; each once")
        found[row["id"]] = value
    return found

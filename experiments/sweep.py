"""Measures a grid of sampler settings on one or more trained runs: one row a setting in OUT/results.jsonl.

    python experiments/sweep.py --config=configs/sweeps/text8_nfe.py --workdir=runs/text8 [--workdir=...] --out=runs/text8/nfe

Rows that are there already are skipped, so a sweep that was stopped goes on where it was. Per-sample values lie in OUT/samples/*.npz, the
scores of real held-out text (ceiling) and of its shuffled characters (floor) in OUT/reference.json. experiments/plot.py draws it all.

Machines that share OUT each take every N-th setting with --hosts=N --host=I, I from 0, and write OUT/results_I.jsonl, which the other
programs read too. The same command without these flags measures what a machine left undone, and makes results.jsonl of it all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from ml_collections import config_flags

from dllm.core.config import config_dict, main, require, to_dataclass, write_atomic
from dllm.core.lookup import lookup
from dllm.core.types import UserError
from dllm.evals import gen_nll, results
from dllm.evals.generate import Generated, Task, check_request, forbidden, generate, make_task, remark
from dllm.evals.held_out import given, held_out
from dllm.evals.spelling import read_words, shuffle
from dllm.evals.stats import Context, Metric
from dllm.ops.passes import mean_by_kind
from dllm.train.checkpoint import load_run
from dllm.train.sharding import MeshConfig, make_mesh
from dllm.train.workdir import locked

FLAGS = flags.FLAGS
CONFIG = config_flags.DEFINE_config_file("config", None, "the grid, a file in configs/sweeps/")
flags.DEFINE_multi_string("workdir", None, "workdir of a trained run; give it again for more", required=True)
flags.DEFINE_string("out", None, "folder of the results", required=True)
flags.DEFINE_integer("step", None, "checkpoint to measure; the latest by default")
flags.DEFINE_string("data_path", None, "where the text of reference.json lies, if not where the run read it")
flags.DEFINE_integer("hosts", 1, "machines that share this sweep", lower_bound=1)
flags.DEFINE_integer("host", None, "which of them this is, from 0", lower_bound=0)


@dataclass(frozen=True)
class PointConfig:
    sampler: str
    options: dict  # of the sampler's Options
    settings: dict  # of dllm.evals.generate.Request


@dataclass(frozen=True)
class SweepConfig:
    num_samples: int
    batch: int
    seed: int
    evals: tuple[str, ...]
    judge: str  # workdir of an autoregressive run, for gen_nll and text_nll, or of a masked model, for protein; "": none
    points: tuple[PointConfig, ...]
    fold: str = ""  # command that folds {fasta} and writes {csv}, for protein; "": none


Work = tuple[dict[str, Any], Task, Context, np.ndarray | None]  # the row's key, what is to be measured, texts as long as the samples


def score(config: SweepConfig, context: Context, tokens_BL: np.ndarray, lengths_B: np.ndarray) -> dict[str, Metric]:
    """Returns all metrics of the sweep."""
    return {k: v for name in config.evals for k, v in lookup("evals", name).evaluate(tokens_BL, lengths_B, context).items()}


def make_row(g: Generated, metrics: dict[str, Metric]) -> dict[str, Any]:
    """Returns the measured part of a row. A cycle is a round of drafting and judging: a main pass that doesn't just draft or commit."""
    cycles = g.nfe_B.sum() - g.passes.draft.sum() - g.passes.commit.sum()
    row = {
        "num_samples": len(g.tokens_BL),
        "nfe": float(g.nfe_B.mean()),
        "nfe_weighted": float(g.nfe_weighted_B.mean()),
        "passes": mean_by_kind(g.passes),
        "tokens_per_pass": float(g.new_B.sum() / g.nfe_B.sum()),
        "tokens_per_cycle": float(g.new_B.sum() / cycles),
        "accept_rate": float(g.accepted_B.sum() / g.proposed_B.sum()) if g.proposed_B.sum() else None,
        "seconds_per_sample": g.seconds_per_sample,
    }
    for name, metric in metrics.items():
        row |= {name: results.number(metric.value), f"{name}_stderr": results.number(metric.stderr)}
    return row


def write_reference(out: Path, run: Any, config: SweepConfig, context: Context) -> None:
    """Writes OUT/reference.json: every metric of real held-out chunks (ceiling) and of their shuffled characters (floor), with stderr."""
    data, chunks_BL = held_out(run.config, FLAGS.data_path, "valid")
    chunks_BL = chunks_BL[np.linspace(0, len(chunks_BL) - 1, min(len(chunks_BL), max(config.num_samples, 512))).astype(int)]
    reference: dict[str, Any] = {"data": asdict(data), "num_samples": len(chunks_BL)}
    for side, tokens_BL in (("ceiling", chunks_BL), ("floor", shuffle(chunks_BL, given_BL=given(run, chunks_BL)))):
        for name, m in score(config, context, tokens_BL, np.full(len(tokens_BL), tokens_BL.shape[1])).items():
            reference.setdefault(name, {}).update({side: results.number(m.value), f"{side}_stderr": results.number(m.stderr)})
    write_atomic(out / "reference.json", json.dumps(reference, indent=1))


def print_table(rows: list[dict[str, Any]], names: list[str]) -> None:
    """Prints one line a row, by model and sampler, fewest passes first; of the settings those that differ within the sampler."""
    head = f"{'model':12} {'sampler':18} {'setting':24} {'nfe':>7} {'weighted':>8} {'tok/pass':>8} {'accept':>6} {'ms/sample':>9}"
    print(f"\n{head}  " + "  ".join(f"{n:>16}" for n in names))
    for r in sorted(rows, key=lambda r: (r["model"], r["sampler"], r["nfe"])):
        peers = [p["setting"] for p in rows if p["sampler"] == r["sampler"]]
        setting = " ".join(f"{k}={v}" for k, v in r["setting"].items() if any(p.get(k) != v for p in peers))
        accept = "" if r["accept_rate"] is None else f"{r['accept_rate']:.3f}"
        speed = f"{r['nfe']:7.2f} {r['nfe_weighted']:8.2f} {r['tokens_per_pass']:8.2f} {accept:>6} {1e3 * r['seconds_per_sample']:9.2f}"
        print(f"{r['model']:12} {r['sampler']:18} {setting:24} {speed}  " + "  ".join(f"{_pm(r, n):>16}" for n in names))


def _pm(row: dict[str, Any], name: str) -> str:
    value, stderr = row.get(name), row.get(f"{name}_stderr")
    return "" if value is None else f"{value:.4f}" + ("" if stderr is None else f" ± {stderr:.4f}")


def run() -> None:
    config, out = to_dataclass(SweepConfig, config_dict(CONFIG.value), "config"), Path(FLAGS.out)
    require(config, "config", ("num_samples", "batch"), "positive", lambda x: x >= 1)
    require(config, "config", ("evals", "points"), "a list of one or more", lambda x: len(x) >= 1)
    require(config, "config", ("seed",), "0 or more, below 2**32", lambda x: 0 <= x < 2**32)
    needs = {name: getattr(lookup("evals", name), "NEEDS", ()) for name in config.evals}
    for name in needs:
        if "run" in needs[name]:
            text = f"config.evals has {name}, which scores held-out text and not samples: drop it;"
            raise UserError(f"{text} experiments/evaluate.py --evals={name} measures it")
    host, hosts = FLAGS.host, FLAGS.hosts
    if (host is None) != (hosts == 1) or (host or 0) >= hosts:
        raise UserError(f"--host={host} and --hosts={hosts} name no share: number the hosts from 0 to hosts - 1, of 2 hosts or more")
    mesh, spelled = make_mesh(MeshConfig(data=-1, fsdp=1, tensor=1)), any("words" in need for need in needs.values())
    judge = load_run(config.judge) if config.judge else None
    work: list[Work] = []  # everything is checked before anything is measured
    keys: dict[str, tuple[int, str]] = {}  # of a row, where it comes from
    for workdir in FLAGS.workdir:
        loaded = load_run(workdir, FLAGS.step, mesh)
        asked = {need for name in needs for need in needs[name]}
        context = Context(
            words=read_words(workdir) if spelled else None,
            judge=judge,
            tokenizer=loaded.tokenizer if "tokenizer" in asked else None,
            held_out=held_out(loaded.config, FLAGS.data_path, "test")[1] if "held_out" in asked else None,
            fold=config.fold,
        )
        if judge and "gen_nll" in config.evals:
            gen_nll.require_same_symbols(judge, loaded)
        never, lengths, texts_NL = getattr(loaded.tokenizer, "forbidden", ()), set(), None
        highest = max(set(range(min(loaded.model_config.vocab, loaded.tokenizer.vocab))) - set(never))
        digest = hashlib.sha256(json.dumps(loaded.config, sort_keys=True).encode()).hexdigest()[:12]
        name = {"model": Path(workdir).resolve().name, "step": loaded.step, "config_hash": digest}
        for number, point in enumerate(config.points):
            task = make_task(loaded, point.sampler, point.options, point.settings)
            if note := remark(task):
                print(f"points[{number}] of {workdir}: {note}")
            if forbidden(task) and texts_NL is None:  # samples are as long as real ones
                texts_NL = held_out(loaded.config, FLAGS.data_path, "valid", config.num_samples)[1]
            prompt = check_request(task, config.num_samples, config.batch, [], texts_NL)
            length = prompt.tokens.shape[1]
            if length not in lengths:  # what a metric lacks shows now
                score(config, context, np.where(prompt.given[:1], prompt.tokens[:1], highest), np.array([length]))
                lengths.add(length)
            setting = asdict(task.options) | task.request.changed()
            row, here = name | {"sampler": point.sampler, "setting": setting, "seed": config.seed}, f"points[{number}] of {workdir}"
            if (there := keys.setdefault(results.row_key(row), (len(work), here)))[0] != len(work):
                raise UserError(f"{there[1]} and {here} would be one row ({point.sampler}, {setting}); drop one of them")
            work.append((row, task, context, texts_NL))
    with contextlib.ExitStack() as locks:
        locks.enter_context(locked(out, "sweeping", "--out", shared=host is not None))
        if host is None:
            results.gather(out)
        else:
            locks.enter_context(locked(out, f"sweeping as --host={host}", "--host", name=f".lock_{host}"))
        measure(config, work[host or 0 :: hosts], out, mesh, host)


def measure(config: SweepConfig, work: list[Work], out: Path, mesh: Any, host: int | None) -> None:
    """Adds the rows that are missing to OUT."""
    results.repair(results.rows_file(out, host))
    there = {results.row_key(row): row for row in results.read_rows(out)}
    fits = lambda row: row["num_samples"] == config.num_samples and set(config.evals) <= set(row["evals"])
    todo = [w for w in work if not (results.row_key(w[0]) in there and fits(there[results.row_key(w[0])]))]
    if not host and work and not (out / "reference.json").exists():
        try:
            write_reference(out, work[0][1].run, config, work[0][2])
        except UserError as e:  # the data may lie on another machine
            print(f"no reference.json, hence no lines of real and shuffled text: {e}")
    share = f" are the share of host {host} of {FLAGS.hosts}" * (host is not None)
    print(f"{len(work)} settings{share}, {len(work) - len(todo)} of them there already")
    clock = time.monotonic()
    for n, (key, task, context, texts_NL) in enumerate(todo, 1):
        g = generate(task, num=config.num_samples, batch=config.batch, seed=config.seed, texts_NL=texts_NL, mesh=mesh)
        metrics = score(config, context, g.tokens_BL, g.lengths_B)
        row = key | make_row(g, metrics) | {"evals": list(config.evals)}
        small = np.uint16 if g.tokens_BL.max(initial=0) < 2**16 else np.int32
        arrays = {"tokens": g.tokens_BL.astype(small), "lengths": g.lengths_B, "nfe": g.nfe_B, "nfe_weighted": g.nfe_weighted_B}
        results.append_row(out, row, arrays | {"proposed": g.proposed_B, "accepted": g.accepted_B} | results.metric_arrays(metrics), host)
        left = (time.monotonic() - clock) / n * (len(todo) - n)
        first = next(iter(metrics))
        print(f"[{n}/{len(todo)}] {key['sampler']} nfe {row['nfe']:.2f} {first} {_pm(row, first)}, about {left:.0f} s left", flush=True)
    ours = {results.row_key(w[0]) for w in work}
    rows = [r for r in results.read_rows(out) if results.row_key(r) in ours]
    print_table(rows, [k for k in next(iter(rows), ()) if f"{k}_stderr" in rows[0]])
    print(f"wrote {results.rows_file(out, host)}, {out / 'samples'} and {out / 'reference.json'}")


if __name__ == "__main__":
    main(run)

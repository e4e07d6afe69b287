"""Measures drafters on trained runs: tokens a cycle, wall time by batch and by reply length, and whether the text's law stays.

    python experiments/speculate.py --workdir=runs/stories/uno[,RUN...] --tables=length,speed,reply,lossless --out=FOLDER
    python experiments/speculate.py --out=FOLDER --plot              # the figure again, from the rows alone

Prompts are the first --given tokens of held-out rows, each its own; all continuations have --new tokens, and none stops. Ways to decode, of
--ways: chain, block, tree and tree_rejection (cycles of two passes), single_pass and prompt_lookup (of one). A length is L rows of a pass:
a seed and L - 1 drafts. Rows are appended to OUT/speculation.jsonl; those that are there already, of the same settings and the same
checkpoint, aren't measured again, so a program that was stopped goes on where it was. OUT/speculation.png and .svg show them all.

length    tokens and accepted drafts a cycle, ± one standard error over sequences, of the run's adapter; beside it, in the ways of two
          passes, of floors (tables of unigrams and skip bigrams, made of the train split) and of the ceiling (perfect marginals, from
          --paths sampled continuations, of --ceiling_num prompts). The ceiling is slow: --ways=chain --drafters=perfect is a run apart.
speed     by batch, all ways in turn over the same prompts: ms a token, speed-up over plain autoregression (the faster of the sampler of
          that name and psi_spec at length 1; median and quartiles over --repetitions; `cpu` in CPU seconds of this process, steadier on a
          busy machine), and what a cycle of the loop costs in plain passes, C: drafting pays from C tokens a cycle on. A loop runs to the
          slowest row of its batch, and tokens a cycle are a row's by that count. `adaptive` goes by costs measured just before.
reply     speed-up by reply length, one at a time, at --length and adaptive. The pass over the prompt is in it.
lossless  p-value of a permutation test of texts at --length against plain ones, --each of every prompt, and how many texts at temperature
          0 aren't the plain ones; in float32. `autoregressive` is the floor; risd_lossy is lossy, and to be caught.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from dllm.core.config import main, to_dataclass, writable_folder, write_atomic
from dllm.core.lookup import lookup
from dllm.core.types import UserError
from dllm.data.corpus import DataConfig, Rows
from dllm.evals import results, speculation, speculation_rows
from dllm.evals.held_out import held_out
from dllm.evals.speculation import DRAFTERS, DRAFTING, Setup, Unit
from dllm.samplers.loop import kind
from dllm.train.checkpoint import load_run
from dllm.train.workdir import locked

TABLES = ("length", "speed", "reply", "lossless")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
FLAGS = flags.FLAGS
flags.DEFINE_list("workdir", [], "workdirs of trained uno runs, by comma")
flags.DEFINE_integer("step", None, "checkpoint to measure; the latest by default")
flags.DEFINE_string("out", None, "folder of the rows and the figure", required=True)
flags.DEFINE_list("tables", list(TABLES), "of length, speed, reply, lossless")
flags.DEFINE_list("ways", list(DRAFTING), f"of {', '.join(DRAFTING)}")
flags.DEFINE_list("drafters", list(DRAFTERS), f"of {', '.join(DRAFTERS)}, in the table length")
flags.DEFINE_list("lengths", "2,4,8,16", "rows of a pass, 2 or more")
flags.DEFINE_integer("length", 8, "that of the tables reply and lossless", lower_bound=2)
flags.DEFINE_integer("children", 4, "candidates of a tree for each drafted position", lower_bound=1)
flags.DEFINE_integer("nodes", 16, "of a tree: rows of its verifying pass", lower_bound=2)
flags.DEFINE_float("temperature", 1.0, "of all tables", lower_bound=0.0)
flags.DEFINE_enum("split", "test", ["valid", "test"], "where the prompts are from")
flags.DEFINE_string("data_path", None, "where the data lies, if not where the run read it")
flags.DEFINE_integer("num", 64, "prompts", lower_bound=1)
flags.DEFINE_integer("given", 16, "tokens of a prompt", lower_bound=1)
flags.DEFINE_integer("new", 128, "tokens of a continuation", lower_bound=1)
flags.DEFINE_integer("batch", 32, "rows that the tables length and lossless draw together", lower_bound=1)
flags.DEFINE_integer(
    "paths",
    256,
    "continuations that the ceiling samples at each cycle, beside each other: what the marginals are estimated from",
    lower_bound=1,
)
flags.DEFINE_integer("ceiling_num", 8, "prompts of the ceiling", lower_bound=1)
flags.DEFINE_list("batches", "1,4,16,32", "rows that the table speed decodes together")
flags.DEFINE_list("replies", "2,4,8,16,32,64,128,256", "tokens of a reply, in the table reply")
flags.DEFINE_integer("repetitions", 15, "calls of each way that are timed", lower_bound=1)
flags.DEFINE_integer("each", 4, "texts of a prompt, in the table lossless", lower_bound=1)
flags.DEFINE_integer("permutations", 999, "of its test; the smallest p-value is 1 / (1 + permutations)", lower_bound=1)
flags.DEFINE_integer("seed", 0, "of the draws", lower_bound=0, upper_bound=2**32 - 1)
flags.DEFINE_bool("plot", False, "draw what OUT holds, and measure nothing")


def numbers(name: str, low: int) -> list[int]:
    """Returns the whole numbers of a list flag, ascending. Raises UserError for others, and for such below `low`."""
    values = getattr(FLAGS, name)
    if not values or not all(x.strip().isdecimal() and int(x) >= low for x in values):
        raise UserError(f"--{name} is {','.join(values)!r}; make it whole numbers of {low} or more, by comma")
    return sorted({int(x) for x in values})


def chosen(name: str, known: Any) -> list[str]:
    """Returns the words of a list flag. Raises UserError for an unknown one."""
    values = list(dict.fromkeys(getattr(FLAGS, name)))
    for value in values:
        if value not in known:
            raise UserError(f"--{name} has {value!r}; there are: {', '.join(known)}")
    if not values:
        raise UserError(f"--{name} is empty; there are: {', '.join(known)}")
    return values


def load(workdir: str, room: int) -> Setup:
    """Returns the run and its prompts. Raises UserError where it has no adapter, or they or `room` more tokens don't fit."""
    if not np.isfinite(FLAGS.temperature):
        raise UserError(f"--temperature is {FLAGS.temperature}; make it a finite number, 0 or more")
    run = load_run(workdir, FLAGS.step)
    if kind(run.model_module, run.model_config) != "uno":
        raise UserError(f"{workdir} holds no adapter that drafts: pass the workdir of a run of the model uno")
    _, chunks_BL = held_out(run.config, FLAGS.data_path, FLAGS.split, FLAGS.num)
    if len(chunks_BL) < FLAGS.num:
        raise UserError(f"--num={FLAGS.num}, and the {FLAGS.split} split of {workdir} has {len(chunks_BL)} rows: lower it")
    if chunks_BL.shape[1] < FLAGS.given:
        raise UserError(f"--given={FLAGS.given}, and the rows of {workdir} have {chunks_BL.shape[1]} tokens: lower it")
    if FLAGS.given + room > run.model_config.length:
        text = f"a prompt of {FLAGS.given} and {room} new tokens are {FLAGS.given + room}, and the context of {workdir}"
        raise UserError(f"{text} is {run.model_config.length}: lower --given, --new or --replies")
    return Setup(run, np.asarray(chunks_BL[:, : FLAGS.given]), FLAGS.new, FLAGS.temperature, FLAGS.seed)


def train_rows(run: Any) -> list[np.ndarray]:
    """Returns the training text, row by row."""
    data = to_dataclass(DataConfig, run.config["data"] | ({} if FLAGS.data_path is None else {"path": FLAGS.data_path}), "data")
    train = lookup("data", data.name).load(data).train
    return list(train.tokens) if isinstance(train, Rows) else [train]


def units(workdir: str) -> list[tuple[dict[str, Any], Unit]]:
    """Returns all that is to be measured of a run, each with what its rows are known by."""
    tables, ways, names = chosen("tables", TABLES), chosen("ways", DRAFTING), chosen("drafters", DRAFTERS)
    lengths, replies, batches = numbers("lengths", 2), numbers("replies", 1), numbers("batches", 1)
    setup = load(workdir, max(FLAGS.new, *replies) if "reply" in tables else FLAGS.new)
    run, tree, found = setup.run, (FLAGS.children, FLAGS.nodes), []
    if max(*lengths, FLAGS.length) > run.model_config.block + 1:
        longest, trained = max(*lengths, FLAGS.length), run.model_config.block
        print(f"note: {workdir} was trained on {trained} noise rows, and a length of {longest} has {longest - 1}: it may draft worse")
    if logged := speculation_rows.logged_acceptance(Path(workdir), run.step):
        found.append(Unit("acceptance", [{}], lambda: [logged]))
    if "length" in tables:
        text = train_rows(run) if {"unigram", "skip_bigram"} & {*names} else []
        drafts = speculation.make_drafts(names, text, run.model_config.vocab, max(lengths) - 1, FLAGS.paths)
        found += speculation.length_units(setup, ways, lengths, drafts, FLAGS.batch, (FLAGS.ceiling_num, FLAGS.paths), tree)
    if "speed" in tables:
        found += [speculation.speed_unit(setup, ways, lengths, batch, FLAGS.repetitions, tree) for batch in batches]
    if "reply" in tables:
        longest = dataclasses.replace(setup, new=max(replies))
        found.append(speculation.reply_unit(longest, FLAGS.length, lengths, replies, FLAGS.repetitions))
    if "lossless" in tables:
        how = FLAGS.batch, FLAGS.each, FLAGS.permutations
        found += speculation.lossless_units(setup, ways, FLAGS.length, lengths, *how, tree)
    digest = hashlib.sha256(json.dumps(run.config, sort_keys=True).encode()).hexdigest()[:12]
    about = {"model": Path(workdir).resolve().name, "step": run.step, "config_hash": digest}
    return [(about, unit) for unit in found]


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """Writes out.png and out.svg: a panel for each table that has rows, dashed lines for floors and ceilings."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("plots need matplotlib: pip install -e '.[plots]'") from None
    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    panels = speculation_rows.panels(rows)
    if not panels:
        raise UserError(f"{out}.jsonl has no row to draw: measure a table first")
    columns = min(3, len(panels))
    rc = {"font.size": 9, "svg.hashsalt": "dllm", "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    with plt.rc_context(rc):
        lines = -(-len(panels) // columns)
        figure, axes = plt.subplots(lines, columns, figsize=(5.2 * columns, 4.4 * lines), squeeze=False, layout="constrained")
        for ax, panel in zip(axes.flat, panels):
            for n, curve in enumerate(panel.curves):
                style = {"color": f"C{n % 10}", "linestyle": "--" if curve.yardstick else "none" if curve.line else "-"}
                style |= {"marker": MARKERS[n // 10 % len(MARKERS)], "markersize": 4, "linewidth": 1.5, "elinewidth": 1, "capsize": 2}
                ax.errorbar(curve.x, curve.y, curve.error, label=curve.label, **style)
                if curve.yardstick and len(curve.x) == 1:
                    ax.axhline(curve.y[0], color=style["color"], linewidth=1, linestyle="--")
                if curve.line:
                    ax.plot(curve.x, curve.line[0] + curve.line[1] * curve.x, color=style["color"], linewidth=1)
            if panel.level is not None:
                ax.axhline(panel.level, color="#999999", linewidth=1, linestyle=(0, (5, 4)), zorder=0)
            if panel.log:
                ax.set_xscale("log", base=2)
                ax.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
            ax.set_xlabel(panel.x)
            ax.set_ylabel(panel.y)
            ax.grid(True, color="#e6e6e6", linewidth=0.7)
            ax.legend(fontsize=7)
        for ax in axes.flat[len(panels) :]:
            ax.axis("off")
        for ending, how in (("png", {"dpi": 160}), ("svg", {"metadata": {"Date": None}})):
            picture = io.BytesIO()
            figure.savefig(picture, format=ending, **how)
            write_atomic(f"{out}.{ending}", picture.getvalue())
        plt.close(figure)


def measure(work: list[tuple[dict[str, Any], Unit]], path: Path) -> list[dict[str, Any]]:
    """Adds the rows that are missing to the file, and returns all that were asked for."""
    results.repair(path)
    device = jax.devices()[0]
    machine = {"platform": device.platform, "device": device.device_kind, "jax": jax.__version__}
    there = speculation_rows.read_rows(path)
    wanted = [[about | {"table": unit.table, "setting": setting} for setting in unit.settings] for about, unit in work]
    todo = [n for n, keys in enumerate(wanted) if not all(speculation_rows.row_key(key) in there for key in keys)]
    print(f"{len(work)} measurements, {len(work) - len(todo)} of them there already", flush=True)
    clock = time.monotonic()
    for done, n in enumerate(todo, 1):
        for key, row in zip(wanted[n], work[n][1].measure(), strict=True):
            results.append_line(path, key | row | machine)
        left = (time.monotonic() - clock) / done * (len(todo) - done)
        settings = work[n][1].settings[0] if len(wanted[n]) == 1 else {k: v for k, v in work[n][1].settings[0].items() if k == "batch"}
        what = " ".join(str(v) for k, v in settings.items() if k in ("way", "length", "drafter", "batch"))
        print(f"[{done}/{len(todo)}] {wanted[n][0]['model']} {work[n][1].table} {what}, about {left:.0f} s left", flush=True)
    there = speculation_rows.read_rows(path)
    return [there[speculation_rows.row_key(key)] for keys in wanted for key in keys]


def run() -> None:
    path = Path(FLAGS.out) / "speculation.jsonl"
    if FLAGS.plot:
        draw([*speculation_rows.read_rows(path).values()], path.with_suffix(""))
    else:
        if not FLAGS.workdir:
            raise UserError("pass --workdir=RUN[,RUN...], workdirs of trained uno runs; or --plot, to draw the rows that OUT holds")
        work = [each for workdir in FLAGS.workdir for each in units(workdir)]  # everything is checked before anything is measured
        with locked(writable_folder(FLAGS.out), "measuring", "--out"):
            rows = measure(work, path)
            there = [*speculation_rows.read_rows(path).values()]
            print("\n".join(speculation_rows.describe(row, there) for row in rows))
            draw(there, path.with_suffix(""))
        print(f"wrote {path}")
    print(f"wrote {path.with_suffix('.png')} and {path.with_suffix('.svg')}")


if __name__ == "__main__":
    main(run)

"""Searches the interval of t that trains a block-diffusion model with the least variance, on held-out text of its run.

    python experiments/schedule.py --workdir=runs/sdar [--num=64] [--by=gradient]

Every interval [low, low + width] of widths .5 to .9 at steps of .05, and [0, 1] beside them (see dllm/evals/schedule.py); prints the best,
and what to pass to train.py for it. BD3-LM repeats this every 5,000 steps. Writes WORKDIR/schedule.json.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from absl import flags

from dllm.core.config import main, writable_folder, write_atomic
from dllm.evals import schedule
from dllm.evals.held_out import held_out
from dllm.train.checkpoint import load_run

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", None, "workdir of a trained block-diffusion run", required=True)
flags.DEFINE_enum("by", "gradient", ["gradient", "nelbo"], "the variance to minimise")
flags.DEFINE_enum("split", "valid", ["valid", "test"], "the held-out text")
flags.DEFINE_integer("num", 64, "chunks of it, spread evenly; 0: all", lower_bound=0)
flags.DEFINE_string("data_path", None, "where the data lies, if not where the run read it")
flags.DEFINE_integer("step", None, "checkpoint to measure; the latest by default")
flags.DEFINE_integer("seed", 0, "of the noise", lower_bound=0, upper_bound=2**32 - 1)
SHOWN = 8


def run() -> None:
    loaded = load_run(FLAGS.workdir, FLAGS.step)
    data, chunks_BL = held_out(loaded.config, FLAGS.data_path, FLAGS.split, FLAGS.num)
    out = writable_folder(FLAGS.workdir) / "schedule.json"
    found = sorted(schedule.intervals(loaded, chunks_BL, FLAGS.seed), key=lambda interval: getattr(interval, FLAGS.by))
    whole = next(interval for interval in found if interval.high - interval.low > 0.99)
    print(f"{FLAGS.workdir}, step {loaded.step}: {len(chunks_BL)} chunks of {data.length}, {FLAGS.split} split, by {FLAGS.by}")
    print("   low  high   var of a block's nats   var of the gradient")
    for interval in dict.fromkeys([*found[:SHOWN], whole]):
        print(f"  {interval.low:4.2f}  {interval.high:4.2f}   {interval.nelbo:21.4g}   {interval.gradient:19.4g}")
    rows = [dataclasses.asdict(interval) for interval in found]
    write_atomic(
        out, json.dumps({"step": loaded.step, "chunks": len(chunks_BL), "seed": FLAGS.seed, "by": FLAGS.by, "intervals": rows}) + "\n"
    )
    print(f"best: --config.objective.low={found[0].low} --config.objective.high={found[0].high}\nwrote {Path(out)}")


if __name__ == "__main__":
    main(run)

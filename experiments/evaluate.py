"""Scores a trained run on held-out text, and appends the figures to WORKDIR/evals.jsonl.

    python experiments/evaluate.py --workdir=runs/text8 --evals=bound [--split=test] [--num=512]
    python experiments/evaluate.py --workdir=runs/text8 --evals=likelihood --num=64 [--option.rate=0.1 --option.n_verify=4 ...]

`likelihood` is that of the sampler self_speculative, with the options of the run's config unless others are given; it takes a forward of
as many rows as a chunk has characters, twice a chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from dllm.core.config import main, to_dataclass
from dllm.core.lookup import lookup
from dllm.core.types import UserError
from dllm.data import pipeline
from dllm.data.corpus import DataConfig
from dllm.evals import results
from dllm.evals.spelling import read_words
from dllm.evals.stats import Context
from dllm.samplers import self_speculative
from dllm.train.checkpoint import load_run
from dllm.train.run import part

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", None, "workdir of a trained run", required=True)
flags.DEFINE_list("evals", "bound", "modules of dllm/evals, by comma; spelling and entropy score the held-out text itself")
flags.DEFINE_enum("split", "valid", ["valid", "test"], "the held-out text")
flags.DEFINE_integer("num", 512, "chunks of it, spread evenly; 0: all", lower_bound=0)
flags.DEFINE_string("judge", "", "workdir of a gpt run, for gen_nll")
flags.DEFINE_string("data_path", None, "where the data lies, if not where the run read it")
flags.DEFINE_integer("step", None, "checkpoint to evaluate; the latest by default")
flags.DEFINE_integer("seed", 0, "of the random draws of an estimator")
DEFINE = {str: flags.DEFINE_string, int: flags.DEFINE_integer, float: flags.DEFINE_float}
OPTION = {
    f.name: DEFINE[type(f.default)](
        f"option.{f.name}", None, "of self_speculative, for the eval likelihood; as in the run's config if unset"
    )
    for f in dataclasses.fields(self_speculative.Options)
}


def sampler_options(section: Mapping[str, Any], given: Mapping[str, Any]) -> self_speculative.Options:
    """Returns the options in a run's sampler section, the defaults if that names another sampler, changed by those given."""
    own = {k: v for k, v in section.items() if k != "name"} if section.get("name") == "self_speculative" else {}
    return to_dataclass(self_speculative.Options, own | given, "option")


def run() -> None:
    modules = {name: lookup("evals", name) for name in FLAGS.evals}
    given = {name: flag.value for name, flag in OPTION.items() if flag.value is not None}
    takes_options = any("options" in getattr(m, "NEEDS", ()) for m in modules.values())
    if given and not takes_options:
        raise UserError("--option.KEY=VALUE is for the eval likelihood: add it to --evals")
    loaded = load_run(FLAGS.workdir, FLAGS.step)
    objective = part("diffusion", "Config", loaded.config["objective"], "objective")
    context = Context(
        words=read_words(FLAGS.workdir) if any("words" in getattr(m, "NEEDS", ()) for m in modules.values()) else None,
        judge=load_run(FLAGS.judge) if FLAGS.judge else None,
        run=loaded,
        objective=(objective.module, objective.config),
        options=sampler_options(loaded.config["sampler"], given) if takes_options else None,
        seed=FLAGS.seed,
    )
    section = loaded.config["data"] | ({} if FLAGS.data_path is None else {"path": FLAGS.data_path})
    data = to_dataclass(DataConfig, section, "data")
    chunks_BL = pipeline.chunks(getattr(lookup("data", data.name).load(data), FLAGS.split), data.length)
    count = min(FLAGS.num or len(chunks_BL), len(chunks_BL))
    chunks_BL = chunks_BL[np.arange(count) * len(chunks_BL) // count]
    lengths_B = np.full(count, data.length)
    row = {"step": loaded.step, "split": FLAGS.split, "chunks": count, "seed": FLAGS.seed, "estimator": {}}
    row |= {"option": dataclasses.asdict(context.options)} if takes_options else {}
    print(f"{FLAGS.workdir}, step {loaded.step}: {count} chunks of {data.length} characters, {FLAGS.split} split")
    for name, module in modules.items():
        row["estimator"][name] = getattr(module, "ESTIMATOR", "ratio of sums over the chunks")
        print(f"{name}: {row['estimator'][name]}")
        for metric, m in module.evaluate(chunks_BL, lengths_B, context).items():
            row |= {metric: results.number(m.value), f"{metric}_stderr": results.number(m.stderr)}
            print(f"  {metric:24} {m.value:9.4f} ± {m.stderr:.4f}")
    out = Path(FLAGS.workdir) / "evals.jsonl"
    results.repair(out)
    results.append_line(out, row)
    print(f"appended to {out}")


if __name__ == "__main__":
    main(run)

"""Scores a trained run on held-out text, and appends the figures to WORKDIR/evals.jsonl.

    python experiments/evaluate.py --workdir=runs/text8 --evals=bound [--split=test] [--num=512]
    python experiments/evaluate.py --workdir=runs/text8 --evals=likelihood --num=64 [--option.rate=0.1 --option.n_verify=4 ...]

    python experiments/evaluate.py --workdir=runs/owt --evals=text_nll --judge=runs/gpt2_large
    python experiments/evaluate.py --workdir=runs/proteins --evals=protein [--judge=runs/esm2] [--fold="COMMAND {fasta} {csv}"]

text_nll and protein are for samples, in sweeps; here they say what real text scores. protein compares with the other of the two splits;
external/esmfold.py is a program for --fold.

`likelihood` is that of the sampler self_speculative, with the options of the run's config unless others are given; it takes a forward of
as many rows as a chunk has characters, twice a chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import flags

from dllm.core.config import main, to_dataclass, writable_folder
from dllm.core.lookup import lookup
from dllm.core.types import UserError
from dllm.evals import gen_nll, results
from dllm.evals.held_out import held_out
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
flags.DEFINE_string("judge", "", "workdir of a run: an autoregressive one for gen_nll and text_nll, a masked model for protein")
flags.DEFINE_string("fold", "", "command that folds {fasta} and writes {csv}, for protein")
flags.DEFINE_string("data_path", None, "where the data lies, if not where the run read it")
flags.DEFINE_integer("step", None, "checkpoint to evaluate; the latest by default")
flags.DEFINE_integer("seed", 0, "of the random draws of an estimator", lower_bound=0, upper_bound=2**32 - 1)
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
    if not modules:
        raise UserError("--evals names nothing to measure; pass --evals=bound, say")
    needs = {need for module in modules.values() for need in getattr(module, "NEEDS", ())}
    given = {name: flag.value for name, flag in OPTION.items() if flag.value is not None}
    if given and "options" not in needs:
        raise UserError("--option.KEY=VALUE is for the eval likelihood: add it to --evals")
    if FLAGS.judge and "judge" not in needs and "protein" not in modules:
        raise UserError("--judge is for the eval gen_nll, text_nll or protein: add it to --evals")
    if FLAGS.fold and "protein" not in modules:
        raise UserError("--fold is for the eval protein: add it to --evals")
    loaded = load_run(FLAGS.workdir, FLAGS.step)
    objective = part("diffusion", "Config", loaded.config["objective"], "objective")
    other = "test" if FLAGS.split == "valid" else "valid"
    context = Context(
        words=read_words(FLAGS.workdir) if "words" in needs else None,
        judge=load_run(FLAGS.judge) if FLAGS.judge else None,
        run=loaded,
        objective=(objective.module, objective.config),
        options=sampler_options(loaded.config.get("sampler", {}), given) if "options" in needs else None,
        tokenizer=loaded.tokenizer if "tokenizer" in needs else None,
        held_out=held_out(loaded.config, FLAGS.data_path, other, 0)[1] if "held_out" in needs else None,
        fold=FLAGS.fold,
        seed=FLAGS.seed,
    )
    if context.judge and "gen_nll" in modules:
        gen_nll.require_same_symbols(context.judge, loaded)
    data, chunks_BL = held_out(loaded.config, FLAGS.data_path, FLAGS.split, FLAGS.num)
    count, lengths_B = len(chunks_BL), np.full(len(chunks_BL), data.length)
    for module in [*modules.values()][1:]:  # what a later one refuses shows before the hours of the first
        module.evaluate(chunks_BL[:1], lengths_B[:1], context)
    out = writable_folder(FLAGS.workdir) / "evals.jsonl"
    results.repair(out)
    row = {"step": loaded.step, "split": FLAGS.split, "chunks": count, "seed": FLAGS.seed, "estimator": {}}
    row |= {"option": dataclasses.asdict(context.options)} if "options" in needs else {}
    heading = f"{FLAGS.workdir}, step {loaded.step}: {count} chunks of {data.length} symbols, {FLAGS.split} split\n"
    for name, module in modules.items():
        metrics = module.evaluate(chunks_BL, lengths_B, context)
        row["estimator"][name] = getattr(module, "ESTIMATOR", "ratio of sums over the chunks")
        print(f"{heading}{name}: {row['estimator'][name]}")
        heading = ""
        for metric, m in metrics.items():
            row |= {metric: results.number(m.value), f"{metric}_stderr": results.number(m.stderr)}
            print(f"  {metric:24} {m.value:9.4f} ± {m.stderr:.4f}")
    results.append_line(out, row)
    print(f"appended to {out}")


if __name__ == "__main__":
    main(run)

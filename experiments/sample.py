"""Prints samples of a trained run, with the network passes that each took.

    python experiments/sample.py --workdir=runs/text8 --sampler=self_speculative --num=16
        [--option.rate=0.05 --option.n_verify=4 ...]      options of the sampler (dllm/samplers/<name>.py, Options)
        [--setting.temperature=0.8 --setting.top_p=0.9]   settings that every sampler obeys
        [--prompt="the king of "]                         a prefix; with ? at open positions: infilling, "the ??????? of spain"
                                                          of a protein all its residues, "M?????????": it has ten
    python experiments/sample.py --workdir=runs/stories --sampler=block_diffusion --setting.max_new=200 --prompt="Once upon a time"
        [--setting.stop=2]                                of a run with a tokenizer: ids, or one token's text
        [--stream]                                        one sample, printed as it becomes final

Otherwise also writes them as JSON lines, one a sample, to --out (WORKDIR/samples/... by default).
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_dict, config_flags

import dllm.samplers
from dllm.core.config import main, writable_folder, write_atomic
from dllm.evals.generate import Request, check_request, forbidden, generate, make_task, parse_prompt, remark, stream
from dllm.evals.held_out import held_out
from dllm.train.checkpoint import load_run
from dllm.train.sharding import MeshConfig, make_mesh


def all_options(argv: list[str]) -> dict[str, Any]:
    """Returns the options of all samplers, none of them set: flags are read before the sampler's name is.

    Two samplers may mean different types by one name; then the one that the command line names has its own.
    """
    names = sorted(m.name for m in pkgutil.iter_modules(dllm.samplers.__path__))
    names.sort(key=lambda name: any(arg in (f"--sampler={name}", f"-sampler={name}", name) for arg in argv))
    modules = [importlib.import_module(f"dllm.samplers.{name}") for name in names]
    fields = [f for module in modules if hasattr(module, "Options") for f in dataclasses.fields(module.Options)]
    return {f.name: config_dict.placeholder(type(f.default)) for f in fields}


def define(name: str, values: dict[str, Any]) -> flags.FlagHolder:
    """Returns the flag --name.KEY=VALUE. ml_collections looks up the keys of the command line here: a wrong one ends the program now."""
    try:
        return config_flags.DEFINE_config_dict(name, config_dict.ConfigDict(values))
    except AttributeError as e:
        print(f"error: there is no --{name}.{str(e).strip(chr(34) + chr(39))}; there are: {', '.join(values)}", file=sys.stderr)
        sys.exit(2)


FLAGS = flags.FLAGS
SETTING = define("setting", dataclasses.asdict(Request()))
OPTION = define("option", all_options(sys.argv))
flags.DEFINE_string("workdir", None, "workdir of a trained run", required=True)
flags.DEFINE_string("sampler", None, "a module of dllm/samplers", required=True)
flags.DEFINE_integer("num", 16, "samples")
flags.DEFINE_integer("batch", 128, "samples that are drawn together")
flags.DEFINE_string("prompt", "", "text; of a character model a-z and space, ? is an open position. What lies behind its end is open too")
flags.DEFINE_integer("seed", 0, "sample n depends on the seed and on n", lower_bound=0, upper_bound=2**32 - 1)
flags.DEFINE_integer("step", None, "checkpoint to sample from; the latest by default")
flags.DEFINE_string("data_path", None, "where the data lies, if not where the run read it: samples of proteins are as long as real ones")
flags.DEFINE_string("out", "", "file of the JSON lines")
flags.DEFINE_bool("stream", False, "print sample 0 as it becomes final, and write nothing")


def lengths_of(task: Any, row: list[int | None]) -> Any:
    """Returns held-out texts, as long as which proteins become that no prompt tells the length of; None of other models."""
    if row or not forbidden(task):
        return None
    return held_out(task.run.config, FLAGS.data_path, "valid", FLAGS.num)[1]


def run() -> None:
    mesh = make_mesh(MeshConfig(data=-1, fsdp=1, tensor=1))
    loaded = load_run(FLAGS.workdir, FLAGS.step, mesh)
    options = {k: v for k, v in OPTION.value.items() if v is not None}
    task = make_task(loaded, FLAGS.sampler, options, SETTING.value.to_dict())
    if note := remark(task):
        print(note, file=sys.stderr)
    row = parse_prompt(FLAGS.prompt, loaded.tokenizer)
    texts_NL = lengths_of(task, row)
    check_request(task, FLAGS.num, FLAGS.batch, row, texts_NL)
    if FLAGS.stream:
        for piece in stream(task, seed=FLAGS.seed, row=row):
            print(piece, end="", flush=True)
        return print()
    out = Path(FLAGS.out) if FLAGS.out else Path(FLAGS.workdir) / "samples" / f"{FLAGS.sampler}_step{loaded.step}_seed{FLAGS.seed}.jsonl"
    writable_folder(out.parent)
    g = generate(task, num=FLAGS.num, batch=FLAGS.batch, seed=FLAGS.seed, row=row, texts_NL=texts_NL, mesh=mesh)
    lines: list[dict[str, Any]] = []
    for n, (tokens_L, length) in enumerate(zip(g.tokens_BL, g.lengths_B, strict=True)):
        text = loaded.tokenizer.decode(tokens_L[:length].tolist())
        lines.append({"text": text, "nfe": int(g.nfe_B[n]), "nfe_weighted": float(g.nfe_weighted_B[n])})
        lines[-1] |= {"new_tokens": int(g.new_B[n]), "proposed": int(g.proposed_B[n]), "accepted": int(g.accepted_B[n])}
        print(f"[{n}] {g.nfe_B[n]:>4} passes  {text}")
    rate = f", {g.accepted_B.sum() / g.proposed_B.sum():.1%} of the drafted tokens accepted" if g.proposed_B.sum() else ""
    per_pass = g.new_B.sum() / max(g.nfe_B.sum(), 1)
    print(f"{g.nfe_B.mean():.1f} passes a sample, {per_pass:.2f} tokens a pass{rate}, {g.seconds_per_sample:.3g} s a sample")
    write_atomic(out, "".join(json.dumps(line) + "\n" for line in lines))
    print(f"wrote {out}")


if __name__ == "__main__":
    main(run)

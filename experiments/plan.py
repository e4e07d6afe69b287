"""Compiles the train step or the sampler of a config for devices that aren't here, and prints what it takes of each of them.

    make .aot/.ready
    .aot/bin/python experiments/plan.py --config=configs/sdar.py:8b --topology=v5p:2x2x2 [--what=decode --rows=64 --length=8192]
    .aot/bin/python experiments/plan.py --config=configs/plan.py --out=experiments/results/plan     # the committed table

Memory, time of compilation and kernels are the compiler's, of the very program that would run. Of training it is one step; of decoding, one
turn of the sampler's loop, though the whole sampler is compiled. What doesn't fit is changed until it does (dllm/evals/plan.py: remedy).
OUT gets rows.jsonl and README.md; what is there already isn't compiled again. Nothing is trained, and no data is read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import runpy
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
from absl import flags
from ml_collections import ConfigDict, config_flags

from dllm.core.config import config_dict, main, to_dataclass, write_atomic
from dllm.core.types import UserError
from dllm.evals import flops, hlo, plan, results
from dllm.train.ahead import make_mesh, sampler_program, train_program
from dllm.train.run import Run, run_config
from dllm.train.workdir import locked

FLAGS = flags.FLAGS
CONFIG = config_flags.DEFINE_config_file("config", None, "a run's file, or one with cases: configs/plan.py")
flags.DEFINE_string("topology", "", "of a run's file: CHIP:SHAPE, such as v5e:4x4, v5p:2x2x2, v6e:2x4, h200:8")
flags.DEFINE_enum("what", "train", ["train", "decode"], "of a run's file: which program")
flags.DEFINE_integer("rows", 64, "of decoding: sequences at a time")
flags.DEFINE_integer("length", 0, "of decoding: positions of a sequence; the model's by default")
flags.DEFINE_string("out", "", "folder of the table")


@dataclasses.dataclass(frozen=True)
class Case:
    """A program and its devices. config: a run's file, FILE:PRESET, "" for the flag's own; changes: of that, "section.key": value.

    rows, length: of decoding; of training the config has them.
    """

    name: str
    what: Literal["train", "decode"]
    config: str
    topology: str
    changes: dict
    rows: int = 0
    length: int = 0


def make_config(case: Case) -> dict[str, Any]:
    """Returns the config of a case, as its file and its changes tell it. Raises UserError where there is none."""
    file, _, preset = case.config.partition(":")
    if file and not Path(file).exists():
        raise UserError(f"cannot read {file}, the config of the case {case.name}; run this from the repository's root")
    config = (runpy.run_path(file)["get_config"](*[preset] * bool(preset)) if file else ConfigDict(config_dict(CONFIG.value))).to_dict()
    for key, value in case.changes.items():
        section, _, name = key.partition(".")
        if section not in config:
            raise UserError(f"unknown key {key} in the changes of the case {case.name}; sections are: {', '.join(config)}")
        config[section][name] = value
    return config


def make_run(case: Case) -> Run:
    """Returns the run of a case. Raises UserError where there is none."""
    return run_config(make_config(case))


def make_key(case: Case) -> str:
    """Returns what a row is known by: keys that configs get later, with their defaults, are no part of it."""
    told = json.dumps([make_config(case), dataclasses.asdict(case)], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def measure(case: Case, run: Run) -> dict[str, Any]:
    """Returns what a row tells of a case: compiled, and taken apart."""
    here, mesh = plan.chip(case.topology), make_mesh(run.mesh, plan.devices(case.topology))
    decoding = case.what == "decode"
    length = (case.length or run.model.config.length) if decoding else run.data.length
    function, arguments, sizes = sampler_program(run, mesh, case.rows, length) if decoding else train_program(run, mesh)
    row = {"mesh": list(mesh.devices.shape), "rows": case.rows or run.train.batch, "length": length, "accumulate": run.train.accumulate}
    row |= {"remat": getattr(run.model.config, "remat", False), **sizes, "excess": 0, "error": "", "largest": []}
    with jax.set_mesh(mesh):
        traced = function.trace(*arguments)
        asked = (flops.cycle if decoding else flops.work)(traced.jaxpr, here.platform)
        lowered, clock = traced.lower(), time.process_time()
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as e:
            found = plan.overflow(e, sum(sizes.values())) or {"error": str(e).splitlines()[0][:200], "peak": 0}
            return row | found | {"compile_s": time.process_time() - clock}
    row |= plan.memory(compiled, here) | {"compile_s": time.process_time() - clock}
    program = hlo.Program(compiled.as_text())
    row |= plan.counted(program.cycle() if decoding else program.cost(), asked, mesh.size)
    row |= {"instructions": sum(map(len, program.computations.values()))}
    return row | {"seconds": plan.roofline(here, row["flops"], row["moved"], row["received"])}


def solve(case: Case, known: dict[str, Mapping[str, Any]], out: Path | None) -> list[Mapping[str, Any]]:
    """Returns the rows of a case: as it is, and where it doesn't fit, changed until it does. Those that aren't known are made."""
    rows: list[Mapping[str, Any]] = []
    while True:
        run, key = make_run(case), make_key(case)
        if key not in known:
            known[key] = {"key": key, **dataclasses.asdict(case), "jax": jax.__version__} | measure(case, run)
            if out:
                results.append_line(out / "rows.jsonl", known[key])
            print(plan.show(known[key]), flush=True)
        rows.append(known[key])
        change = plan.remedy(rows[-1], getattr(run.model.config, "heads", 1)) if rows[-1]["excess"] else None
        if not change:
            return rows
        print(f"  next: {change}", flush=True)
        fields = {name: value for name, value in change.items() if "." not in name}
        case = dataclasses.replace(case, **fields, changes=case.changes | {key: v for key, v in change.items() if "." in key})


def run() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # how long it takes is asked for
    config, out = config_dict(CONFIG.value), Path(FLAGS.out) if FLAGS.out else None
    if "cases" in config:
        cases = [to_dataclass(Case, each, f"cases[{i}]") for i, each in enumerate(config["cases"])]
    elif not FLAGS.topology:
        raise UserError("pass --topology=CHIP:SHAPE, such as --topology=v5e:4x4")
    else:
        run = run_config(config)
        cases = [Case(run.model.name, FLAGS.what, "", FLAGS.topology, {}, FLAGS.rows * (FLAGS.what == "decode"), FLAGS.length)]
    for case in cases:  # everything is checked before anything is compiled
        make_mesh(make_run(case).mesh, plan.devices(case.topology))
    if not out:
        for case in cases:
            solve(case, {}, None)
        return
    with locked(out, "planning", "--out"):
        results.repair(out / "rows.jsonl")
        known = results.read_table(out / "rows.jsonl", lambda row: row["key"], "a plan's row")
        rows = [row for case in cases for row in solve(case, known, out)]
        write_atomic(out / "README.md", plan.page(rows))
    print(f"wrote {out / 'README.md'} and {out / 'rows.jsonl'}")


if __name__ == "__main__":
    main(run)

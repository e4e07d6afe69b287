"""Times attention beside its rivals, train steps, and samplers beside their floor: unattended, without a network, in --minutes.

    python experiments/bench_attention.py --out=runs/attention [--minutes=8]       # on a GPU or TPU; on a CPU small shapes, for a check
    python experiments/bench_attention.py --out=runs/attention --tables=attention --shapes=sdar_4k_b4,uno_4k_b4 --rivals=kernel,two_call

Shapes are those of dllm/kernels/block_attention/arg_specs.py: [clean ; noisy] rows of 2k, 4k and 8k a half, forward and backward, and the
decode form. Each rival is compiled, compared with the definition, and timed in turn with the others. One that can't serve a case, for
want of memory say, gets a row with the reason. Then a step of each of --presets (configs/text8_ssmd.py) on random tokens, and samplers of
its first with random weights.

OUT/results.jsonl has a row a line, written as soon as it is known; OUT/attention.md is the page, OUT/attention.png the picture. What is
there isn't measured again, so the same command goes on where the last one stopped. The most telling cases come first; none is begun that
would likely outlast --minutes, and what was left out is said. A case that kills its process, or hangs for --patience seconds, loses its
row, and another process goes on.
"""

from __future__ import annotations

import dataclasses
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from dllm.core.config import main, to_dataclass, writable_folder, write_atomic
from dllm.core.lookup import lookup
from dllm.core.types import UserError
from dllm.evals import attention_page, attention_speed, results, speed, unattended
from dllm.evals.unattended import Job
from dllm.train.run import Run, run_config
from dllm.train.sharding import MeshConfig, make_mesh
from dllm.train.state import create
from dllm.train.step import make_train_step, put

FLAGS = flags.FLAGS
TABLES = ("attention", "train", "sampler")
flags.DEFINE_string("out", None, "folder of the results", required=True)
flags.DEFINE_list("tables", list(TABLES), f"of {', '.join(TABLES)}")
flags.DEFINE_list("shapes", None, "of attention; by default those of training and decoding, on a CPU the small ones")
flags.DEFINE_list("rivals", list(attention_speed.RIVALS), "what computes attention")
flags.DEFINE_list("presets", None, "of configs/text8_ssmd.py; by default mini and paper (12 x 768), on a CPU tiny")
flags.DEFINE_float("minutes", 8.0, "no case is begun that would likely end later", lower_bound=0.0)
flags.DEFINE_float("patience", 150.0, "seconds until a case counts as hanging; 0: one process, unwatched", lower_bound=0.0)
flags.DEFINE_integer("repetitions", 15, "turns of each rival", lower_bound=1)
flags.DEFINE_float("seconds", 1.0, "of the turns of one rival, about", lower_bound=0.0)
flags.DEFINE_integer("batch", 32, "rows that a sampler draws together", lower_bound=1)

GUESS = {"both": 25.0, "forward": 15.0, "decode": 15.0, "train": 45.0, "sampler": 45.0}  # seconds of a case, until one was seen
SAMPLERS = {
    "ancestral": {"rate": 0.1},
    "self_speculative": {"rate": 0.25, "n_verify": 8, "verification": "chain"},
}


def preset(name: str) -> Run:
    """Returns the run of configs/text8_ssmd.py, on one device."""
    config = runpy.run_path(str(Path(__file__).parents[1] / "configs/text8_ssmd.py"))["get_config"](name)
    return dataclasses.replace(run_config(config.to_dict()), mesh=MeshConfig(1, 1, 1))


def jobs() -> list[Job]:
    """Returns the cases. Raises UserError for a name that doesn't exist."""
    on_cpu, tables, found = jax.default_backend() == "cpu", FLAGS.tables, []
    for case in attention_speed.cases(attention_speed.find_specs(FLAGS.shapes, on_cpu)) * ("attention" in tables):
        rows = lambda rivals, starts, case=case: attention_speed.measure(case, rivals, FLAGS.repetitions, FLAGS.seconds, starts)
        found.append(Job(attention_speed.importance(case.spec), case.spec.name, case.kind, FLAGS.rivals, rows))
    names = FLAGS.presets or (["tiny"] if on_cpu else ["mini", "paper"])
    for name in names * ("train" in tables):
        rows = lambda rivals, starts, name=name: train_step(preset(name), starts)
        found.append(Job(1.5, name, "train", ["train_step"], rows))
    for sampler in list(SAMPLERS) * ("sampler" in tables):
        rows = lambda rivals, starts, sampler=sampler: sampled(preset(names[0]), sampler, starts)
        found.append(Job(1.5, names[0], "sampler", [sampler], rows))
    return found


def train_step(run: Run, starts: Callable[..., None]) -> Iterator[dict[str, Any]]:
    """Yields the row of a train step on random tokens."""
    starts(["train_step"])
    mesh, batch, length = make_mesh(run.mesh), run.train.batch, run.data.length
    tokens = np.random.default_rng(0).integers(run.model.config.vocab, size=(batch, length), dtype=np.int32)
    with jax.set_mesh(mesh):
        state, data = create(run, mesh), put({"tokens": tokens}, mesh)
        compiled = make_train_step(run, mesh).lower(state, data).compile()
        kept = [state]

        def call():
            kept[0], metrics = compiled(kept[0], data)
            return metrics

        parameters = sum(x.size for x in jax.tree.leaves(state.params))
        seconds = attention_speed.time_calls({"step": call}, FLAGS.repetitions, FLAGS.seconds)["step"]
        low, mid, high = np.quantile(seconds, (0.25, 0.5, 0.75)).tolist()
        row = {"rival": "train_step", "ms": 1e3 * mid, "ms_quartiles": [1e3 * low, 1e3 * high], "repetitions": len(seconds)}
        row |= {"batch": batch, "length": length, "parameters": parameters, "bytes": attention_speed.memory(compiled)}
        row |= {"dtype": run.model.config.dtype, "loss": float(call()["loss"])}
        yield row | {"tokens_per_s": batch * length / mid, "tflops": 6 * parameters * batch * length / mid / 1e12}


def sampled(run: Run, name: str, starts: Callable[..., None]) -> Iterator[dict[str, Any]]:
    """Yields the row of a sampler, of a model with random weights: wall time over its floor (dllm/evals/speed.py)."""
    starts([name])
    model, config, sampler = run.model.module, run.model.config, lookup("samplers", name)
    variables = jax.jit(lambda key: model.init(config, key))(jax.random.key(0))
    options = to_dataclass(sampler.Options, SAMPLERS[name], "option")
    program = speed.prepare(sampler, model, config, options, variables, FLAGS.batch, 0, 0)
    timing = speed.time_program(program, speed.bare_passes(model, config, variables, FLAGS.batch, program.passes), FLAGS.repetitions)
    low, mid, high = (1e3 * np.quantile(timing.sampler_2R[0], (0.25, 0.5, 0.75))).tolist()
    label = lambda kind: f"{kind.name}_{kind.columns}"
    row = {"rival": name, "option": SAMPLERS[name], "batch": FLAGS.batch, "ms": mid, "ms_quartiles": [low, high]}
    row |= {"ratio": timing.ratio()[0], "ratio_quartiles": [timing.ratio(q)[0] for q in (0.25, 0.75)]}
    row |= {"passes": {label(kind): n for kind, n in program.passes.items()}, "bytes": program.memory()}
    yield row | {"pass_ms": {label(kind): 1e3 * float(np.median(s[0])) / program.passes[kind] for kind, s in timing.passes_2R.items()}}


def measure(out: Path) -> None:
    """Measures what isn't there yet, and writes the page and the picture."""
    device = jax.devices()[0]
    about = {"device": device.device_kind, "platform": device.platform, "jax": jax.__version__}
    tell = lambda row: print(attention_page.line(row), flush=True)
    try:
        left = unattended.work(jobs(), out, about, 60 * FLAGS.minutes, GUESS, tell)
    except unattended.DeviceLost as e:
        print(f"the device was lost ({e}); another process has to go on", file=sys.stderr)
        sys.exit(unattended.AGAIN)
    rows = [row for row in unattended.read_rows(out).values() if row["device"] == device.device_kind]
    page = attention_page.page(rows, left, about)
    write_atomic(out / "attention.md", page)
    print(f"\n{page}\nwrote {out / 'attention.md'}")
    try:
        if attention_page.draw(rows, out / "attention.png"):
            print(f"wrote {out / 'attention.png'}")
    except ImportError:
        print("no picture: it needs matplotlib, pip install -e '.[plots]'; with it, the same command draws what is there")


def run() -> None:
    for flag, known in (("tables", TABLES), ("rivals", attention_speed.RIVALS)):
        if unknown := [name for name in getattr(FLAGS, flag) if name not in known]:
            raise UserError(f"no {flag} {unknown[0]!r}; there are: {', '.join(known)}")
    attention_speed.find_specs(FLAGS.shapes, True)
    for name in FLAGS.presets or ():
        preset(name)
    out = writable_folder(FLAGS.out)
    results.repair(out / unattended.TABLE)
    if not FLAGS.patience:
        measure(out)
        return
    end = time.monotonic() + 60 * FLAGS.minutes
    command = lambda: [sys.executable, *sys.argv, "--patience=0", f"--minutes={max(0.0, (end - time.monotonic()) / 60):.2f}"]
    code = unattended.supervise(command, out, FLAGS.patience)
    if code < 0:
        raise UserError(f"the process that measures was ended by signal {-code}; the same command goes on where it was")
    sys.exit(code)


if __name__ == "__main__":
    main(run)

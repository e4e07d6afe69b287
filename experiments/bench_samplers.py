"""Times the compiled samplers against their floor: the network passes that their loops execute, each as a bare jitted forward.

    python experiments/bench_samplers.py --config=configs/text8_ssmd.py [--batch=32] [--sampler=ancestral,confidence]     # fresh weights
    python experiments/bench_samplers.py --workdir=runs/text8 --out=runs/text8/bench       # a trained run's; a row a line in bench.jsonl

`ratio` is wall time / (executed passes by kind x the time of the bare forward): the median, and quartiles, over --repetitions in which
the two take turns. `cpu` is the same in CPU seconds of this process, steadier on a busy machine. `host` is how many times as long a
Python loop takes that calls the jitted forwards and draws in numpy. MiB are arguments, results and temporaries, as the compiler plans
them. Compiling is timed without the persistent cache. A program with a callback, infeed or outfeed is an error.
"""

from __future__ import annotations

import resource
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from ml_collections import config_flags

from dllm.core.config import config_dict, main, to_dataclass, writable_folder
from dllm.core.lookup import lookup
from dllm.core.types import UserError
from dllm.evals import results, speed
from dllm.ops.windows import window_table
from dllm.train.checkpoint import Loaded, load_run
from dllm.train.run import run_config

FLAGS = flags.FLAGS
CONFIG = config_flags.DEFINE_config_file("config", None, "a file of configs/, for its model with fresh weights")
flags.DEFINE_string("workdir", None, "workdir of a trained run, in place of --config")
flags.DEFINE_integer("step", None, "checkpoint to load; the latest by default")
flags.DEFINE_integer("batch", 32, "rows that are drawn together", lower_bound=1)
flags.DEFINE_list("sampler", None, "modules of dllm/samplers, by comma; all that go with the model by default")
flags.DEFINE_integer("repetitions", 15, "calls of each sampler that are timed", lower_bound=1)
flags.DEFINE_integer("seed", 0, "of weights, prompts and draws", lower_bound=0, upper_bound=2**32 - 1)
flags.DEFINE_string("out", "", "folder of bench.jsonl")

# (sampler, options, share of the sequence that is given), few passes and many.
POINTS = {
    "hybrid": [
        *((name, {"rate": rate}, 0.0) for name in ("ancestral", "confidence") for rate in (0.1, 0.01)),
        ("self_speculative", {"rate": 0.25, "n_verify": 8, "verification": "chain"}, 0.0),
        ("self_speculative", {"rate": 0.02, "n_verify": 2, "verification": "chain"}, 0.0),
        ("self_speculative", {"rate": 0.25, "n_verify": 8, "verification": "block"}, 0.0),
        ("self_speculative", {"rate": 0.02, "n_verify": 2, "verification": "block"}, 0.0),
    ],
    "gpt": [("autoregressive", {}, 0.0), ("autoregressive", {}, 0.5)],
}


def load() -> Loaded:
    """Returns the model of --workdir, or that of --config with fresh weights and step 0."""
    if (FLAGS.workdir is None) == (CONFIG.value is None):
        raise UserError("pass one of --config=configs/NAME.py (fresh weights) and --workdir=RUN")
    if FLAGS.workdir is not None:
        return load_run(FLAGS.workdir, FLAGS.step)
    run = run_config(config_dict(CONFIG.value))
    variables = run.model.module.init(run.model.config, jax.random.key(FLAGS.seed))
    return Loaded(run.to_dict(), run.model.module, run.model.config, variables, 0, Path())


def host_seconds(loaded: Loaded, name: str, options: Any) -> float | None:
    """Returns the median time of the loop on the host, None where there is none to compare with."""
    if name not in ("ancestral", "self_speculative") or getattr(options, "verification", "chain") != "chain":
        return None
    model, config = loaded.model_module, loaded.model_config
    table, n_verify = window_table(options.window, config.length, options.rate), getattr(options, "n_verify", 0)
    window, keep = int(table.max()), 1 + (n_verify > 0)
    draft = jax.jit(lambda variables, *rows: (*model.bind(config, variables).draft(*rows, window)[:keep], None)[:2])
    verify = jax.jit(lambda variables, hidden, *rows: model.bind(config, variables).verify(hidden, *rows, window))
    seconds = []
    for n in range(2 + FLAGS.repetitions // 3):  # the first compiles
        clock = time.perf_counter()
        forwards = (lambda *rows: draft(loaded.variables, *rows)), (lambda *rows: verify(loaded.variables, *rows))
        speed.host_loop(*forwards, table, n_verify, FLAGS.batch, FLAGS.seed + n)
        seconds.append(time.perf_counter() - clock)
    return float(np.median(seconds[1:]))


def measure(loaded: Loaded, name: str, options: Any, given: int) -> dict[str, Any]:
    """Returns the row of one setting. Raises UserError if its program leaves the device."""
    static = lookup("samplers", name), loaded.model_module, loaded.model_config
    program = speed.prepare(*static, options, loaded.variables, FLAGS.batch, given, FLAGS.seed)
    if found := speed.leaves_device(program.run.as_text()):
        raise UserError(f"the program of {name} leaves the device: {', '.join(found)}")
    bare = speed.bare_passes(*static[1:], loaded.variables, FLAGS.batch, program.passes)
    timing = speed.time_program(program, bare, FLAGS.repetitions)
    wall, host = float(np.median(timing.sampler_2R[0])), host_seconds(loaded, name, options)
    quartiles = [timing.ratio(q)[0] for q in (0.25, 0.75)]
    device, stats = jax.devices()[0], jax.devices()[0].memory_stats() or {}
    row = {"sampler": name, "option": asdict(options), "given": given, "batch": FLAGS.batch, "repetitions": FLAGS.repetitions}
    label = lambda kind: f"{kind.name}_{kind.columns}"
    row |= {"passes": {label(kind): executed for kind, executed in program.passes.items()}}
    row |= {"pass_ms": {label(kind): 1e3 * float(np.median(s_2R[0])) / program.passes[kind] for kind, s_2R in timing.passes_2R.items()}}
    row |= {"wall_ms": 1e3 * wall, "samples_per_s": FLAGS.batch / wall, "ratio": timing.ratio()[0], "ratio_quartiles": quartiles}
    row |= {"cpu_ratio": timing.ratio()[1] if device.platform == "cpu" else None, "host_ratio": host and host / wall}
    row |= {"leaves_device": found, "compile_s": program.compile_seconds, "bytes": program.memory()}
    row |= {"device_peak_bytes": stats.get("peak_bytes_in_use")}  # of the process so far, as the next
    row |= {"host_peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    return row | {"platform": device.platform, "device": device.device_kind, "jax": jax.__version__}


HEAD = (
    f"{'sampler':16} {'setting':28} {'ratio':>5} {'quartiles':>11} {'cpu':>5} {'host':>5} {'wall ms':>8} {'samples/s':>9} {'compile s':>9} "
    f"{'MiB':>6} {'leaves':>6}  executed passes x ms"
)


def line(row: dict[str, Any], changes: dict[str, Any]) -> str:
    """Returns the row as a line of the table; of its options those in `changes`."""
    setting = " ".join(f"{k}={v}" for k, v in changes.items()).replace("verification=", "") or f"given={row['given']}"
    number = lambda x: "" if x is None else f"{x:.2f}"
    low, high = row["ratio_quartiles"]
    ratios = f"{row['ratio']:5.2f} {low:5.2f} {high:5.2f} {number(row['cpu_ratio']):>5} {number(row['host_ratio']):>5}"
    size = f"{row['compile_s']:9.1f} {sum(row['bytes'].values()) / 2**20:6.1f} {' '.join(row['leaves_device']) or 'none':>6}"
    passes = "  ".join(f"{kind} {n} x {row['pass_ms'][kind]:.2f}" for kind, n in row["passes"].items())
    return f"{row['sampler']:16} {setting:28} {ratios} {row['wall_ms']:8.1f} {row['samples_per_s']:9.1f} {size}  {passes}"


def run() -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    loaded = load()
    model, length = loaded.config["model"], loaded.model_config.length
    parameters = sum(x.size for x in jax.tree.leaves(loaded.variables))
    fits = lambda name: name != "self_speculative" or loaded.model_config.n_causal > 0
    points = [point for point in POINTS[model["name"]] if fits(point[0])]
    names = dict.fromkeys(point[0] for point in points)
    for name in FLAGS.sampler or ():
        if name not in names:
            raise UserError(f"no sampler {name!r} to time with this {model['name']} model; there are: {', '.join(names)}")
    points = [point for point in points if point[0] in (FLAGS.sampler or names)]
    out = writable_folder(FLAGS.out) / "bench.jsonl" if FLAGS.out else None
    if out:
        results.repair(out)
    print(f"{model['name']}, {parameters:,} parameters, step {loaded.step}, batch {FLAGS.batch}, {jax.devices()[0].device_kind}")
    print(HEAD)
    for name, changes, share in points:
        options = to_dataclass(lookup("samplers", name).Options, changes, "option")
        row = measure(loaded, name, options, int(share * length))
        print(line(row, changes), flush=True)
        if out:
            results.append_line(out, {"model": model, "parameters": parameters, "step": loaded.step, "seed": FLAGS.seed} | row)
    if out:
        print(f"appended to {out}")


if __name__ == "__main__":
    main(run)

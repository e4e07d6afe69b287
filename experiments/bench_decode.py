"""Times decoding by blocks: a pass against the context, fused against separate commits, whole samplers against their floor, loop memory.

    python experiments/bench_decode.py --model=sdar-1.7b --layers=4 [--batch=4] [--out=FOLDER]      # a public shape, random weights
    python experiments/bench_decode.py --workdir=runs/stories/b4 --batch=32 --new=128 --repetitions=15     # a trained run
    python experiments/bench_decode.py --workdir=runs/stories/uno --batch=32 --new=128 --repetitions=15    # one with an adapter that drafts

Four tables, all of the same weights; with --out, their rows are appended to OUT/bench_decode.jsonl.

context  ms of a pass over one block (of one sequence) behind so many tokens in the cache, over a fused pair of blocks (with an adapter: of
         a draft and of a verifying pass of 8 rows), and over one token (autoregression); and of the pass without a cache, which reads the
         context anew. That one is skipped, with the reason, where it would take longer than --longest or more than --gib of temporaries.
         Contexts may be longer than the model's own.
commit   ms of the fused pass (a finished block, and the next one's first look) against two passes, one after the other, by batch.
sampler  passes a token by kind, then `ratio`: wall time / (executed passes by kind x ms of each as a bare jitted forward), the median and
         quartiles over --repetitions in which the two take turns; `cpu` is the same in CPU seconds. Rows are given prompts of --given
         tokens in turn: with unequal ones they finish their blocks at different passes. A program with a callback is an error.
memory   temporaries of the decode loop, compiled for the longest context with its cache as an argument, beside that cache; with --layers
         below the model's own depth, of the whole depth too.

Four minutes on two idle CPU cores for the first command, and 8 GB of memory.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import jax
import numpy as np
from absl import flags

from dllm.core.config import main, to_dataclass, writable_folder
from dllm.core.lookup import lookup
from dllm.core.types import UserError
from dllm.evals import decode_speed, results, speed
from dllm.models import public, qwen3, uno
from dllm.models.decoder import DTYPES
from dllm.ops import masks
from dllm.samplers import psi_spec
from dllm.train.checkpoint import load_run

FLAGS = flags.FLAGS
flags.DEFINE_string("model", None, "a row of dllm/models/public.py, with random weights")
flags.DEFINE_integer("layers", 0, "cut --model to so many; 0: its own", lower_bound=0)
flags.DEFINE_integer("block", 0, "block length of --model; one without a MASK gets one behind its vocabulary. 0: its own", lower_bound=0)
flags.DEFINE_enum("dtype", None, DTYPES, "of --model's weights and activations; float32 on CPU, else the table's")
flags.DEFINE_string("workdir", None, "workdir of a trained block-diffusion run, or of one with an adapter, in place of --model")
flags.DEFINE_integer("step", None, "checkpoint to load; the latest by default")
flags.DEFINE_list("contexts", "256,512,1024,2048,4096,8192", "tokens in the cache, whole blocks")
flags.DEFINE_list("batches", "1,4,16", "rows of the table `commit`; its context is the first of --contexts")
flags.DEFINE_integer("batch", 4, "rows that a sampler draws together", lower_bound=1)
flags.DEFINE_integer("new", 5, "tokens that it writes behind the longest prompt, and then to the end of a block", lower_bound=1)
flags.DEFINE_list("given", "1,2,3", "lengths of the prompts, which rows take in turn")
flags.DEFINE_list("strategy", None, "of the tables `sampler` and `memory`; all by default")
flags.DEFINE_integer("repetitions", 3, "calls of each sampler that are timed", lower_bound=1)
flags.DEFINE_float("budget", 1.0, "seconds for each pass of the first two tables", lower_bound=0.0)
flags.DEFINE_float("longest", 10.0, "seconds that one pass without a cache may be expected to take", lower_bound=0.0)
flags.DEFINE_float("gib", 6.0, "temporaries that it may want", lower_bound=0.0)
flags.DEFINE_integer("seed", 0, "of weights, prompts and draws", lower_bound=0, upper_bound=2**32 - 1)
flags.DEFINE_string("out", "", "folder of bench_decode.jsonl")

STRATEGIES = {
    "static fused": ("block_diffusion", {"select": "static", "commit": "fused"}),
    "static separate": ("block_diffusion", {"select": "static", "commit": "separate"}),
    "dynamic fused": ("block_diffusion", {"select": "dynamic", "commit": "fused"}),
    "dynamic separate": ("block_diffusion", {"select": "dynamic", "commit": "separate"}),
    "self_verified": ("self_verified", {}),
    "autoregressive": ("autoregressive", {}),
}
SAME_LOOP = ("dynamic fused", "dynamic separate")  # as static, in what memory it takes
DRAFTING = {  # of a run with an adapter
    "chain": ("psi_spec", {}),
    "block": ("psi_spec", {"verification": "block"}),
    "tree": ("psi_spec", {"verification": "tree"}),
    "single pass": ("psi_spec", {"single_pass": True}),
    "prompt_lookup": ("prompt_lookup", {}),
    "autoregressive": ("autoregressive", {}),
}


def load() -> tuple[str, ModuleType, qwen3.Config, Any, int]:
    """Returns (name, model, config, variables, the model's own depth)."""
    if (FLAGS.workdir is None) == (FLAGS.model is None):
        raise UserError("pass one of --model=NAME (a public shape, random weights) and --workdir=RUN")
    if FLAGS.workdir is not None:
        if FLAGS.layers or FLAGS.block or FLAGS.dtype:
            raise UserError("--layers, --block and --dtype belong to --model; a run has its own")
        run = load_run(FLAGS.workdir, FLAGS.step)
        if run.model_module is not uno and (run.model_module is not qwen3 or run.model_config.mask_id < 0):
            raise UserError(
                f"{FLAGS.workdir} holds no block-diffusion model: pass the workdir of a qwen3 run with a mask_id, or of an uno run"
            )
        return f"{FLAGS.workdir}, step {run.step}", run.model_module, run.model_config, run.variables, run.model_config.layers
    public.family(FLAGS.model)
    if FLAGS.model not in public.MODELS:
        raise UserError(f"--model={FLAGS.model} is a family; pass one of {', '.join(public.MODELS)}")
    config = public.MODELS[FLAGS.model]
    if config.mask_id < 0 and not FLAGS.block:
        raise UserError(f"{FLAGS.model} is autoregressive: pass --block=LENGTH to make it a block-diffusion model, or a row sdar-*")
    own = config.layers
    if FLAGS.layers > own:
        raise UserError(f"--layers={FLAGS.layers}, and {FLAGS.model} has {own}: pass fewer")
    changes: dict[str, Any] = dict(layers=FLAGS.layers or own, block=FLAGS.block or config.block)
    if config.mask_id < 0:
        changes |= dict(vocab=config.vocab + 1, mask_id=config.vocab, tied=False)
    dtype = FLAGS.dtype or ("float32" if jax.default_backend() == "cpu" else config.dtype)
    config = dataclasses.replace(config, **changes, dtype=dtype, param_dtype=dtype)
    return f"{FLAGS.model}, random weights", qwen3, config, qwen3.init(config, jax.random.key(FLAGS.seed)), own


def numbers(name: str, low: int = 1) -> list[int]:
    """Returns the whole numbers of a list flag. Raises UserError for others, and for such below `low`."""
    values = getattr(FLAGS, name)
    if not values or not all(x.strip().isdecimal() and int(x) >= low for x in values):
        raise UserError(f"--{name} is {','.join(values)!r}; make it whole numbers of {low} or more, by comma")
    return [int(x) for x in values]


def contexts(model: ModuleType, config: qwen3.Config, variables: Any) -> Any:
    """Yields a row of the table `context` for each of --contexts."""
    last, rate, drafts = "", 0.0, model is uno
    rows = psi_spec.Options().length if drafts else config.block
    passes = {"block": decode_speed.block_pass, "fused": decode_speed.fused_pass}
    passes = {"draft": decode_speed.draft_pass, "verify": decode_speed.verify_pass} if drafts else passes
    bare = lambda forward, *most: decode_speed.bare_forward(model, config, variables, 1, forward, *most)
    print(f"\n{'context':>8} " + " ".join(f"{name + ' ms':>10}" for name in (*passes, "one")) + f" {'uncached ms':>12}")
    for context in numbers("contexts"):
        calls = {name: bare(shape(rows, context)) for name, shape in passes.items()} | {"one": bare(decode_speed.ar_pass(context))}
        uncached = decode_speed.uncached_pass(rows, context, masks.causal if drafts else None)
        try:
            if rate * uncached.rows > FLAGS.longest:
                raise UserError(f"{rate * uncached.rows:.0f} s or more; --longest={FLAGS.longest:g}")
            calls["uncached"], skipped = bare(uncached, FLAGS.gib * 2**30), ""
        except UserError as e:
            skipped = str(e)
        ms = {name: 1e3 * s for name, s in decode_speed.time_forwards(calls, FLAGS.repetitions, FLAGS.budget).items()}
        rate = ms["uncached"] / 1e3 / uncached.rows if "uncached" in ms else rate
        last = f"{ms['uncached']:12.2f}" if "uncached" in ms else f"{'skipped':>12}  ({skipped})"
        print(f"{context:8} " + " ".join(f"{ms[name]:10.2f}" for name in (*passes, "one")) + f" {last}", flush=True)
        yield {"context": context, "batch": 1, "ms": ms, "skipped": skipped}


def commits(config: qwen3.Config, variables: Any) -> Any:
    """Yields a row of the table `commit` for each of --batches."""
    context = numbers("contexts")[0]
    shapes = {"block": decode_speed.block_pass(config.block, context), "fused": decode_speed.fused_pass(config.block, context)}
    print(f"\n{'batch':>8} {'block ms':>10} {'fused ms':>10} {'2 block / fused':>16}")
    for batch in numbers("batches"):
        calls = {name: decode_speed.bare_forward(qwen3, config, variables, batch, shape) for name, shape in shapes.items()}
        ms = {name: 1e3 * s for name, s in decode_speed.time_forwards(calls, FLAGS.repetitions, FLAGS.budget).items()}
        gain = 2 * ms["block"] / ms["fused"]
        print(f"{batch:8} {ms['block']:10.2f} {ms['fused']:10.2f} {gain:16.2f}", flush=True)
        yield {"context": context, "batch": batch, "ms": ms, "gain": gain}


def resolve(strategy: str, model: ModuleType, config: qwen3.Config) -> tuple[Any, Any, qwen3.Config, Any]:
    """Returns (sampler, model, config, options): for autoregression the same weights under a config without a MASK."""
    name, changes = (DRAFTING if model is uno else STRATEGIES)[strategy]
    module = lookup("samplers", name)
    config = dataclasses.replace(config, mask_id=-1) if name == "autoregressive" else config
    return module, model, config, to_dataclass(module.Options, changes, "option")


def samplers(model: ModuleType, config: qwen3.Config, variables: Any, strategies: list[str]) -> Any:
    """Yields a row of the table `sampler` for each strategy. Raises UserError if a program leaves the device."""
    given, batch = numbers("given"), FLAGS.batch
    print(f"\n{'sampler':17} {'ratio':>5} {'quartiles':>11} {'cpu':>5} {'wall ms':>9} {'tokens/s':>9}  passes a token; executed x ms")
    for strategy in strategies:
        static = resolve(strategy, model, config)
        program = decode_speed.prepare(*static, variables, batch, given, FLAGS.new, FLAGS.seed)
        if found := speed.leaves_device(program.run.as_text()):
            raise UserError(f"the program of {strategy} leaves the device: {', '.join(found)}")
        bare = {forward: decode_speed.bare_forward(*static[1:3], variables, batch, forward) for forward in program.passes}
        timing = speed.time_program(program, bare, FLAGS.repetitions)
        ms = {forward.name(): 1e3 * float(np.median(s_2R[0])) / program.passes[forward] for forward, s_2R in timing.passes_2R.items()}
        executed, a_token = {f.name(): n for f, n in program.passes.items()}, decode_speed.passes_a_token(program)
        wall, quartiles = float(np.median(timing.sampler_2R[0])), [timing.ratio(q)[0] for q in (0.25, 0.75)]
        row = {"strategy": strategy, "batch": batch, "given": given, "new": FLAGS.new, "option": dataclasses.asdict(static[3])}
        row |= {"passes_a_token": a_token, "executed": executed, "pass_ms": ms, "wall_ms": 1e3 * wall, "ratio": timing.ratio()[0]}
        row |= {"ratio_quartiles": quartiles, "cpu_ratio": timing.ratio()[1] if jax.default_backend() == "cpu" else None}
        row |= {"tokens_per_s": decode_speed.written(program) / wall, "bytes": program.memory()}
        kinds = " ".join(f"{kind} {n:.2f}" for kind, n in a_token.items())
        passes = "  ".join(f"{name} {n} x {ms[name]:.2f}" for name, n in executed.items())
        ratios = f"{row['ratio']:5.2f} {quartiles[0]:5.2f} {quartiles[1]:5.2f} " + (
            f"{row['cpu_ratio']:5.2f}" if row["cpu_ratio"] else " " * 5
        )
        print(f"{strategy:17} {ratios} {1e3 * wall:9.1f} {row['tokens_per_s']:9.1f}  {kinds}; {passes}", flush=True)
        yield row


def memories(model: ModuleType, config: qwen3.Config, variables: Any, strategies: list[str], own: int) -> Any:
    """Yields rows of the table `memory` for each strategy whose loop is another: of the model at hand, and at its own depth."""
    length = max(numbers("contexts"))
    print(f"\n{'loop':17} {'layers':>6} {'cache MiB':>10} {'temporary MiB':>14} {'share':>6}   batch {FLAGS.batch}, context {length}")
    for strategy in [s for s in strategies if s not in SAME_LOOP or s.replace("dynamic", "static") not in strategies]:
        for layers in dict.fromkeys((config.layers, own)):
            whole = dataclasses.replace(config, layers=layers)
            shapes = jax.eval_shape(lambda key, whole=whole: model.init(whole, key), jax.random.key(0))
            sampler, _, whole, options = resolve(strategy, model, whole)
            plan = decode_speed.loop_memory(sampler, model, whole, options, shapes, FLAGS.batch, length)
            share, mib = plan["temp"] / plan["cache"], {key: size / 2**20 for key, size in plan.items()}
            print(f"{strategy:17} {layers:6} {mib['cache']:10.1f} {mib['temp']:14.1f} {share:6.1%}", flush=True)
            yield {"strategy": strategy, "layers": layers, "batch": FLAGS.batch, "context": length, "bytes": plan, "share": share}


def run() -> None:
    name, model, config, variables, own = load()
    known = DRAFTING if model is uno else STRATEGIES
    strategies = FLAGS.strategy or list(known)
    for strategy in strategies:
        if strategy not in known:
            raise UserError(f"no strategy {strategy!r}; there are: {', '.join(known)}")
    for key in ("contexts", "batches", "given"):
        numbers(key)
    if model is qwen3 and (odd := [context for context in numbers("contexts") if context % config.block]):
        raise UserError(f"--contexts has {odd[0]}, and a block is {config.block} tokens: make it a multiple")
    out = writable_folder(FLAGS.out) / "bench_decode.jsonl" if FLAGS.out else None
    if out:
        results.repair(out)
    parameters, device = sum(x.size for x in jax.tree.leaves(variables)), jax.devices()[0]
    about = {"model": {"name": name, **dataclasses.asdict(config)}, "parameters": parameters, "seed": FLAGS.seed}
    about |= {"platform": device.platform, "device": device.device_kind, "jax": jax.__version__}
    print(f"{name}: {parameters:,} parameters, {config.layers} layers, block {config.block}, {config.dtype}, {device.device_kind}")
    tables = {
        "context": contexts(model, config, variables),
        "commit": commits(config, variables) if model is qwen3 else [],
        "sampler": samplers(model, config, variables, strategies),
        "memory": memories(model, config, variables, strategies, own),
    }
    for table, rows in tables.items():
        for row in rows:
            if out:
                results.append_line(out, about | {"table": table} | row)
    if out:
        print(f"appended to {out}")


if __name__ == "__main__":
    main(run)

"""Trains the model of a config file, and goes on where an earlier run in the same workdir stopped, to the same numbers.

    python experiments/train.py --config=configs/text8_ssmd.py --workdir=runs/text8 [--config.KEY=VALUE ...]
    python experiments/train.py --config=configs/text8_ssmd.py:paper --workdir=runs/paper     # another preset of the file

The workdir gets config.json, words.txt.gz (the words of the training text) or tokenizer/, metrics.jsonl, samples/ and checkpoints/.
Ctrl-C and SIGTERM save before they end it. Several devices, processes or hosts: docs/many_devices.md.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import config_flags

from dllm.core import config
from dllm.core.lookup import lookup
from dllm.core.types import UserError
from dllm.data import corpus as corpora
from dllm.data import pipeline, tokenizers
from dllm.ops.draws import KeyedDraws
from dllm.ops.settings import make_settings
from dllm.samplers import loop
from dllm.train import checkpoint, sharding, step, workdir
from dllm.train.run import Run, check_corpus, run_config, stages
from dllm.train.state import SAMPLE, abstract, create, stream
from dllm.train.writer import Writer

CONFIG = config_flags.DEFINE_config_file("config", None, "a file of configs/; :NAME picks a preset, --config.KEY=VALUE overrides")
WORKDIR = flags.DEFINE_string("workdir", None, "where the run is kept", required=True)


def main() -> None:
    with sharding.joined_processes():
        start()


def start() -> None:
    """Reads config, corpus and mesh, and trains."""
    run, folder = run_config(config.config_dict(CONFIG.value)), Path(WORKDIR.value)
    mesh = sharding.make_mesh(run.mesh)
    rows = sharding.batch_rows(mesh)
    if run.train.batch % (rows * run.train.accumulate):
        parts = f" x train.accumulate = {rows * run.train.accumulate}" if run.train.accumulate > 1 else f" = {rows}"
        raise UserError(f"train.batch={run.train.batch} must be a multiple of the mesh's data x fsdp{parts}")
    workdir.check_run(folder, run)
    corpus = lookup("data", run.data.name).load(run.data)
    with jax.set_mesh(mesh):
        train(run, folder, mesh, corpus)


def train(run: Run, folder: Path, mesh: jax.sharding.Mesh, corpus: corpora.Corpus) -> None:
    """Runs the steps that are missing. Whatever the config may have wrong shows before the workdir is touched."""
    plan, length, process = run.train, run.data.length, sharding.process_rows(mesh)
    first = jax.process_index() == 0  # the process that writes what isn't a checkpoint
    tokenizer = tokenizers.read(corpus.tokenizer) if corpus.tokenizer else tokenizers.CHARACTERS
    check_corpus(run, corpus, tokenizer.mask)
    batches = pipeline.train_batches(corpus.train, length, plan.batch, plan.seed, *process, run.data.buckets)
    valid = pipeline.eval_batches(corpus.valid, length, plan.batch, plan.eval_batches, *process)
    train_steps = {first: step.make_train_step(stage, mesh) for first, stage in stages(run)}
    eval_step = step.make_eval_step(run, mesh)
    samples = make_samples(run, mesh, tokenizer, corpus.valid) if run.sampler else None
    poll = sharding.make_poll(mesh)
    due = lambda now, every: every > 0 and (now % every == 0 or now == plan.steps)

    # State: this workdir's last checkpoint, or else another run's weights, or else fresh.
    state, origin = abstract(run, mesh), ""
    like = lambda x_BL: jax.ShapeDtypeStruct((plan.batch, length), x_BL.dtype, sharding=sharding.batch_sharding(mesh))
    for train_step in train_steps.values():
        jax.eval_shape(train_step, state, jax.tree.map(like, valid[0]))
    if not checkpoint.complete_steps(folder):
        state, origin = create(run, mesh), "from scratch"
        if plan.init_from:
            state, origin = checkpoint.warm_start(state, run, mesh)

    lock = workdir.locked(folder) if first else contextlib.nullcontext()
    with lock, checkpoint.manager(folder, writing=True) as checkpoints, workdir.asked_to_stop() as stop:
        start = saved = max(checkpoint.complete_steps(folder), default=0)
        if start:
            state, origin = checkpoint.restore(checkpoints, start, abstract(run, mesh), batches, run), f"resumed at step {start}"
        if first:
            workdir.write_run(folder, run)
            if corpus.tokenizer:
                for name, data in tokenizers.files(corpus.tokenizer).items():
                    config.write_atomic(folder / tokenizers.FOLDER / name, data)
            elif isinstance(corpus.train, np.ndarray) and not (folder / "words.txt.gz").exists():
                text = "".join(word + "\n" for word in corpora.words(corpus.train))
                config.write_atomic(folder / "words.txt.gz", gzip.compress(text.encode(), mtime=0))
        log = Writer(folder / "metrics.jsonl", start, plan.steps, plan.batch * length, silent=not first)
        size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        text = corpus.train
        read = f"{text.size:,} characters" if isinstance(text, np.ndarray) else f"{len(text) * length:,} tokens"
        log.show(f"{run.model.name}, {size:,} parameters, {read} of {corpus.name}, {mesh.size} device(s); {origin}")

        def settle(now: int, metrics: step.Metrics) -> None:
            """Reads a step's metrics, which waits for it; stops if they are not finite, writes them if they are due."""
            row = step.to_row(metrics)
            if not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])):
                last = f"the last good checkpoint is of step {saved}" if saved else "there is no checkpoint yet"
                raise UserError(
                    f"step {now}: the loss is {row['loss']} and its gradient's norm {row['grad_norm']}; {last}. Lower optim.lr, "
                    "raise optim.warmup or set optim.clip, in another --workdir"
                )
            if due(now, plan.log_every):
                log.train(now, row)
            elif now == start + 1:
                log.restart(now)  # compilation is behind us

        try:
            before = None
            for now in range(start + 1, plan.steps + 1):
                batch = step.put(next(batches), mesh)
                train_step = train_steps[max(first for first in train_steps if first < now)]
                with jax.transfer_guard("disallow"):
                    state, metrics = train_step(state, batch)
                if before:
                    settle(*before)  # the device is busy with this step while the last one's metrics are read
                before = now, metrics
                stopping = poll(bool(stop))
                save = stopping or now == plan.steps or due(now, plan.save_every)
                if not (save or due(now, plan.eval_every) or due(now, plan.sample_every)):
                    continue
                settle(*before)
                before = None
                with log.aside(now):
                    if due(now, plan.eval_every):
                        row = {f"valid_{key}": value for key, value in step.evaluate(eval_step, state.ema, valid, mesh).items()}
                        log.row({"step": now, **row})
                        log.show(f"step {now}/{plan.steps}  " + "  ".join(f"{key} {value:.4g}" for key, value in row.items()))
                    if samples and due(now, plan.sample_every):
                        texts = [tokenizer.decode(tokens) for tokens in samples(state.ema, now)]
                        log.show("\n".join(f"  | {text}" for text in texts))
                        if first:
                            config.write_atomic(folder / "samples" / f"{now}.txt", "\n".join(texts) + "\n")
                    if save:
                        checkpoint.save(checkpoints, now, state, batches, run.to_dict())
                        saved = now
                if stopping:
                    checkpoint.finish(checkpoints)
                    log.show(f"stopped and saved at step {now} of {plan.steps}; the same command goes on from there")
                    sys.exit(128 + (stop or [signal.SIGTERM])[0])  # the signal may be another process's
            checkpoint.finish(checkpoints)
            log.show(f"step {plan.steps} of {plan.steps} is done; checkpoints/, metrics.jsonl and samples/ are in {folder}")
        finally:
            log.close()


def make_samples(
    run: Run, mesh: jax.sharding.Mesh, tokenizer: tokenizers.Tokenizer, texts: np.ndarray | corpora.Rows
) -> Callable[..., list[list[int]]]:
    """Returns (params, step) -> four sequences of ids, drawn by the run's sampler; proteins are as long as the first of `texts`."""
    rows, length, model = math.lcm(4, sharding.batch_rows(mesh)), run.data.length, run.model
    sampler = loop.compile_sampler(run.sampler.module, model.module, model.config, run.sampler.config)
    if never := getattr(tokenizer, "forbidden", ()):
        hidden = loop.hide(texts.take(np.arange(rows) % len(texts))["tokens"], never)
        prompt = loop.frame(hidden, length, never, model.config.pad_id)
    else:
        prompt = loop.make_prompt([loop.opening(model.module, model.config, tokenizer)] * rows, length)
    settings = make_settings(rows, model.config.vocab, banned=[i for i in never if i < model.config.vocab])

    draws = lambda now: KeyedDraws(jax.random.fold_in(stream(run.train.seed, SAMPLE), now), jnp.arange(rows, dtype=jnp.int32))
    jax.eval_shape(sampler, {"params": abstract(run, mesh).params}, settings, draws(0), prompt)  # bad options fail now, not in an hour

    def samples(params, now: int) -> list[list[int]]:
        drawn = sampler({"params": params}, settings, draws(now), prompt)
        tokens_BL, lengths_B = jax.device_get(jax.device_put((drawn.tokens, drawn.lengths), sharding.replicated(mesh)))
        return [row[:length].tolist() for row, length in zip(tokens_BL[:4], lengths_B[:4])]

    return samples


if __name__ == "__main__":
    config.main(main)

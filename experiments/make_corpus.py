"""Samples a corpus from a trained autoregressive run: rows of tokens that training reads with data.name=tokens.

    python experiments/make_corpus.py --workdir=runs/stories --out=runs/corpus --tokens=10_000_000 --length=256
        [--setting.temperature=1.0 --setting.top_k=0 ...] [--seed=0] [--batch=256] [--held_out=0.02]

A row is --length tokens from BOS on (of a model with a BOS of its own, a gpt: without it). What the model writes behind the end of a story
is the next one, with its BOS, and the last story of a row is cut; so rows look as those that such models are trained on.

Row n depends on the seed and n alone. Rows are written to OUT/shards as they come, so a run that was killed goes on to the same corpus;
with the last of them OUT gets train.npz, valid.npz, test.npz (--held_out of the rows for each of the two, without those that occur in an
earlier split) and tokenizer/.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from ml_collections import config_dict, config_flags

from dllm.core.config import main, read_json, writable_folder, write_atomic
from dllm.core.types import UserError
from dllm.data import tokenizers
from dllm.evals.generate import Request, Task, check_request, draw, make_task, whole_batch
from dllm.train.checkpoint import load_run
from dllm.train.sharding import MeshConfig, make_mesh
from dllm.train.workdir import locked
from dllm.train.writer import clock

FLAGS = flags.FLAGS
ASKED = {k: v for k, v in dataclasses.asdict(Request()).items() if k not in ("max_new", "stop")}
SETTING = config_flags.DEFINE_config_dict("setting", config_dict.ConfigDict(ASKED))
flags.DEFINE_string("workdir", None, "workdir of a trained autoregressive run", required=True)
flags.DEFINE_string("out", None, "folder of the corpus", required=True)
flags.DEFINE_integer("tokens", 10_000_000, "in all splits together, rounded up to whole rows", lower_bound=1)
flags.DEFINE_integer("length", 256, "tokens a row, with its BOS", lower_bound=2)
flags.DEFINE_integer("batch", 256, "rows that are drawn together", lower_bound=1)
flags.DEFINE_integer("shard", 16, "batches a shard: what a killed run loses at most", lower_bound=1)
flags.DEFINE_integer("seed", 0, "of the draws", lower_bound=0, upper_bound=2**32 - 1)
flags.DEFINE_integer("step", None, "checkpoint to sample from; the latest by default")
flags.DEFINE_float("held_out", 0.02, "share of the rows in valid, and in test", lower_bound=0.0, upper_bound=0.4)


def run() -> None:
    mesh = make_mesh(MeshConfig(data=-1, fsdp=1, tensor=1))
    loaded, out = load_run(FLAGS.workdir, FLAGS.step, mesh), Path(FLAGS.out)
    if FLAGS.length > loaded.model_config.length:
        raise UserError(f"--length is {FLAGS.length}, and the model's context {loaded.model_config.length}; make it at most that")
    rows = -(-FLAGS.tokens // FLAGS.length)
    if int(rows * FLAGS.held_out) < 1:
        raise UserError(f"--held_out={FLAGS.held_out} of {rows} rows is not one; raise it, or --tokens")
    opening = check_request(make_task(loaded, "autoregressive", {}, {}), 1, 1, []).given
    settings = SETTING.value.to_dict() | {"max_new": FLAGS.length - int(np.asarray(opening).sum())}
    task = make_task(loaded, "autoregressive", {"grow": 64}, settings)
    keys = ("tokens", "length", "seed", "held_out", "shard", "batch")
    about = {"workdir": str(FLAGS.workdir), "step": loaded.step, "setting": settings} | {key: getattr(FLAGS, key) for key in keys}
    with locked(out, "making a corpus", "--out"):
        check_same(out / "corpus.json", about)
        write_atomic(out / "corpus.json", json.dumps(about, indent=2) + "\n")
        for name, data in tokenizers.files(loaded.workdir / tokenizers.FOLDER).items():
            write_atomic(out / tokenizers.FOLDER / name, data)
        if all((out / f"{split}.npz").is_file() for split in ("train", "valid", "test")):
            print(f"{out} is done already")
            return
        sample(task, out, rows, mesh)
        tokens_NL = np.concatenate([read_shard(path) for path in sorted((out / "shards").glob("*.npy"))])[:rows]
        write_splits(out, tokens_NL, int(rows * FLAGS.held_out))
        shutil.rmtree(out / "shards")


def check_same(path: Path, about: dict) -> None:
    """Returns None if the folder is new, or of this very corpus. Raises UserError that names what differs."""
    if not path.exists():
        return
    old = read_json(path)
    for key, value in about.items():
        if not isinstance(old, dict) or old.get(key) != value:
            was = old.get(key) if isinstance(old, dict) else old
            raise UserError(f"{path.parent} holds a corpus with {key}={was!r}, not {value!r}; use its value, or another --out")


def read_shard(path: Path) -> np.ndarray:
    try:
        return np.load(path)
    except (OSError, ValueError, EOFError):
        raise UserError(f"{path} is damaged; delete it and run the same command again") from None


def sample(task: Task, out: Path, rows: int, mesh: Any) -> None:
    """Draws the shards that are missing, and writes each when it is whole."""
    prompt, small = check_request(task, 1, 1, []), np.uint16 if task.run.model_config.vocab <= 2**16 else np.int32
    folder, batch = writable_folder(out / "shards"), whole_batch(FLAGS.batch, mesh)
    path = lambda start: folder / f"{start:09d}.npy"
    shards = [range(start, min(start + batch * FLAGS.shard, rows), batch) for start in range(0, rows, batch * FLAGS.shard)]
    todo = [starts for starts in shards if not path(starts[0]).is_file()]
    total, done = sum(map(len, todo)), 0
    print(f"{rows:,} rows of {FLAGS.length} tokens; {total} of {sum(map(len, shards))} batches are to be drawn", flush=True)
    drawn = draw(task, prompt, itertools.chain(*todo), batch=batch, seed=FLAGS.seed, mesh=mesh)
    seconds = 0.0  # compilation is not in it
    for starts in todo:
        parts = []
        for (tokens_BL, *_), took in itertools.islice(drawn, len(starts)):
            parts.append(tokens_BL.astype(small))
            done, seconds = done + 1, seconds + took
        buffer = io.BytesIO()
        np.save(buffer, np.concatenate(parts))
        write_atomic(path(starts[0]), buffer.getvalue())
        rate = f"{done * batch * FLAGS.length / seconds:,.0f} tokens/s, {clock((total - done) * seconds / done)} left"
        print(f"{done} of {total} batches, {rate}", flush=True)


def write_splits(out: Path, tokens_NL: np.ndarray, held_out: int) -> None:
    """Writes train.npz, and valid.npz and test.npz of at most `held_out` rows: those that don't occur in an earlier split."""
    count, seen = len(tokens_NL) - 2 * held_out, set()
    parts = dict(zip(("train", "valid", "test"), np.split(tokens_NL, [count, count + held_out])))
    for split, part_NL in parts.items():
        names = [row.tobytes() for row in part_NL]
        new_NL = part_NL if split == "train" else part_NL[[name not in seen for name in names]]
        seen.update(names)
        if len(new_NL) == 0:
            raise UserError(f"all rows of the {split} split occur in an earlier one; raise setting.temperature, or --length")
        buffer = io.BytesIO()
        np.savez_compressed(buffer, tokens=new_NL)
        write_atomic(out / f"{split}.npz", buffer.getvalue())
        print(f"{len(new_NL):10,} rows, {new_NL.size:12,} tokens  {out / split}.npz")


if __name__ == "__main__":
    main(run)

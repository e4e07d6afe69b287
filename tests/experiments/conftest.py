"""What the tests of the programs share: a place with runs and sweeps in it, made once."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import jax
import pytest

from dllm.data.corpus import encode
from dllm.data.pipeline import train_batches
from dllm.train import checkpoint
from dllm.train.run import Run, run_config
from dllm.train.sharding import make_mesh
from dllm.train.state import create
from tests.experiments.programs import SWEEP, Programs, config_text
from tests.train import tiny

SAMPLER = {"name": "self_speculative", "window": "cosine", "rate": 0.5, "n_verify": 2, "verification": "chain"}


def save(folder: Path, run: Run) -> Path:
    """Returns `folder`, made a workdir with a checkpoint of random weights; not by run_config's leave, so that any model may be in it."""
    text, mesh = tiny.text(), make_mesh(run.mesh)
    folder.mkdir()
    with jax.set_mesh(mesh), checkpoint.manager(folder, writing=True) as manager:
        checkpoint.save(manager, 1, create(run, mesh), train_batches(encode(text), run.data.length, 4, 0), run.to_dict())
    (folder / "words.txt.gz").write_bytes(gzip.compress("\n".join(sorted({*text.split()})).encode(), mtime=0))
    return folder


@pytest.fixture(scope="session")
def programs():
    with Programs() as started:
        yield started


@pytest.fixture(scope="session")
def place(tmp_path_factory, programs):
    """A text, a config, a trained run with checkpoints 2 and 4, runs of other models, a sweep of the first. No test changes it."""
    place = tmp_path_factory.mktemp("place")
    tiny.corpus_file(place)
    values = tiny.run(data__path=str(place / "text8"), sampler=SAMPLER, train__steps=4, train__save_every=2, train__eval_every=0).to_dict()
    (place / "config.json").write_text(json.dumps(values))
    (place / "config.py").write_text(config_text(values))
    done = programs.run("train", f"--config={place / 'config.py'}", f"--workdir={place / 'run'}")
    assert done.code == 0, done.err
    run = run_config(values)
    gpt = run_config(values | {"model": tiny.GPT, "objective": {"name": "next_token"}, "sampler": {"name": ""}})
    small = dataclasses.replace(gpt.model, config=dataclasses.replace(gpt.model.config, vocab=20))
    plain = dataclasses.replace(run.model, config=dataclasses.replace(run.model.config, n_causal=0))
    save(place / "gpt", gpt)
    save(place / "gpt_20", dataclasses.replace(gpt, model=small))
    save(place / "mdm", dataclasses.replace(run, model=plain))
    (place / "sweep.py").write_text(config_text(SWEEP))
    done = programs.run("sweep", f"--config={place / 'sweep.py'}", f"--workdir={place / 'run'}", f"--out={place / 'swept'}")
    assert done.code == 0, done.err
    return place

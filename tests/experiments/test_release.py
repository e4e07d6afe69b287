"""A run is released, and the release is sampled, swept and looked into without its training run."""

import gzip
import json
import shutil

import jax
import numpy as np
import pytest

from dllm.data.corpus import encode, words
from dllm.data.pipeline import train_batches
from dllm.train import checkpoint
from dllm.train.sharding import make_mesh
from dllm.train.state import create
from tests.train import tiny

POINT = {"sampler": "self_speculative", "options": {"rate": 0.3, "n_verify": 2}, "settings": {"temperature": 0.5}}


@pytest.fixture(scope="module")
def program(programs):
    """Returns a function that runs a program and returns what it printed: stdout, or, with another exit code, the last line of stderr."""

    def run(name, *flags, code=0):
        done = programs.run(name, *flags)
        assert done.code == code, done.err
        return done.out if code == 0 else done.err.strip().splitlines()[-1]

    return run


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return tiny.corpus_file(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def released(tmp_path_factory, text, program):
    """The release of a run with random weights, which is gone."""
    workdir, folder = (tmp_path_factory.mktemp("release") / name for name in ("run", "small"))
    run = tiny.run(data__path=str(text))
    mesh = make_mesh(run.mesh)
    with jax.set_mesh(mesh), checkpoint.manager(workdir, writing=True) as manager:
        checkpoint.save(manager, 5, create(run, mesh), train_batches(encode(tiny.text()), 16, 8, 0), run.to_dict())
    assert "words.txt.gz" in program("release", f"--workdir={workdir}", f"--out={folder}", code=2)  # that file is still missing
    assert not (folder / "weights.npz").exists()
    (workdir / "words.txt.gz").write_bytes(gzip.compress("\n".join(words(encode(tiny.text()))).encode()))
    printed = program("release", f"--workdir={workdir}", f"--out={folder}")
    total = sum(path.stat().st_size for path in folder.iterdir())
    assert printed.splitlines()[-1].split()[:2] == [f"{total / 1e6:.3f}", "MB"]
    shutil.rmtree(workdir)
    return folder


def test_sample(released, program, tmp_path):
    printed = program("sample", f"--workdir={released}", "--sampler=self_speculative", "--num=2", f"--out={tmp_path / 's.jsonl'}")
    lines = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert [len(line["text"]) for line in lines] == [16, 16]
    assert lines[0]["text"] in printed


def test_sweep_of_chosen_points(released, program, tmp_path):
    """No text is needed: what would be measured on it, reference.json, is there."""
    (tmp_path / "reference.json").write_text("{}")
    (tmp_path / "points.json").write_text(json.dumps({"seed": 0, "points": [POINT]}))
    config = f"--config=configs/sweeps/points.py:{tmp_path / 'points.json'}"
    program("sweep", config, f"--workdir={released}", f"--out={tmp_path}", "--config.num_samples=8")
    row = json.loads((tmp_path / "results.jsonl").read_text())
    assert (row["model"], row["step"], row["seed"], row["num_samples"]) == ("small", 5, 1, 8)
    assert row["setting"]["n_verify"] == 2
    assert row["setting"]["temperature"] == 0.5


def test_ranks(released, text, program, tmp_path):
    printed = program("ranks", f"--workdir={released}", f"--data_path={text}", "--num=9", "--starts=0,3", f"--out={tmp_path / 'r'}")
    with np.load(tmp_path / "r.npz") as arrays:
        assert arrays["starts"].tolist() == [0, 3]
        for name in ("gain", "acceptance", "gain_stderr", "acceptance_stderr"):
            assert np.isnan(arrays[name]).sum(axis=1).tolist() == [0, 3]
        first = arrays["acceptance"][1, 3]
    assert f"{first:8.3f}" in printed
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "r.svg").read_text().count("<path") > 20
    assert "can't start at rank 16" in program("ranks", f"--workdir={released}", f"--data_path={text}", "--starts=16", code=2)

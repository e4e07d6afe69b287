"""The programs around a trained run: sweep, sample, evaluate and plot, each as a user starts it."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from dllm.data.corpus import encode, words
from dllm.data.pipeline import train_batches
from dllm.evals import results
from dllm.train import checkpoint
from dllm.train.run import run_config
from dllm.train.sharding import make_mesh
from dllm.train.state import create

REPO = Path(__file__).parents[2]
CONFIG = {
    "data": {"name": "text8", "length": 12},
    "model": {"name": "hybrid", "length": 12, "width": 16, "n_noncausal": 1, "n_causal": 1, "heads": 2, "mlp": 32},
    "objective": {"name": "ssmd"},
    "optim": {"lr": 1e-3, "warmup": 1, "b1": 0.9, "b2": 0.99, "weight_decay": 0.0, "clip": 1.0, "ema": 0.9, "train_only": ""},
    "train": {"seed": 0, "steps": 1, "batch": 4, "log_every": 1, "eval_every": 0, "eval_batches": 1, "sample_every": 0, "save_every": 0}
    | {"init_from": ""},
    "mesh": {"data": 1, "fsdp": 1, "tensor": 1},
    "sampler": {"name": ""},
}
SWEEP = """
from ml_collections import ConfigDict

def get_config():
    points = ({"sampler": "ancestral", "options": {"rate": 0.3}, "settings": {}},
              {"sampler": "ancestral", "options": {"rate": 0.12}, "settings": {"temperature": 0.5}},
              {"sampler": "self_speculative", "options": {"rate": 0.3, "n_verify": 2}, "settings": {}})
    return ConfigDict({"num_samples": 20, "batch": 16, "seed": 0, "evals": ("spelling", "entropy"), "judge": "", "points": points})
"""
CONTRACT = {
    *("model", "step", "config_hash", "sampler", "setting", "seed", "num_samples", "nfe", "nfe_weighted", "passes", "tokens_per_pass"),
    *("tokens_per_cycle", "accept_rate", "seconds_per_sample", "spelling", "spelling_stderr", "entropy", "entropy_stderr"),
}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run as training leaves it, with random weights."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    folder.mkdir()
    text = encode("the cat sat on a mat and the dog ran off " * 100)
    (folder / "text8").write_bytes(("the cat sat on a mat and the dog ran off " * 100).encode())
    (folder / "words.txt.gz").write_bytes(gzip.compress("\n".join(words(text)).encode()))
    run = run_config(CONFIG | {"data": CONFIG["data"] | {"path": str(folder / "text8")}})
    mesh = make_mesh(run.mesh)
    with jax.set_mesh(mesh), checkpoint.manager(folder, writing=True) as manager:
        checkpoint.save(manager, 1, create(run, mesh), train_batches(text, 12, 4, 0), run.to_dict())
    (folder / "sweep.py").write_text(SWEEP)
    return folder


def program(name, *flags, code=0):
    """Returns what the program printed: stdout, or, with another exit code, the last line of stderr."""
    done = subprocess.run([sys.executable, f"experiments/{name}.py", *flags], cwd=REPO, capture_output=True, text=True, env=os.environ)
    assert done.returncode == code, done.stderr
    if code:
        assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1] if code else done.stdout


def test_a_sweep_that_was_killed_goes_on(workdir, tmp_path):
    flags = [f"--config={workdir / 'sweep.py'}", f"--workdir={workdir}", f"--out={tmp_path}"]
    printed = program("sweep", *flags)
    assert "3 settings, 0 of them there already" in printed
    path = tmp_path / "results.jsonl"
    whole = path.read_text()
    rows = [json.loads(line) for line in whole.splitlines()]
    assert len(rows) == 3
    assert all(set(row) >= CONTRACT for row in rows)
    assert [row["model"] for row in rows] == ["small"] * 3
    assert rows[1]["setting"] == {"window": "cosine", "rate": 0.12, "temperature": 0.5}
    assert rows[0]["accept_rate"] is None
    assert 0 < rows[2]["accept_rate"] <= 1
    for row in rows:
        with np.load(tmp_path / row["samples"]) as arrays:
            assert arrays["tokens"].shape == (20, 12)
            assert row["nfe"] == pytest.approx(arrays["nfe"].mean())
            assert row["spelling"] == pytest.approx(arrays["spelling/numerator"].sum() / arrays["spelling/denominator"].sum())
    reference = json.loads((tmp_path / "reference.json").read_text())
    assert reference["spelling_inner"]["ceiling"] == 1.0
    assert reference["spelling"]["floor"] < 0.6

    path.write_text("".join(line + "\n" for line in whole.splitlines()[:2]) + whole.splitlines()[2][:40])  # killed in the third row
    printed = program("sweep", *flags)
    assert "3 settings, 2 of them there already" in printed
    again = [json.loads(line) for line in path.read_text().splitlines()]
    assert again[:2] == rows[:2]
    timeless = lambda row: {k: v for k, v in row.items() if k != "seconds_per_sample"}
    assert timeless(again[2]) == timeless(rows[2])

    printed = program("plot", f"--sweep={tmp_path}", "--x=both", "--y=entropy")
    assert (tmp_path / "entropy_both.png").stat().st_size > 10_000
    assert "<svg" in (tmp_path / "entropy_both.svg").read_text()
    assert "has no metric gen_nll; it has: entropy" in program("plot", f"--sweep={tmp_path}", "--y=gen_nll", code=2)


def test_sample(workdir):
    out = workdir / "s.jsonl"
    flags = [f"--workdir={workdir}", "--sampler=self_speculative", "--num=3", f"--out={out}"]
    printed = program("sample", *flags, "--option.rate=0.3", "--setting.temperature=0.5", "--prompt=the ??? x")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 3
    for line in lines:
        assert line["text"].startswith("the ")
        assert line["text"][7:9] == " x"
        assert line["new_tokens"] == 6
        assert f"{line['nfe']} passes  {line['text']}" in printed
    assert str(out) in printed
    assert program("sample", *flags, "--setting.heat=2", code=2).startswith("error: there is no --setting.heat; there are: temperature")


def test_evaluate(workdir):
    printed = program("evaluate", f"--workdir={workdir}", "--evals=bound,spelling", "--num=9", "--split=test")
    row = json.loads((workdir / "evals.jsonl").read_text().splitlines()[-1])
    assert (row["split"], row["chunks"], row["step"]) == ("test", 9, 1)
    assert row["draft_bpc"] > 3
    assert row["spelling"] > 0.5
    assert f"{row['draft_bpc']:.4f} ± {row['draft_bpc_stderr']:.4f}" in printed
    assert "there are: bound, entropy, gen_nll, likelihood, nelbo" in program("evaluate", f"--workdir={workdir}", "--evals=nothing", code=2)


def test_evaluate_likelihood(workdir):
    """The run names no sampler: the sampler's defaults hold, where the command line doesn't say otherwise."""
    flags = [f"--workdir={workdir}", "--num=3", "--option.rate=0.3"]
    printed = program("evaluate", *flags, "--option.n_verify=1", "--evals=likelihood")
    row = json.loads((workdir / "evals.jsonl").read_text().splitlines()[-1])
    assert row["option"] == {"window": "cosine", "rate": 0.3, "n_verify": 1, "verification": "chain"}
    assert row["elbo_bpc"] > 3
    assert row["passes_given_x"] == pytest.approx(row["causal_passes_given_x"], rel=1e-6)  # with one verification, one each
    assert row["tokens_per_pass_given_x"] == pytest.approx(12 / row["passes_given_x"])
    assert f"{row['elbo_bpc']:.4f} ± {row['elbo_bpc_stderr']:.4f}" in printed
    assert "for the eval likelihood: add it" in program("evaluate", *flags, "--evals=bound", code=2)
    assert "option.rate" in program("evaluate", *flags, "--option.pace=1", code=2)


def test_rows_on_disk(tmp_path):
    key = {"model": "m", "step": 1, "config_hash": "c", "sampler": "s", "seed": 0}
    for value in (1.0, 2.0, 3.0):
        results.append_row(tmp_path, key | {"setting": {"rate": min(value, 2.0)}, "nfe": value}, {"nfe": np.ones(2)})
    rows = results.read_rows(tmp_path)
    assert [r["nfe"] for r in rows] == [1.0, 3.0]  # of two with one key the last
    path = tmp_path / "results.jsonl"
    text = path.read_text()
    path.write_text(text + text[:30])
    assert results.read_rows(tmp_path) == rows  # half a line is not read
    results.repair(path)
    assert path.read_text() == text
    results.repair(path)
    assert path.read_text() == text

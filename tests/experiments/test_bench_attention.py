"""experiments/bench_attention.py: its rows, page and picture, that it goes on where it stopped, and what it refuses."""

from __future__ import annotations

import json

import pytest

from tests.experiments.programs import complaint

SMALL = ["--repetitions=2", "--seconds=0.01", "--batch=4", "--patience=0", "--minutes=30"]


def rows(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def test_rows_page_and_picture(programs, tmp_path):
    shapes = ["--tables=attention", "--shapes=tree,decode_causal", "--rivals=xla,dense,cudnn"]
    done = programs.run("bench_attention", f"--out={tmp_path}", *shapes, *SMALL)
    assert done.code == 0, done.err
    first = rows(tmp_path)
    found = {(row["shape"], row["pass"], row["rival"]): row for row in first}
    assert found.keys() == {
        (*case, rival)
        for case in (("tree", "both"), ("tree", "forward"), ("decode_causal", "decode"))
        for rival in ("xla", "dense", "cudnn")
    }
    for (_, _, rival), row in found.items():
        assert ("ms" in row) == (rival != "cudnn") != ("reason" in row)
        assert rival == "cudnn" or row["error"] < 1e-5
        assert row["platform"] == row["device"] == "cpu"
    page = (tmp_path / "attention.md").read_text()
    assert page in done.out
    for text in (
        "## Forward and backward",
        "## Decode",
        "| tree |",
        "| decode_causal |",
        "cuDNN is for NVIDIA GPUs | both; forward; decode",
    ):
        assert text in page
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")

    done = programs.run("bench_attention", f"--out={tmp_path}", *shapes, *SMALL)  # again: nothing is left to do
    assert done.code == 0, done.err
    assert rows(tmp_path) == first
    assert (tmp_path / "attention.md").read_text() == page


def test_train_step(programs, tmp_path):
    done = programs.run("bench_attention", f"--out={tmp_path}", "--tables=train", *SMALL)
    assert done.code == 0, done.err
    (row,) = rows(tmp_path)
    assert (row["shape"], row["pass"], row["batch"], row["length"]) == ("tiny", "train", 32, 32)
    assert row["tokens_per_s"] == pytest.approx(32 * 32 / row["ms"] * 1e3)
    assert 2 < row["loss"] < 8
    page = (tmp_path / "attention.md").read_text()
    assert "## Train steps" in page
    assert "## Forward" not in page
    assert not (tmp_path / "attention.png").exists()


@pytest.mark.slow
def test_samplers(programs, tmp_path):
    done = programs.run("bench_attention", f"--out={tmp_path}", "--tables=sampler", *SMALL)
    assert done.code == 0, done.err
    assert [row["rival"] for row in rows(tmp_path)] == ["ancestral", "self_speculative"]
    for row in rows(tmp_path):
        floor = sum(n * row["pass_ms"][kind] for kind, n in row["passes"].items())
        assert row["ratio"] == pytest.approx(row["ms"] / floor, rel=0.5)  # of two repetitions
        assert row["batch"] == 4
    assert "## Samplers" in (tmp_path / "attention.md").read_text()


def test_without_time_all_is_left_out_and_said(programs, tmp_path):
    """By way of the process that watches another."""
    done = programs.run("bench_attention", f"--out={tmp_path}", "--minutes=0", "--shapes=tree", "--tables=attention,train")
    assert done.code == 0, done.err
    assert "no time for: tiny train, tree both, tree forward" in (tmp_path / "attention.md").read_text()
    assert not (tmp_path / "results.jsonl").exists()


def test_without_matplotlib_there_is_a_page(programs, tmp_path):
    hide = "import sys; sys.modules['matplotlib'] = None"
    flags = ["--tables=attention", "--shapes=tree", "--rivals=dense"]
    done = programs.run("bench_attention", f"--out={tmp_path}", *flags, *SMALL, first=hide)
    assert done.code == 0, done.err
    assert "it needs matplotlib" in done.out
    assert (tmp_path / "attention.md").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shapes=sdar_3k_b4"], "no shape 'sdar_3k_b4'; there are: sdar_2k_b4"),
        (["--rivals=kernel,flash"], "no rivals 'flash'; there are: kernel, xla"),
        (["--tables=attention,loss"], "no tables 'loss'; there are: attention, train, sampler"),
        (["--presets=huge"], "no preset 'huge' in this config; there are: tiny, mini"),
        (["--minutes=-1"], "--minutes"),
        (["--repetitions=0"], "--repetitions"),
        (["--out=/proc/nowhere"], "cannot make the folder /proc/nowhere"),
    ],
)
def test_what_it_refuses(programs, tmp_path, flags, message):
    done = programs.run("bench_attention", f"--out={tmp_path / 'out'}", *flags)
    assert message in complaint(done)
    assert not (tmp_path / "out" / "results.jsonl").exists()

"""experiments/bench_samplers.py: its rows, and what it refuses."""

from __future__ import annotations

import json

import pytest

from tests.experiments.programs import complaint


def test_rows(programs, place, tmp_path):
    """Of the samplers of a plain masked-diffusion run: a row each, with the floor's parts, whole figures, and nothing that leaves."""
    (tmp_path / "bench.jsonl").write_text('{"sampler": "anc')  # half a line of a killed program
    done = programs.run(
        "bench_samplers", f"--workdir={place / 'mdm'}", "--sampler=ancestral", "--batch=4", "--repetitions=1", f"--out={tmp_path}"
    )
    assert done.code == 0, done.err
    rows = [json.loads(line) for line in (tmp_path / "bench.jsonl").read_text().splitlines()]
    assert [(row["sampler"], row["option"]["rate"], row["batch"]) for row in rows] == [("ancestral", 0.1, 4), ("ancestral", 0.01, 4)]
    for row in rows:
        assert row["leaves_device"] == []
        assert row["passes"].keys() == row["pass_ms"].keys()
        floor = sum(executed * row["pass_ms"][kind] for kind, executed in row["passes"].items())
        assert row["ratio"] == pytest.approx(row["wall_ms"] / floor)  # of one repetition
        assert min(row["compile_s"], row["cpu_ratio"], row["host_ratio"], row["samples_per_s"], *row["bytes"].values()) > 0
        assert row["model"]["n_causal"] == 0
    assert "none" in done.out.splitlines()[2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "pass one of --config"),
        (["--config=configs/text8_gpt.py:tiny", "--workdir=WORKDIR"], "pass one of --config"),
        (["--config=configs/text8_gpt.py:tiny", "--sampler=ancestral"], "there are: autoregressive"),
        (["--workdir=WORKDIR", "--sampler=self_speculative"], "there are: ancestral, confidence"),
    ],
)
def test_what_it_refuses(programs, place, flags, message):
    done = programs.run("bench_samplers", *(flag.replace("WORKDIR", str(place / "mdm")) for flag in flags))
    assert message in complaint(done)

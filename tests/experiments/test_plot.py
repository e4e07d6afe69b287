"""Curves out of sweep rows, and the picture and the comparison that `plot` makes of them."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.evals import results
from dllm.evals.stats import Metric

REPO = Path(__file__).parents[2]


def write_sweep(out, model="toy", speed=2.0, batch=400):
    """A sweep whose self-speculative curve needs `speed` times fewer passes than the baseline for the same spelling."""
    rng = np.random.default_rng(0)
    for sampler, factor in (("self_speculative", speed), ("ancestral", 1.0)):
        for passes in (32, 16, 8, 4):
            nfe_B, words_B = passes * np.exp(rng.normal(0, 0.1, batch)) / factor, rng.integers(6, 12, batch)
            level_B = np.clip(rng.normal(0.3 + 0.15 * np.log(passes / 4), 0.1, batch), 0, 1)
            metric = Metric(rng.binomial(words_B, level_B).astype(float), words_B.astype(float))
            setting = {"window": "cosine", "rate": 1 / passes} | ({"n_verify": passes // 4} if factor != 1 else {})
            row = {"model": model, "step": 1, "config_hash": "c", "sampler": sampler, "setting": setting, "seed": 0}
            row |= {"nfe": nfe_B.mean(), "nfe_weighted": 1.1 * nfe_B.mean(), "spelling": metric.value, "spelling_stderr": metric.stderr}
            results.append_row(out, row, {"nfe": nfe_B, "nfe_weighted": 1.1 * nfe_B} | results.metric_arrays({"spelling": metric}))


def test_curves(tmp_path):
    write_sweep(tmp_path / "a")
    write_sweep(tmp_path / "b", model="other")
    knobs = ["rate", "n_verify"]
    curves = results.read_curves([str(tmp_path / "a")], "nfe", "spelling", knobs)
    assert [(c.label, len(c.points)) for c in curves] == [("self-speculative", 4), ("ancestral", 4)]
    passes = [p.nfe_B.mean() for p in curves[1].points]
    assert passes == sorted(passes)
    assert curves[1].points[0].nfe_B.mean() == pytest.approx(4, rel=0.05)
    both = results.read_curves([str(tmp_path / "a"), str(tmp_path / "b")], "nfe", "spelling", knobs)
    assert [c.label for c in both] == ["self-speculative, toy", "ancestral, toy", "self-speculative, other", "ancestral, other"]
    split = results.read_curves([str(tmp_path / "a")], "nfe", "spelling", ["rate"])
    assert [c.label for c in split] == [*(f"self-speculative, n_verify={n}" for n in (8, 4, 2, 1)), "ancestral"]
    with pytest.raises(UserError, match="no metric foo; it has: spelling"):
        results.read_curves([str(tmp_path / "a")], "nfe", "foo", knobs)
    with pytest.raises(UserError, match="no results in"):
        results.read_curves([str(tmp_path)], "nfe", "spelling", knobs)
    next((tmp_path / "a" / "samples").iterdir()).write_bytes(b"PK half")
    with pytest.raises(UserError, match="sweep again"):
        results.read_curves([str(tmp_path / "a")], "nfe", "spelling", knobs)


def test_picture_and_comparison(tmp_path):
    write_sweep(tmp_path)
    (tmp_path / "reference.json").write_text(json.dumps({"spelling": {"ceiling": 0.9, "floor": 0.1}}))
    command = [sys.executable, "experiments/plot.py", f"--sweep={tmp_path}", "--x=nfe", "--y=spelling", "--compare"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"wrote {tmp_path}/spelling_nfe.png" in done.stdout
    assert (tmp_path / "spelling_nfe.png").read_bytes().startswith(b"\x89PNG")
    from matplotlib import image

    pixels = image.imread(tmp_path / "spelling_nfe.png")[:, :, :3]
    for colour in ((0x3D, 0x3D, 0x3D), (0xD1, 0x49, 0x5B)):  # a line of each sampler is really there
        assert (np.abs(pixels - np.array(colour) / 255).max(axis=2) < 0.02).sum() > 500
    svg = (tmp_path / "spelling_nfe.svg").read_text()
    assert svg.count("<path") > 30
    mean = next(line.split() for line in done.stdout.splitlines() if "geometric mean" in line)
    assert float(mean[2]) == pytest.approx(2.0, abs=0.15)
    assert len([line for line in done.stdout.splitlines() if line.startswith("  spelling 0.")]) == 5

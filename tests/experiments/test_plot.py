"""Curves out of sweep rows, and the picture and the comparison that `plot` makes of them."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.evals import results
from dllm.evals.stats import Metric, mean_metric

REPO = Path(__file__).parents[2]


def write_sweep(out, model="toy", speeds=(("self_speculative", 2.0), ("ancestral", 1.0)), batch=400):
    """A sweep whose curves need `speed` times fewer passes than one of speed 1 for the same spelling."""
    rng = np.random.default_rng(0)
    for sampler, factor in speeds:
        for passes in (32, 16, 8, 4):
            nfe_B, words_B = passes * np.exp(rng.normal(0, 0.1, batch)) / factor, rng.integers(6, 12, batch)
            level_B = np.clip(rng.normal(0.3 + 0.15 * np.log(passes / 4), 0.1, batch), 0, 1)
            metric = Metric(rng.binomial(words_B, level_B).astype(float), words_B.astype(float))
            setting = {"window": "cosine", "rate": 1 / passes} | ({"n_verify": passes // 4} if sampler == "self_speculative" else {})
            row = {"model": model, "step": 1, "config_hash": "c", "sampler": sampler, "setting": setting, "seed": 0}
            metrics = {"spelling": metric, "entropy": mean_metric(rng.normal(2.5 + 0.01 * (factor == 2), 0.05, batch))}
            row |= {"nfe": nfe_B.mean(), "nfe_weighted": 1.1 * nfe_B.mean()}
            row |= {name: m.value for name, m in metrics.items()} | {f"{name}_stderr": m.stderr for name, m in metrics.items()}
            results.append_row(out, row, {"nfe": nfe_B, "nfe_weighted": 1.1 * nfe_B} | results.metric_arrays(metrics))


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
    assert both[0].points[0].entropy.value == pytest.approx(2.51, abs=0.01)
    fewer = results.read_curves([str(tmp_path / "a")], "nfe", "spelling", knobs, from_nfe=6.0)
    assert [len(c.points) for c in fewer] == [2, 3]  # 8 and 16 passes; 8, 16 and 32
    fewer = results.read_curves([str(tmp_path / "a")], "nfe_weighted", "spelling", knobs, from_nfe=8.5)
    assert [len(c.points) for c in fewer] == [1, 2]  # main passes, however x counts them
    with pytest.raises(UserError, match="has a value of spelling at 100 passes or more"):
        results.read_curves([str(tmp_path / "a")], "nfe", "spelling", knobs, from_nfe=100.0)
    with pytest.raises(UserError, match="no metric foo; it has: entropy, spelling"):
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


def test_a_twin_joins_the_baseline(tmp_path):
    """The twin needs 1.5 times fewer passes than the model's own draft: against the better of both, 2 x becomes 1.33 x."""
    write_sweep(tmp_path / "a")
    write_sweep(tmp_path / "b", model="twin", speeds=[("ancestral", 1.5)])
    command = [sys.executable, "experiments/plot.py", f"--sweep={tmp_path / 'a'}", f"--sweep={tmp_path / 'b'}", "--x=both", "--compare"]
    done = subprocess.run([*command, f"--out={tmp_path / 'c' / 'curves'}", "--from_nfe=1"], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1] == "self-speculative, toy (4 points) against the better of: ancestral, toy and ancestral, twin (4 and 4 points)"
    written = json.loads((tmp_path / "c" / "curves_compare.json").read_text())
    assert f"wrote {tmp_path / 'c' / 'curves_compare.json'}" in lines
    assert (written["y"], written["from_nfe"]) == ("spelling", 1.0)
    entries = written["comparisons"]
    assert [(e["x"], len(e["baseline"])) for e in entries] == [("nfe", 2), ("nfe", 1), ("nfe", 1)] + [
        ("nfe_weighted", n) for n in (2, 1, 1)
    ]
    together, own, twin = entries[:3]
    assert together["mean"] == pytest.approx(2 / 1.5, abs=0.15)
    assert (own["mean"], twin["mean"]) == pytest.approx((2.0, 2 / 1.5), abs=0.15)
    assert together["mean_low"] < 2 / 1.5 < together["mean_high"]
    assert together["mean_entropy_gap"] == pytest.approx(0.01, abs=4 * together["mean_entropy_gap_stderr"])
    assert together["mean_entropy_gap_stderr"] < 0.004
    mean = next(line for line in lines if "geometric mean" in line)
    gap, stderr = together["mean_entropy_gap"], together["mean_entropy_gap_stderr"]
    assert mean.endswith(
        f"{together['mean']:.2f} x   [{together['mean_low']:.2f}, {together['mean_high']:.2f}]   entropy {gap:+.4f} ± {stderr:.4f}"
    )
    assert f"  it needs 1/{together['mean']:.2f} of the baseline's network passes (NFE), averaged over the band" in lines
    assert any(line.startswith(f"  against ancestral, toy alone: {own['mean']:.2f} x") for line in lines)

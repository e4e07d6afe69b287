"""The settings that tune chooses of a sweep, and the sweep that measures them anew."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.evals import results

REPO = Path(__file__).parents[2]


def write_sweep(out, model="toy", seed=3):
    """At each number of passes three settings of each sampler, the second of them the best; and one below 4 passes."""
    rng = np.random.default_rng(0)
    for sampler in ("ancestral", "self_speculative"):
        for passes in (2.0, 4.0, 8.0, 16.0, 32.0):
            for n, better in ((1, 0.0), (2, 0.05), (3, 0.01)):
                setting = {"window": "linear", "rate": passes} | ({"n_verify": n} if sampler == "self_speculative" else {})
                setting |= {"temperature": n / 2} if n != 2 else {}
                row = {"model": model, "step": 1, "config_hash": "c", "sampler": sampler, "setting": setting, "seed": seed}
                nfe = passes * (1 + n / 10)
                quality = 0.3 + 0.1 * np.log(nfe) + better + rng.uniform(0, 0.001)
                row |= {"nfe": nfe, "nfe_weighted": 2 * nfe, "spelling": quality, "gen_nll": -quality}
                results.append_row(out, row, {"nfe": np.full(2, nfe)})


def sweep_config(path):
    """Returns the config as --config=configs/sweeps/points.py:PATH gives it."""
    return runpy.run_path(str(REPO / "configs" / "sweeps" / "points.py"))["get_config"](str(path)).to_dict()


def test_the_best_settings_become_a_sweep(tmp_path, programs):
    write_sweep(tmp_path)
    done = programs.run("tune", f"--sweep={tmp_path}", "--num=4", "--x=nfe_weighted")
    assert done.code == 0, done.err
    out = tmp_path / "points_nfe_weighted.json"
    assert f"wrote {out}" in done.out
    assert "ancestral: 4 of 12 settings" in done.out
    config = sweep_config(out)
    assert (config["seed"], config["evals"]) == (4, ("spelling", "entropy"))
    points = config["points"]
    assert [p["sampler"] for p in points] == ["ancestral"] * 4 + ["self_speculative"] * 4
    assert [p["options"] for p in points[:4]] == [{"window": "linear", "rate": rate} for rate in (4.0, 8.0, 16.0, 32.0)]
    assert [p["options"]["n_verify"] for p in points[4:]] == [2] * 4
    assert [p["settings"] for p in points] == [{}] * 8
    for p in json.loads(out.read_text())["points"]:
        assert p["tuned"]["nfe"] == pytest.approx(1.2 * p["options"]["rate"])


def test_options(tmp_path, programs):
    write_sweep(tmp_path / "a")
    common = f"--sweep={tmp_path / 'a'}", f"--out={tmp_path / 'p.json'}"
    done = programs.run("tune", *common, "--samplers=self_speculative", "--from_nfe=0", "--num=2", "--y=gen_nll")
    assert done.code == 0, done.err
    points = sweep_config(tmp_path / "p.json")["points"]
    assert [p["options"]["n_verify"] for p in points] == [2, 2]  # of a metric where less is better, the least
    done = programs.run("tune", *common, "--samplers=confidence")
    assert (done.code, "no rows of the sampler 'confidence'; there are: ancestral" in done.err) == (2, True)
    assert "no row has a value of entropy" in programs.run("tune", *common, "--y=entropy").err
    write_sweep(tmp_path / "b", model="other")
    assert "several models (other step 1, toy step 1)" in programs.run("tune", *common, f"--sweep={tmp_path / 'b'}").err


def test_a_file_that_tune_did_not_write(tmp_path):
    for text in ("[]", "{}", '{"seed": 0, "points": [{"sampler": "ancestral"}]}'):
        (tmp_path / "p.json").write_text(text)
        with pytest.raises(UserError, match="is not a file that experiments/tune"):
            sweep_config(tmp_path / "p.json")
    with pytest.raises(UserError, match=r"pass --config=configs/sweeps/points\.py:PATH"):
        sweep_config("")

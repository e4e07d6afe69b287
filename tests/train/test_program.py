"""experiments/train.py as a user runs it: killed, stopped, broken, misused."""

from __future__ import annotations

import gzip
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dllm.core.paths import named_leaves
from dllm.core.types import UserError
from dllm.train import checkpoint, workdir
from tests.train import tiny

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    """A config over a generated text; every second step is saved, so that a kill often falls into a save."""
    folder = tmp_path_factory.mktemp("config")
    values = tiny.config(data__path=str(tiny.corpus_file(folder)), train__save_every=2)
    path = folder / "tiny.py"
    path.write_text(f"from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict({values!r})\n")
    return path


def start(config_file, folder, *overrides):
    command = [sys.executable, "experiments/train.py", f"--config={config_file}", f"--workdir={folder}", *overrides]
    return subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(*args):
    """Returns (exit code, stdout, stderr) of a run that is left alone."""
    process = start(*args)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def send_after(process, folder, step, number):
    """Sends the signal once metrics.jsonl has a row of `step`."""
    metrics = folder / "metrics.jsonl"
    while process.poll() is None:
        if metrics.exists() and f'"step": {step},' in metrics.read_text():
            process.send_signal(number)
            break
        time.sleep(0.002)
    return process.communicate(timeout=300)


def parameters(folder):
    """Returns {name: array} of the last checkpoint's EMA and raw weights, and its optimizer state."""
    (step,) = checkpoint.complete_steps(folder)[-1:]
    with checkpoint.manager(folder, writing=False) as manager:
        restore = checkpoint.ocp.args.StandardRestore
        items = manager.restore(step, args=checkpoint.ocp.args.Composite(params=restore(), ema=restore(), train=restore()))
    return {name: np.asarray(leaf) for name, leaf in named_leaves(dict(items)).items()}


def rows(folder):
    """Returns the rows of metrics.jsonl without what depends on the clock."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in ("tokens_per_s", "seconds")} for line in lines]


def assert_same_run(folder, undisturbed):
    assert rows(folder) == rows(undisturbed)
    ours, theirs = parameters(folder), parameters(undisturbed)
    assert list(ours) == list(theirs)
    for name in ours:
        assert ours[name].tobytes() == theirs[name].tobytes(), name


@pytest.fixture(scope="module")
def undisturbed(config_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    code, out, err = finish(config_file, folder)
    assert code == 0, err
    assert "step 40 of 40 is done" in out
    return folder


def test_a_run_leaves_what_it_promises(undisturbed):
    config = json.loads((undisturbed / "config.json").read_text())
    assert config["model"]["gain"] == tiny.run().model.config.gain, "defaults are resolved"
    words = gzip.decompress((undisturbed / "words.txt.gz").read_bytes()).decode().split()
    text = tiny.text()
    assert words == sorted(set(text[: len(text) * 9 // 10].split()))
    assert checkpoint.complete_steps(undisturbed) == [36, 38, 40]
    log = rows(undisturbed)
    assert [row["step"] for row in log if "loss" in row] == list(range(1, 41))
    assert [row["step"] for row in log if "valid_loss" in row] == [10, 20, 30, 40]
    assert log[-1]["valid_draft_bpc"] < next(row for row in log if "valid_loss" in row)["valid_draft_bpc"]


def test_stopped_and_killed_equals_undisturbed(config_file, undisturbed, tmp_path):
    """SIGTERM, then kill -9, then left alone: the same command three times, and every number and bit of the undisturbed run."""
    folder = tmp_path / "run"
    process = start(config_file, folder)
    out, err = send_after(process, folder, 7, signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "the same command goes on from there" in out
    process = start(config_file, folder)
    send_after(process, folder, 21, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    code, out, err = finish(config_file, folder)
    assert code == 0, err
    assert "resumed at step" in out
    assert_same_run(folder, undisturbed)


@pytest.mark.slow
def test_three_kills_at_random_moments(config_file, undisturbed, tmp_path):
    """The moments are random in time, from the first import on."""
    folder = tmp_path / "run"
    for _ in range(3):
        process = start(config_file, folder)
        time.sleep(random.uniform(0.5, 8))
        process.kill()
        process.communicate()
    code, _, err = finish(config_file, folder)
    assert code == 0, err
    assert_same_run(folder, undisturbed)


def test_a_finished_run_is_left_alone(config_file, undisturbed):
    before = (undisturbed / "metrics.jsonl").read_bytes()
    code, out, err = finish(config_file, undisturbed)
    assert (code, "step 40 of 40 is done" in out) == (0, True), err
    assert (undisturbed / "metrics.jsonl").read_bytes() == before


def test_nan_stops_with_its_step_and_saves_nothing_bad(config_file, tmp_path):
    folder = tmp_path / "run"
    code, _, err = finish(config_file, folder, "--config.optim.lr=1e30", "--config.optim.warmup=0", "--config.train.save_every=1")
    assert code == 2
    line = err.strip().splitlines()[-1]
    assert line.startswith("error: step "), err
    step = int(line.split()[2].rstrip(":"))
    assert f"the last good checkpoint is of step {step - 1}" in line
    assert checkpoint.complete_steps(folder)[-1] == step - 1
    assert all(np.isfinite(leaf).all() for leaf in parameters(folder).values())
    assert rows(folder)[-1]["step"] == step - 1


def test_bad_input_ends_with_one_line(config_file, undisturbed):
    """All at once: each takes as long as the imports do."""
    cases = {
        "--config.optim.lr=0.5": "holds a run with optim.lr=0.01, not 0.5; use its value, or another --workdir",
        "--config.model.widht=3": "the config file has no key widht",
        "--config.data.path=/no/such/file": "/no/such/file",
    }
    for message, process in {message: start(config_file, undisturbed, override) for override, message in cases.items()}.items():
        _, err = process.communicate(timeout=300)
        assert process.returncode in (1, 2)
        assert message in err
        assert "Traceback" not in err


def test_one_run_a_workdir(tmp_path):
    run = tmp_path / "run"
    with workdir.locked(run), pytest.raises(UserError, match="another process is training in"), workdir.locked(run):
        pass
    with workdir.locked(run):  # the lock went with its holder, the file stays
        assert (run / ".lock").exists()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write in --workdir="), workdir.locked(tmp_path / "file"):
        pass


def test_a_second_signal_ends_the_process_as_usual():
    before = signal.getsignal(signal.SIGINT)  # a process in the background may have it ignored
    with workdir.asked_to_stop() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == before

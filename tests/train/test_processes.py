"""Several processes train one model: to the numbers of one, through kills and signals, and with one line where they can't."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time

import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.train import checkpoint, sharding, workdir
from tests.experiments.programs import config_text
from tests.train import processes, tiny

SAMPLER = {"name": "self_speculative", "window": "cosine", "rate": 0.5, "n_verify": 2, "verification": "chain"}
MESH = {"data": -1, "fsdp": 1, "tensor": 1}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A run of 40 steps that evaluates, samples and saves."""
    folder = tmp_path_factory.mktemp("config")
    values = tiny.config(data__path=str(tiny.corpus_file(folder)), train__save_every=5, train__sample_every=20, sampler=SAMPLER, mesh=MESH)
    (folder / "c.py").write_text(config_text(values))
    return f"--config={folder / 'c.py'}"


def rows(folder):
    """Returns the rows of metrics.jsonl without what depends on the clock."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in ("tokens_per_s", "seconds")} for line in lines]


def assert_close(folder, other):
    """The same rows, each number within the rounding of a sum in another order, and the same samples."""
    ours, theirs = rows(folder), rows(other)
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for a, b in zip(ours, theirs):
        np.testing.assert_allclose([*a.values()], [*b.values()], rtol=1e-5)
    samples = lambda folder: {path.name: path.read_text() for path in (folder / "samples").iterdir()}
    assert samples(folder) == samples(other)
    assert checkpoint.complete_steps(folder) == checkpoint.complete_steps(other)


def run(folder, config, number=2, devices=1, *flags):
    """Returns `folder`, after a run that was left alone."""
    done = processes.end(processes.start(number, [config, f"--workdir={folder}", *flags], devices))
    assert [code for code, *_ in done] == [0] * number, done[0][2] + done[-1][2]
    assert "is done" in done[0][1]
    assert not any("step" in out for _, out, _ in done[1:]), "the first alone speaks"
    return folder


@pytest.fixture(scope="module")
def undisturbed(config, tmp_path_factory):
    return run(tmp_path_factory.mktemp("two") / "run", config)


@pytest.fixture(scope="module")
def alone(config, tmp_path_factory):
    """The same run of a single process."""
    folder = tmp_path_factory.mktemp("one") / "run"
    ((code, _, err),) = processes.end([processes.one([config, f"--workdir={folder}"])])
    assert code == 0, err
    return folder


def send(started, folder, step, which, number):
    """Sends one process the signal once metrics.jsonl has a row of `step`."""
    while all(process.poll() is None for process in started):
        if (folder / "metrics.jsonl").exists() and f'"step": {step},' in (folder / "metrics.jsonl").read_text():
            started[which].send_signal(number)
            return
        time.sleep(0.002)


def test_a_signal_to_one_process_stops_all(config, tmp_path):
    """They agree on the step, save it together, and say where to go on. The signal goes to the one that doesn't write."""
    folder = tmp_path / "run"
    quick = ["--config.train.steps=4000", "--config.train.sample_every=0", "--config.train.eval_every=0"]
    started = processes.start(2, [config, f"--workdir={folder}", *quick])
    send(started, folder, 3, 1, signal.SIGTERM)
    (code, out, err), (other, *_) = processes.end(started)
    assert (code, other) == (128 + signal.SIGTERM,) * 2, err
    last = rows(folder)[-1]["step"]
    assert f"stopped and saved at step {last} of 4000; the same command goes on from there" in out
    assert checkpoint.complete_steps(folder)[-1] == last


@pytest.mark.slow
def test_two_processes_train_as_one(undisturbed, alone):
    assert_close(undisturbed, alone)


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_killed_and_started_again(config, undisturbed, alone, tmp_path, which):
    """The other ends by itself, soon, and says why; both together then go on to the same numbers."""
    folder = tmp_path / "run"
    started = processes.start(2, [config, f"--workdir={folder}"])
    send(started, folder, 13, which, signal.SIGKILL)
    clock = time.monotonic()
    done = processes.end(started, timeout=2 * sharding.SILENCE)
    code, _, err = done[1 - which]
    assert done[which][0] == -signal.SIGKILL
    assert time.monotonic() - clock < 1.5 * sharding.SILENCE
    # Where JAX itself sees first that the coordinator is gone it ends the process, at once and in its own words.
    assert code == 2 or (code == -signal.SIGABRT and which == 0), err
    assert sharding.LOST in err or (which == 0 and "another task died" in err), err
    done = processes.end(processes.start(2, [config, f"--workdir={folder}"]))
    assert [code for code, *_ in done] == [0, 0], done[0][2]
    assert "resumed at step" in done[0][1]
    assert_close(folder, undisturbed)
    assert_close(folder, alone)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1, 2), (1, 2, 2), (2, 1, 2)])
def test_meshes_over_processes(config, alone, tmp_path, mesh):
    """Over two processes: `tensor`, so that both feed the same rows; `fsdp` and `tensor`; `data`, with `tensor` inside."""
    flags = [f"--config.mesh.{axis}={size}" for axis, size in zip(sharding.AXES, mesh)]
    folder = run(tmp_path / "run", config, 2, int(np.prod(mesh)) // 2, *flags)
    losses = lambda folder: [row["loss"] for row in rows(folder) if "loss" in row]
    np.testing.assert_allclose(losses(folder), losses(alone), rtol=1e-4)


@pytest.mark.slow
def test_one_process_goes_on_where_two_stopped(config, alone, tmp_path):
    folder = tmp_path / "run"
    started = processes.start(2, [config, f"--workdir={folder}"])
    send(started, folder, 13, 0, signal.SIGINT)
    assert [code for code, *_ in processes.end(started)] == [128 + signal.SIGINT, 128 + signal.SIGTERM]
    ((code, out, err),) = processes.end([processes.one([config, f"--workdir={folder}"])])
    assert code == 0, err
    assert "resumed at step" in out
    assert_close(folder, alone)


# What can't be


def complaint(done):
    """Returns the one line of a process that ended with an error, without XLA's own words."""
    code, _, err = done
    assert code == 2, err
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    return line


def test_variables_that_make_no_run(monkeypatch):
    """Before anything is waited for."""
    cases = [
        ({"NUM_PROCESSES": "2"}, "JAX_NUM_PROCESSES is set and JAX_COORDINATOR_ADDRESS isn't; set that to host:port of process 0"),
        ({"PROCESS_ID": "0"}, "JAX_PROCESS_ID is set and JAX_COORDINATOR_ADDRESS isn't"),
        ({"COORDINATOR_ADDRESS": "localhost"}, "JAX_COORDINATOR_ADDRESS is 'localhost'; make it host:port"),
        ({"COORDINATOR_ADDRESS": "a:1", "NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES is 'two'; make it a whole number"),
        ({"COORDINATOR_ADDRESS": "a:1", "PROCESS_ID": "-1"}, "JAX_PROCESS_ID is '-1'; make it a whole number"),
        (
            {"COORDINATOR_ADDRESS": "a:1", "NUM_PROCESSES": "2", "PROCESS_ID": "2"},
            "JAX_PROCESS_ID is 2 and JAX_NUM_PROCESSES 2; number the processes from 0 to 1",
        ),
    ]
    for environment, message in cases:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(f"JAX_{name}", value)
            with pytest.raises(UserError, match=message), sharding.joined_processes():
                pass


def test_batches_that_the_processes_cannot_share(config, tmp_path):
    """Both say so, and neither waits for the other. One of them is told to save elsewhere: nothing is written."""
    flags = [config, f"--workdir={tmp_path / 'run'}", "--config.train.batch=7"]
    first, second = map(complaint, processes.end(processes.start(2, flags)))
    assert first == second == "error: train.batch=7 must be a multiple of the mesh's data x fsdp = 2"
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_one_that_fails_alone_takes_the_others_along(config, tmp_path):
    """The folder is in use, which the first sees; and a mesh that leaves the second without work."""
    folder = tmp_path / "run"
    with workdir.locked(folder):
        clock = time.monotonic()
        done = processes.end(processes.start(2, [config, f"--workdir={folder}"]))
        assert complaint(done[0]) == f"error: another process is training in {folder}; wait for it, or use another --workdir"
        assert done[1][0] not in (0, None)
        assert time.monotonic() - clock < 2 * sharding.SILENCE + 60
    done = processes.end(processes.start(2, [config, f"--workdir={folder}", "--config.mesh.data=1"]))
    assert "has none of process 1's; set mesh.data=-1" in complaint(done[0])


@pytest.mark.slow
def test_two_processes_with_one_number(config, tmp_path):
    """JAX aborts the one that came first; what was said before tells why."""
    at = {"JAX_COORDINATOR_ADDRESS": f"localhost:{processes.port()}", "JAX_NUM_PROCESSES": "2"}
    started = [processes.one([config, f"--workdir={tmp_path / 'run'}"], **at, JAX_PROCESS_ID="0") for _ in range(2)]
    while all(process.poll() is None for process in started):
        time.sleep(0.1)
    for process in started:  # the other may be ending too: a signal would cut its words off
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.terminate()
    done = processes.end(started)
    assert all(code != 0 for code, *_ in done)
    assert all("process 0 of 2, meeting at" in out and "each with a number of its own" in out for _, out, _ in done if out)
    assert any("ALREADY_EXISTS" in err for *_, err in done), [(code, err[:2000]) for code, _, err in done]
    assert not (tmp_path / "run").exists()

"""Kills, full disks, and two programs in one folder: what is lost, what is repeated, and what the next run makes of it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dllm.core.paths import named_leaves
from dllm.train import checkpoint
from tests.experiments.programs import POINT, REPO, SWEEP, Done, Programs, complaint, config_text, files

POINTS = (POINT, POINT | {"options": {"rate": 0.3}}, {"sampler": "self_speculative", "options": {"rate": 0.5}, "settings": {}})


@pytest.fixture(scope="module")
def swept(programs, place, tmp_path_factory):
    """Returns (the flags of a sweep without --out, where it has run undisturbed, the seconds it took)."""
    folder = tmp_path_factory.mktemp("swept")
    (folder / "sweep.py").write_text(config_text(SWEEP | {"points": POINTS}))
    flags, clock = (f"--config={folder / 'sweep.py'}", f"--workdir={place / 'run'}"), time.monotonic()
    done = programs.run("sweep", *flags, f"--out={folder / 'out'}")
    assert done.code == 0, done.err
    return flags, folder / "out", time.monotonic() - clock


def rows(out: Path) -> list[dict]:
    """Returns the rows of a sweep without what depends on the clock; every line of the file must be whole, and its key the only one."""
    found = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    keys = {json.dumps([row[key] for key in ("model", "step", "config_hash", "sampler", "setting", "seed")]) for row in found}
    assert len(keys) == len(found)
    return [{key: value for key, value in row.items() if key != "seconds_per_sample"} for row in found]


def assert_same_sweep(out: Path, undisturbed: Path) -> None:
    """No row is lost, repeated or changed, and no file is more or less."""
    assert rows(out) == rows(undisturbed)
    names = lambda folder: sorted(path.relative_to(folder) for path in files(folder))
    assert names(out) == names(undisturbed)
    for row in rows(out):
        with np.load(out / row["samples"]) as ours, np.load(undisturbed / row["samples"]) as theirs:
            assert ours.files == theirs.files
            for name in ours.files:
                np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


KILL = "import os, signal, threading; from dllm.evals import results; kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
BEFORE_LINE = KILL + "results.append_line = kill"
IN_LINE = KILL + "write = os.write; os.write = lambda file, data: kill(write(file, data[: len(data) // 2]))"
IN_ARRAYS = KILL + "os.replace = kill"
AFTER = KILL + "timer = threading.Timer({}, kill); timer.daemon = True; timer.start()"


def test_a_killed_sweep_loses_no_row_and_repeats_none(programs, swept, tmp_path):
    """Between a row's arrays and its line, in the middle of a line, before the arrays are in place, and at a random time."""
    flags, undisturbed, seconds = swept
    out, seed = tmp_path / "out", random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # shown if the test fails
    killed = lambda first: programs.run("sweep", *flags, f"--out={out}", first=first)

    assert killed(BEFORE_LINE).code == -signal.SIGKILL
    assert not (out / "results.jsonl").exists()
    assert len(list((out / "samples").iterdir())) == 1

    assert killed(IN_LINE).code == -signal.SIGKILL
    text = (out / "results.jsonl").read_text()
    assert text.startswith('{"model": "run"')
    assert "\n" not in text

    shutil.rmtree(out / "samples")
    assert killed(IN_ARRAYS).code == -signal.SIGKILL
    assert [path.suffix for path in (out / "samples").iterdir()] == [".part"]
    assert (out / "results.jsonl").read_text() == "", "the half line was cut off"

    assert killed(AFTER.format(random.Random(seed).uniform(0, seconds))).code in (-signal.SIGKILL, 0)
    done = programs.run("sweep", *flags, f"--out={out}")
    assert done.code == 0, done.err
    assert_same_sweep(out, undisturbed)
    printed = programs.run("sweep", *flags, f"--out={out}").out
    assert "3 settings, 3 of them there already" in printed


@pytest.mark.slow
def test_a_sweep_killed_at_random_times(swept, tmp_path):
    """Started as a user does, and killed from outside: three times, from the first import to the last row."""
    flags, undisturbed, _ = swept
    command, seed = [sys.executable, "experiments/sweep.py", *flags], random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    clock = time.monotonic()
    subprocess.run([*command, f"--out={tmp_path / 'whole'}"], cwd=REPO, check=True, capture_output=True)
    seconds = time.monotonic() - clock
    for moment in np.random.default_rng(seed).uniform(0, seconds, 3):
        process = subprocess.Popen([*command, f"--out={tmp_path / 'out'}"], cwd=REPO, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(moment)
        process.kill()
        process.wait()
    subprocess.run([*command, f"--out={tmp_path / 'out'}"], cwd=REPO, check=True, capture_output=True)
    assert_same_sweep(tmp_path / "out", undisturbed)


# Two at once


@contextlib.contextmanager
def held(tmp_path: Path, module: str, function: str, name: str, *flags: str) -> Iterator[list[Done]]:
    """Runs a program that stops in module.function until this context ends; yields the list that then holds how it ended."""
    stop = f"""
import time
from pathlib import Path
import {module} as module
go_on = module.{function}
def wait(*args):
    Path({str(tmp_path / "here")!r}).touch()
    while not Path({str(tmp_path / "go")!r}).exists():
        time.sleep(0.01)
    return go_on(*args)
module.{function} = wait
"""
    done: list[Done] = []
    with Programs() as others:
        thread = threading.Thread(target=lambda: done.append(others.run(name, *flags, first=stop)))
        thread.start()
        while thread.is_alive() and not (tmp_path / "here").exists():
            time.sleep(0.01)
        try:
            yield done
        finally:
            (tmp_path / "go").touch()
            thread.join()


def state(run: Path) -> dict[str, np.ndarray]:
    """Returns the weights, raw and averaged, and the optimizer's state of a run's last checkpoint."""
    with checkpoint.manager(run, writing=False) as manager:
        restore = checkpoint.ocp.args.StandardRestore
        args = checkpoint.ocp.args.Composite(params=restore(), ema=restore(), train=restore())
        items = manager.restore(checkpoint.complete_steps(run)[-1], args=args)
    return {name: np.asarray(leaf) for name, leaf in named_leaves(dict(items)).items()}


def assert_same_run(run: Path, undisturbed: Path) -> None:
    """The same checkpoints, to the bit, and the same metrics."""
    assert checkpoint.complete_steps(run) == checkpoint.complete_steps(undisturbed)
    ours, theirs = state(run), state(undisturbed)
    assert list(ours) == list(theirs)
    for name in ours:
        assert ours[name].tobytes() == theirs[name].tobytes(), name
    timeless = lambda line: {key: value for key, value in json.loads(line).items() if key not in ("tokens_per_s", "seconds")}
    lines = [[timeless(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] for folder in (run, undisturbed)]
    assert lines[0] == lines[1]
    assert {path.name for path in run.iterdir()} == {path.name for path in undisturbed.iterdir()}
    assert {path.name for path in (run / "checkpoints").iterdir()} == {path.name for path in (undisturbed / "checkpoints").iterdir()}


def test_two_runs_in_one_workdir(programs, place, tmp_path):
    flags = (f"--config={place / 'config.py'}", f"--workdir={tmp_path / 'run'}")
    with held(tmp_path, "dllm.train.checkpoint", "save", "train", *flags) as done:
        before = files(tmp_path)
        line = complaint(programs.run("train", *flags))
        assert line == f"error: another process is training in {tmp_path / 'run'}; wait for it, or use another --workdir"
        assert files(tmp_path) == before
    assert done[0].code == 0, done[0].err
    assert_same_run(tmp_path / "run", place / "run")


def test_two_sweeps_into_one_folder(programs, swept, tmp_path):
    flags, undisturbed, _ = swept
    flags = (*flags, f"--out={tmp_path / 'out'}")
    with held(tmp_path, "dllm.evals.results", "append_line", "sweep", *flags) as done:
        before = files(tmp_path)
        line = complaint(programs.run("sweep", *flags))
        assert line == f"error: another process is sweeping in {tmp_path / 'out'}; wait for it, or use another --out"
        assert files(tmp_path) == before
    assert done[0].code == 0, done[0].err
    assert_same_sweep(tmp_path / "out", undisturbed)


# Full disks

FILL = """
import contextlib
def fill():
    with contextlib.suppress(OSError), open({filler!r}, "ab", 0) as file:
        while file.write(bytes(4096)):
            pass
"""
LIMIT = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))"


class Disk:
    """A file system of 1 MB that only a process of its own has mounted; others reach it through that process's root."""

    def __init__(self, at: Path):
        mount = f"mount -t tmpfs -o size=1m none {at} && echo mounted && exec cat"
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.holder = subprocess.Popen(["unshare", "-rm", "sh", "-c", mount], **pipes, text=True)
        self.there = self.holder.stdout.readline() == "mounted\n"
        self.folder = Path(f"/proc/{self.holder.pid}/root{at}")
        self.filler = self.folder / "filler"
        self.first = FILL.format(filler=str(self.filler))

    def fill(self, but: int = 0) -> None:
        """Takes all room `but` so many pages."""
        exec(self.first + "\nfill()", {})
        os.truncate(self.filler, self.filler.stat().st_size - 4096 * but)


@pytest.fixture
def disk(tmp_path):
    if not shutil.which("unshare"):
        pytest.skip("no unshare here to mount a small disk with")
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk")
    if not disk.there:
        pytest.skip("this system lets no user mount a small disk")
    yield disk
    disk.holder.communicate()  # it ends with its input, and so it does if the tests are killed


def half_done(place: Path, run: Path) -> Path:
    """Returns `run`, made the trained run as it was at step 2."""
    shutil.copytree(place / "run", run)
    shutil.rmtree(run / "checkpoints" / "4")
    return run


def test_a_checkpoint_that_finds_no_room(programs, place, disk):
    run = half_done(place, disk.folder / "run")
    flags = (f"--config={place / 'config.py'}", f"--workdir={run}")
    disk.fill(but=15)
    line = complaint(programs.run("train", *flags))
    assert line.startswith(f"error: cannot write a checkpoint in {run / 'checkpoints'}: No space left on device")
    assert line.endswith("; make room and run the same command again")
    assert checkpoint.complete_steps(run) == [2]
    disk.filler.unlink()
    done = programs.run("train", *flags)
    assert done.code == 0, done.err
    assert "resumed at step 2" in done.out
    assert_same_run(run, place / "run")


@pytest.mark.slow
def test_a_checkpoint_that_may_not_grow(programs, place, tmp_path):
    """The limit of a file's size stands for the disk's where no small disk can be made; a quota fails like it."""
    run = half_done(place, tmp_path / "run")
    flags = (f"--config={place / 'config.py'}", f"--workdir={run}")
    line = complaint(programs.run("train", *flags, first=LIMIT.format(9000)))
    assert line.startswith(f"error: cannot write a checkpoint in {run / 'checkpoints'}: File too large; make room")
    assert checkpoint.complete_steps(run) == [2]
    assert programs.run("train", *flags).code == 0
    assert_same_run(run, place / "run")


@pytest.mark.slow
def test_a_run_that_finds_no_room_for_its_papers(programs, place, disk):
    """At the start, for the list of words; then for the first row of metrics."""
    run = disk.folder / "run"
    flags = (f"--config={place / 'config.py'}", f"--workdir={run}")
    disk.fill(but=1)
    line = complaint(programs.run("train", *flags))
    assert line == f"error: cannot write {run / 'words.txt.gz'}: No space left on device; make room, or choose another place"
    assert sorted(path.name for path in run.iterdir()) == [".lock", "checkpoints", "config.json"]
    disk.filler.unlink()
    first = disk.first + "from dllm.train.writer import Writer\nrow = Writer.row\nWriter.row = lambda *args: (fill(), row(*args))"
    line = complaint(programs.run("train", *flags, first=first))
    assert line == f"error: cannot append to {run / 'metrics.jsonl'}: No space left on device; make room and run the same command again"
    disk.filler.unlink()
    done = programs.run("train", *flags)
    assert done.code == 0, done.err
    assert_same_run(run, place / "run")


def test_a_sweep_that_finds_no_room(programs, swept, disk):
    """For a row's arrays, then for its line."""
    flags, undisturbed, _ = swept
    out = disk.folder / "out"
    for function, message in (("append_row", "cannot write "), ("append_line", "cannot append to ")):
        first = disk.first + f"from dllm.evals import results as r\nf = r.{function}\nr.{function} = lambda *args: (fill(), f(*args))"
        line = complaint(programs.run("sweep", *flags, f"--out={out}", first=first))
        assert line.startswith(f"error: {message}{out}/")
        assert ": No space left on device; make room" in line
        assert not [path for path in files(out) if path.suffix == ".part"]
        disk.filler.unlink()
    done = programs.run("sweep", *flags, f"--out={out}")
    assert done.code == 0, done.err
    assert_same_sweep(out, undisturbed)


def test_a_picture_and_samples_that_find_no_room(programs, place, swept, disk):
    disk.fill()
    line = complaint(programs.run("plot", f"--sweep={swept[1]}", f"--out={disk.folder / 'p'}"))
    assert line == f"error: cannot write {disk.folder / 'p.png'}: No space left on device; make room, or choose another place"
    flags = (f"--workdir={place / 'run'}", "--sampler=ancestral", "--num=2", f"--out={disk.folder / 's.jsonl'}")
    line = complaint(programs.run("sample", *flags))
    assert line == f"error: cannot write {disk.folder / 's.jsonl'}: No space left on device; make room, or choose another place"
    assert [path.name for path in disk.folder.iterdir()] == ["filler"]


def test_as_a_user_starts_them(place, tmp_path):
    """Fresh processes, without the shortcut of the other tests: one line, code 2."""
    commands = {
        "train": (f"--config={place / 'config.py'}", f"--workdir={tmp_path / 'new'}", "--config.model.vocab=20"),
        "sample": (f"--workdir={tmp_path / 'new'}", "--sampler=ancestral"),
        "sweep": (f"--config={place / 'sweep.py'}", f"--workdir={place / 'run'}", f"--out={tmp_path / 'new'}", "--num=3"),
    }
    start = lambda name: subprocess.Popen(
        [sys.executable, f"experiments/{name}.py", *commands[name]], cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for name, process in {name: start(name) for name in commands}.items():
        out, err = process.communicate(timeout=300)
        assert (process.returncode, out) == (2, ""), name
        complaint(Done(process.returncode, out, err))
    assert not list(tmp_path.iterdir())

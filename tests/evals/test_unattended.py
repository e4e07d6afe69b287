"""Measurements that go on: after a failure, after a kill, after a hang, and only as long as there is time."""

from __future__ import annotations

import json
import sys

import pytest

from dllm.core.types import UserError
from dllm.evals import unattended
from dllm.evals.unattended import AGAIN, DeviceLost, Job

ABOUT = {"device": "d"}


def job(shape, *names, rank=0.0, fail=None, calls=None):
    def rows(rivals, starts):
        for name in rivals:
            starts([name])
            if calls is not None:
                calls.append((shape, name))
            if name == fail:
                raise ValueError("it broke\nin two lines")
            yield {"rival": name, "ms": 1.0}

    return Job(rank, shape, "forward", names, rows)


def work(out, *jobs, seconds=100.0, guess=1.0):
    told = []
    left = unattended.work(jobs, out, ABOUT, seconds, {"forward": guess}, told.append)
    return left, [(row["shape"], row["rival"], row.get("reason")) for row in told]


def test_what_is_there_is_not_measured_again(tmp_path):
    calls = []
    jobs = job("b", "x", "y", rank=1.0, calls=calls), job("a", "x", calls=calls)
    assert work(tmp_path, *jobs) == ([], [("a", "x", None), ("b", "x", None), ("b", "y", None)])
    lines = (tmp_path / "results.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "results.jsonl").write_text("".join(lines[:2]) + lines[2][:20])  # killed while it wrote
    calls.clear()
    assert work(tmp_path, *jobs)[1] == [("b", "y", None)]
    assert calls == [("b", "y")]
    assert list(unattended.read_rows(tmp_path)) == [("d", "a", "forward", "x"), ("d", "b", "forward", "x"), ("d", "b", "forward", "y")]
    assert not (tmp_path / "running.json").exists()


def test_a_failure_is_a_row_and_the_rest_goes_on(tmp_path):
    _, told = work(tmp_path, job("a", "x", "y", "z", fail="y"), job("b", "x"))
    assert told == [("a", "x", None), ("a", "y", "ValueError: it broke"), ("a", "z", "ValueError: it broke"), ("b", "x", None)]


def test_a_lost_device_ends_it_after_the_row(tmp_path, monkeypatch):
    def lost():
        raise DeviceLost("gone")

    monkeypatch.setattr(unattended, "check_device", lost)
    with pytest.raises(DeviceLost):
        work(tmp_path, job("a", "x", fail="x"), job("b", "x"))
    assert list(unattended.read_rows(tmp_path)) == [("d", "a", "forward", "x")]


def test_time_runs_out(tmp_path):
    """What would likely take longer than is left is left out; what it was seen to take replaces the guess."""
    assert work(tmp_path, job("a", "x"), job("b", "x"), seconds=0.5, guess=1.0) == (["a forward", "b forward"], [])
    left, told = work(tmp_path, job("a", "x"), job("b", "x"), seconds=50.0, guess=49.0)
    assert left == []
    assert len(told) == 2


def test_what_killed_the_process_is_known_after_it(tmp_path):
    row = ABOUT | {"shape": "a", "pass": "forward", "rival": "x"}
    (tmp_path / "running.json").write_text(json.dumps([row]))
    assert work(tmp_path, job("a", "x", "y"))[1] == [("a", "y", None)]
    assert "the process ended" in unattended.read_rows(tmp_path)["d", "a", "forward", "x"]["reason"]


def test_a_foreign_line_is_an_error(tmp_path):
    (tmp_path / "results.jsonl").write_text('{"device": "d"}\n')
    with pytest.raises(UserError, match=r"line 1 of .*results.jsonl is not a row of this benchmark: delete that line"):
        work(tmp_path, job("a", "x"))


# A process that writes a line each time it is started, and then does what the list says for that time.
PROCESS = """
import os, sys, time
out, *ways = sys.argv[1:]
path = os.path.join(out, "results.jsonl")
times = len(open(path).readlines()) if os.path.exists(path) else 0
way = ways[times]
if way != "nothing":
    open(path, "a").write("line\\n")
if way == "hang":
    time.sleep(60)
if way in ("crash", "nothing"):
    os.kill(os.getpid(), 9)
sys.exit(int(way))
"""


@pytest.mark.parametrize(
    ("ways", "code"),
    [
        (["0"], 0),
        (["2", "0"], 2),
        (["crash", str(AGAIN), "0"], 0),
        (["hang", "0"], 0),
        (["crash", "nothing"], -9),
    ],
    ids=lambda ways: " ".join(ways) if isinstance(ways, list) else "",
)
def test_supervise(tmp_path, ways, code):
    """Processes that were lost are replaced while they get further; others' codes are the program's."""
    command = lambda: [sys.executable, "-S", "-c", PROCESS, str(tmp_path), *ways]
    assert unattended.supervise(command, tmp_path, patience=1.5) == code
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == sum(way != "nothing" for way in ways[: 1 if code == 2 else None])

"""A sweep that several hosts share: each measures its own settings, nothing is lost or measured twice, and any of them may die."""

from __future__ import annotations

import json
import shutil
import signal

import pytest

from dllm.evals import results
from tests.experiments.programs import POINT, SWEEP, complaint, config_text
from tests.experiments.test_faults import BEFORE_LINE, assert_same_sweep, held

POINTS = tuple(POINT | {"options": {"rate": rate}} for rate in (0.5, 0.3, 0.2))


@pytest.fixture(scope="module")
def swept(programs, place, tmp_path_factory):
    """Returns (the flags of a sweep of three settings without --out, where one host has run it)."""
    folder = tmp_path_factory.mktemp("swept")
    (folder / "sweep.py").write_text(config_text(SWEEP | {"points": POINTS}))
    flags = (f"--config={folder / 'sweep.py'}", f"--workdir={place / 'run'}")
    done = programs.run("sweep", *flags, f"--out={folder / 'out'}")
    assert done.code == 0, done.err
    return flags, folder / "out"


def rates(path):
    return [json.loads(line)["setting"]["rate"] for line in path.read_text().splitlines()]


def test_two_at_once_and_one_of_them_killed(programs, swept, tmp_path):
    """Both have the folder at the same time; host 0 dies between a row's arrays and its line; the plain command does the rest."""
    flags, undisturbed = swept
    out = tmp_path / "out"
    flags = (*flags, f"--out={out}")
    with held(tmp_path, "dllm.evals.results", "append_line", "sweep", *flags, "--hosts=2", "--host=1") as second:
        line = complaint(programs.run("sweep", *flags, "--hosts=2", "--host=1"))
        assert line == f"error: another process is sweeping as --host=1 in {out}; wait for it, or use another --host"
        line = complaint(programs.run("sweep", *flags))
        assert line == f"error: another process is sweeping in {out}; wait for it, or use another --out"
        assert programs.run("sweep", *flags, "--hosts=2", "--host=0", first=BEFORE_LINE).code == -signal.SIGKILL
    assert second[0].code == 0, second[0].err
    assert "1 settings are the share of host 1 of 2, 0 of them there already" in second[0].out
    assert rates(out / "results_1.jsonl") == [0.3]
    assert not (out / "results.jsonl").exists()

    done = programs.run("sweep", *flags, "--hosts=2", "--host=0")
    assert done.code == 0, done.err
    assert rates(out / "results_0.jsonl") == [0.5, 0.2]
    assert len(results.read_rows(out)) == 3
    assert "3 settings" not in done.out
    done = programs.run("plot", f"--sweep={out}", f"--out={tmp_path / 'p'}")
    assert done.code == 0, done.err

    (out / "results_0.jsonl").write_text("".join((out / "results_0.jsonl").read_text().splitlines(True)[:1]) + '{"model": "r')
    done = programs.run("sweep", *flags)
    assert done.code == 0, done.err
    assert "3 settings, 2 of them there already" in done.out
    assert rates(out / "results.jsonl") == [0.5, 0.3, 0.2]
    for path in out.glob(".lock_*"):
        path.unlink()
    assert_same_sweep(out, undisturbed)


def test_a_share_of_nothing(programs, swept, tmp_path):
    flags, undisturbed = swept
    out = shutil.copytree(undisturbed, tmp_path / "out")
    for host, settings in ((1, 1), (3, 0)):
        done = programs.run("sweep", *flags, f"--out={out}", "--hosts=4", f"--host={host}")
        assert done.code == 0, done.err
        assert f"{settings} settings are the share of host {host} of 4, {settings} of them there already" in done.out
    assert results.read_rows(out) == results.read_rows(undisturbed)


@pytest.mark.parametrize("share", [["--hosts=2"], ["--host=0"], ["--hosts=2", "--host=2"]])
def test_shares_that_are_none(programs, swept, tmp_path, share):
    line = complaint(programs.run("sweep", *swept[0], f"--out={tmp_path / 'out'}", *share))
    assert "name no share: number the hosts from 0 to hosts - 1" in line
    assert not (tmp_path / "out").exists()


def test_gathering_again_changes_nothing(swept, tmp_path):
    """What was killed between the new file and the removal of the old ones is done again."""
    out = shutil.copytree(swept[1], tmp_path / "out")
    rows, text = results.read_rows(out), (out / "results.jsonl").read_text()
    lines = text.splitlines(True)
    (out / "results_0.jsonl").write_text(lines[0] + lines[2])
    (out / "results_10.jsonl").write_text(lines[1])
    assert results.read_rows(out) == rows
    results.gather(out)
    assert (out / "results.jsonl").read_text() == text
    assert sorted(path.name for path in out.glob("results*")) == ["results.jsonl"]

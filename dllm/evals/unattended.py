"""Long measurements that nobody watches: within a time, whatever fails, with every row on disk at once, in processes that may be lost.

What is about to run is noted first, so that after a process was killed, by a crash or because it hung, it is known what did it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dllm.core.config import read_json, write_atomic
from dllm.evals import results

AGAIN = 75  # exit code of a process that wants another to go on in its place (sysexits: a temporary failure)
TABLE, NOTE = "results.jsonl", "running.json"
KEY = ("device", "shape", "pass", "rival")  # rows with the same are the same measurement
STOPPED = "the process ended while this ran, or was ended because it hung; delete the line to try again"
Row = dict[str, Any]


class DeviceLost(Exception):
    """The device answers no more in this process: after an illegal access, say. Another process has to go on."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What gives the rows of one (shape, pass): rows(rivals, starts) yields one for each of the rivals, with "rival" its name.

    rank    the lowest come first
    starts  is to be called with the rivals that run next: should the process end, it was in one of these
    """

    rank: float
    shape: str
    kind: str
    rivals: Sequence[str]
    rows: Callable[[Sequence[str], Callable[[Sequence[str]], None]], Iterator[Row]]

    def __str__(self) -> str:
        return f"{self.shape} {self.kind}"


def work(jobs: Sequence[Job], out: Path, about: Row, seconds: float, guess: Mapping[str, float], tell: Callable[[Row], None]) -> list[str]:
    """Returns the names of jobs that there was no time for, after appending to OUT/results.jsonl the rows that aren't there.

    about  goes into each row, `device` among it
    guess  seconds that a job of a kind takes, until one has been seen: none begins that would likely outlast `seconds`
    tell   is called with each new row
    Raises DeviceLost, after a row was written for the rival that lost it: another process may go on. UserError: see read_rows.
    """
    begin, seen, left = time.monotonic(), {}, []
    _settle(out)
    there = read_rows(out)
    for job in sorted(jobs, key=lambda job: job.rank):
        key = about | {"shape": job.shape, "pass": job.kind}
        rivals = [name for name in job.rivals if _key(key | {"rival": name}) not in there]
        if not rivals:
            continue
        if time.monotonic() - begin + seen.get(job.kind, guess[job.kind]) > seconds:
            left.append(str(job))
            continue
        clock = time.monotonic()
        try:
            for row in _guarded(job, rivals, lambda names, key=key: _note(out, [key | {"rival": name} for name in names])):
                results.append_line(out / TABLE, key | row)
                tell(key | row)
        finally:
            (out / NOTE).unlink(missing_ok=True)
        seen[job.kind] = max(seen.get(job.kind, 0.0), time.monotonic() - clock)
    return list(dict.fromkeys(left))


def read_rows(out: Path) -> dict[tuple[Any, ...], Row]:
    """Returns the rows of OUT/results.jsonl by their key (results.read_table)."""
    return results.read_table(out / TABLE, _key, "a row of this benchmark")


def reason(e: Exception) -> str:
    """Returns what a row says about a case that failed: the error's first line, and its type where we didn't raise it to say so."""
    text = next((text.strip() for text in str(e).splitlines() if text.strip()), "without a word")
    return (text if isinstance(e, NotImplementedError | MemoryError) else f"{type(e).__name__}: {text}")[:300]


def check_device() -> None:
    """Returns None if the device still computes. Raises DeviceLost."""
    try:
        jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.zeros((), jnp.int32)))
    except Exception as e:
        raise DeviceLost(reason(e)) from e


def supervise(command: Callable[[], Sequence[str]], out: Path, patience: float) -> int:
    """Returns the exit code of the command's process. One that asks for it (AGAIN) or was killed is started anew, if it got further.

    A process that changes nothing in OUT for `patience` seconds is killed: it hangs. Negative codes are signals.
    """
    while True:
        rows, started = _size(out / TABLE), time.time()
        process = subprocess.Popen(command())
        try:
            while process.poll() is None:
                if time.time() - max(started, *_times(out)) > patience:
                    process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
        except KeyboardInterrupt:  # the process had it too
            process.wait()
            raise
        further = _size(out / TABLE) > rows or (out / NOTE).exists()
        if not further or (process.returncode != AGAIN and process.returncode >= 0):
            return process.returncode


def _guarded(job: Job, rivals: Sequence[str], starts: Callable[[Sequence[str]], None]) -> Iterator[Row]:
    """Yields the job's rows; where it raises, rows with the reason for those that it owes."""
    owed = list(rivals)
    try:
        for row in job.rows(rivals, starts):
            yield row
            owed.remove(row["rival"])
    except DeviceLost:
        raise
    except Exception as e:  # whatever it was: the others are to be measured
        yield from ({"rival": name, "reason": reason(e)} for name in owed)
        check_device()


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)


def _note(out: Path, rows: list[Row]) -> None:
    write_atomic(out / NOTE, json.dumps(rows) + "\n")


def _settle(out: Path) -> None:
    """Appends rows for what an earlier process, since killed, had noted."""
    results.repair(out / TABLE)
    if (out / NOTE).exists():
        for row in read_json(out / NOTE):
            results.append_line(out / TABLE, row | {"reason": STOPPED})
        (out / NOTE).unlink()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _times(folder: Path) -> list[float]:
    times = [0.0]
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return times

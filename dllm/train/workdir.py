"""A run's folder: one process group at a time, one run for good; and the wish to stop."""

from __future__ import annotations

import contextlib
import fcntl
import json
import signal
from collections.abc import Iterator
from pathlib import Path

from dllm.core.config import read_json, write_atomic
from dllm.core.types import UserError
from dllm.train.run import Run, check_same, is_resolved


@contextlib.contextmanager
def locked(workdir: Path, doing: str = "training", flag: str = "--workdir", *, name: str = ".lock", shared: bool = False) -> Iterator[None]:
    """Holds the folder, making it if need be. The system drops the lock with the process, however that ends.

    A `shared` hold goes with other shared ones; `name` is the lock's file, for a part of the folder.
    Raises UserError if another process holds it, or it can't be written; `doing` and `flag` are for its text.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        file = open(workdir / name, "a+")
    except OSError as e:
        raise UserError(f"cannot write in {flag}={workdir}: {e.strerror}; choose another place") from None
    with file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another process is {doing} in {workdir}; wait for it, or use another {flag}") from None
        yield


def check_run(workdir: Path, run: Run) -> None:
    """Returns None if the workdir is new or holds this very run. Raises UserError that names the key that differs."""
    if (workdir / "config.json").exists():
        config = read_json(workdir / "config.json")
        if not is_resolved(config):
            raise UserError(f"{workdir / 'config.json'} is not a run's config; remove it: the run's checkpoints hold another copy")
        check_same(config, run.to_dict(), workdir)


def write_run(workdir: Path, run: Run) -> None:
    """Writes config.json."""
    write_atomic(workdir / "config.json", json.dumps(run.to_dict(), indent=2) + "\n")


@contextlib.contextmanager
def asked_to_stop() -> Iterator[list[int]]:
    """Yields a list that SIGINT or SIGTERM puts its number into. A second one ends the process as usual."""
    asked: list[int] = []

    def ask(number: int, _: object) -> None:
        asked.append(number)
        signal.signal(number, signal.SIG_DFL)

    old = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)

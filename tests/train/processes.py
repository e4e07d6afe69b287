"""Starts experiments/train.py as several processes of one run on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]


def port() -> int:
    """Returns a port that is free now."""
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def start(number: int, flags: list[str], devices: int = 1, **environment: str) -> list[subprocess.Popen]:
    """Returns the processes, of `devices` CPU devices each."""
    at = {"JAX_COORDINATOR_ADDRESS": f"localhost:{port()}", "JAX_NUM_PROCESSES": str(number), "JAX_NUM_CPU_DEVICES": str(devices)}
    return [one(flags, **at, JAX_PROCESS_ID=str(index), **environment) for index in range(number)]


def one(flags: list[str], **environment: str) -> subprocess.Popen:
    """Returns one process of experiments/train.py in this environment."""
    command = [sys.executable, "experiments/train.py", *flags]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=REPO, env=os.environ | environment, **pipes)


def end(processes: list[subprocess.Popen], timeout: float = 300) -> list[tuple[int, str, str]]:
    """Returns (exit code, stdout, stderr) of each; kills those that are not over in time."""
    try:
        return [(process.returncode, out, err) for process in processes for out, err in [process.communicate(timeout=timeout)]]
    finally:
        for process in processes:
            process.kill()

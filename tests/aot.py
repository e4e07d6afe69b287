"""Runs code in a process of its own in the environment that has the compilers of TPU and GPU, without such a device."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
PYTHON = Path(os.environ.get("AOT_PYTHON", REPO / ".aot/bin/python"))
needs_compilers = pytest.mark.skipif(not PYTHON.exists(), reason="no device compilers here: `make .aot/.ready` installs them")


def run(code: str, *arguments: str) -> str:
    """Returns what the code printed. Raises AssertionError with its last lines if it failed."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "PYTHONPATH": str(REPO)}
    done = subprocess.run([PYTHON, "-c", code, *arguments], env=env, cwd=REPO, text=True, capture_output=True, timeout=900)
    assert done.returncode == 0, "\n".join(done.stderr.splitlines()[-30:])
    return done.stdout

"""Starts the command-line programs, each in a process of its own, forked from one that has done the imports: 4 seconds less a time.

What runs is the file in experiments/ as __main__, on a command line, with its own exit code, stdout and stderr. Only the interpreter's
clearing up at the end is left out: it would copy every page that the imports filled.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[2]
IMPORTS = ("ml_collections.config_flags", "dllm.train.checkpoint", "dllm.train.step", "dllm.evals.generate", "dllm.evals.spelling")


POINT = {"sampler": "ancestral", "options": {"rate": 0.5}, "settings": {}}
SWEEP = {"num_samples": 4, "batch": 4, "seed": 0, "evals": ("spelling",), "judge": "", "points": (POINT,)}


@dataclass(frozen=True)
class Done:
    """How a program ended; `code` is negative where a signal ended it."""

    code: int
    out: str
    err: str


class Programs:
    """The process with the imports; a context."""

    def __init__(self):
        self.server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPO,
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},  # else Python itself writes beside a test's config file
        )

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stdin.close()
        self.server.wait()
        self.server.stdout.close()

    def run(self, name: str, *flags: str, first: str = "") -> Done:
        """Returns how experiments/NAME.py ended. `first`: statements that its process runs before it, to break something."""
        with tempfile.TemporaryDirectory() as folder:
            request = {"name": name, "flags": [str(flag) for flag in flags], "first": first, "folder": folder}
            self.server.stdin.write(json.dumps(request) + "\n")
            self.server.stdin.flush()
            code = int(self.server.stdout.readline())
            return Done(code, *((Path(folder) / stream).read_text() for stream in ("out", "err")))


def config_text(values: dict) -> str:
    """Returns the source of a config file with these values."""
    return f"from ml_collections import ConfigDict\n\n\ndef get_config():\n    return ConfigDict({values!r})\n"


def files(*folders: Path) -> dict[Path, bytes | None]:
    """Returns the contents of all that lies below the folders, None for a folder."""
    return {path: path.read_bytes() if path.is_file() else None for folder in folders for path in folder.rglob("*")}


def complaint(done: Done) -> str:
    """Returns the line that a program ended with: all of its stderr."""
    assert done.code > 0, done
    (line,) = done.err.splitlines()
    assert line.startswith("error: "), done.err
    assert len(line) > len("error: ") + 20
    return line


def serve() -> dict | None:
    """Returns the request that this process, a child, is to run; None in the parent, once nothing more can come."""
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            return request
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


def become(request: dict) -> None:
    """Runs the program of a request as if this process had been started with it."""
    for number, stream in ((0, os.devnull), (1, f"{request['folder']}/out"), (2, f"{request['folder']}/err")):
        os.dup2(os.open(stream, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    script = f"experiments/{request['name']}.py"
    sys.argv, sys.path[0] = [script, *request["flags"]], "experiments"
    code = 0
    try:
        exec(request["first"], {})
        runpy.run_path(script, run_name="__main__")
    except SystemExit as e:
        code = e.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.path.insert(1, str(REPO))
    for module in IMPORTS:
        importlib.import_module(module)
    gc.freeze()
    if (work := serve()) is not None:
        become(work)

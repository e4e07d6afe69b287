"""What a run leaves for people: metrics.jsonl, and one live line of progress."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from dllm.core.config import append_text, write_atomic
from dllm.core.types import UserError

Row = dict[str, float | int]


def rows_until(path: Path, step: int) -> list[Row]:
    """Returns the rows of metrics.jsonl up to `step`, and cuts the file there.

    A run that goes on from a checkpoint writes the later rows anew; a killed one may have left half a line. Any other line
    that is no row is a UserError.
    """
    rows = []
    lines = path.read_text(errors="replace").split("\n")[:-1] if path.exists() else []  # after the last newline: nothing, or half a line
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if row["step"] <= step:
                rows.append(row)
        except (ValueError, KeyError, TypeError):
            raise UserError(f"line {number} of {path} is not a row of a run: delete that line") from None
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))
    return rows


class Writer:
    """Appends rows to metrics.jsonl and shows them; a silent one does neither (all processes of a run but the first)."""

    def __init__(self, path: Path, step: int, steps: int, tokens_per_step: int, silent: bool = False, stream: io.TextIOBase = sys.stdout):
        rows = [] if silent else rows_until(path, step)
        self.path = None if silent else path
        self.steps, self.tokens_per_step, self.stream = steps, tokens_per_step, stream
        self.live = stream.isatty()
        self.width = 0  # of the live line on the screen
        self.seconds = max((row.get("seconds", 0) for row in rows), default=0)  # of training, over all the processes that shared in it
        self.restart(step)

    def restart(self, step: int) -> None:
        """Starts the clock, after `step` updates."""
        self.step, self.since = step, time.monotonic()

    @contextlib.contextmanager
    def aside(self, step: int) -> Iterator[None]:
        """Keeps what is done inside, evaluating or saving, out of the run's seconds and rates."""
        self.seconds += time.monotonic() - self.since
        yield
        self.restart(step)

    def train(self, step: int, metrics: Row) -> None:
        """Writes a training row with tokens_per_s, since the last row, and seconds, of the run; and shows it."""
        elapsed = time.monotonic() - self.since
        rate = (step - self.step) * self.tokens_per_step / max(elapsed, 1e-9)
        self.seconds += elapsed
        self.restart(step)
        self.row({"step": step, **metrics, "tokens_per_s": round(rate, 1), "seconds": round(self.seconds, 3)})
        left = (self.steps - step) * self.tokens_per_step / max(rate, 1e-9)
        parts = [f"{key} {value:.4g}" for key, value in metrics.items()]
        self.show("  ".join([f"step {step}/{self.steps}", *parts, f"{rate:,.0f} tokens/s", f"{clock(left)} left"]), stay=not self.live)

    def row(self, row: Row) -> None:
        """Appends one line, whole, to metrics.jsonl."""
        if self.path:
            append_text(self.path, json.dumps(row))

    def show(self, line: str, stay: bool = True) -> None:
        """Prints a line; on a terminal, one that does not stay is overwritten by the next."""
        if self.path:
            self.stream.write(("\r" + line.ljust(self.width) if self.live else line) + ("\n" if stay else ""))
            self.stream.flush()
            self.width = 0 if stay else len(line)

    def close(self) -> None:
        """Ends the live line."""
        if self.width:
            self.stream.write("\n")


def clock(seconds: float | int) -> str:
    """Returns h:mm:ss, or m:ss below an hour."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes}:{seconds:02d}"

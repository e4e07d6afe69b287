"""Sweep results on disk: OUT/results.jsonl, one row a setting, and the per-sequence values of each row in an npz beside it.

A row is appended by one write of a whole line after its npz is in place: whatever kills a sweep leaves whole results, and at worst half a
last line, which `repair` cuts off before the next row is appended. Hosts that share a sweep append each to a file of its own,
results_HOST.jsonl (a line appended by two hosts at once isn't whole on every shared disk), and `gather` makes them one.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dllm.core.config import append_text, write_atomic
from dllm.core.types import UserError
from dllm.evals.compare import Point
from dllm.evals.stats import Metric

KEY = ("model", "step", "config_hash", "sampler", "setting", "seed")


def row_key(row: dict[str, Any]) -> str:
    """Returns the text that says which measurement a row is: two rows with the same key are the same one."""
    return json.dumps([row[k] for k in KEY], sort_keys=True)


def repair(path: Path) -> None:
    """Cuts a half-written last line off a JSON-lines file: what a killed program can leave.

    Raises UserError where it can't be written: programs ask before the work, not after it.
    """
    try:
        with contextlib.suppress(FileNotFoundError), open(path, "r+b") as file:
            text = file.read()
            whole = text.rfind(b"\n") + 1
            if whole < len(text):
                file.truncate(whole)
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror}; move it away, or make it writable") from None


def rows_file(out: Path, host: int | None = None) -> Path:
    """Returns the file that a sweep appends to, or a host of several that share it."""
    return out / ("results.jsonl" if host is None else f"results_{host}.jsonl")


def _host_files(out: Path) -> list[Path]:
    return sorted(path for path in out.glob("results_*.jsonl") if path.stem.removeprefix("results_").isdecimal())


def gather(out: Path) -> None:
    """Moves the hosts' rows to results.jsonl. Whoever calls it holds the folder alone."""
    if hosts := _host_files(out):
        write_atomic(rows_file(out), "".join(json.dumps(row) + "\n" for row in read_rows(out)))
        for path in hosts:
            path.unlink()


def read_rows(out: Path) -> list[dict[str, Any]]:
    """Returns the rows in the order of their first appearance; of several with one key the last. A half-written last line isn't read."""

    def row(line: dict[str, Any]) -> dict[str, Any]:
        return line | {"setting": dict(line["setting"]), "nfe": float(line["nfe"])}

    rows: dict[Any, dict[str, Any]] = {}
    for path in (rows_file(out), *_host_files(out)):
        rows |= {key: row(line) for key, line in read_table(path, lambda line: (row(line), row_key(line))[1], "a sweep row").items()}
    return list(rows.values())


def read_table(path: Path, key: Callable[[dict[str, Any]], Any], what: str) -> dict[Any, dict[str, Any]]:
    """Returns the rows of a JSON-lines file by their key, in the order of their first appearance; of several with one key the last.

    {} where there is no file. A half-written last line isn't read. Raises UserError for a line that isn't JSON, or of which `key` can't be
    taken: it is not `what`.
    """
    rows = {}
    for number, line in enumerate(read_lines(path), 1):
        try:
            row = json.loads(line)
            rows[key(row)] = row
        except (ValueError, KeyError, TypeError):
            raise UserError(f"line {number} of {path} is not {what}: delete that line") from None
    return rows


def read_lines(path: Path) -> list[str]:
    """Returns the whole lines of a file; none if it isn't there."""
    try:
        return path.read_text(errors="replace").split("\n")[:-1]  # after the last newline: nothing, or half a line
    except FileNotFoundError:
        return []
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}; move it away, or make it readable") from None


def append_row(out: Path, row: dict[str, Any], arrays: dict[str, np.ndarray], host: int | None = None) -> None:
    """Writes the arrays to OUT/samples/<hash of the key>.npz, then appends the row, with `samples` the file's name in OUT."""
    name = f"samples/{hashlib.sha256(row_key(row).encode()).hexdigest()[:16]}.npz"
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_atomic(out / name, buffer.getvalue())
    append_line(rows_file(out, host), row | {"samples": name})


def append_line(path: Path, row: dict[str, Any]) -> None:
    """Appends the row to a JSON-lines file. Raises UserError if it can't be; half a line that is then there is cut off by `repair`."""
    append_text(path, json.dumps(row, allow_nan=False))


def metric_arrays(metrics: dict[str, Metric]) -> dict[str, np.ndarray]:
    """Returns the per-sequence parts of the metrics under the names that `load_point` reads."""
    return {f"{name}/{part}": getattr(m, f"{part}_B") for name, m in metrics.items() for part in ("numerator", "denominator")}


def load_point(out: Path, row: dict[str, Any], x: str, y: str) -> Point:
    """Returns passes (`x`: nfe or nfe_weighted) and quality (`y`) of a row's sequences. Raises UserError if the npz lacks them."""
    try:
        with np.load(out / row["samples"]) as arrays:
            return Point(arrays[x], Metric(arrays[f"{y}/numerator"], arrays[f"{y}/denominator"]))
    except (OSError, KeyError, ValueError, EOFError):
        path = out / row["samples"]
        raise UserError(f"{path} lacks {x} and {y} by sequence: delete its line in {out / 'results.jsonl'} and sweep again") from None


@dataclass(frozen=True)
class Curve:
    """The rows of one run and sampler that differ only in the knobs, by rising passes. `fixed` holds the other settings."""

    model: str
    step: int
    sampler: str
    fixed: dict[str, Any]
    label: str
    points: list[Point]


def read_curves(sweeps: list[str], x: str, y: str, knobs: list[str], from_nfe: float = 0.0) -> list[Curve]:
    """Returns the curves of some sweeps, in the order of their rows. `knobs`: the settings that move along a curve.

    Rows of fewer than `from_nfe` main passes are left out. Points have an entropy where their rows do.
    Raises UserError on a folder without rows, and on a metric that a row lacks (it lists those there are).
    """
    groups: dict[str, Curve] = {}
    for out in map(Path, sweeps):
        rows = read_rows(out)
        if not rows:
            raise UserError(f"no results in {out}: --sweep takes the --out of experiments/sweep.py")
        for row in rows:
            if f"{y}_stderr" not in row:
                there = sorted(k.removesuffix("_stderr") for k in row if k.endswith("_stderr"))
                raise UserError(f"a row of {out} has no metric {y}; it has: {', '.join(there)}")
            fixed = {k: v for k, v in row["setting"].items() if k not in knobs}
            name = row_key(row | {"setting": fixed, "seed": None})
            curve = groups.setdefault(name, Curve(row["model"], row["step"], row["sampler"], fixed, "", []))
            if row[y] is not None and row["nfe"] >= from_nfe:
                entropy = load_point(out, row, x, "entropy").quality if "entropy" in row else None
                curve.points.append(replace(load_point(out, row, x, y), entropy=entropy))
    curves = [c for c in groups.values() if c.points]
    if not curves:
        raise UserError(f"no row of {', '.join(sweeps)} has a value of {y}" + f" at {from_nfe:g} passes or more" * bool(from_nfe))
    return [replace(c, label=_label(c, curves), points=sorted(c.points, key=lambda p: p.nfe_B.mean())) for c in curves]


def _label(curve: Curve, curves: list[Curve]) -> str:
    """Returns the sampler's name and whatever else tells this curve from the others."""
    peers = [c for c in curves if c.sampler == curve.sampler]
    words = [curve.sampler.replace("_", "-")]
    words += [f"{k}={v}" for k, v in curve.fixed.items() if any(c.fixed.get(k) != v for c in peers)]
    words += [curve.model] if len({c.model for c in curves}) > 1 else []
    words += [f"step {curve.step}"] if len({c.step for c in peers if c.model == curve.model}) > 1 else []
    return ", ".join(words)


def number(x: float) -> float | None:
    """Returns a JSON number: nan (a standard error of one sequence, accept rate without proposals) becomes null."""
    return None if np.isnan(x) else float(x)

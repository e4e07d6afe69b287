"""The rows of dllm/evals/speculation.py: in a file, as lines of a table, and as curves of a figure.

A row has `table`, `model`, `step`, `config_hash` and `setting`, by which it is known, and what was measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dllm.core.types import UserError
from dllm.evals import results
from dllm.evals.speculation import TWO_PASSES

KEY = ("table", "model", "step", "config_hash", "setting")
TELLING = ("way", "drafter", "length", "paths", "children", "nodes", "batch", "temperature")  # settings that tell curves of one panel apart
Rows = Sequence[Mapping[str, Any]]


def row_key(row: Mapping[str, Any]) -> str:
    """Returns the text that says which measurement a row is: two rows with the same key are the same one."""
    return json.dumps([row[k] for k in KEY], sort_keys=True)


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the rows of a file by their key (results.read_table)."""
    return results.read_table(path, row_key, "a row of speculate.py")


def logged_acceptance(workdir: Path, step: int) -> dict[str, Any] | None:
    """Returns what a run's metrics.jsonl says of held-out acceptance by depth, at `step` or last before it; None if it says nothing."""
    try:
        logged = [json.loads(line) for line in results.read_lines(workdir / "metrics.jsonl")]
    except ValueError:
        raise UserError(f"{workdir / 'metrics.jsonl'} has a line that is not JSON; restore it, or move it away") from None
    logged = [row for row in logged if row["step"] <= step and "valid_accepted" in row]
    if not logged:
        return None
    accept = {k.removeprefix("valid_accept_"): v for k, v in logged[-1].items() if k.startswith("valid_accept_")}
    return {"logged_step": logged[-1]["step"], "accept": accept, "accepted": logged[-1]["valid_accepted"]}


# -- as lines


def describe(row: Mapping[str, Any], rows: Rows) -> str:
    """Returns a row as a line of its table; of drafts with their share of the ceiling's, if `rows` has that."""
    setting, table = row["setting"], row["table"]
    head = f"{row['model']:12} {setting.get('way', ''):14} {setting.get('length', ''):>3}"
    if table == "acceptance":
        return f"{head} step {row['logged_step']}, by depth: " + "  ".join(f"{depth}: {x:.3f}" for depth, x in row["accept"].items())
    if table == "length":
        tokens, accepted = (_pm(row, f"{name}_per_cycle") for name in ("tokens", "accepted"))
        text, share = f"{head} {setting.get('drafter', ''):12} {tokens} tokens, {accepted} accepted a cycle", share_of_ceiling(row, rows)
        return f"{text}, {row['ms_per_cycle']:.2f} ms" + (f", {share:.0%} of the ceiling's" if share is not None else "")
    if table == "lossless":
        differ = f"{row['greedy_mismatches']} of {row['greedy_prompts']} greedy texts differ, {row['greedy_ties']} at ties"
        return f"{head} p = {row['p_value']:.3f}, score {row['score']:5.1f}, {row['tokens_per_cycle']:.2f} tokens a cycle; {differ}"
    head = f"{head} " + (f"reply {setting['reply']:3}" if table == "reply" else f"batch {setting['batch']:2}")
    if "way" not in setting:
        costs = ", ".join(f"C({n}) = {cost:.2f}" for n, cost in zip(setting["lengths"], row["costs"], strict=True) if cost is not None)
        return f"{head} {costs}; the line {row['level']:.2f} + {row['slope']:.3f} L" if costs else f"{head} the clock is too coarse"
    low, high = row["speedup_quartiles"]
    text = f"{head} {row['ms_per_token']:8.3f} ms a token, {row['speedup']:5.2f} x [{low:.2f}, {high:.2f}]"
    text += "" if row["speedup_cpu"] is None else f", cpu {row['speedup_cpu']:.2f} x"
    return f"{text}; {row['tokens_per_cycle']:.2f} tokens a cycle" + (f" of {row['cost']:.2f} passes" if row.get("cost") else "")


def share_of_ceiling(row: Mapping[str, Any], rows: Rows) -> float | None:
    """Returns the accepted drafts a cycle of a row of the table length, as a share of what perfect marginals have in the same setting, by
    the most paths that there are: the best estimate of the marginals."""
    same = lambda r: [r["table"], r["model"], r["step"]] + [r["setting"].get(k) for k in ("way", "length", "temperature", "given", "new")]
    tops = [top for top in rows if top["setting"].get("drafter") == "perfect" and same(top) == same(row) and top["accepted_per_cycle"]]
    most = max(tops, key=lambda top: top["setting"]["paths"], default=None)
    return row["accepted_per_cycle"] / most["accepted_per_cycle"] if most else None


def _pm(row: Mapping[str, Any], name: str) -> str:
    error = row[f"{name}_stderr"]
    return f"{row[name]:.3f}" + ("" if error is None else f" ± {error:.3f}")


# -- as curves


@dataclass(frozen=True)
class Curve:
    label: str
    x: np.ndarray  # [n]
    y: np.ndarray  # [n]
    error: np.ndarray  # [2 n] below and above
    yardstick: bool = False  # a floor or a ceiling
    line: tuple[float, float] | None = None  # (level, slope) of a line beside the points


@dataclass(frozen=True)
class Panel:
    x: str
    y: str
    curves: list[Curve]
    level: float | None = None  # what the curves are to be seen against
    log: bool = False  # the x axis, to base 2


def panels(rows: Rows) -> list[Panel]:
    """Returns the panels that there are rows for: tokens a cycle against length, acceptance by depth, the cost of a cycle against length,
    speed-up against batch and against reply length."""
    of = lambda table: [row for row in rows if row["table"] == table]
    adapter = lambda s: s.get("drafter") == "adapter" and s["way"] in TWO_PASSES
    cycle = [row for row in of("length") if adapter(row["setting"]) or row["setting"].get("way") == "chain"]
    timed = [row for row in of("speed") if row["setting"].get("way") in ("chain", "adaptive")]
    replies = [row for row in of("reply") if row["setting"]["way"] in ("chain", "adaptive")]
    quartiles = lambda row: (row["speedup"], *row["speedup_quartiles"])
    found = [
        Panel("rows of a pass, L", "tokens a cycle", _curves(cycle, "length", _around("tokens_per_cycle")), log=True),
        Panel("depth of the draft", "1 - TV to the target (held out)", [_acceptance(row, of("acceptance")) for row in of("acceptance")]),
        Panel("rows of a pass, L", "cost of a cycle in plain passes, C", _costs(of("speed"))),
        Panel("batch", "speed-up over autoregression", _curves(timed, "batch", quartiles), 1.0, True),
        Panel("tokens of a reply", "speed-up over autoregression", _curves(replies, "reply", quartiles), 1.0, True),
    ]
    return [panel for panel in found if panel.curves]


def _around(name: str) -> Callable[[Mapping[str, Any]], tuple[float, float, float]]:
    return lambda row: (row[name], row[name] - (row[f"{name}_stderr"] or 0), row[name] + (row[f"{name}_stderr"] or 0))


def _curves(rows: Rows, x: str, value: Callable[[Mapping[str, Any]], Any]) -> list[Curve]:
    """Returns a curve for the rows that agree in all settings but x, and in the model. value(row): (value, from, to)."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(_label(row, rows, x), []).append(row)
    curves = []
    for label, group in groups.items():
        group = sorted(group, key=lambda row: row["setting"][x])
        y, low, high = np.array([value(row) for row in group], float).T
        yardstick = group[0]["setting"].get("drafter", "adapter") != "adapter"
        curves.append(Curve(label, np.array([row["setting"][x] for row in group], float), y, np.abs([y - low, high - y]), yardstick))
    return curves


def _label(row: Mapping[str, Any], rows: Rows, x: str) -> str:
    """Returns what tells the row's curve from the others."""
    differs = lambda value: any(value(r) != value(row) for r in rows)
    name = lambda key: {"way": "", "drafter": "", "length": "L "}.get(key, f"{key} ")
    told = [
        key
        for key in TELLING
        if key != x and key in row["setting"] and differs(lambda r, key=key: r["setting"].get(key, row["setting"][key]))
    ]
    words = [f"{name(key)}{row['setting'][key]}" for key in told]
    words += [row["model"]] if differs(lambda r: r["model"]) else []
    words += [f"step {row['step']}"] if any(r["model"] == row["model"] and r["step"] != row["step"] for r in rows) else []
    return ", ".join(words) or row["model"]


def _acceptance(row: Mapping[str, Any], rows: Rows) -> Curve:
    depths, accept = np.array([(float(depth), x) for depth, x in row["accept"].items()]).T
    order = np.argsort(depths)
    return Curve(_label(row, rows, ""), depths[order], accept[order], np.zeros((2, len(depths))))


def _costs(rows: Rows) -> list[Curve]:
    rows = [row for row in rows if "way" not in row["setting"] and any(cost is not None for cost in row["costs"])]

    def curve(row: dict[str, Any]) -> Curve:
        known = [(n, cost) for n, cost in zip(row["setting"]["lengths"], row["costs"], strict=True) if cost is not None]
        x, y = np.array(known, float).T
        return Curve(_label(row, rows, ""), x, y, np.zeros((2, len(y))), line=(row["level"], row["slope"]))

    return [curve(row) for row in rows]

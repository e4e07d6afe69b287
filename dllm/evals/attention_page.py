"""The rows of experiments/bench_attention.py as a page of Markdown and as a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dllm.core.config import write_atomic

PASSES = {
    "both": "Forward and backward",
    "forward": "Forward",
    "decode": "Decode: a pass over a cache",
}
COLOURS = {
    "kernel": "#d1495b",
    "xla": "#e09f3e",
    "two_call": "#2a9d8f",
    "dense": "#3d3d3d",
    "cudnn": "#1f77b4",
    "splash": "#7b5ea7",
    "tokamax": "#8d6e63",
}
Row = dict[str, Any]


def line(row: Row) -> str:
    """Returns the row in a line of text."""
    head = f"{row['shape']:24} {row['pass']:8} {row['rival']:10}"
    found = f" error {row['error']:.1e}" if "error" in row else ""
    if "ms" not in row:
        return f"{head} {row['reason']}{found}"
    low, high = row["ms_quartiles"]
    rates = {"tflops": "TFLOP/s", "gb_per_s": "GB/s", "tokens_per_s": "tokens/s", "ratio": "x the floor"}
    return f"{head} {row['ms']:10.3f} ms [{low:.3f}, {high:.3f}]" + "".join(f" {row[k]:.4g} {rates[k]}" for k in rates if k in row) + found


def page(rows: Sequence[Row], left_out: Sequence[str], about: Row) -> str:
    """Returns the page. left_out: the cases that there was no time for; about: device, platform, jax."""
    where = f"Measured by experiments/bench_attention.py on {about['device']} ({about['platform']}), jax {about['jax']}."
    parts = ["# Attention beside its rivals, train steps, samplers", f"{where} {EXPLAINED}"]
    for kind, title in PASSES.items():
        if some := [row for row in rows if row["pass"] == kind]:
            parts += [f"## {title}", _attention_table(some, kind)]
    if some := [row for row in rows if row["pass"] == "train" and "ms" in row]:
        cells = [[row["shape"], row["batch"], _ms(row), f"{row['tokens_per_s']:,.0f}", f"{row['tflops']:.1f}", _gib(row)] for row in some]
        parts += ["## Train steps", _table(["preset", "batch", "ms", "tokens/s", "TFLOP/s of 6ND", "GiB"], cells)]
    if some := [row for row in rows if row["pass"] == "sampler" and "ms" in row]:
        cells = [[row["rival"], row["shape"], _ms(row), _interval(row["ratio"], row["ratio_quartiles"], 2), _passes(row)] for row in some]
        parts += ["## Samplers against their floor", _table(["sampler", "preset", "ms", "wall / floor", "passes x ms"], cells)]
    if unserved := _unserved(rows):
        parts += ["## Without a time", _table(["what", "reason", "pass, shapes unless all"], unserved)]
    if left_out:
        parts += ["## Left out", "There was no time for: " + ", ".join(left_out) + ". The same command, run again, goes on with these."]
    return "\n\n".join(parts) + "\n"


EXPLAINED = """Milliseconds are medians, and quartiles in brackets, of turns that the columns took. `density` is the share of
(query, key) pairs that the mask allows; `visited` the share that lies in the tiles which a column computes, in the order of the columns,
where known. TFLOP/s count the allowed pairs alone: over the density they are those of dense attention in the same time. `largest error` is
the largest difference from the definition in float32, over its largest value. `kernel`: ours; `xla`: ours without a kernel, tile by tile,
or with a cache chunk by chunk; `two_call`: own block and prefix, merged; `dense`, `cudnn`: jax.nn.dot_product_attention, where need be
with a dense mask; `splash`: JAX's TPU kernel with our mask; `tokamax`: as `dense`."""


def _attention_table(rows: Sequence[Row], kind: str) -> str:
    rivals = list(dict.fromkeys(row["rival"] for row in rows if "ms" in row or "error" in row))
    rate = "gb_per_s" if kind == "decode" else "tflops"
    head = ["shape", "density", "visited", *(f"{rival} ms" for rival in rivals)]
    head += [f"{rival} {'GB/s' if kind == 'decode' else 'TFLOP/s'}" for rival in rivals[:1]] + ["largest error", "GiB"]
    cells = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        by = {row["rival"]: row for row in rows if row["shape"] == shape}
        some = [by.get(rival, {}) for rival in rivals]
        errors = [row["error"] for row in some if "error" in row]
        visited = " ".join(f"{row['visited']:.3f}" if row.get("visited") is not None else "?" for row in some)
        cells.append([shape, f"{next(iter(by.values()))['density']:.3f}", visited, *map(_ms, some)])
        cells[-1] += [f"{some[0][rate]:.4g}" if rate in some[0] else ""] if some else []
        cells[-1] += [f"{max(errors):.1e}" if errors else "", " ".join(_gib(row) or "?" for row in some)]
    return _table(head, cells)


def _unserved(rows: Sequence[Row]) -> list[list[str]]:
    """Returns (rival, reason, where) of the rows without a time; where all shapes of a pass have that reason, they aren't listed."""
    where: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in rows:
        if "reason" in row:
            where.setdefault((row["rival"], row["reason"]), {}).setdefault(row["pass"], []).append(row["shape"])
    every = {kind: len({row["shape"] for row in rows if row["pass"] == kind}) for kind in {row["pass"] for row in rows}}
    name = lambda kind, shapes: kind if len(shapes) == every[kind] else f"{kind} {' '.join(shapes)}"
    return [
        [rival, reason.replace("|", "\\|"), "; ".join(name(*item) for item in by_kind.items())]
        for (rival, reason), by_kind in where.items()
    ]


def _ms(row: Row) -> str:
    if "ms" not in row:
        return ""
    return _interval(row["ms"], row["ms_quartiles"], 3 if row["ms"] < 10 else 1)


def _interval(x: float, quartiles: Sequence[float], digits: int) -> str:
    return f"{x:.{digits}f} [{quartiles[0]:.{digits}f}, {quartiles[1]:.{digits}f}]"


def _gib(row: Row) -> str:
    return f"{row['bytes']['total'] / 2**30:.2f}" if "bytes" in row else ""


def _passes(row: Row) -> str:
    return ", ".join(f"{name} {n} x {row['pass_ms'][name]:.2f}" for name, n in row["passes"].items())


def _table(head: Sequence[str], cells: Sequence[Sequence[Any]]) -> str:
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *cells))


def draw(rows: Sequence[Row], path: Path) -> bool:
    """Writes the picture of the attention rows, a panel for each kind of pass, times on a log axis. False, and no file, without any such
    row. Raises ImportError without matplotlib."""
    timed = [row for row in rows if "ms" in row and row["pass"] in PASSES]
    if not timed:
        return False
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    kinds = [kind for kind in PASSES if any(row["pass"] == kind for row in timed)]
    shapes = {kind: list(dict.fromkeys(row["shape"] for row in timed if row["pass"] == kind)) for kind in kinds}
    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        size = (1 + 4.6 * len(kinds), 1.8 + 0.3 * max(map(len, shapes.values())))
        figure, axes = plt.subplots(1, len(kinds), figsize=size, squeeze=False, layout="constrained")
        for ax, kind in zip(axes[0], kinds):
            for rival, colour in COLOURS.items():
                some = [row for row in timed if row["pass"] == kind and row["rival"] == rival]
                at = [shapes[kind].index(row["shape"]) for row in some]
                spread = [[row["ms"] - row["ms_quartiles"][0] for row in some], [row["ms_quartiles"][1] - row["ms"] for row in some]]
                if some:
                    mark = dict(fmt="o", color=colour, markersize=5, elinewidth=1, capsize=2)
                    ax.errorbar([row["ms"] for row in some], at, xerr=spread, label=rival, **mark)
            ax.set_xscale("log")
            ax.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            ax.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
            ax.xaxis.set_minor_locator(ticker.NullLocator())
            ax.set_yticks(range(len(shapes[kind])), shapes[kind])
            ax.set_ylim(len(shapes[kind]) - 0.5, -0.5)
            ax.set_xlabel("ms")
            ax.set_title(PASSES[kind], fontsize=10)
            ax.grid(True, color="#e6e6e6", linewidth=0.7)
            ax.set_axisbelow(True)
        named = {label: handle for ax in axes[0] for handle, label in zip(*ax.get_legend_handles_labels())}
        figure.legend(named.values(), named.keys(), loc="outside upper center", ncols=len(named), frameon=False)
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=150)
        write_atomic(path, picture.getvalue())
        plt.close(figure)
    return True

"""Draws quality against passes from one or more sweeps, and compares curves.

    python experiments/plot.py --sweep=runs/text8/nfe [--sweep=...] --x=nfe --y=spelling [--compare]

Writes FIRST_SWEEP/<y>_<x>.png and .svg (or --out). One colour a sampler (a curve, of samplers of many), one line style a model; error bars
are one standard error; dashed lines are real held-out text and its shuffled characters. A curve joins, in order of passes, the rows that
differ only in --knobs.
--compare prints how many times fewer passes each curve needs than the baseline, at the qualities that both reach, and writes it all to
FIRST_SWEEP/<y>_compare.json (or OUT_compare.json). The curves of the sampler --baseline, of all models in the sweeps, are one baseline
together, the best of them at each quality; and each of them is one alone. So a twin without causal layers joins the model's own draft:

    python experiments/plot.py --sweep=runs/text8/nfe --sweep=runs/text8_mdm/nfe --from_nfe=4 --compare
"""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from dllm.core.config import main, read_json, write_atomic
from dllm.core.types import UserError
from dllm.evals import compare
from dllm.evals.results import Curve, number, read_curves

AXES = {"nfe": "network passes (NFE)", "nfe_weighted": "network passes, weighted by layers"}
NAMES = {
    "spelling": "spelling accuracy",
    "spelling_inner": "spelling accuracy, whole words",
    "entropy": "unigram entropy of a sequence (nats)",
    "entropy_pooled": "unigram entropy, pooled (nats)",
    "gen_nll": "NLL under the judge (nats a symbol)",
    "text_nll": "NLL under the judge (nats a token of its own)",
    "pseudo_nll": "pseudo-NLL under the judge (nats a residue)",
    "plddt": "mean pLDDT",
}
COLOURS = {"ancestral": "#3d3d3d", "self_speculative": "#d1495b", "confidence": "#1f77b4", "autoregressive": "#2a9d8f"}
MORE_COLOURS = ("#e09f3e", "#7b5ea7", "#8d6e63", "#c77cba", "#7f9172", "#1b6ca8", "#b23a48", "#4d908e")  # in turn, where there is no own
STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

FLAGS = flags.FLAGS
flags.DEFINE_multi_string("sweep", None, "folder of a sweep (its --out); give it again for more", required=True)
flags.DEFINE_enum("x", "nfe", [*AXES, "both"], "how passes are counted; both: two panels")
flags.DEFINE_string("y", "spelling", "the metric")
flags.DEFINE_list("knobs", "rate,n_verify", "settings that move along one curve; rows that differ in others are other curves")
flags.DEFINE_float("from_nfe", 0.0, "leave out the points of fewer main passes (nfe, whatever x is)")
flags.DEFINE_list("samplers", [], "draw these samplers only; all by default")
flags.DEFINE_bool("compare", False, "print the ratio of passes at equal quality")
flags.DEFINE_string("baseline", "ancestral", "the sampler whose curves --compare divides by")
flags.DEFINE_string("out", "", "path of the pictures without ending")


def draw(panels: dict[str, list[Curve]], y: str, reference: dict[str, Any], out: Path) -> None:
    """Writes out.png and out.svg, one panel for each way of counting passes."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("plots need matplotlib: pip install -e '.[plots]'") from None
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    curves = next(iter(panels.values()))
    models = list(dict.fromkeys(c.model for c in curves))
    others = sorted({c.sampler for c in curves} - set(COLOURS))
    rc = {"font.size": 10, "svg.hashsalt": "dllm", "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context(rc):
        width = 1 + 5.4 * len(panels)
        columns = int(width / (0.8 + 0.07 * max(len(c.label) for c in curves)))  # of the legend: inches, of the figure and of a label
        columns = max(1, min(columns, len(curves), 2 * len(panels)))
        size = (width, 4.0 + 0.2 * -(-len(curves) // columns))
        figure, axes = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False, layout="constrained")
        for ax, (x, panel) in zip(axes[0], panels.items(), strict=True):
            twins: dict[tuple[str, str], int] = {}
            for curve in panel:
                twin = twins[curve.sampler, curve.model] = twins.get((curve.sampler, curve.model), -1) + 1
                nfe, value, error = np.array([(p.nfe_B.mean(), p.quality.value, p.quality.stderr) for p in curve.points]).T
                shade = MORE_COLOURS[(others.index(curve.sampler) + twin) % len(MORE_COLOURS)] if curve.sampler in others else None
                line = {"color": shade or COLOURS[curve.sampler], "linestyle": STYLES[models.index(curve.model) % len(STYLES)]}
                mark = {"marker": MARKERS[twin % len(MARKERS)], "markersize": 4.5, "markeredgecolor": "white", "markeredgewidth": 0.5}
                ax.errorbar(nfe, value, np.nan_to_num(error), label=curve.label, linewidth=1.8, elinewidth=1, capsize=2.5, **line, **mark)
            for side, text in (("ceiling", "held-out text"), ("floor", "shuffled characters")):
                if reference.get(y, {}).get(side) is not None:
                    ax.axhline(reference[y][side], color="#999999", linestyle=(0, (5, 4)), linewidth=1, zorder=0)
                    ax.text(0.995, reference[y][side], text, transform=ax.get_yaxis_transform(), ha="right", va="bottom", color="#777777")
            ax.set_xscale("log")
            _ticks(ax, np.concatenate([[p.nfe_B.mean() for p in c.points] for c in panel]))
            ax.set_xlabel(AXES[x])
            ax.grid(True, color="#e6e6e6", linewidth=0.7)
            ax.set_axisbelow(True)
            ax.margins(y=0.08)
        axes[0, 0].set_ylabel(NAMES.get(y, y))
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=columns, frameon=False, handlelength=2.8)
        for ending, how in (("png", {"dpi": 180}), ("svg", {"metadata": {"Date": None}})):
            picture = io.BytesIO()
            figure.savefig(picture, format=ending, **how)
            write_atomic(f"{out}.{ending}", picture.getvalue())
        plt.close(figure)


def _ticks(ax: Any, nfe: np.ndarray) -> None:
    """Puts plain numbers (1, 2, 5, 10, ...) on the log axis, at least three where the passes span little."""
    from matplotlib import ticker

    low, high = 0.9 * nfe.min(), 1.12 * nfe.max()
    for subs in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8), tuple(np.arange(1, 10, 0.5))):
        ticks = [s * 10.0**e for e in range(-1, 6) for s in subs if low <= s * 10.0**e <= high]
        if len(ticks) >= 4:
            break
    ax.set_xlim(low, high)
    ax.xaxis.set_major_locator(ticker.FixedLocator(ticks))
    ax.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    ax.xaxis.set_minor_locator(ticker.NullLocator())


def compare_all(curves: list[Curve], x: str, y: str, sampler: str) -> list[dict[str, Any]]:
    """Prints and returns the comparison of every curve with the baseline's curves, together and, if there are more of them, one by one."""
    baselines = [c for c in curves if c.sampler == sampler]
    if not baselines:
        there = ", ".join(dict.fromkeys(c.sampler for c in curves))
        raise UserError(f"no curve of the baseline sampler {sampler!r}: give --baseline= one of {there}")
    found = []
    for curve in (c for c in curves if c.sampler != sampler):
        for group in [baselines] + [[b] for b in baselines] * (len(baselines) > 1):
            found.append({"x": x, "curve": curve.label, "points": len(curve.points)})
            found[-1] |= {"baseline": [b.label for b in group], "baseline_points": [len(b.points) for b in group]}
            arguments = [b.points for b in group], curve.points, y not in compare.LOWER_IS_BETTER
            z = compare.shortfall(*arguments)
            found[-1]["shortfall_in_stderr"] = None if np.isnan(z) else z
            try:
                found[-1] |= asdict(compare.compare(*arguments))
            except UserError as e:
                found[-1]["error"] = str(e)
            print_comparison(found[-1], y, brief=group is not baselines)
    return found


def print_comparison(c: dict[str, Any], y: str, brief: bool) -> None:
    """Prints one entry of `compare_all`, in one line if brief."""
    x, names, counts = c["x"], " and ".join(c["baseline"]), " and ".join(map(str, c["baseline_points"]))
    entropy = lambda gap, stderr: "" if np.isnan(gap) else f"   entropy {gap:+.4f} ± {stderr:.4f}"
    if "error" not in c:
        interval = f"{c['mean']:.2f} x   [{c['mean_low']:.2f}, {c['mean_high']:.2f}]"
        mean = interval + entropy(c["mean_entropy_gap"], c["mean_entropy_gap_stderr"])
    if brief:
        print(f"  no band with {names} alone" if "error" in c else f"  against {names} alone: {mean}")
        return
    print(f"\n{c['curve']} ({c['points']} points) against {'the better of: ' * (len(c['baseline']) > 1)}{names} ({counts} points)")
    if "error" in c:
        print(f"  {c['error']}")
    else:
        print(f"  {x} of the baseline / {x} at equal {y}, 95 % bootstrap over sequences; entropy in nats less the baseline's")
        for level, ratio, low, high, *gap in zip(*(c[k] for k in ("levels", "ratio", "low", "high", "entropy_gap", "entropy_gap_stderr"))):
            print(f"  {y} {level:.4f}   {ratio:.2f} x   [{low:.2f}, {high:.2f}]{entropy(*gap)}")
        print(f"  geometric mean    {mean}")
        print(f"  it needs 1/{c['mean']:.2f} of the baseline's {AXES[x]}, averaged over the band")
    z = c["shortfall_in_stderr"]
    print("  no common range of passes" if z is None else f"  largest shortfall at equal {x}: {max(z, 0.0):.1f} standard errors")


def plain(x: Any) -> Any:
    """Returns x as JSON takes it: arrays as lists, nan as null."""
    if isinstance(x, dict):
        return {k: plain(v) for k, v in x.items()}
    if isinstance(x, (list, tuple, np.ndarray)):
        return [plain(v) for v in x]
    return number(x) if isinstance(x, float) else x


def run() -> None:
    axes = list(AXES) if FLAGS.x == "both" else [FLAGS.x]
    panels = {x: read_curves(FLAGS.sweep, x, FLAGS.y, FLAGS.knobs, FLAGS.from_nfe) for x in axes}
    there = sorted({c.sampler for c in panels[axes[0]]})
    if missing := [s for s in FLAGS.samplers if s not in there]:
        raise UserError(f"no rows of the sampler {missing[0]!r}; there are: {', '.join(there)}")
    panels = {x: [c for c in curves if c.sampler in (FLAGS.samplers or there)] for x, curves in panels.items()}
    first = Path(FLAGS.sweep[0])
    reference = read_json(first / "reference.json") if (first / "reference.json").exists() else {}
    out = Path(FLAGS.out) if FLAGS.out else first / f"{FLAGS.y}_{FLAGS.x}"
    draw(panels, FLAGS.y, reference, out)
    if FLAGS.compare:
        found = [entry for x, curves in panels.items() for entry in compare_all(curves, x, FLAGS.y, FLAGS.baseline)]
        path = Path(f"{FLAGS.out or first / FLAGS.y}_compare.json")
        write_atomic(path, json.dumps({"y": FLAGS.y, "from_nfe": FLAGS.from_nfe, "comparisons": plain(found)}, indent=1) + "\n")
        print(f"wrote {path}")
    print(f"wrote {out}.png and {out}.svg")


if __name__ == "__main__":
    main(run)

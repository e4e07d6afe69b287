"""Draws quality against passes from one or more sweeps, and compares curves.

    python experiments/plot.py --sweep=runs/text8/nfe [--sweep=...] --x=nfe --y=spelling [--compare]

Writes FIRST_SWEEP/<y>_<x>.png and .svg (or --out). One colour a sampler, one line style a model; error bars are one standard error;
dashed lines are real held-out text and its shuffled characters. A curve joins, in order of passes, the rows that differ only in --knobs.
--compare prints how many times fewer passes each curve needs than the baseline's, at the qualities that both reach.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from dllm.core.config import main, read_json, write_atomic
from dllm.core.types import UserError
from dllm.evals import compare
from dllm.evals.results import Curve, read_curves

AXES = {"nfe": "network passes (NFE)", "nfe_weighted": "network passes, weighted by layers"}
NAMES = {
    "spelling": "spelling accuracy",
    "spelling_inner": "spelling accuracy, whole words",
    "entropy": "unigram entropy of a sequence (nats)",
    "entropy_pooled": "unigram entropy, pooled (nats)",
    "gen_nll": "NLL under the judge (nats a character)",
}
LOWER_IS_BETTER = ("gen_nll",)
COLOURS = {"ancestral": "#3d3d3d", "self_speculative": "#d1495b", "confidence": "#1f77b4", "autoregressive": "#2a9d8f"}
MORE_COLOURS = ("#e09f3e", "#7b5ea7", "#8d6e63", "#c77cba", "#7f9172")  # in turn, for samplers without one of their own
STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

FLAGS = flags.FLAGS
flags.DEFINE_multi_string("sweep", None, "folder of a sweep (its --out); give it again for more", required=True)
flags.DEFINE_enum("x", "nfe", [*AXES, "both"], "how passes are counted; both: two panels")
flags.DEFINE_string("y", "spelling", "the metric")
flags.DEFINE_list("knobs", "rate,n_verify", "settings that move along one curve; rows that differ in others are other curves")
flags.DEFINE_list("samplers", [], "draw these samplers only; all by default")
flags.DEFINE_bool("compare", False, "print the ratio of passes at equal quality")
flags.DEFINE_string("baseline", "ancestral", "the sampler that --compare divides by")
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
    colour = COLOURS | {s: MORE_COLOURS[i % len(MORE_COLOURS)] for i, s in enumerate(others)}
    rc = {"font.size": 10, "svg.hashsalt": "dllm", "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context(rc):
        figure, axes = plt.subplots(1, len(panels), figsize=(1 + 5.4 * len(panels), 4.4), sharey=True, squeeze=False, layout="constrained")
        for ax, (x, panel) in zip(axes[0], panels.items(), strict=True):
            twins: dict[tuple[str, str], int] = {}
            for curve in panel:
                twin = twins[curve.sampler, curve.model] = twins.get((curve.sampler, curve.model), -1) + 1
                nfe, value, error = np.array([(p.nfe_B.mean(), p.quality.value, p.quality.stderr) for p in curve.points]).T
                line = {"color": colour[curve.sampler], "linestyle": STYLES[models.index(curve.model) % len(STYLES)]}
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
        figure.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), 2 * len(panels)), frameon=False, handlelength=2.8)
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


def print_comparison(curves: list[Curve], x: str, y: str, sampler: str) -> None:
    """Prints, for every curve but the baseline's, the ratios of passes at equal quality with their 95 % bootstrap intervals."""
    baselines = [c for c in curves if c.sampler == sampler]
    if not baselines:
        there = ", ".join(dict.fromkeys(c.sampler for c in curves))
        raise UserError(f"no curve of the baseline sampler {sampler!r}: give --baseline= one of {there}")
    for curve in (c for c in curves if c not in baselines):
        base = next((b for b in baselines if b.model == curve.model), baselines[0])
        higher = y not in LOWER_IS_BETTER
        print(f"\n{curve.label} against {base.label}: {x} of the baseline / {x} at equal {y} (95 % bootstrap over sequences)")
        try:
            c = compare.compare(base.points, curve.points, higher)
            for level, ratio, low, high in zip(c.levels, c.ratio, c.low, c.high, strict=True):
                print(f"  {y} {level:.4f}   {ratio:.2f} x   [{low:.2f}, {high:.2f}]")
            print(f"  geometric mean    {c.mean:.2f} x   [{c.mean_low:.2f}, {c.mean_high:.2f}]")
        except UserError as e:
            print(f"  {e}")
        z = compare.shortfall(base.points, curve.points, higher)
        print("  no common range of passes" if np.isnan(z) else f"  largest shortfall at equal {x}: {max(z, 0.0):.1f} standard errors")


def run() -> None:
    axes = list(AXES) if FLAGS.x == "both" else [FLAGS.x]
    panels = {x: read_curves(FLAGS.sweep, x, FLAGS.y, FLAGS.knobs) for x in axes}
    there = sorted({c.sampler for c in panels[axes[0]]})
    if missing := [s for s in FLAGS.samplers if s not in there]:
        raise UserError(f"no rows of the sampler {missing[0]!r}; there are: {', '.join(there)}")
    panels = {x: [c for c in curves if c.sampler in (FLAGS.samplers or there)] for x, curves in panels.items()}
    first = Path(FLAGS.sweep[0])
    reference = read_json(first / "reference.json") if (first / "reference.json").exists() else {}
    out = Path(FLAGS.out) if FLAGS.out else first / f"{FLAGS.y}_{FLAGS.x}"
    draw(panels, FLAGS.y, reference, out)
    if FLAGS.compare:
        for x, curves in panels.items():
            print_comparison(curves, x, FLAGS.y, FLAGS.baseline)
    print(f"wrote {out}.png and {out}.svg")


if __name__ == "__main__":
    main(run)

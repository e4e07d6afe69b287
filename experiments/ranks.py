"""Shows where a hybrid's target beats its draft: gain in bits and acceptance, by place in the window and window start.

    python experiments/ranks.py --workdir=runs/text8 [--split=valid] [--num=256] [--starts=0,8,32]

Held-out chunks with their true tokens, a random order each (see dllm/evals/ranks.py). Writes WORKDIR/ranks.png, .svg and .npz (or --out):
the npz has starts, and the mean and stderr over chunks of gain and acceptance at each start and rank, nan before the start.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from absl import flags

from dllm.core.config import main, writable_folder, write_atomic
from dllm.core.types import UserError
from dllm.evals import ranks
from dllm.evals.held_out import held_out
from dllm.train.checkpoint import load_run

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", None, "workdir of a trained hybrid", required=True)
flags.DEFINE_enum("split", "valid", ["valid", "test"], "the held-out text")
flags.DEFINE_integer("num", 256, "chunks of it, spread evenly; 0: all", lower_bound=0)
flags.DEFINE_list("starts", [], "window starts, in ranks; 0, powers of two, three quarters and the end by default")
flags.DEFINE_string("data_path", None, "where the data lies, if not where the run read it")
flags.DEFINE_integer("step", None, "checkpoint to measure; the latest by default")
flags.DEFINE_integer("seed", 0, "of the orders", lower_bound=0, upper_bound=2**32 - 1)
flags.DEFINE_string("out", "", "path of what is written, without ending")

PANELS = {"gain": "gain of the target over the draft (bits)", "acceptance": "acceptance, 1 - TV(draft, target)"}


def draw(found: ranks.ByRank, out: Path) -> None:
    """Writes out.png and out.svg: a panel each, a line for each window start, against the place in the window."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("plots need matplotlib: pip install -e '.[plots]'") from None
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    names = _names(ranks.offset_bins(found.gain.shape[2]))
    rc = {"font.size": 10, "svg.hashsalt": "dllm", "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context(rc):
        figure, axes = plt.subplots(1, len(PANELS), figsize=(11.8, 4.4), layout="constrained")
        colours = plt.get_cmap("viridis")(np.linspace(0, 0.92, len(found.starts)))
        for ax, (name, text) in zip(axes, PANELS.items(), strict=True):
            mean_SK, stderr_SK = ranks.by_offset(getattr(found, name), found.starts)
            for start, colour, mean_K, stderr_K in zip(found.starts, colours, mean_SK, stderr_SK, strict=True):
                line = {"marker": "o", "markersize": 4, "linewidth": 1.6, "elinewidth": 1, "capsize": 2}
                ax.errorbar(np.arange(len(names)), mean_K, np.nan_to_num(stderr_K), label=str(start), color=colour, **line)
            ax.set_xticks(np.arange(len(names)), names)
            ax.set_xlabel("place in the window (1: the first drafted)")
            ax.set_ylabel(text)
            ax.grid(True, color="#e6e6e6", linewidth=0.7)
        axes[0].axhline(0, color="#999999", linewidth=1, zorder=0)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", title="revealed\nbefore", frameon=False)
        for ending, how in (("png", {"dpi": 180}), ("svg", {"metadata": {"Date": None}})):
            picture = io.BytesIO()
            figure.savefig(picture, format=ending, **how)
            write_atomic(f"{out}.{ending}", picture.getvalue())
        plt.close(figure)


def _names(bins: list[tuple[int, int]]) -> list[str]:
    """Returns the places of each bin, counted from 1: "1", "2", "3-4"."""
    return [f"{a + 1}" if b == a + 1 else f"{a + 1}-{b}" for a, b in bins]


def print_table(found: ranks.ByRank) -> None:
    """Prints, for gain and acceptance, one line a window start, one column a place in the window."""
    for name, text in PANELS.items():
        mean_SK, stderr_SK = ranks.by_offset(getattr(found, name), found.starts)
        columns = "".join(f"{n:>8}" for n in _names(ranks.offset_bins(found.gain.shape[2])))
        print(f"\n{text}, by place in the window; stderr up to {np.nanmax(stderr_SK, initial=0):.3f}\nrevealed{columns}")
        for start, mean_K in zip(found.starts, mean_SK, strict=True):
            print(f"{start:8}" + "".join("" if np.isnan(m) else f"{m:8.3f}" for m in mean_K))


def run() -> None:
    loaded = load_run(FLAGS.workdir, FLAGS.step)
    try:
        starts = tuple(sorted({int(i) for i in FLAGS.starts})) or ranks.default_starts(loaded.model_config.length)
    except ValueError:
        raise UserError(f"--starts={','.join(FLAGS.starts)} must be whole numbers, by comma") from None
    ranks.check(loaded, starts)
    data, chunks_BL = held_out(loaded.config, FLAGS.data_path, FLAGS.split, FLAGS.num)
    out = Path(FLAGS.out) if FLAGS.out else Path(FLAGS.workdir) / "ranks"
    writable_folder(out.parent)
    found = ranks.by_rank(loaded, chunks_BL, starts, FLAGS.seed)
    print(f"{FLAGS.workdir}, step {loaded.step}: {len(chunks_BL)} chunks of {data.length} characters, {FLAGS.split} split")
    print_table(found)
    arrays = {"starts": np.array(starts)}
    for name in PANELS:
        arrays[name], arrays[f"{name}_stderr"] = ranks.mean_and_stderr(getattr(found, name))
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_atomic(f"{out}.npz", buffer.getvalue())
    draw(found, out)
    print(f"\nwrote {out}.png, {out}.svg and {out}.npz")


if __name__ == "__main__":
    main(run)

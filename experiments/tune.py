"""Chooses the best settings of a tuning sweep, spread evenly over passes: what to measure anew and publish.

    python experiments/tune.py --sweep=runs/text8/tune [--sweep=...] --x=nfe --y=spelling --num=9 --from_nfe=4

The passes from the fewest to the most, by --x, are cut into --num equal bins on a log axis; of each sampler the best setting of each bin
is chosen, the one that lies highest above the sampler's trend. Written to FIRST_SWEEP/points_<x>.json (or --out), which
configs/sweeps/points.py turns into a sweep with a seed of its own: figures that chose a setting are too good to be published.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from dllm.core.config import main, write_atomic
from dllm.core.lookup import lookup
from dllm.core.types import UserError
from dllm.evals.compare import LOWER_IS_BETTER, frontier
from dllm.evals.results import read_rows

FLAGS = flags.FLAGS
flags.DEFINE_multi_string("sweep", None, "folder of a tuning sweep (its --out), all of one model; give it again for more", required=True)
flags.DEFINE_enum("x", "nfe", ["nfe", "nfe_weighted"], "how passes are counted")
flags.DEFINE_string("y", "spelling", "the metric that settings are chosen by")
flags.DEFINE_integer("num", 9, "bins: settings to choose of each sampler, at most", lower_bound=1)
flags.DEFINE_float("from_nfe", 4.0, "leave out settings of fewer main passes (nfe, whatever x is)")
flags.DEFINE_list("samplers", [], "choose of these samplers only; of all by default")
flags.DEFINE_string("out", "", "file of the chosen settings")


def split(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the row's setting as a sweep config has it: the sampler's options, and the settings that all samplers obey."""
    names = [f.name for f in dataclasses.fields(lookup("samplers", row["sampler"]).Options)]
    options = {k: v for k, v in row["setting"].items() if k in names}
    return {"sampler": row["sampler"], "options": options, "settings": {k: v for k, v in row["setting"].items() if k not in names}}


def choose(rows: list[dict[str, Any]], x: str, y: str, num: int) -> list[dict[str, Any]]:
    """Returns the best of the rows of one sampler, by rising x."""
    sign = -1.0 if y in LOWER_IS_BETTER else 1.0
    return [rows[i] for i in frontier(np.array([r[x] for r in rows], float), sign * np.array([r[y] for r in rows]), num)]


def run() -> None:
    rows = [row for out in FLAGS.sweep for row in read_rows(Path(out))]
    if not rows:
        raise UserError(f"no results in {', '.join(FLAGS.sweep)}: --sweep takes the --out of experiments/sweep.py")
    if len(models := {(r["model"], r["step"], r["config_hash"]) for r in rows}) > 1:
        names = ", ".join(f"{model} step {step}" for model, step, _ in sorted(models))
        raise UserError(f"the sweeps hold rows of several models ({names}): choose the settings of each by itself")
    there = list(dict.fromkeys(r["sampler"] for r in rows))
    if missing := [s for s in FLAGS.samplers if s not in there]:
        raise UserError(f"no rows of the sampler {missing[0]!r}; there are: {', '.join(there)}")
    metrics = sorted({k for r in rows for k, v in r.items() if isinstance(v, float) and not k.endswith("_stderr")})
    if FLAGS.y not in metrics:
        raise UserError(f"no row has a value of {FLAGS.y}; there are: {', '.join(metrics)}")
    usable = [r for r in rows if r.get(FLAGS.y) is not None and r["nfe"] >= FLAGS.from_nfe and r["sampler"] in (FLAGS.samplers or there)]
    if not usable:
        raise UserError(f"no row has a value of {FLAGS.y} at {FLAGS.from_nfe:g} passes or more: sweep other settings, or lower --from_nfe")
    points = []
    for sampler in dict.fromkeys(r["sampler"] for r in usable):
        mine = [r for r in usable if r["sampler"] == sampler]
        best = choose(mine, FLAGS.x, FLAGS.y, FLAGS.num)
        print(f"{sampler}: {len(best)} of {len(mine)} settings")
        for r in best:
            points.append(split(r) | {"tuned": {k: r[k] for k in ("nfe", "nfe_weighted", FLAGS.y)}})
            setting = " ".join(f"{k}={v}" for k, v in r["setting"].items())
            print(f"  nfe {r['nfe']:7.2f}   nfe_weighted {r['nfe_weighted']:7.2f}   {FLAGS.y} {r[FLAGS.y]:.4f}   {setting}")
    out = Path(FLAGS.out) if FLAGS.out else Path(FLAGS.sweep[0]) / f"points_{FLAGS.x}.json"
    tuned = {k: rows[0][k] for k in ("model", "step", "config_hash")} | {"x": FLAGS.x, "y": FLAGS.y}
    write_atomic(out, json.dumps(tuned | {"seed": max(r["seed"] for r in rows), "points": points}, indent=1) + "\n")
    print(f"wrote {out}; measure them: experiments/sweep.py --config=configs/sweeps/points.py:{out} --workdir=... --out=...")
    print("and compare them as one curve each: experiments/plot.py --sweep=... --knobs=window,rate,n_verify,verification --compare")


if __name__ == "__main__":
    main(run)

"""Every strategy of block diffusion on the adapted storyteller, judged by its autoregressive parent.

    python experiments/sweep.py --config=configs/sweeps/stories.py         --workdir=runs/stories/b4     --out=runs/stories/nfe_b4
    python experiments/sweep.py --config=configs/sweeps/stories.py         --workdir=runs/stories/b8     --out=runs/stories/nfe_b8
    python experiments/sweep.py --config=configs/sweeps/stories.py:parent  --workdir=runs/stories/parent --out=runs/stories/nfe_parent
    python experiments/plot.py  --sweep=runs/stories/nfe_b4 --sweep=runs/stories/nfe_b8 --x=nfe --y=gen_nll --knobs=n,tau,gamma,factor

512 samples of 128 tokens a setting; 10 minutes on 2 CPU cores.
"""

from ml_collections import ConfigDict

from dllm.core.types import UserError

STRATEGIES = {
    "static": [{"n": n} for n in (1, 2, 4)],
    "dynamic": [{"tau": tau} for tau in (0.3, 0.5, 0.7, 0.9)],
    "sequential": [{"n": n} for n in (1, 2, 4)],
    "random": [{"n": n} for n in (1, 2)],
    "entropy_bounded": [{"gamma": gamma} for gamma in (0.35, 1.0, 2.0, 4.0)],
    "factor": [{"factor": factor} for factor in (0.5, 1.0, 2.0)],
}


def get_config(which: str = "strategies") -> ConfigDict:
    """Returns the sweep's config: see SweepConfig in experiments/sweep.py."""
    points = [("block_diffusion", {"select": select, **option}) for select, options in STRATEGIES.items() for option in options]
    biased = [{"select": "static", "n": n} for n in (1, 2)] + [{"select": "dynamic", "tau": tau} for tau in (0.5, 0.7, 0.9)]
    points += [("block_diffusion", {"confidence": "sampled", **option}) for option in biased]  # as the public decoders
    points += [("self_verified", {"window": window}) for window in (4, 8)]
    if which == "parent":
        points = [("autoregressive", {})]
    elif which != "strategies":
        raise UserError(f"no settings {which!r}; there are: strategies, parent")
    config = ConfigDict({"num_samples": 512, "batch": 256, "seed": 0, "evals": ("gen_nll", "entropy"), "judge": "runs/stories/parent"})
    config.points = tuple({"sampler": sampler, "options": option, "settings": {"max_new": 127}} for sampler, option in points)
    return config

r"""Proteins against passes: a frozen masked model, and the causal block on it, by the same judges.

    python experiments/sweep.py --config=configs/sweeps/proteins.py:ancestral --workdir=runs/proteins/backbone \
        --out=runs/proteins/nfe/backbone
    python experiments/sweep.py --config=configs/sweeps/proteins.py --workdir=runs/proteins/frozen --out=runs/proteins/nfe/frozen
    python experiments/plot.py  --sweep=runs/proteins/nfe/frozen --sweep=runs/proteins/nfe/backbone --x=both --y=pseudo_nll --compare

With --config.fold="PYTHON external/esmfold.py --fasta={fasta} --csv={csv}" also by ESMFold (docs/judges.md).
"""

from ml_collections import ConfigDict

from dllm.core.types import UserError

PAIRS = ((1, 0.005), (2, 0.01), (3, 0.02), (4, 0.04), (8, 0.083), (10, 0.15))  # n_verify and rate
POINTS = {
    "ancestral": [{"window": "cosine", "rate": rate} for _, rate in PAIRS],
    "self_speculative": [{"window": "cosine", "rate": rate, "n_verify": n} for n, rate in PAIRS],
}


def get_config(sampler: str = "self_speculative") -> ConfigDict:
    """Returns the sweep's config: see SweepConfig in experiments/sweep.py."""
    if sampler not in POINTS:
        raise UserError(f"no settings for {sampler!r}; there are: {', '.join(POINTS)}")
    config = ConfigDict({"num_samples": 512, "batch": 128, "seed": 0, "evals": ("protein",), "judge": "runs/proteins/judge", "fold": ""})
    config.points = tuple({"sampler": sampler, "options": options, "settings": {}} for options in POINTS[sampler])
    return config

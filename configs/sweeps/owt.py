"""NLL against passes on OpenWebText, or its twin, judged by an autoregressive model; and the settings of the paper's ablations.

    for model in ssmd mdm block gpt; do
      python experiments/sweep.py --config=configs/sweeps/owt.py:$model --workdir=runs/owt_mini/$model --out=runs/owt_mini/nll/$model
    done
    python experiments/sweep.py --config=configs/sweeps/owt.py:ablations --workdir=runs/owt_mini/ssmd --out=runs/owt_mini/nll/ablations
    python experiments/plot.py  --sweep=runs/owt_mini/nll/ssmd --sweep=runs/owt_mini/nll/mdm --x=both --y=text_nll --knobs=rate,n_verify

The judge is the twin's own; a larger one: --config.judge=runs/smollm2 --config.num_samples=64 (docs/judges.md).
"""

from ml_collections import ConfigDict

from dllm.core.types import UserError

PAIRS = ((1, 0.005), (2, 0.01), (3, 0.02), (4, 0.04), (8, 0.083), (10, 0.15))  # n_verify and rate: the paper's, for rows an eighth as long
VERIFICATIONS = (1, 2, 4, 8)  # at the rate .04
LINEAR = (3.0, 6.0, 12.0, 24.0)  # widest windows that take about as many passes as the cosine's rates


def speculative(n_verify, rate, window="cosine"):
    return ("self_speculative", {"window": window, "rate": rate, "n_verify": n_verify})


POINTS = {
    "ssmd": [speculative(*pair) for pair in PAIRS],
    "mdm": [("ancestral", {"window": "cosine", "rate": rate}) for _, rate in PAIRS],
    "block": [("block_diffusion", {"select": "static", "n": n}) for n in (1, 2, 4)]
    + [("block_diffusion", {"select": "dynamic", "tau": tau}) for tau in (0.3, 0.5, 0.7, 0.9)],
    "gpt": [("autoregressive", {})],
    "ablations": [speculative(n, 0.04) for n in VERIFICATIONS] + [speculative(4, rate, "linear") for rate in LINEAR],
}


def get_config(which: str = "ssmd") -> ConfigDict:
    """Returns the sweep's config: see SweepConfig in experiments/sweep.py."""
    if which not in POINTS:
        raise UserError(f"no settings for {which!r}; there are: {', '.join(POINTS)}")
    config = ConfigDict({"num_samples": 512, "batch": 128, "seed": 0, "evals": ("text_nll", "entropy"), "judge": "runs/owt_mini/judge"})
    config.points = tuple({"sampler": sampler, "options": options, "settings": {}} for sampler, options in POINTS[which])
    return config

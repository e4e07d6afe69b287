"""The settings that tuning chose on the lexicon corpus, measured anew: the curves of experiments/results/lexicon_mini.

    python experiments/sweep.py --config=configs/sweeps/lexicon.py:ancestral --workdir=runs/lexicon_mdm --out=runs/lexicon/twin
    python experiments/sweep.py --config=configs/sweeps/lexicon.py:ancestral --workdir=runs/lexicon_ssmd --out=runs/lexicon/own
    python experiments/sweep.py --config=configs/sweeps/lexicon.py:self_speculative --workdir=runs/lexicon_ssmd --out=runs/lexicon/ssmd
    python experiments/plot.py --sweep=runs/lexicon/ssmd --sweep=runs/lexicon/own --sweep=runs/lexicon/twin --x=both --from_nfe=4 \
        --knobs=window,rate,n_verify,verification --compare

1024 samples a setting, 15 minutes on 2 CPU cores.
"""

from ml_collections import ConfigDict

from dllm.core.types import UserError

CONSTANT = (16, 13, 11, 10, 8, 6, 5, 4, 3, 2, 1)  # better than cosine or linear windows at equal passes, for a model this small
PAIRS = ((16, 8), (16, 4), (12, 4), (10, 4), (8, 4), (6, 3), (4, 2), (3, 2), (2, 1), (1, 1))  # window, n_verify


def get_config(sampler: str = "self_speculative") -> ConfigDict:
    """Returns the sweep's config: see SweepConfig in experiments/sweep.py."""
    points = {"ancestral": [{"window": "constant", "rate": float(w)} for w in CONSTANT]}
    speculative = [{"window": "constant", "rate": float(w), "n_verify": n, "verification": "block"} for w, n in PAIRS]
    points["self_speculative"] = speculative
    if sampler not in points:
        raise UserError(f"no settings for {sampler!r}; there are: {', '.join(points)}")
    config = ConfigDict({"num_samples": 1024, "batch": 128, "seed": 2, "evals": ("spelling", "entropy"), "judge": ""})
    config.points = tuple({"sampler": sampler, "options": option, "settings": {}} for option in points[sampler])
    return config

"""The quickstart's curve: six settings of the baseline and six of self-speculative sampling, on the small model of configs/quickstart.py.

    python experiments/sweep.py --config=configs/sweeps/quickstart.py --workdir=runs/quickstart --out=runs/quickstart/nfe

1024 samples a setting; about a minute on 2 CPU cores.
"""

from ml_collections import ConfigDict

PAIRS = ((32, 1.0), (16, 0.5), (8, 0.34), (8, 0.25), (6, 0.167), (4, 0.083))  # n_verify, rate


def get_config() -> ConfigDict:
    """Returns the sweep's config: see SweepConfig in experiments/sweep.py."""
    points = [{"sampler": "ancestral", "options": {"rate": rate}, "settings": {}} for _, rate in PAIRS]
    points += [{"sampler": "self_speculative", "options": {"rate": rate, "n_verify": n}, "settings": {}} for n, rate in PAIRS]
    config = ConfigDict({"num_samples": 1024, "batch": 128, "seed": 0, "evals": ("spelling", "entropy"), "judge": ""})
    config.points = tuple(points)
    return config

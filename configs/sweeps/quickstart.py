"""The quickstart's curve: six settings of the baseline and six of self-speculative sampling, on the small model of configs/quickstart.py.

    python experiments/sweep.py --config=configs/sweeps/quickstart.py --workdir=runs/quickstart --out=runs/quickstart/nfe

512 samples a setting.
"""

from ml_collections import ConfigDict

RATES = (0.34, 0.25, 0.167, 0.125, 0.083, 0.04)


def get_config() -> ConfigDict:
    """Returns the sweep's config: see SweepConfig in experiments/sweep.py."""
    points = [{"sampler": "ancestral", "options": {"rate": rate}, "settings": {}} for rate in RATES]
    points += [{"sampler": "self_speculative", "options": {"rate": rate, "n_verify": 3}, "settings": {}} for rate in RATES]
    config = ConfigDict({"num_samples": 512, "batch": 128, "seed": 0, "evals": ("spelling", "entropy"), "judge": ""})
    config.points = tuple(points)
    return config

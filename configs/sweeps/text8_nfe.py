"""Quality against network passes: the masked-diffusion baseline, most-confident-first, and self-speculative sampling.

    python experiments/sweep.py --config=configs/sweeps/text8_nfe.py --workdir=runs/text8 --out=runs/text8/nfe

512 samples a setting, 12 minutes for `mini` on 2 CPU cores. The rates from .01 to .083 are the paper's range on text8; the larger ones go
below it. Many verifications cost little by the rule `nfe`, and are weighed by the rule `nfe_weighted`.
"""

from ml_collections import ConfigDict

RATES = (1.0, 0.5, 0.25, 0.167, 0.125, 0.083, 0.06, 0.04, 0.02, 0.01)
PAIRS = ((64, 1.0), (32, 0.5), (8, 0.25), (8, 0.167), (8, 0.125), (6, 0.083), (4, 0.06), (4, 0.04), (3, 0.02), (2, 0.01))  # n_verify, rate


def get_config() -> ConfigDict:
    """Returns the sweep's config: see SweepConfig in experiments/sweep.py."""
    points = [{"sampler": sampler, "options": {"rate": rate}, "settings": {}} for sampler in ("ancestral", "confidence") for rate in RATES]
    points += [{"sampler": "self_speculative", "options": {"rate": rate, "n_verify": n}, "settings": {}} for n, rate in PAIRS]
    config = ConfigDict({"num_samples": 512, "batch": 128, "seed": 0, "evals": ("spelling", "entropy"), "judge": ""})
    config.points = tuple(points)
    return config

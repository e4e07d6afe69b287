"""Quality against network passes: the masked-diffusion baseline, most-confident-first, and self-speculative sampling.

    python experiments/sweep.py --config=configs/sweeps/text8_nfe.py --workdir=runs/text8 --out=runs/text8/nfe

512 samples a setting. The pairs (n_verify, rate) from (1, .002) to (10, .083) are the paper's; the larger rates go below its range.
"""

from ml_collections import ConfigDict

RATES = (0.25, 0.167, 0.125, 0.083, 0.06, 0.04, 0.02, 0.01, 0.005, 0.002)
PAIRS = ((10, 0.25), (10, 0.167), (10, 0.125), (10, 0.083), (8, 0.04), (4, 0.02), (3, 0.01), (2, 0.005), (1, 0.002))


def get_config() -> ConfigDict:
    """Returns the sweep's config: see SweepConfig in experiments/sweep.py."""
    points = [{"sampler": sampler, "options": {"rate": rate}, "settings": {}} for sampler in ("ancestral", "confidence") for rate in RATES]
    points += [{"sampler": "self_speculative", "options": {"rate": rate, "n_verify": n}, "settings": {}} for n, rate in PAIRS]
    config = ConfigDict({"num_samples": 512, "batch": 128, "seed": 0, "evals": ("spelling", "entropy"), "judge": ""})
    config.points = tuple(points)
    return config

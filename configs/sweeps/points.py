"""The settings that experiments/tune.py chose, measured anew with another seed.

    python experiments/sweep.py --config=configs/sweeps/points.py:runs/text8/tune/points_nfe.json --workdir=runs/text8 --out=runs/text8/nfe

1024 samples a setting; --config.seed=... and --config.num_samples=... as everywhere. The seed is the tuning sweep's plus one.
"""

from ml_collections import ConfigDict

from dllm.core.config import read_json
from dllm.core.types import UserError


def get_config(path: str = "") -> ConfigDict:
    """Returns the sweep's config: see SweepConfig in experiments/sweep.py. `path`: the file that tune wrote."""
    if not path:
        raise UserError("pass --config=configs/sweeps/points.py:PATH, a file that experiments/tune.py wrote")
    tuned = read_json(path)
    try:
        keys = ("sampler", "options", "settings")
        points, seed = [{key: point[key] for key in keys} for point in tuned["points"]], int(tuned["seed"]) + 1
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path} is not a file that experiments/tune.py wrote: run that again") from None
    config = ConfigDict({"num_samples": 1024, "batch": 128, "seed": seed, "evals": ("spelling", "entropy"), "judge": ""})
    config.points = tuple(points)
    return config

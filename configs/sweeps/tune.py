"""Windows, N and verification to choose from, for experiments/tune.py: on few samples, with a seed of their own.

    python experiments/sweep.py --config=configs/sweeps/tune.py:self_speculative --workdir=runs/text8 --out=runs/text8/tune
    python experiments/sweep.py --config=configs/sweeps/tune.py:ancestral --workdir=runs/text8 --out=runs/text8/tune
    python experiments/tune.py  --sweep=runs/text8/tune --x=nfe
    python experiments/sweep.py --config=configs/sweeps/points.py:runs/text8/tune/points_nfe.json --workdir=runs/text8 --out=runs/text8/nfe

256 samples a setting; fifteen minutes for `mini` on 2 CPU cores, most of it compilation.
"""

from ml_collections import ConfigDict

from dllm.core.types import UserError

COSINE = (0.25, 0.2, 0.167, 0.125, 0.1, 0.083, 0.06, 0.04, 0.03, 0.02, 0.01)
CONSTANT, LINEAR = (16.0, 10.0, 8.0, 6.0, 4.0, 3.0, 2.0, 1.0), (32.0, 16.0, 8.0, 4.0)
BLOCKS = {32.0: (2, 4, 8), 16.0: (2, 4, 8), 12.0: (2, 4), 8.0: (2, 3), 6.0: (2, 3), 4.0: (2, 3), 3.0: (2,), 2.0: (1, 2)}  # W: N
FEW = {"cosine": (1.0, 0.5, 0.34, 0.25, 0.167, 0.125, 0.083), "constant": (16.0, 8.0), "linear": (32.0, 16.0)}  # windows of several tokens


def get_config(sampler: str = "self_speculative") -> ConfigDict:
    """Returns the sweep's config: see SweepConfig in experiments/sweep.py."""
    if sampler == "ancestral":
        options = [{"window": w, "rate": r} for w, rates in (("cosine", COSINE), ("constant", CONSTANT), ("linear", LINEAR)) for r in rates]
    elif sampler == "self_speculative":
        options = [{"rate": r, "n_verify": n, "verification": "block"} for r in FEW["cosine"] for n in (1, 2, 3, 4, 8)]
        options += [{"rate": r, "n_verify": n, "verification": "chain"} for r in (0.5, 0.25, 0.125) for n in (1, 2, 4)]
        options += [{"window": w, "rate": r, "n_verify": n} for w in ("constant", "linear") for r in FEW[w] for n in (2, 4)]
        options += [{"rate": r, "n_verify": n} for r, n in ((0.06, 3), (0.06, 1), (0.04, 2), (0.04, 1), (0.02, 2), (0.02, 1), (0.01, 1))]
        options += [{"window": "constant", "rate": w, "n_verify": n, "verification": "block"} for w, ns in BLOCKS.items() for n in ns]
    else:
        raise UserError(f"no settings to choose from for {sampler!r}; there are: ancestral, self_speculative")
    config = ConfigDict({"num_samples": 256, "batch": 128, "seed": 1, "evals": ("spelling", "entropy"), "judge": ""})
    config.points = tuple({"sampler": sampler, "options": option, "settings": {}} for option in options)
    return config

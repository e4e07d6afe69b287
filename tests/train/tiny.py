"""A run small enough for tests: a hybrid of two thin layers on generated words."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np

from dllm.train.run import Run, run_config

CONFIG: dict[str, dict[str, Any]] = {
    "data": {"name": "text8", "path": "", "length": 16},
    "model": {"name": "hybrid", "length": 16, "width": 16, "n_noncausal": 2, "n_causal": 1, "heads": 2, "mlp": 32},
    "objective": {"name": "ssmd"},
    "optim": {"lr": 1e-2, "warmup": 4, "b1": 0.9, "b2": 0.98, "weight_decay": 0.5, "clip": 1.0, "ema": 0.15, "train_only": ""},
    "train": {"seed": 0, "steps": 40, "batch": 8, "init_from": ""},
    "mesh": {"data": 1, "fsdp": 1, "tensor": 1},
    "sampler": {"name": ""},
}
CONFIG["train"] |= {"log_every": 1, "eval_every": 10, "eval_batches": 2, "sample_every": 0, "save_every": 10}
GPT = {"name": "gpt", "length": 16, "width": 16, "layers": 2, "heads": 2, "mlp": 32}


def config(**overrides: Any) -> dict[str, dict[str, Any]]:
    """Returns the config with overrides, written optim__lr=1; a dict replaces a whole section."""
    changed = copy.deepcopy(CONFIG)
    for key, value in overrides.items():
        section, _, name = key.partition("__")
        if name:
            changed[section][name] = value
        else:
            changed[section] = value
    return changed


def run(**overrides: Any) -> Run:
    return run_config(config(**overrides))


def text(characters: int = 20_000, seed: int = 0) -> str:
    """Returns words drawn from a fixed small vocabulary."""
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(list("abcdefgh"), rng.integers(1, 6))) for _ in range(50)]
    return " ".join(rng.choice(words, characters // 2))[:characters]


def corpus_file(folder: Path) -> Path:
    path = folder / "text8"
    path.write_text(text())
    return path

"""The twin of configs/text8_ssmd.py without a causal part: a plain masked-diffusion model with as many layers, and the same training.

    python experiments/train.py --config=configs/text8_mdm.py --workdir=runs/text8_mdm [--config.data.path=PATH]

Presets: configs/text8_mdm.py:paper, and :tiny.
"""

from ml_collections import ConfigDict

from dllm.core.types import UserError
from dllm.models import hybrid

TRAIN = {
    "tiny": dict(steps=600, batch=32, lr=2e-3, warmup=50, b2=0.98, ema=0.99),
    "mini": dict(steps=4000, batch=32, lr=3e-3, warmup=100, b2=0.98, ema=0.999),
    "paper": dict(steps=1_000_000, batch=512, lr=1.5e-4, warmup=10_000, b2=0.999, ema=0.9999),
}


def get_config(preset="mini"):
    if preset not in TRAIN:
        raise UserError(f"no preset {preset!r} in this config; there are: {', '.join(TRAIN)}")
    model, train = hybrid.PRESETS[preset], TRAIN[preset]
    every = min(train["steps"] // 10, 10_000)

    config = ConfigDict()
    config.data = dict(name="text8", path="", length=model["length"], lexicon=0)
    config.model = dict(name="hybrid", vocab=27, theta=1e4, residual=True, gain=0.1, pairing="crossed", dtype="float32", remat=True)
    config.model.update(model)
    config.model.update(n_noncausal=model["n_noncausal"] + model["n_causal"], n_causal=0)
    config.objective = dict(name="ssmd")
    config.optim = dict(lr=train["lr"], warmup=train["warmup"], b1=0.9, b2=train["b2"], weight_decay=0.01, clip=1.0, ema=train["ema"])
    config.optim.train_only = ""
    config.train = dict(seed=0, steps=train["steps"], batch=train["batch"], init_from="")
    config.train.update(log_every=min(every // 5, 500), eval_every=every, eval_batches=32, sample_every=2 * every, save_every=every)
    config.mesh = dict(data=-1, fsdp=1, tensor=1)
    config.sampler = dict(name="ancestral", window="cosine", rate=0.05)
    return config

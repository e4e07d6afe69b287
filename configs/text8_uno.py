"""A drafter for a character model: an adapter on the frozen `gpt` of configs/text8_gpt.py, on the text that one was trained on.

    python experiments/train.py --config=configs/text8_gpt.py --workdir=runs/text8_gpt [--config.data.path=PATH]
    python experiments/train.py --config=configs/text8_uno.py --workdir=runs/text8_uno [--config.data.path=PATH]

Presets: configs/text8_uno.py:tiny and :paper, for that config's. Another base: --config.train.init_from=WORKDIR. The text isn't the base's
own, so `accepted` is no estimate of what a draft pass has accepted. Figures of a shorter run, on another text:
experiments/results/text8_uno.
"""

from ml_collections import ConfigDict

from dllm.core.types import UserError
from dllm.models import gpt

TRAIN = {
    "tiny": dict(steps=600, batch=32, lr=2e-3, warmup=50, b2=0.98, ema=0.99, rank=8),
    "mini": dict(steps=4000, batch=32, lr=1e-3, warmup=100, b2=0.98, ema=0.999, rank=16),
    "paper": dict(steps=100_000, batch=512, lr=5e-5, warmup=500, b2=0.999, ema=0.9999, rank=64),
}


def get_config(preset="mini"):
    if preset not in TRAIN:
        raise UserError(f"no preset {preset!r} in this config; there are: {', '.join(TRAIN)}")
    base, train = gpt.PRESETS[preset], TRAIN[preset]
    every = min(train["steps"] // 10, 10_000)

    config = ConfigDict()
    config.data = dict(name="text8", path="", length=base["length"], lexicon=0)
    config.model = dict(name="uno", vocab=27, begins=True, block=8, theta=1e4, dtype="float32", remat=True)
    config.model.update(base, kv_heads=base["heads"], head_width=base["width"] // base["heads"])
    config.model.update(rank=train["rank"], alpha=16.0 * train["rank"], targets="q,k,v,o,gate,up,down")
    config.model.update(noise="uniform", noise_low=0, noise_high=0, noise_mask=-1)
    config.objective = dict(name="uno", tv=1.0, kl=0.01, ce=0.0, ce_target="teacher", survival="length", blocks="2,4,8", chunk=0)
    config.optim = dict(lr=train["lr"], warmup=train["warmup"], b1=0.9, b2=train["b2"], weight_decay=0.0, clip=1.0, ema=train["ema"])
    config.optim.update(train_only="^lora/", decay="cosine")
    config.train = dict(
        seed=0, steps=train["steps"], batch=train["batch"], init_from=f"runs/text8_gpt{'' if preset == 'mini' else '_' + preset}"
    )
    config.train.update(log_every=min(every // 5, 500), eval_every=every, eval_batches=32, sample_every=2 * every, save_every=every)
    config.mesh = dict(data=-1, fsdp=1, tensor=1)
    config.sampler = dict(name="psi_spec", length=8)
    return config

r"""A drafter for Qwen3-8B: Uno's adapter on the frozen model, by the released recipe (arXiv 2609.04010), for accelerators.

    python experiments/convert_hf.py --model=qwen3-8b --src=Qwen3-8B --dst=runs/qwen3_8b
    python experiments/train.py --config=configs/qwen3_uno.py --workdir=runs/qwen3_uno --config.data.path=ROWS \
        --config.train.init_from=runs/qwen3_8b

ROWS is a folder of rows of tokens (dllm/data/tokens.py), the model's own replies at best. Presets: 8b, and the smaller parents 0.6b, 1.7b
and 4b. Rank 128 of every product, blocks of 2, 4, 6, 8, 12 and 16. What it takes on which devices: experiments/results/plan.
"""

import dataclasses

from ml_collections import ConfigDict

from dllm.core.types import UserError
from dllm.models import public

SIZES = ("0.6b", "1.7b", "4b", "8b")


def get_config(preset="8b"):
    if preset not in SIZES:
        raise UserError(f"no preset {preset!r} in this config; there are: {', '.join(SIZES)}")
    base = dataclasses.asdict(public.MODELS[f"qwen3-{preset}"]) | {"block": 16}

    config = ConfigDict()
    config.data = dict(name="tokens", path="", length=4096, lexicon=0)
    config.model = dict(name="uno", begins=False, rank=128, alpha=2048.0, targets="q,k,v,o,gate,up,down", **base)
    config.model.update(remat=True, noise="uniform", noise_low=0, noise_high=0, noise_mask=-1)
    config.objective = dict(name="uno", tv=1.0, kl=0.0, ce=0.0, ce_target="teacher", survival="none", blocks="2,4,6,8,12,16", chunk=512)
    config.optim = dict(lr=1e-5, warmup=562, b1=0.9, b2=0.999, weight_decay=0.0, clip=1.0, ema=0.0, train_only="^lora/")
    config.optim.update(decay="constant", lr_factor=1.0, lr_factor_on="")
    config.train = dict(seed=0, steps=28125, batch=128, init_from="runs/qwen3_8b".replace("8b", preset))
    config.train.update(log_every=50, eval_every=1000, eval_batches=16, sample_every=0, save_every=1000)
    config.mesh = dict(data=-1, fsdp=8, tensor=1)
    config.sampler = dict(name="psi_spec", length=16)
    return config

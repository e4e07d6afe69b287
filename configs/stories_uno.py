"""A drafter for stories260K: an adapter on the frozen storyteller, trained on a corpus that it wrote itself.

    python experiments/convert_hf.py  --model=stories260k --src=stories260K.bin --dst=runs/stories/parent
    python experiments/make_corpus.py --workdir=runs/stories/parent --out=runs/stories/corpus --tokens=10_000_000 --length=256
    python experiments/train.py       --config=configs/stories_uno.py --workdir=runs/stories_uno/main

The default is `survival_length,tv_kl,r16,curriculum`: the expected accepted length and a hundredth of KL, rank 16, blocks of 2, then of 4,
then of 8. Presets, each one change of the released `tv`: any of PRESETS, or more than one with commas between them,
configs/stories_uno.py:survival,r32; all end with blocks of 8. The corpus is the base's own text, so `accepted` estimates what a draft pass
of 9 rows has accepted. An hour of one CPU core that had other work too. Results: experiments/results/stories_uno.
"""

import dataclasses

from ml_collections import ConfigDict

from dllm.core.types import UserError
from dllm.models import public

PRESETS = {
    "tv": {},
    "survival": {"objective.survival": "prefix"},
    "survival_length": {"objective.survival": "length"},
    "kl": {"objective.tv": 0.0, "objective.kl": 1.0},
    "ce": {"objective.tv": 0.0, "objective.ce": 1.0},
    "ce_data": {"objective.tv": 0.0, "objective.ce": 1.0, "objective.ce_target": "data"},
    "tv_kl": {"objective.kl": 0.01},
    "mask": {"model.noise": "mask", "model.noise_mask": 0},  # <unk>, which the corpus doesn't hold
    "r4": {"model.rank": 4},  # alpha / rank stays
    "r16": {"model.rank": 16},
    "r32": {"model.rank": 32},
    "scale2": {"scale": 2.0},
    "scale64": {"scale": 64.0},
    "curriculum": {"objective.blocks": "2,4,8"},
}


def get_config(preset="survival_length,tv_kl,r16,curriculum"):
    for name in preset.split(","):
        if name not in PRESETS:
            raise UserError(f"no preset {name!r} in this config; there are: {', '.join(PRESETS)}")
    base = dataclasses.asdict(public.MODELS["stories260k"]) | {"block": 8}

    config = ConfigDict()
    config.data = dict(name="tokens", path="runs/stories/corpus", length=256, lexicon=0)
    config.model = dict(name="uno", begins=False, rank=8, alpha=128.0, targets="q,k,v,o,gate,up,down", **base)
    config.model.update(remat=False, noise="uniform", noise_low=3, noise_high=0, noise_mask=-1)  # 0 to 2 are <unk>, BOS and EOS
    config.objective = dict(name="uno", tv=1.0, kl=0.0, ce=0.0, ce_target="teacher", survival="none", blocks="", chunk=64)
    config.optim = dict(lr=1e-3, warmup=100, b1=0.9, b2=0.98, weight_decay=0.0, clip=1.0, ema=0.999, train_only="^lora/")
    config.optim.update(decay="cosine", lr_factor=1.0, lr_factor_on="")
    config.train = dict(seed=0, steps=6000, batch=8, init_from="runs/stories/parent")
    config.train.update(log_every=50, eval_every=250, eval_batches=16, sample_every=500, save_every=250)
    config.mesh = dict(data=-1, fsdp=1, tensor=1)
    config.sampler = dict(name="psi_spec", length=8)
    changes = {key: value for name in preset.split(",") for key, value in PRESETS[name].items()}
    scale = changes.pop("scale", 16.0)  # alpha / rank
    config.update_from_flattened_dict(changes)
    config.model.alpha = scale * config.model.rank
    return config

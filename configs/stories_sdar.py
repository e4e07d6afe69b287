"""Block diffusion from an autoregressive parent: stories260K, converted, adapted on a corpus that it wrote itself.

    python experiments/convert_hf.py  --model=stories260k --src=stories260K.bin           --dst=runs/stories/parent
    python experiments/convert_hf.py  --model=stories260k --src=stories260K.bin --block=4 --dst=runs/stories/start_b4
    python experiments/make_corpus.py --workdir=runs/stories/parent --out=runs/stories/corpus --tokens=10_000_000 --length=256
    python experiments/train.py       --config=configs/stories_sdar.py:b4 --workdir=runs/stories/b4

Presets: configs/stories_sdar.py:b4 and :b8, blocks of 4 and 8 tokens; runs/stories/start_b8 is converted with --block=8. 290 thousand
parameters; 57 minutes on 2 CPU cores that had other work too. Results: experiments/results/stories_sdar.
"""

import dataclasses

from ml_collections import ConfigDict

from dllm.core.types import UserError
from dllm.models import public

BLOCKS = {"b4": 4, "b8": 8}


def get_config(preset="b4"):
    if preset not in BLOCKS:
        raise UserError(f"no preset {preset!r} in this config; there are: {', '.join(BLOCKS)}")
    parent = public.MODELS["stories260k"]
    model = dataclasses.replace(parent, vocab=parent.vocab + 1, mask_id=parent.vocab, tied=False, block=BLOCKS[preset])

    config = ConfigDict()
    config.data = dict(name="tokens", path="runs/stories/corpus", length=256, lexicon=0)
    config.model = dict(name="qwen3", **dataclasses.asdict(model))
    config.objective = dict(name="block_diffusion", low=0.001, high=1.0, weight="time", complementary=False, sdar_public=False, parts=1)
    config.optim = dict(lr=1e-3, warmup=100, b1=0.9, b2=0.98, weight_decay=0.01, clip=1.0, ema=0.999, train_only="")
    config.optim.update(lr_factor=1.0, lr_factor_on="")
    config.train = dict(seed=0, steps=2000, batch=8, init_from=f"runs/stories/start_{preset}")
    config.train.update(log_every=50, eval_every=200, eval_batches=32, sample_every=400, save_every=200)
    config.mesh = dict(data=-1, fsdp=1, tensor=1)
    config.sampler = dict(name="block_diffusion", select="dynamic", n=1, tau=0.9, confidence="max")
    return config

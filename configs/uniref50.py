r"""The paper's protein experiment (arXiv 2510.03929, section 5.3): one causal block trained on a frozen masked-diffusion model, DPLM-150M.

    python experiments/prepare.py    --data=uniref50 --src=uniref50.fasta.gz --dst=data/uniref50
    python experiments/convert_hf.py --model=dplm-150m --src=DPLM_150M --dst=runs/dplm
    python experiments/train.py      --config=configs/uniref50.py:frozen --workdir=runs/uniref50 --config.data.path=data/uniref50 \
        --config.train.init_from=runs/dplm

The paper tells no settings of this training: batches have DPLM's million tokens, and the rest is that of its text models. Hardware,
time, and what was published: docs/paper.md.

Twins for 2 CPU cores: mini_backbone, a masked model, mini_frozen, a causal block on it, mini_scratch, both trained together with a layer
less, and mini_judge, another masked model, to ask for pseudo_nll:

    python experiments/prepare.py --data=uniref50 --src=PROTEINS --dst=data/proteins --length=256 --long=drop
    python experiments/train.py   --config=configs/uniref50.py:mini_backbone --workdir=runs/proteins/backbone \
        --config.data.path=data/proteins
    python experiments/train.py   --config=configs/uniref50.py:mini_frozen --workdir=runs/proteins/frozen \
        --config.data.path=data/proteins --config.train.init_from=runs/proteins/backbone
"""

import dataclasses

from ml_collections import ConfigDict

from dllm.core.types import UserError
from dllm.models import esm2

MINI = dict(length=256, width=128, heads=4, mlp=512)
MODELS = {
    "frozen": esm2.Config(**esm2.PRESETS["t30_150m"], n_causal=1, dtype="bfloat16"),
    "mini_backbone": esm2.Config(**MINI, n_noncausal=6),
    "mini_frozen": esm2.Config(**MINI, n_noncausal=6, n_causal=1),
    "mini_scratch": esm2.Config(**MINI, n_noncausal=5, n_causal=1),
    "mini_judge": esm2.Config(**MINI, n_noncausal=6),
}
TRAIN = {
    "frozen": dict(steps=100_000, batch=1024, lr=1.5e-4, warmup=2_000, b2=0.999, ema=0.9999, tv=0.0),
    "mini": dict(steps=2000, batch=32, lr=2e-3, warmup=100, b2=0.98, ema=0.995, tv=1.0),
}
# Rows of one batch are of about one length, and padded to that.
BUCKETS = {"frozen": (128, 256, 384, 512, 768), "mini": (96, 128, 160, 192, 224)}


def get_config(preset="frozen"):
    if preset not in MODELS:
        raise UserError(f"no preset {preset!r} in this config; there are: {', '.join(MODELS)}")
    model, size = MODELS[preset], preset.partition("_")[0]
    train, every = TRAIN[size], TRAIN[size]["steps"] // (8 if size == "mini" else 100)
    frozen = preset.endswith("frozen")

    config = ConfigDict()
    config.data = dict(name="uniref50", path="", length=model.length, lexicon=0, buckets=BUCKETS[size])
    config.model = dict(name="esm2", **dataclasses.asdict(model))
    config.objective = dict(name="ssmd", tv=train["tv"] if model.n_causal else 0.0)
    config.optim = dict(lr=train["lr"], warmup=train["warmup"], b1=0.9, b2=train["b2"], weight_decay=0.01, clip=1.0, ema=train["ema"])
    config.optim.train_only = "^(join|causal|gain)" if frozen else ""
    config.train = dict(seed=int(preset == "mini_judge"), steps=train["steps"], batch=train["batch"], init_from="")
    config.train.update(log_every=max(every // 10, 1), eval_every=every, eval_batches=16, sample_every=2 * every, save_every=every)
    config.mesh = dict(data=-1, fsdp=1, tensor=1)
    speculative = dict(name="self_speculative", window="cosine", rate=0.04, n_verify=4, verification="chain")
    config.sampler = speculative if model.n_causal else dict(name="ancestral", window="cosine", rate=0.04)
    return config

r"""Block diffusion (SDAR) on text8 from scratch; and, of each published SDAR size, the fine-tuning of a converted checkpoint.

    python experiments/train.py --config=configs/sdar.py --workdir=runs/sdar [--config.data.path=PATH]

trains `mini` (block 4) on text8, or a text in its image; configs/sdar.py:tiny is smaller. The noise of training is clipped, so its loss is
no bound: evaluate.py --evals=nelbo gives that, schedule.py another interval. Other blocks: configs/sdar.py:mini,b8

A published size, 1.7b, 4b, 8b or 30b-a3b, with a block of 4 (or ,b8 ,b16 ,b32 ,b64), is trained on rows of tokens (dllm/data/tokens.py;
prompts and responses become such rows by dllm/data/packing.py). The checkpoint is SDAR's own, or that of its parent Qwen3:

    python experiments/convert_hf.py --model=sdar-4b-b8 --src=SDAR-4B-Chat-b8 --dst=runs/sdar_4b_b8        # or --src=Qwen3-4B-Base
    python experiments/train.py --config=configs/sdar.py:4b,b8 --workdir=runs/sft --config.train.init_from=runs/sdar_4b_b8 \
        --config.data.path=ROWS

That wants accelerators: in float32, weights, gradients, moments and EMA take 20 bytes a parameter (4b: 88 GB), over mesh.fsdp devices.
`--config.objective.sdar_public=True` with low=0.001 and high=1.0 draws the noise as SDAR's released training code does.
"""

import dataclasses

from ml_collections import ConfigDict

from dllm.core.types import UserError
from dllm.models import public, qwen3

TRAIN = {
    "tiny": dict(steps=600, batch=32, lr=2e-3, warmup=50, b2=0.98, ema=0.99),
    "mini": dict(steps=4000, batch=32, lr=3e-3, warmup=100, b2=0.98, ema=0.999),
    # SDAR's fine-tuning: lr 1e-5 after 3 % warm-up, and no decay. The number of steps is the corpus's.
    "published": dict(steps=5000, batch=64, lr=1e-5, warmup=150, b2=0.999, ema=0.0),
}
SIZES = ("1.7b", "4b", "8b", "30b-a3b")
LENGTH = 4096  # tokens a row, for the published sizes

# The intervals of least variance on LM1B (BD3-LM, arXiv 2503.09573, table 8): small blocks want heavy masking, large ones the middle.
CLIPPED = {4: (0.45, 0.95), 8: (0.45, 0.95), 16: (0.3, 0.8), 32: (0.3, 0.8), 64: (0.3, 0.8)}


def get_config(preset="mini"):
    preset, _, suffix = preset.partition(",")
    if preset not in (*qwen3.PRESETS, *SIZES):
        raise UserError(f"no preset {preset!r} in this config; there are: {', '.join((*qwen3.PRESETS, *SIZES))}")
    blocks = {"": 4, **{f"b{block}": block for block in public.BLOCKS}}
    if suffix not in blocks:
        raise UserError(f"no block {suffix!r} in this config; there are: {', '.join(name for name in blocks if name)}")
    block, published = blocks[suffix], preset in SIZES
    train = TRAIN["published" if published else preset]
    every = min(train["steps"] // 10, 10_000)

    config = ConfigDict()
    if published:
        row = public.MODELS[f"sdar-{preset}{f'-b{block}' * (block > 4)}"]
        # Steps of 1e-5 are lost on bfloat16 parameters; the activations stay so.
        model = dataclasses.replace(row, param_dtype="float32")
        config.data = dict(name="tokens", path="", length=LENGTH, lexicon=0)
    else:
        model = qwen3.Config(**qwen3.PRESETS[preset], vocab=28, mask_id=27, block=block)
        config.data = dict(name="text8", path="", length=model.length, lexicon=0)
    low, high = CLIPPED[block]
    config.model = dict(name="qwen3", **dataclasses.asdict(model))
    config.objective = dict(name="block_diffusion", low=low, high=high, weight="time", complementary=False, sdar_public=False, parts=1)
    config.optim = dict(lr=train["lr"], warmup=train["warmup"], b1=0.9, b2=train["b2"], clip=1.0, ema=train["ema"], train_only="")
    config.optim.update(weight_decay=0.0 if published else 0.01, decay="constant" if published else "cosine")
    config.train = dict(seed=0, steps=train["steps"], batch=train["batch"], init_from="")
    config.train.update(log_every=min(every // 5, 500), eval_every=every, eval_batches=32, sample_every=2 * every, save_every=every)
    config.mesh = dict(data=-1, fsdp=8 if published else 1, tensor=1)
    config.sampler = dict(name="block_diffusion", select="dynamic", n=1, tau=0.9, confidence="max")
    return config

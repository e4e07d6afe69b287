r"""The paper's OpenWebText experiment (arXiv 2510.03929, table 1): self-speculative masked diffusion, and what it is compared with.

    python experiments/prepare.py --data=openwebtext --src=OPENWEBTEXT --dst=data/owt --tokenizer=GPT2
    python experiments/train.py   --config=configs/owt.py:ssmd --workdir=runs/owt --config.data.path=data/owt

ssmd (11 non-causal layers and 1 causal), mdm (12 non-causal), block (block diffusion, blocks of 4) and gpt (autoregressive) have the same
layers and tokens: 1,000,000 steps of 256 rows of 1,024 tokens. The paper's dropout of .1 is left out. Hardware, time, and what was
published: docs/paper.md.

Each as a twin for 2 CPU cores, configs/owt.py:mini_ssmd, mini_mdm, mini_block, mini_gpt, and mini_judge, an autoregressive model that is
wider and has another seed, on rows of 128 tokens of a byte-level BPE of 4,096:

    python experiments/prepare.py --data=openwebtext --src=TEXTS --dst=data/owt_mini --vocab=4096 --length=128 --held_out=drawn \
        --valid=140 --test=140
    python experiments/train.py   --config=configs/owt.py:mini_ssmd --workdir=runs/owt_mini/ssmd --config.data.path=data/owt_mini

A name behind ssmd chooses an ablation: configs/owt.py:mini_ssmd,no_residual (two_causal, paired).
"""

import dataclasses

from ml_collections import ConfigDict

from dllm.core.types import UserError
from dllm.models import gpt, hybrid, qwen3

SIZES = {
    "": dict(vocab=50257, length=1024, width=768, heads=12, mlp=2048, layers=12, dtype="bfloat16"),
    "mini_": dict(vocab=4096, length=128, width=128, heads=4, mlp=384, layers=6, dtype="float32"),
}
TRAIN = {
    "": dict(steps=1_000_000, batch=256, lr=1.5e-4, warmup=10_000, b2=0.999, ema=0.9999, tv=0.0),
    "mini_": dict(steps=2400, batch=32, lr=2e-3, warmup=100, b2=0.98, ema=0.995, tv=1.0),
}
SAMPLERS = {
    "ssmd": dict(name="self_speculative", window="cosine", rate=0.04, n_verify=4, verification="chain"),
    "mdm": dict(name="ancestral", window="cosine", rate=0.04),
    "block": dict(name="block_diffusion", select="dynamic", n=1, tau=0.9, confidence="max"),
    "gpt": dict(name="autoregressive"),
}
ABLATIONS = {
    "no_residual": {"model.residual": False},
    "two_causal": {"model.n_causal": 2},  # the second takes the place of a non-causal one
    "paired": {"model.pairing": "paired"},
}


def get_config(preset="ssmd"):
    preset, _, ablation = preset.partition(",")
    size = "mini_" if preset.startswith("mini_") else ""
    kind = preset.removeprefix(size)
    if kind not in (*SAMPLERS, *["judge"] * bool(size)):
        names = (*SAMPLERS, *(f"mini_{name}" for name in (*SAMPLERS, "judge")))
        raise UserError(f"no preset {preset!r} in this config; there are: {', '.join(names)}")
    if ablation and (kind != "ssmd" or ablation not in ABLATIONS):
        raise UserError(f"no ablation {ablation!r} of {kind} in this config; of ssmd there are: {', '.join(ABLATIONS)}")
    train, sizes = TRAIN[size], dict(SIZES[size])
    layers, every = sizes.pop("layers"), train["steps"] // (8 if size else 100)
    judge, kind = kind == "judge", "gpt" if kind == "judge" else kind
    causal = ABLATIONS.get(ablation, {}).get("model.n_causal", 1) if kind == "ssmd" else 0

    config = ConfigDict()
    config.data = dict(name="openwebtext", path="", length=sizes["length"], lexicon=0)
    if kind in ("ssmd", "mdm"):
        config.model = dict(name="hybrid", **dataclasses.asdict(hybrid.Config(**sizes, n_noncausal=layers - causal, n_causal=causal)))
        config.objective = dict(name="ssmd", tv=train["tv"] if causal else 0.0)
    elif kind == "block":
        mask = sizes["vocab"]
        sizes |= dict(vocab=mask + 1, mask_id=mask, block=4, kv_heads=sizes["heads"], head_width=sizes["width"] // sizes["heads"])
        config.model = dict(name="qwen3", **dataclasses.asdict(qwen3.Config(**sizes, layers=layers, qk_norm=False)))
        config.objective = dict(name="block_diffusion")
    else:
        wider = dict(width=192, heads=6, mlp=512) if judge else {}
        config.model = dict(name="gpt", **dataclasses.asdict(gpt.Config(**sizes | wider, layers=layers)))
        config.objective = dict(name="next_token")
    config.optim = dict(lr=train["lr"], warmup=train["warmup"], b1=0.9, b2=train["b2"], weight_decay=0.01, clip=1.0, ema=train["ema"])
    config.optim.train_only = ""
    config.train = dict(seed=int(judge), steps=train["steps"], batch=train["batch"], init_from="")
    config.train.update(log_every=max(every // 10, 1), eval_every=every, eval_batches=32, sample_every=2 * every, save_every=every)
    config.mesh = dict(data=-1, fsdp=1, tensor=1)
    config.sampler = SAMPLERS[kind]
    config.update_from_flattened_dict(ABLATIONS.get(ablation, {}))
    return config

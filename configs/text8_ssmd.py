"""Self-speculative masked diffusion on text8 (arXiv 2510.03929), or on a text in its image.

    python experiments/train.py --config=configs/text8_ssmd.py --workdir=runs/text8 [--config.data.path=PATH]

`mini` on 2 CPU cores: 15 to 25 minutes, 1.3 M parameters; on Wikipedia text (with mini,no_tv) valid_draft_bpc 2.77 and valid_causal_ce 2.32
at the end.

Without a path, text8 (31 MB) is downloaded once; a path is a text8 file, or a folder of parts. Presets: configs/text8_ssmd.py:paper (also
:paper_10_2, :paper_no_residual, :tiny). The causal part alone, on a trained backbone:

    --config.train.init_from=WORKDIR --config.optim.train_only='^(join|causal|gain)'

A name behind the preset chooses one of HEADS, variants of the causal part and its training: configs/text8_ssmd.py:mini,two_layers
--config.data.lexicon=500 keeps the 500 most frequent words of the text only: a language that a small model can learn to spell.
"""

from ml_collections import ConfigDict

from dllm.core.types import UserError
from dllm.models import hybrid

# What training a model differs in. The paper's text8 settings are not public: these are its OpenWebText ones, with MD4's batch and EMA.
TRAIN = {
    "tiny": dict(steps=600, batch=32, lr=2e-3, warmup=50, b2=0.98, ema=0.99, tv=1.0),
    "mini": dict(steps=4000, batch=32, lr=3e-3, warmup=100, b2=0.98, ema=0.999, tv=1.0),
    "paper": dict(steps=1_000_000, batch=512, lr=1.5e-4, warmup=10_000, b2=0.999, ema=0.9999, tv=0.0),
}

# One change each. Of two causal layers, the second takes the place of a non-causal one.
HEADS = {
    "two_layers": {"model.n_noncausal": 4, "model.n_causal": 2},
    "heads_8": {"model.causal_heads": 8},
    "mlp_768": {"model.causal_mlp": 768},
    "lr_2": {"optim.lr_factor": 2.0},
    "lr_half": {"optim.lr_factor": 0.5},
    "gain_1": {"model.gain": 1.0},
    "no_tv": {"objective.tv": 0.0},
    "elbo": {"objective.elbo": 1.0, "objective.prefixes": 8},
}


def get_config(preset="mini"):
    preset, _, head = preset.partition(",")
    if preset not in hybrid.PRESETS:
        raise UserError(f"no preset {preset!r} in this config; there are: {', '.join(hybrid.PRESETS)}")
    if head and head not in HEADS:
        raise UserError(f"no head {head!r} in this config; there are: {', '.join(HEADS)}")
    model, train = hybrid.PRESETS[preset], TRAIN["paper" if preset.startswith("paper") else preset]
    every = min(train["steps"] // 10, 10_000)

    config = ConfigDict()
    config.data = dict(name="text8", path="", length=model["length"], lexicon=0)
    config.model = dict(name="hybrid", vocab=27, theta=1e4, residual=True, gain=0.1, pairing="crossed", dtype="float32", remat=True)
    config.model.update(causal_heads=0, causal_mlp=0)
    config.model.update(model)
    config.objective = dict(name="ssmd", tv=train["tv"], elbo=0.0, prefixes=1)
    config.optim = dict(lr=train["lr"], warmup=train["warmup"], b1=0.9, b2=train["b2"], weight_decay=0.01, clip=1.0, ema=train["ema"])
    config.optim.update(train_only="", lr_factor=1.0, lr_factor_on="^(join|causal|gain)")
    config.train = dict(seed=0, steps=train["steps"], batch=train["batch"], init_from="")
    config.train.update(log_every=min(every // 5, 500), eval_every=every, eval_batches=32, sample_every=2 * every, save_every=every)
    config.mesh = dict(data=-1, fsdp=1, tensor=1)
    config.sampler = dict(name="self_speculative", window="cosine", rate=0.05, n_verify=2, verification="chain")
    config.update_from_flattened_dict(HEADS.get(head, {}))
    return config

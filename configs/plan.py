"""The programs of the table of experiments/results/plan: what training and decoding at full size take of which devices.

    .aot/bin/python experiments/plan.py --config=configs/plan.py --out=experiments/results/plan

A case is a run's file, changes of it, and slices of devices. configs/plan.py:sdar-8b is that case alone, for another --out.

OpenWebText's and UniRef50's programs differ from text8's by vocabulary, length and batch; plan.py reads no data. UniRef50's is a frozen
backbone of the shape of ESM-2's 150M, a SwiGLU 1712 wide having as many weights as its MLP, with one causal block to be trained; a
million tokens a batch, as its backbone had (DPLM-150M).
"""

from ml_collections import ConfigDict

from dllm.core.types import UserError

SSMD, UNO, SDAR = "configs/text8_ssmd.py:paper", "configs/qwen3_uno.py:8b", "configs/sdar.py:"
OWT = {"data.name": "tokens", "data.length": 1024, "model.vocab": 50257, "model.length": 1024, "train.batch": 256}
PROTEINS = {"data.name": "tokens", "data.length": 1024, "model.vocab": 33, "model.length": 1024, "train.batch": 1024}
ESM2 = {"model.width": 640, "model.heads": 20, "model.mlp": 1712, "model.n_noncausal": 30, "optim.train_only": "^(join|causal|gain)"}
HALF = {"model.param_dtype": "bfloat16"}

# Of each: its file, changes, and slices with the mesh, data x fsdp x tensor, that is tried first.
TRAIN = {
    "text8-ssmd": (SSMD, {}, "v5e:2x2=4x1x1 v5p:2x2x1=4x1x1 v6e:2x2=4x1x1 h200:8=8x1x1"),
    "owt-ssmd": (SSMD, OWT, "v5e:4x4=16x1x1 v5p:2x2x2=8x1x1 v6e:4x4=16x1x1 h200:8=8x1x1"),
    "uniref50-150m+1": (SSMD, PROTEINS | ESM2, "v5e:4x4=16x1x1 v5p:2x2x2=8x1x1 v6e:2x4=8x1x1 h200:8=8x1x1"),
    "sdar-1.7b": (SDAR + "1.7b", {}, "v5e:4x4=1x16x1 v5p:2x2x1=1x4x1 v6e:2x4=1x8x1 h200:8=1x8x1"),
    "sdar-8b": (SDAR + "8b", {}, "v5e:8x8=1x64x1 v5p:2x2x2=1x8x1 v6e:4x4=1x16x1 h200:8=1x8x1"),
    "sdar-30b-a3b": (SDAR + "30b-a3b", {}, "v5e:16x16=1x64x4 v5p:2x4x4=1x8x4 v6e:8x8=1x16x4 h200:8=1x2x4"),
    "uno-qwen3-8b": (UNO, {}, "v5e:4x4=1x16x1 v5p:2x2x1=1x4x1 v6e:2x4=1x8x1 h200:8=1x8x1"),
}
# And sequences at a time, and their positions: with the 16 rows of Uno's last pass a cache of 8,192 slots.
DECODE = {
    "sdar-8b": (SDAR + "8b", HALF, "v5e:4x4=4x1x4 v5p:2x2x1=1x1x4 v6e:2x4=2x1x4 h200:8=1x1x8", 64, 8192),
    "uno-qwen3-8b": (UNO, {}, "v5e:4x4=4x1x4 v5p:2x2x1=1x1x4 v6e:2x4=2x1x4 h200:8=1x1x8", 64, 8176),
}


def get_config(only=""):
    if only and only not in TRAIN:
        raise UserError(f"no case {only!r} in this config; there are: {', '.join(TRAIN)}")
    cases = []
    for what, rows in (("train", TRAIN), ("decode", DECODE)):
        for name, (file, changes, slices, *decoding) in rows.items():
            for each in slices.split() if only in ("", name) else ():
                topology, mesh = each.split("=")
                sizes = zip(("mesh.data", "mesh.fsdp", "mesh.tensor"), map(int, mesh.split("x")))
                case = dict(name=name, what=what, config=file, topology=topology, changes={**changes, **dict(sizes)})
                cases.append(case | dict(zip(("rows", "length"), decoding)))
    return ConfigDict({"cases": tuple(cases)})

"""The public models as rows of one table: their shapes, and what their config.json lacks, the mask id and the block length of SDAR.

Sources: the models' config.json; for the mask id and the blocks SDAR's training code and the names of its repositories (JetLM/SDAR-*).
SDAR is Qwen3 trained on, its tied head copied out: 1.7B has 2.03 billion parameters. DPLM is ESM-2's shape.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from dllm.core.types import UserError
from dllm.models import esm2, gpt2
from dllm.models.qwen3 import Config

MASK_ID = 151669  # the row of Qwen3's padded vocabulary behind its last token; spelt <|MASK|> in one file of SDAR's and <MASK> in others
MASK_SPELLINGS = ("<|MASK|>", "<MASK>")
BLOCKS = (4, 8, 16, 32, 64)  # SDAR-*-Chat, and the same with -b8 to -b64 behind its name

_HALF = dict(dtype="bfloat16", param_dtype="bfloat16")
_QWEN3 = Config(
    vocab=151936, length=32768, kv_heads=8, head_width=128, block=1, mask_id=-1, tied=True, theta=1e6, eps=1e-6, norm="eager", **_HALF
)
_SIZES = {
    "0.6b": dict(width=1024, mlp=3072, layers=28, heads=16),
    "1.7b": dict(width=2048, mlp=6144, layers=28, heads=16),
    "4b": dict(width=2560, mlp=9728, layers=36, heads=32),
    "8b": dict(width=4096, mlp=12288, layers=36, heads=32, tied=False),
    "30b-a3b": dict(width=2048, mlp=768, layers=48, heads=32, kv_heads=4, experts=128, experts_per_token=8, tied=False),
}
_SMOLLM2 = Config(
    vocab=49152, length=8192, width=576, layers=30, heads=9, kv_heads=3, head_width=64, mlp=1536, block=1, mask_id=-1, qk_norm=False,
    tied=True, theta=1e5, eps=1e-5, norm="eager", **_HALF,
)  # fmt: skip
_STORIES = Config(
    vocab=512, length=512, width=64, layers=5, heads=8, kv_heads=4, head_width=8, mlp=172, block=1, mask_id=-1, qk_norm=False, tied=True,
    theta=1e4, eps=1e-5, norm="eager",
)  # fmt: skip


def _sdar(size: str, block: int) -> Config:
    return dataclasses.replace(_QWEN3, **_SIZES[size] | dict(tied=False, mask_id=MASK_ID, block=block, norm="fused"))


MODELS: dict[str, Any] = {
    **{f"qwen3-{size}": dataclasses.replace(_QWEN3, **shape) for size, shape in _SIZES.items()},
    **{f"sdar-{size}{f'-b{block}' * (block > 4)}": _sdar(size, block) for size in _SIZES if size != "0.6b" for block in BLOCKS},
    "smollm2-135m": _SMOLLM2,
    "smollm2-135m-instruct": _SMOLLM2,
    "stories260k": _STORIES,
    **{f"gpt2-{size}": gpt2.Config(**gpt2.PRESETS[size]) for size in ("small", "medium", "large", "xl")},
    **{f"esm2-{size.replace('_', '-')}": esm2.Config(**esm2.PRESETS[size]) for size in ("t6_8m", "t12_35m", "t30_150m", "t33_650m")},
    "dplm-150m": esm2.Config(**esm2.PRESETS["t30_150m"]),
}
# A family, and the `model_type` of the checkpoints that it can be made of.
FAMILIES = {
    "sdar": ("sdar", "sdar_moe", "qwen3", "qwen3_moe"),
    "qwen3": ("qwen3", "qwen3_moe"),
    "llama": ("llama",),
    "stories": ("llama",),
    "gpt2": ("gpt2",),
    "esm2": ("esm",),
    "dplm": ("esm",),
}
_FAMILY = {"smollm2": "llama", "stories260k": "stories"}  # of a row, by what its name begins with, if not with the family's
# What a copy of a model may have otherwise. Chat models read further than their base; dtypes and rounding are the caller's choice.
_FREE = ("length", "norm", "dtype", "param_dtype", "remat")


def family(name: str) -> str:
    """Returns the family that `name`, a row of the table or a family itself, belongs to. Raises UserError for an unknown name."""
    if name in FAMILIES:
        return name
    if name not in MODELS:
        raise UserError(f"no public model {name!r}; there are the families {', '.join(FAMILIES)}, and {', '.join(MODELS)}")
    first = name.partition("-")[0]
    return _FAMILY.get(first, first)


def check(name: str, config: Any) -> None:
    """Returns None if `config` is the row `name`, or, `name` being a family, the row of its size, should there be one.

    Raises UserError that names the first field that differs.
    """
    size = lambda c: [getattr(c, key, 0) for key in ("width", "layers", "n_noncausal", "experts")]
    block = lambda c: getattr(c, "block", 1)
    if name in MODELS:
        rows = [name]
    else:
        rows = [row for row, c in MODELS.items() if family(row) == name and size(c) == size(config) and block(c) in (block(config), 1)]
    for row in rows[:1]:
        for key, value in dataclasses.asdict(MODELS[row]).items():
            if key not in _FREE and getattr(config, key) != value:
                mine = getattr(config, key)
                raise UserError(f"the checkpoint has {key}={mine}, and {row} {key}={value}; pass the --model that it is, or its family")

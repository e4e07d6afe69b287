"""The table of public models: parameters, counted without making any, and what the table says no to."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.models import hf, public

COUNTS = {  # SDAR's by the sizes of its published files in bfloat16, Qwen3's tied ones by those less a head
    "sdar-1.7b": 2_031_739_904,
    "sdar-4b": 4_411_424_256,
    "sdar-8b": 8_190_735_360,
    "sdar-30b-a3b": 30_532_122_624,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 2_031_739_904 - 151936 * 2048,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "smollm2-135m": 134_515_008,
    "stories260k": 260_032,
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "esm2-t6-8m": 7_840_794 - 1026 * 320 - (6 * 20 + 1),  # less unused embeddings of positions, and a head that predicts contacts
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_are_as_many_as_published(name):
    assert sum(leaf.size for leaf in hf.abstract(public.MODELS[name]).values()) == COUNTS[name]
    assert sum(int(np.prod(place.shape)) for place in hf.places(public.MODELS[name]).values()) == COUNTS[name]


def test_active_parameters_tensors_and_cache():
    moe, dense = public.MODELS["sdar-30b-a3b"], public.MODELS["sdar-4b"]
    experts = sum(leaf.size for name, leaf in hf.abstract(moe).items() if name.endswith(("moe/gate", "moe/up", "moe/down")))
    assert COUNTS["sdar-30b-a3b"] - experts * (moe.experts - moe.experts_per_token) // moe.experts == 3_353_032_704
    assert len(hf.places(dense)) == 399  # as the index of SDAR-4B says
    cache = lambda c: 2 * 2 * c.layers * c.kv_heads * c.head_width
    sizes = ("1.7b", "4b", "8b", "30b-a3b")
    assert [cache(public.MODELS[f"sdar-{size}"]) for size in sizes] == [114_688, 147_456, 147_456, 98_304]


@pytest.mark.parametrize("name", ["esm2-t12-35m", "esm2-t30-150m", "esm2-t33-650m", "dplm-150m"])
def test_the_sizes_of_proteins_models(name):
    count = sum(leaf.size for leaf in hf.abstract(public.MODELS[name]).values())
    assert count / 1e6 == pytest.approx(int(name.rpartition("-")[2][:-1]), rel=0.05)
    assert public.family(name) == name.partition("-")[0]


def test_every_published_block_length_has_a_row():
    """https://github.com/JetAstra/SDAR/issues/12: the block length is a choice of each run; the mask id is one, wherever it is read."""
    for size in ("1.7b", "4b", "8b", "30b-a3b"):
        rows = [public.MODELS[f"sdar-{size}{suffix}"] for suffix in ("", "-b8", "-b16", "-b32", "-b64")]
        assert [row.block for row in rows] == [4, 8, 16, 32, 64]
        assert {dataclasses.replace(row, block=4) for row in rows} == {rows[0]}
        assert (rows[0].mask_id, rows[0].tied, public.family(f"sdar-{size}-b8")) == (151669, False, "sdar")


def test_a_row_is_known_by_its_size_and_checked():
    sdar = public.MODELS["sdar-4b-b16"]
    public.check("sdar-4b-b16", dataclasses.replace(sdar, length=40960, dtype="float32"))
    public.check("sdar", sdar)
    public.check("sdar", dataclasses.replace(sdar, width=64, heads=3, kv_heads=3))  # no row of that size
    with pytest.raises(UserError, match=r"the checkpoint has theta=10000.0, and sdar-4b-b16 theta=1000000.0; pass"):
        public.check("sdar", dataclasses.replace(sdar, theta=1e4))
    with pytest.raises(UserError, match="the checkpoint has width=2560, and sdar-8b width=4096"):
        public.check("sdar-8b", sdar)
    with pytest.raises(
        UserError,
        match=r"no public model 'sdar-5b'; there are the families sdar, qwen3, llama, stories, gpt2, esm2, dplm, and qwen3-0.6b, ",
    ):
        public.family("sdar-5b")

"""configs/sdar.py: every preset it offers is a run, of the public table's shape where it is a published size."""

import dataclasses
import runpy
from pathlib import Path

import pytest

from dllm.core.types import UserError
from dllm.models import public
from dllm.train.run import run_config

CONFIG = runpy.run_path(str(Path(__file__).parents[2] / "configs" / "sdar.py"))


@pytest.mark.parametrize("row", [row for row in public.MODELS if row.startswith("sdar-")])
def test_every_published_size_has_a_run(row):
    """https://github.com/JetAstra/SDAR/issues/12: the block length is a choice of the run; the mask id is the table's, whatever it is."""
    _, *size, block = row.split("-") if "-b" in row.removeprefix("sdar-30b-a3b") else (*row.split("-"), "")
    run = run_config(CONFIG["get_config"]("-".join(size) + ("," + block) * bool(block)).to_dict())
    wanted = dataclasses.replace(public.MODELS[row], param_dtype="float32")
    assert run.model.config == wanted
    assert run.objective.config.low < run.objective.config.high
    assert run.data.length % wanted.block == 0


@pytest.mark.parametrize("preset, block", [("tiny", 4), ("mini", 4), ("mini,b16", 16)])
def test_presets_from_scratch(preset, block):
    run = run_config(CONFIG["get_config"](preset).to_dict())
    assert (run.model.config.block, run.model.config.mask_id) == (block, 27)


@pytest.mark.parametrize("preset, text", [("13b", "no preset '13b'"), ("4b,b5", "no block 'b5'")])
def test_unknown_ones_are_refused(preset, text):
    with pytest.raises(UserError, match=text):
        CONFIG["get_config"](preset)

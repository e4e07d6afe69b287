from __future__ import annotations

import re

import pytest

from dllm.core.types import UserError
from dllm.train.run import check_same, run_config
from tests.train import tiny


def test_config_json_describes_the_same_run():
    for overrides in ({}, {"model": tiny.GPT, "objective": {"name": "next_token"}}, {"sampler": {"name": "ancestral", "rate": 0.2}}):
        run = tiny.run(**overrides)
        assert run_config(run.to_dict()) == run
        assert list(run.to_dict()) == ["data", "model", "objective", "optim", "train", "mesh", "sampler"]


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"model__widht": 3}, "unknown key model.widht; model has: "),
        ({"optim__lr": "big"}, "optim.lr must be float, not 'big'"),
        ({"train__steps": True}, "train.steps must be int, not True"),
        ({"train__steps": 0}, "train.steps is 0; it must be positive"),
        ({"train": {"seed": 0}}, "missing key train.steps (int)"),
        ({"model": {"width": 3}}, "missing key model.name (str)"),
        ({"model__name": "transformer"}, "no models named 'transformer'; there are: gpt, hybrid"),
        ({"objective__name": "corruption"}, "no diffusion named 'corruption'; there are: next_token, ssmd"),
        ({"sampler__name": "beam"}, "no samplers named 'beam'; there are: ancestral"),
        ({"data__length": 8}, "data.length is 8 and model.length 16; make them equal"),
        ({"optim__train_only": "("}, "optim.train_only is not a regular expression"),
        ({"extra": {}}, "unknown section extra in the config"),
        ({"mesh": 3}, "the config's mesh must be a section"),
    ],
)
def test_errors_name_the_key(overrides, message):
    with pytest.raises(UserError, match=re.escape(message)):
        tiny.run(**overrides)


def test_a_missing_section_is_an_error():
    with pytest.raises(UserError, match="section mesh is missing"):
        run_config({name: section for name, section in tiny.config().items() if name != "mesh"})


def test_what_may_change_in_a_workdir():
    old = tiny.run().to_dict()
    check_same(old, tiny.run(train__log_every=9, mesh__data=2, sampler={"name": "ancestral"}).to_dict(), "w")
    for override, key in [({"train__steps": 41}, "train.steps=40, not 41"), ({"data__name": "pydocs"}, "data.name='text8', not 'pydocs'")]:
        with pytest.raises(UserError, match=re.escape(f"w holds a run with {key}")):
            check_same(old, tiny.run(**override).to_dict(), "w")
    del old["model"]["gain"]  # a workdir from before the key was there
    with pytest.raises(UserError, match=r"model\.gain='absent', not "):
        check_same(old, tiny.run().to_dict(), "w")

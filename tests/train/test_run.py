from __future__ import annotations

import re

import pytest

from dllm.core.types import UserError
from dllm.data import tokens
from dllm.data.corpus import DataConfig
from dllm.train.run import check_corpus, check_same, run_config
from tests.data.files import rows_folder
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
        ({"model__name": "transformer"}, "no models named 'transformer'; there are: "),
        ({"objective__name": "corruption"}, "no diffusion named 'corruption'; there are: block_diffusion, next_token, ssmd"),
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
    del old["model"]["gain"]  # a workdir from before the key was there has its default
    check_same(old, tiny.run().to_dict(), "w")
    with pytest.raises(UserError, match=r"model\.gain=0\.1, not 0\.5"):
        check_same(old, tiny.run(model__gain=0.5).to_dict(), "w")
    old = tiny.run().to_dict()
    del old["optim"]["lr"]  # this has none
    with pytest.raises(UserError, match=r"optim\.lr='absent', not "):
        check_same(old, tiny.run().to_dict(), "w")


QWEN3 = {"name": "qwen3", "vocab": 28, "length": 32, "width": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_width": 8, "mlp": 32}


def test_qwen3_may_be_larger_than_the_corpus():
    """More ids (MASK among them) and a longer context than the data's; gpt and hybrid are cut to measure."""
    run = tiny.run(model=QWEN3 | {"mask_id": 27}, objective={"name": "block_diffusion"})
    assert (run.model.config.length, run.data.length) == (32, 16)
    tiny.run(model=QWEN3 | {"mask_id": -1}, objective={"name": "next_token"})


@pytest.mark.parametrize(
    "model, objective, message",
    [
        (QWEN3 | {"vocab": 26, "mask_id": 25}, "block_diffusion", "model.vocab is 26, and the corpus has 27 symbols"),
        (QWEN3 | {"length": 8, "mask_id": 27}, "block_diffusion", "data.length is 16 and model.length, the longest sequence, 8"),
        (QWEN3 | {"mask_id": -1}, "block_diffusion", "block_diffusion doesn't go with the model qwen3 of mask_id=-1"),
        (QWEN3 | {"mask_id": 27}, "next_token", "next_token doesn't go with the model qwen3 of mask_id=27"),
        (QWEN3 | {"mask_id": 27}, "ssmd", "ssmd doesn't go with the model qwen3 of mask_id=27: ssmd is for hybrid"),
        (tiny.GPT | {"vocab": 28}, "next_token", "model.vocab is 28, and the corpus has 27 symbols; make it that many"),
        (tiny.GPT, "ssmd", "ssmd doesn't go with the model gpt"),
    ],
)
def test_model_and_objective_fit(model, objective, message):
    with pytest.raises(UserError, match=re.escape(message)):
        tiny.run(model=model, objective={"name": objective})


def test_the_corpus_must_fit_the_run(tmp_path):
    """The mask id is in the config once, and tokenizer and corpus must agree: https://github.com/hxhcreate/DARE/issues/13"""
    folder = rows_folder(tmp_path / "c", vocab=20, segment=lambda x: x * 0)
    corpus = tokens.load(DataConfig("tokens", str(folder), 16))
    section = {"name": "tokens", "path": str(folder), "length": 16}
    masked = tiny.run(data=section, model=QWEN3 | {"mask_id": 25}, objective={"name": "block_diffusion"})
    check_corpus(masked, corpus)
    for mask_id, theirs, message in [(5, None, "model.mask_id is 5, and the train split of the corpus tokens holds it")] + [
        (25, 26, "model.mask_id is 25, and the corpus's tokenizer has MASK at 26")
    ]:
        run = tiny.run(data=section, model=QWEN3 | {"mask_id": mask_id}, objective={"name": "block_diffusion"})
        with pytest.raises(UserError, match=message):
            check_corpus(run, corpus, theirs)
    plain = tiny.run(data=section, model=QWEN3 | {"mask_id": -1}, objective={"name": "next_token"})
    with pytest.raises(UserError, match="the corpus has the field segment, and the objective next_token doesn't take it"):
        check_corpus(plain, corpus)
    small = tiny.run(data=section, model=tiny.GPT | {"vocab": 20}, objective={"name": "next_token"})
    with pytest.raises(UserError, match=r"model.vocab is 20, and the corpus has 27 symbols"):
        check_corpus(small, corpus)

"""Training an adapter: what it starts from, what stays, and the stages of a curriculum."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest

from dllm.core.paths import named_leaves
from dllm.core.types import UserError
from dllm.data import tokens
from dllm.data.corpus import DataConfig
from dllm.models import hf, qwen3
from dllm.train import checkpoint, converted, sharding, step
from dllm.train.run import check_corpus, run_config, stages
from dllm.train.state import abstract, create
from tests.data.files import rows_folder
from tests.experiments.programs import Programs, config_text
from tests.train import tiny
from tests.train.test_checkpoint import write
from tests.train.test_program import assert_same_run, parameters, rows

REPO = Path(__file__).parents[2]
GPT = {"model": tiny.GPT, "objective": {"name": "next_token"}}
SHAPE = {"length": 16, "width": 16, "layers": 2, "heads": 2, "kv_heads": 2, "head_width": 8, "mlp": 32}
UNO = SHAPE | {"name": "uno", "vocab": 27, "begins": True, "block": 4, "rank": 2, "alpha": 32.0}
TEXT = np.random.default_rng(0).integers(0, 27, (8, 16)).astype(np.int32)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A workdir of a gpt whose weights are random, and its EMA."""
    workdir = tmp_path_factory.mktemp("gpt")
    return workdir, write(workdir, tiny.run(**GPT), 10).ema


def adapter(base, **overrides):
    """The config of a run on that base."""
    plain = {"model": UNO, "objective": {"name": "uno"}, "optim__train_only": "^lora/", "train__init_from": str(base)}
    return tiny.config(**plain | overrides)


def started(config):
    """Returns (run, mesh, state, what was loaded)."""
    run = run_config(config)
    mesh = sharding.make_mesh(run.mesh)
    with jax.set_mesh(mesh):
        return run, mesh, *checkpoint.warm_start(create(run, mesh), run, mesh)


def refused(config):
    run = run_config(config)
    mesh = sharding.make_mesh(run.mesh)
    checkpoint.warm_start(abstract(run, mesh), run, mesh)


def is_lora(name):
    return "lora/" in name


def test_the_base_stays_bit_for_bit_and_the_draft_nears_the_target(base):
    run, mesh, state, text = started(adapter(base[0], optim__lr=0.03))
    theirs, fresh = named_leaves(base[1]), named_leaves(jax.device_get(state.params))
    assert f"{len(theirs)} of {len(fresh)} parameters loaded; new: lora/stack/" in text
    assert "not used" not in text
    named = lambda tree: {name for name in named_leaves(tree) if "/mu/" in name or "/nu/" in name}
    assert named(state.opt_state)
    assert all(is_lora(name) for name in named(state.opt_state))
    train_step, metrics = step.make_train_step(run, mesh), []
    with jax.set_mesh(mesh):
        for _ in range(40):
            state, row = train_step(state, step.put({"tokens": TEXT}, mesh))
            metrics.append(jax.device_get(row))
    for tree in (state.params, state.ema):
        for name, leaf in named_leaves(jax.device_get(tree)).items():
            if is_lora(name):
                assert not np.array_equal(leaf, fresh[name]), name
            else:
                np.testing.assert_array_equal(leaf, theirs[name], err_msg=name)
    first, last = (np.mean([row["tv"] for row in part]) for part in (metrics[:5], metrics[-5:]))
    assert last < 0.9 * first
    assert np.mean([row["accepted"] for row in metrics[-5:]]) > 1.1 * np.mean([row["accepted"] for row in metrics[:5]])
    assert metrics[0]["tokens"] == 8 * 15


@pytest.mark.slow
def test_four_devices_equal_one(base):
    """With MASK noise: where noise is the text's token, draft and target are one at first, and the sign of their difference is dust."""
    found, model = [], UNO | {"noise": "mask"}
    objective = {"name": "uno", "chunk": 5, "survival": "length", "kl": 0.1}
    for mesh in ({"data": 1, "fsdp": 1, "tensor": 1}, {"data": 2, "fsdp": 2, "tensor": 1}):
        run, mesh, state, _ = started(adapter(base[0], model=model, mesh=mesh, objective=objective))
        with jax.set_mesh(mesh):
            _, row = step.make_train_step(run, mesh)(state, step.put({"tokens": TEXT}, mesh))
        found.append(jax.device_get(row))
    for name in found[0]:
        np.testing.assert_allclose(found[1][name], found[0][name], rtol=2e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_a_converted_model_is_a_base_and_an_adapter_trains_on(tmp_path):
    config = qwen3.Config(vocab=30, block=1, mask_id=-1, **SHAPE | {"kv_heads": 1})
    sections = {"data": {}, "model": {"name": "qwen3", **dataclasses.asdict(config)}, "objective": {}}
    with converted.writing(tmp_path / "base", sections, {}, hf.abstract(config)) as arrays:
        for i, array in enumerate(arrays.values()):
            array[...] = np.random.default_rng(i).normal(size=array.shape)
    model = UNO | {"vocab": 30, "begins": False, "kv_heads": 1}
    one = adapter(tmp_path / "base", model=model)
    run, _, state, _ = started(one)
    theirs = checkpoint.load_run(tmp_path / "base").variables["params"]
    for name, leaf in named_leaves(state.params).items():
        assert is_lora(name) or np.array_equal(leaf, named_leaves(theirs)[name])

    write(tmp_path / "first", run, 5)
    lora = named_leaves(checkpoint.load_run(tmp_path / "first").variables["params"])
    _, _, state, text = started(adapter(tmp_path / "first", model=model | {"block": 8}, train__seed=9))
    assert "new:" not in text
    for name, leaf in named_leaves(state.params).items():
        np.testing.assert_array_equal(leaf, lora[name], err_msg=name)
    for changes, message in [
        ({"alpha": 8.0}, "has alpha=32.0, and the model alpha=8.0"),
        ({"rank": 4}, "has rank=2, and the model rank=4"),
    ]:
        with pytest.raises(UserError, match=re.escape(message) + ".*make them equal"):
            refused(adapter(tmp_path / "first", model=model | changes))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mlp": 48}, "has mlp=32, and the model mlp=48; an adapter's base stays: make them equal"),
        ({"heads": 1, "kv_heads": 1, "head_width": 16}, "has heads=2, and the model heads=1"),
        ({"theta": 5e5}, "has theta=10000.0, and the model theta=500000.0"),
        ({"eps": 1e-5}, "has eps=1e-06, and the model eps=1e-05"),
        ({"qk_norm": False}, "has qk_norm=True, and the model qk_norm=False"),
        ({"tied": True}, "has tied=False, and the model tied=True"),
        ({"begins": False, "vocab": 28}, "has vocab=27, and the model vocab=28"),
        ({"begins": False}, "has begins=True, and the model begins=False"),
        ({"kv_heads": 1}, "has no stack/layers/k/kernel of this shape, and optim.train_only freezes it; train it too, or make"),
    ],
)
def test_another_base_is_named(changes, message, base):
    """Weights alone don't tell how many heads they are of, nor how rotary positions turn."""
    with pytest.raises(UserError, match=re.escape(message)):
        refused(adapter(base[0], model=UNO | changes))


def test_a_hybrid_or_a_block_diffusion_model_is_no_base(tmp_path):
    write(tmp_path, tiny.run(), 1)
    with pytest.raises(UserError, match="holds a model that is hybrid, and an adapter's base is autoregressive"):
        refused(adapter(tmp_path))


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"optim__train_only": ""}, "optim.train_only='' trains embed/embedding, and the model uno verifies with what isn't its adapter"),
        ({"optim__train_only": "q/(kernel|a|b)$"}, "trains stack/layers/q/kernel"),
        ({"train__init_from": ""}, "train.init_from is empty, and of the model uno only the adapter is trained"),
        ({"objective": {"name": "uno", "blocks": "2,8"}}, "objective.blocks=2,8 ends with 8, and model.block is 4; make them equal"),
        ({"objective": {"name": "next_token"}}, "next_token doesn't go with the model uno"),
        ({"model": tiny.GPT}, "the objective uno doesn't go with the model gpt"),
        ({"model": UNO | {"vocab": 26}}, "model.vocab is 26, and the corpus has 27 symbols"),
        ({"objective": {"name": "uno", "survival": "both"}}, "objective.survival must be 'none' or 'prefix' or 'length', not 'both'"),
    ],
)
def test_bad_runs_are_refused(overrides, message, base):
    with pytest.raises(UserError, match=re.escape(message)):
        run_config(adapter(base[0], **overrides))


def test_rows_with_prompts_and_documents_are_taken(tmp_path, base):
    folder = rows_folder(tmp_path / "c", segment=lambda x: x * 0 + 1, trained=lambda x: x > 3)
    section = {"name": "tokens", "path": str(folder), "length": 16}
    corpus = tokens.load(DataConfig("tokens", str(folder), 16))
    run, mesh, state, _ = started(adapter(base[0], data=section))
    check_corpus(run, corpus)
    with jax.set_mesh(mesh):
        _, row = step.make_train_step(run, mesh)(state, step.put(corpus.train.take(np.arange(8)), mesh))
    assert 0 < row["tokens"] < 8 * 15


def test_stages_are_runs_that_differ_in_their_block(base):
    run = run_config(adapter(base[0], objective={"name": "uno", "blocks": "2,3,4"}))
    assert [(first, part.model.config.block) for first, part in stages(run)] == [(0, 2), (13, 3), (26, 4)]
    assert stages(run)[-1][1] == run
    assert stages(tiny.run()) == ((0, tiny.run()),)


AT = """
from dllm.train.writer import Writer
own = Writer.train
def train(self, step, row):
    own(self, step, row)
    step == {step} and {what}
Writer.train = train
"""


@pytest.mark.slow
def test_a_stopped_and_a_killed_curriculum_equal_the_undisturbed(base, tmp_path):
    """Over the edge between two stages, which are two programs: stopped before it, killed behind it, and left alone."""
    values = adapter(base[0], data__path=str(tiny.corpus_file(tmp_path)), objective={"name": "uno", "blocks": "2,4"})
    values["train"] |= {"steps": 12, "save_every": 2, "eval_every": 6}
    (tmp_path / "config.py").write_text(config_text(values))
    stop = AT.format(step=3, what="__import__('signal').raise_signal(15)")
    kill = AT.format(step=9, what="__import__('os')._exit(9)")
    with Programs() as programs:
        flags = lambda name: (f"--config={tmp_path / 'config.py'}", f"--workdir={tmp_path / name}")
        run = lambda name, first="": programs.run("train", *flags(name), first=first)
        done = run("whole")
        assert done.code == 0, done.err
        codes = [run("parts", first).code for first in (stop, kill, "")]
    assert codes == [143, 9, 0]
    assert checkpoint.complete_steps(tmp_path / "parts")[-1] == 12
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    trained = {row["step"]: row for row in rows(tmp_path / "whole") if "loss" in row}
    assert [("accept_4" in trained[now], "accept_2" in trained[now]) for now in (6, 7)] == [(False, True), (True, True)]
    assert all("valid_accept_4" in row for row in rows(tmp_path / "whole") if "valid_loss" in row), "of the model's block from the start"
    frozen = {name: leaf for name, leaf in parameters(tmp_path / "whole").items() if name.startswith("ema/") and not is_lora(name)}
    for name, leaf in named_leaves(base[1]).items():
        np.testing.assert_array_equal(frozen[f"ema/{name}"], leaf, err_msg=name)
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["objective"]["blocks"] == "2,4"


@pytest.mark.parametrize("file", ["stories_uno", "text8_uno"])
def test_every_preset_is_a_run(file):
    module = runpy.run_path(str(REPO / "configs" / f"{file}.py"))
    for name in module["PRESETS" if "PRESETS" in module else "TRAIN"]:
        run = run_config(module["get_config"](name).to_dict())
        assert run.optim.train_only == "^lora/"
        assert all(run.data.length % part.model.config.block == 0 for _, part in stages(run))
    with pytest.raises(UserError, match="no preset 'none' in this config; there are: "):
        module["get_config"]("none")

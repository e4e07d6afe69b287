"""The program convert_hf: there and back, and what it says of bad input, which leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from dllm.core.paths import named_leaves
from dllm.models import esm2, gpt2, hf, peft, public, uno
from dllm.train.checkpoint import load_run
from tests.experiments.programs import REPO, complaint, files

SMALL = dict(vocab=24, mask_id=-1, length=8, width=16, mlp=8, layers=2, heads=4, kv_heads=2, head_width=4)
CONFIG = dataclasses.replace(public.MODELS["qwen3-1.7b"], **SMALL, dtype="float32", param_dtype="float32")  # tied


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A Qwen3 checkpoint in several files, with a tokenizer that knows MASK as id 23, a SDAR and a Llama one. No test changes them."""
    folder, rng = tmp_path_factory.mktemp("checkpoints"), np.random.default_rng(0)
    llama = dataclasses.replace(CONFIG, qk_norm=False)
    sdar = dataclasses.replace(CONFIG, tied=False, mask_id=23, block=4)
    for name, config in {"qwen3": CONFIG, "llama": llama, "sdar": sdar}.items():
        hf.save(folder / name, config, {n: rng.normal(size=x.shape).astype(np.float32) for n, x in hf.abstract(config).items()}, 1500)
        (folder / name / "added_tokens.json").write_text(json.dumps({"<MASK>": 23}))
    return folder


def tensors(folder):
    return {name: array.tobytes() for file in folder.glob("*.safetensors") for name, array in load_file(file).items()}


def test_there_and_back(programs, checkpoints, tmp_path):
    src, workdir, back = checkpoints / "sdar", tmp_path / "w", tmp_path / "back"
    done = programs.run("convert_hf", "--model=sdar", f"--src={src}", f"--dst={workdir}")
    assert (done.code, done.err) == (0, "")
    assert "of float32, vocabulary 24, block 4, mask id 23" in done.out
    assert {path.name for path in workdir.iterdir()} == {".lock", "config.json", "tokenizer", "weights"}
    loaded = load_run(workdir)
    assert (loaded.model_config.mask_id, loaded.model_config.block, loaded.config["objective"]["name"]) == (23, 4, "block_diffusion")
    done = programs.run("convert_hf", "--model=sdar", f"--src={workdir}", f"--dst={back}", "--reverse")
    assert (done.code, done.err) == (0, "")
    assert tensors(back) == tensors(src)
    assert (back / "added_tokens.json").read_bytes() == (src / "added_tokens.json").read_bytes()
    assert json.loads((back / "config.json").read_text()) == json.loads((src / "config.json").read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "w"]
    line = complaint(programs.run("convert_hf", "--model=qwen3", f"--src={workdir}", f"--dst={tmp_path / 'q'}", "--reverse"))
    assert "holds a model of type sdar, not --model=qwen3; pass --model=sdar" in line
    before = files(tmp_path)
    line = complaint(programs.run("convert_hf", "--model=sdar", f"--src={src}", f"--dst={workdir}"))
    assert "holds a model already; give the new one a folder of its own" in line
    line = complaint(programs.run("convert_hf", "--model=sdar", f"--src={workdir}", f"--dst={back}", "--reverse"))
    assert "is not empty; give the checkpoint a folder of its own" in line
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    "name, config, says",
    [
        ("gpt2", gpt2.Config(vocab=24, length=8, width=16, layers=2, heads=4, mlp=8), "vocabulary 24, autoregressive"),
        ("esm2", esm2.Config(length=8, width=16, n_noncausal=2, heads=4, mlp=8), "vocabulary 33, mask id 32"),
    ],
)
def test_gpt2_and_esm2_there_and_back(name, config, says, programs, tmp_path):
    rng, src = np.random.default_rng(0), tmp_path / "src"
    hf.save(src, config, {n: rng.normal(size=x.shape).astype(np.float32) for n, x in hf.abstract(config).items()})
    for change in ({}, {"token_dropout": True}):
        edit(**change)(src, place := tmp_path / f"src{len(change)}")
        done = programs.run("convert_hf", f"--model={name}", f"--src={place}", f"--dst={tmp_path / f'w{len(change)}'}")
        assert (done.code, done.err) == (0, "")
        assert says in done.out
        assert ("token_dropout, which is off here" in done.out) == bool(change)
    done = programs.run("convert_hf", f"--model={name}", f"--src={tmp_path / 'w0'}", f"--dst={tmp_path / 'back'}", "--reverse")
    assert (done.code, done.err) == (0, "")
    assert tensors(tmp_path / "back") == tensors(src)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads((src / "config.json").read_text())
    line = complaint(programs.run("convert_hf", "--model=llama", f"--src={tmp_path / 'w0'}", f"--dst={tmp_path / 'no'}", "--reverse"))
    assert f"not --model=llama; pass --model={name}" in line


def damaged(change):
    """Returns what makes, in the test's folder, a changed copy of the checkpoint qwen3."""

    def make(src: Path, folder: Path) -> None:
        folder.mkdir()
        for file in src.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        change(folder)

    return make


def edit(**keys):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | keys))

    return damaged(change)


def cut(folder):
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-5])


@pytest.mark.parametrize(
    "make, flags, says",
    [
        (damaged(cut), ("--model=qwen3",), "model-00001-of-00"),
        (edit(vocab_size=25), ("--model=qwen3",), "the tensor model.embed_tokens.weight of"),
        (edit(vocab_size=23), ("--model=qwen3",), "and its config wants [23, 16]; use the config.json that belongs to it"),
        (edit(tie_word_embeddings=False), ("--model=qwen3",), "lacks the tensor lm_head.weight; set tie_word_embeddings if its head"),
        (edit(mask_token_id=22), ("--model=sdar", "--block=4"), "has '<MASK>' as id 23, and the model's mask id is 22"),
        (edit(mask_token_id=23), ("--model=sdar", "--block=9"), "model.block is 9; make it 1 to model.length = 8"),
        (edit(mask_token_id=23), ("--model=sdar",), "nothing says the block length; pass --block"),
        (None, ("--model=sdar", "--block=4"), "model.mask_id is 151669; make it an id below model.vocab = 24"),
        (None, ("--model=sdar-1.7b",), "the checkpoint has vocab=24, and sdar-1.7b vocab=151936"),
        (None, ("--model=llama",), "is of model_type 'qwen3', from which no llama is made; pass --model=sdar or qwen3"),
        (
            None,
            ("--model=gemma",),
            "no public model 'gemma'; there are the families sdar, qwen3, llama, stories, gpt2, esm2, dplm, and qwen3-0.6b",
        ),
        (None, ("--model=qwen3", "--block=two"), "--block"),
        (None, ("--model=qwen3", "--reverse"), "holds no checkpoint"),
        (None, ("--model=qwen3", "--reverse", "--block=4"), "--block belongs to the other direction"),
        (None, ("--model=qwen3", "--reverse", f"--src={REPO / 'release' / 'lexicon_mini'}"), "holds a model 'hybrid'"),
        (None, ("--model=qwen3", "--src=nowhere"), "cannot read --src=nowhere: there is no such file or folder"),
    ],
)
def test_bad_input(make, flags, says, programs, checkpoints, tmp_path):
    """Truncated safetensors, wrong vocabulary, a checkpoint without lm_head and tie=false, mask ids that disagree
    (https://github.com/hxhcreate/DARE/issues/13), block lengths, models: one line that names it."""
    src = checkpoints / "qwen3"
    if make:
        make(src, tmp_path / "src")
        src = tmp_path / "src"
    before = files(tmp_path)
    line = complaint(programs.run("convert_hf", f"--src={src}", f"--dst={tmp_path / 'new' / 'w'}", *flags))
    assert says in line
    assert files(tmp_path) == before


def test_llama_to_block_diffusion(programs, checkpoints, tmp_path):
    """Its tokenizer must leave the new id free."""
    flags = ("--model=llama", "--block=2", f"--dst={tmp_path / 'w'}")
    done = programs.run("convert_hf", f"--src={checkpoints / 'llama'}", *flags)
    assert "has '<MASK>' as id 23, and the model's mask id is 24" in complaint(done)
    edit()(checkpoints / "llama", tmp_path / "src")
    (tmp_path / "src" / "added_tokens.json").unlink()
    done = programs.run("convert_hf", f"--src={tmp_path / 'src'}", *flags)
    assert done.code == 0, done.err
    assert "vocabulary 25, block 2, mask id 24" in done.out
    assert "has no tokenizer; put its files into" in done.out
    assert load_run(tmp_path / "w").model_config.vocab == 25


ADAPTED = uno.Config(**dataclasses.asdict(CONFIG) | dict(block=3), rank=2, alpha=4.0, targets="q,down", noise_high=20)


def test_an_adapter_there_and_back(programs, checkpoints, tmp_path):
    """A PEFT folder and a converted base make a drafter's workdir, its frozen weights the base's; of that the same folder comes back."""
    base, workdir, back = tmp_path / "base", tmp_path / "w", tmp_path / "back"
    assert programs.run("convert_hf", "--model=qwen3", f"--src={checkpoints / 'qwen3'}", f"--dst={base}").code == 0
    fresh = uno.init(ADAPTED, jax.random.key(0))["params"]
    peft.save(tmp_path / "adapter", ADAPTED, jax.tree.map(lambda x: x + 1, fresh), "base")
    flags = ("--model=uno", f"--src={tmp_path / 'adapter'}", f"--dst={workdir}")
    done = programs.run("convert_hf", *flags, f"--base={base}")
    assert (done.code, done.err) == (0, "")
    assert "rank=2, alpha=4.0, targets=q,down, noise=uniform, noise_low=1, noise_high=20, noise_mask=-1, block=3" in done.out
    loaded, frozen = load_run(workdir), load_run(base)
    assert (loaded.config["model"]["name"], loaded.model_config) == ("uno", ADAPTED)
    assert (workdir / "tokenizer" / "added_tokens.json").read_bytes() == (base / "tokenizer" / "added_tokens.json").read_bytes()
    leaves = named_leaves(loaded.variables["params"])
    for name, leaf in named_leaves(frozen.variables["params"]).items():
        np.testing.assert_array_equal(leaves.pop(name), leaf)
    assert leaves.keys() == {f"lora/stack/layers/{name}/{side}" for name in ("q", "down") for side in "ab"}
    done = programs.run("convert_hf", "--model=uno", f"--src={workdir}", f"--dst={back}", "--reverse", "--base=base")
    assert (done.code, done.err) == (0, "")
    assert "Applied to every row it is another model" in done.out
    for file in (tmp_path / "adapter").iterdir():
        assert (back / file.name).read_bytes() == file.read_bytes()

    new, from_base, before = f"--dst={tmp_path / 'new'}", f"--base={base}", files(tmp_path)
    reverse = ("--model=uno", f"--src={workdir}", "--reverse")
    for bad, says in (
        (flags, "pass --base, the workdir of the model that it was trained on"),
        ((*flags, from_base), "holds a model already"),
        ((*flags, from_base, new, "--block=2"), "says that 3 noise rows were trained together, and --block 2"),
        ((*flags, f"--base={workdir}"), "holds a model 'uno' that is no adapter's base; that is a qwen3 with mask_id=-1"),
        ((*flags, f"--base={tmp_path / 'nowhere'}"), "holds no checkpoint"),
        ((*flags, from_base, new, f"--src={base}"), "cannot read"),
        ((*reverse, new, f"--src={base}"), "holds a model 'qwen3', without an adapter"),
        ((*reverse, f"--dst={back}"), "is not empty; give the checkpoint a folder of its own"),
        ((*reverse, new, "--block=3"), "--block belongs to the other direction"),
        ((*reverse, new, "--model=qwen3"), "holds a model 'uno'"),
        (("--model=qwen3", f"--src={checkpoints / 'qwen3'}", new, from_base), "--base belongs to --model=uno"),
    ):
        assert says in complaint(programs.run("convert_hf", *bad))
        assert files(tmp_path) == before

"""The programs on tokens: train a qwen3, sample it, make a corpus of its samples, train block diffusion on that, sweep it."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from tests.data.files import rows_folder
from tests.experiments.programs import complaint, config_text, files
from tests.train import tiny

SHAPE = {"name": "qwen3", "length": 32, "width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_width": 8, "mlp": 32}
AR = {"model": SHAPE | {"vocab": 263, "block": 1, "mask_id": -1}, "objective": {"name": "next_token"}}
MASKED = {"model": SHAPE | {"vocab": 264, "block": 4, "mask_id": 263}, "objective": {"name": "block_diffusion"}}


def train(programs, place, name, config, data, sampler):
    train = {"train__steps": 2, "train__eval_every": 2, "train__sample_every": 2, "train__save_every": 2}
    values = tiny.config(data={"name": "tokens", "path": str(data), "length": 16}, **train) | config | {"sampler": sampler}
    (place / f"{name}.py").write_text(config_text(values))
    return programs.run("train", f"--config={place / name}.py", f"--workdir={place / name}")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory, programs):
    """An autoregressive run on a corpus with a tokenizer, a corpus of its samples, a block-diffusion run on these. No test changes it."""
    place = tmp_path_factory.mktemp("tokens")
    rows_folder(place / "corpus", vocab=263, tokenizer={"ab": -1.0})
    done = train(programs, place, "ar", AR, place / "corpus", {"name": "autoregressive"})
    assert done.code == 0, done.err
    made = programs.run("make_corpus", *MAKE, f"--workdir={place / 'ar'}", f"--out={place / 'made'}")
    assert made.code == 0, made.err
    done = train(programs, place, "bd", MASKED, place / "made", {"name": "block_diffusion"})
    assert done.code == 0, done.err
    return place


MAKE = ("--tokens=640", "--length=16", "--batch=4", "--shard=2", "--held_out=0.2", "--seed=3")


def test_a_workdir_is_self_contained(tokens, programs, tmp_path):
    """It samples where the corpus is gone, from the BOS that training rows begin with, and as a release."""
    for name in ("ar", "bd"):
        assert (tokens / name / "tokenizer" / "tok.bin").read_bytes() == (tokens / "corpus" / "tokenizer" / "tok.bin").read_bytes()
        assert not (tokens / name / "words.txt.gz").exists()
        assert len((tokens / name / "samples" / "2.txt").read_text()) > 0
    shutil.copytree(tokens / "bd", tmp_path / "bd")
    done = programs.run("release", f"--workdir={tmp_path / 'bd'}", f"--out={tmp_path / 'small'}")
    assert done.code == 0, done.err
    flags = ("--num=3", "--setting.max_new=6", "--setting.stop=ab", "--prompt=ab a", f"--out={tmp_path / 's.jsonl'}")
    options = {"autoregressive": "grow=4", "block_diffusion": "tau=0.5", "self_verified": "window=3"}  # window: text for other samplers
    for workdir, sampler in ((tokens / "ar", "autoregressive"), (tmp_path / "small", "block_diffusion"), (tokens / "bd", "self_verified")):
        done = programs.run("sample", f"--workdir={workdir}", f"--sampler={sampler}", f"--option.{options[sampler]}", *flags)
        assert done.code == 0, done.err
        lines = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
        assert all(line["text"].startswith("ab a") and 1 <= line["new_tokens"] <= 6 for line in lines)


def test_make_corpus_goes_on_to_the_same(tokens, programs, tmp_path):
    """Killed in the third of five shards, and run again: the same rows as at one go. Splits are disjoint; every row begins with BOS."""
    out, flags = tmp_path / "made", (*MAKE, f"--workdir={tokens / 'ar'}")
    first = "import dllm.core.config as c; n, w = [], c.write_atomic\n"
    first += (
        "def fail(path, data):\n    n.append(path)\n    if len(n) == 5: raise KeyboardInterrupt\n    w(path, data)\nc.write_atomic = fail"
    )
    stopped = programs.run("make_corpus", *flags, f"--out={out}", first=first)
    assert (stopped.code, stopped.err) == (130, "error: interrupted\n")
    assert len([*(out / "shards").glob("*.npy")]) == 2
    assert not (out / "train.npz").exists()
    done = programs.run("make_corpus", *flags, f"--out={out}")
    assert done.code == 0, done.err
    assert "6 of 10 batches are to be drawn" in done.out
    assert not (out / "shards").exists()
    rows = {}
    for split, count in (("train", 24), ("valid", 8), ("test", 8)):
        rows[split] = np.load(out / f"{split}.npz")["tokens"]
        np.testing.assert_array_equal(rows[split], np.load(tokens / "made" / f"{split}.npz")["tokens"])
        assert (rows[split].shape, rows[split].dtype) == ((count, 16), np.uint16)
        assert (rows[split][:, 0] == 1).all()
    assert len({row.tobytes() for part in rows.values() for row in part}) == 40
    before = files(out)
    assert "done already" in programs.run("make_corpus", *flags, f"--out={out}").out
    assert "holds a corpus with seed=3, not 4" in complaint(programs.run("make_corpus", *flags, "--seed=4", f"--out={out}"))
    assert files(out) == before
    for flag, says in (("--length=64", "--length is 64, and the model's context 32"), ("--held_out=0.001", "is not one; raise it")):
        assert says in complaint(programs.run("make_corpus", *flags, flag, f"--out={tmp_path / 'no'}"))
    line = complaint(programs.run("make_corpus", *MAKE, f"--workdir={tokens / 'bd'}", f"--out={tmp_path / 'no'}"))
    assert "autoregressive doesn't go with the model qwen3 of mask_id=263" in line
    assert not (tmp_path / "no").exists()


def test_a_sweep_with_the_parent_as_judge(tokens, programs, tmp_path):
    points = [{"sampler": "block_diffusion", "options": {"tau": 0.0}, "settings": {"max_new": 10}}]
    points += [{"sampler": "self_verified", "options": {}, "settings": {"max_new": 13, "stop": "2"}}]
    sweep = {"num_samples": 4, "batch": 4, "seed": 0, "evals": ("gen_nll", "entropy"), "judge": str(tokens / "ar"), "points": tuple(points)}
    (tmp_path / "sweep.py").write_text(config_text(sweep))
    flags = (f"--config={tmp_path / 'sweep.py'}", f"--workdir={tokens / 'bd'}")
    done = programs.run("sweep", *flags, f"--out={tmp_path / 'out'}")
    assert done.code == 0, done.err
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [row["sampler"] for row in rows] == ["block_diffusion", "self_verified"]
    assert rows[0]["passes"].keys() == {"denoise", "query_tokens"}  # with tau = 0 a block a pass, each committed by the next one's
    assert rows[0]["nfe"] == 3  # positions 1..10: the rest of block 0, block 1, block 2
    for row in rows:
        assert 3 < row["gen_nll"] < 8  # about ln 263: hardly trained
        with np.load(tmp_path / "out" / row["samples"]) as arrays:
            assert (arrays["gen_nll/denominator"] == arrays["lengths"] - 1).all()
            assert (arrays["tokens"][:, 0] == 1).all()
            assert arrays["tokens"].max() < 263  # MASK is never written: https://github.com/JetAstra/SDAR/issues/8
            assert arrays["lengths"].max() <= 14
    reference = json.loads((tmp_path / "out" / "reference.json").read_text())
    assert {"ceiling", "floor"} <= reference["gen_nll"].keys()
    (tmp_path / "sweep.py").write_text(config_text(sweep | {"evals": ("spelling",)}))
    assert "spelling is for character models" in complaint(programs.run("sweep", *flags, f"--out={tmp_path / 'no'}"))
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    "program, flags, says",
    [
        ("sample", ("--sampler=block_diffusion", "--setting.stop=264"), ("setting stop holds an id outside the vocabulary of 264",)),
        ("sample", ("--sampler=block_diffusion", "--setting.stop=abab"), ("'abab', which is not one token", "give ids")),
        ("sample", ("--sampler=block_diffusion", "--option.select=best"), ("no select 'best'; there are: static, dynamic",)),
        ("sample", ("--sampler=block_diffusion", "--setting.max_new=40"), ("max_new of 40 are 40 tokens", "context is 32")),
        ("sample", ("--sampler=autoregressive",), ("autoregressive doesn't go with the model qwen3 of mask_id=263", "block_diffusion")),
        ("sample", ("--sampler=ancestral",), ("ancestral doesn't go with the model qwen3",)),
        ("train", ("--config.model.block=0",), ("model.block is 0; make it 1 to model.length = 32",)),
        ("train", ("--config.model.block=33",), ("model.block is 33; make it 1 to model.length = 32",)),
        ("train", ("--config.model.mask_id=264",), ("model.mask_id is 264; make it an id below model.vocab",)),
        ("train", ("--config.model.mask_id=1",), ("model.mask_id is 1, and the train split", "holds it")),
        ("train", ("--config.model.vocab=100", "--config.model.mask_id=99"), ("model.vocab is 100, and the corpus has 263 symbols",)),
        ("train", ("--config.model.mask_id=-1",), ("block_diffusion doesn't go with the model qwen3 of mask_id=-1",)),
        ("train", ("--config.data.length=64",), ("data.length is 64 and model.length, the longest sequence, 32",)),
        ("train", ("--config.data.length=8",), ("rows of 16 tokens, and data.length is 8",)),
    ],
    ids=lambda x: x[-1] if isinstance(x, tuple) and x[0].startswith("--") else "",
)
def test_bad_input(tokens, programs, tmp_path, program, flags, says):
    before = files(tokens)
    workdir = tmp_path / "new" if program == "train" else tokens / "bd"
    own = (f"--config={tokens / 'bd.py'}",) if program == "train" else ("--num=2", f"--out={tmp_path / 'new' / 's'}")
    line = complaint(programs.run(program, f"--workdir={workdir}", *own, *flags))
    for piece in says:
        assert piece in line
    assert files(tokens) == before
    assert not (tmp_path / "new").exists()


def test_a_workdir_without_its_tokenizer(tokens, programs, tmp_path):
    shutil.copytree(tokens / "bd", tmp_path / "bd")
    shutil.rmtree(tmp_path / "bd" / "tokenizer")
    flags = (f"--workdir={tmp_path / 'bd'}", "--sampler=block_diffusion", f"--out={tmp_path / 'new' / 's'}")
    assert "the model has 264 ids, and" in complaint(programs.run("sample", *flags))
    (tmp_path / "bd" / "tokenizer").mkdir()
    (tmp_path / "bd" / "tokenizer" / "tok.bin").write_bytes(b"\0" * 6)
    assert "tok.bin is no llama2.c tokenizer, or cut off" in complaint(programs.run("sample", *flags))


def test_schedule_names_the_flags_of_the_best_interval(tokens, programs, tmp_path):
    shutil.copytree(tokens / "bd", tmp_path / "bd")
    done = programs.run("schedule", f"--workdir={tmp_path / 'bd'}", f"--data_path={tokens / 'corpus'}", "--num=0", "--by=nelbo")
    assert done.code == 0, done.err
    found = json.loads((tmp_path / "bd" / "schedule.json").read_text())
    variances = [interval["nelbo"] for interval in found["intervals"]]
    assert found["chunks"] == 16
    assert variances == sorted(variances)
    best = found["intervals"][0]
    assert f"best: --config.objective.low={best['low']} --config.objective.high={best['high']}" in done.out
    done = programs.run("schedule", f"--workdir={tokens / 'ar'}")
    assert "block-diffusion" in complaint(done)

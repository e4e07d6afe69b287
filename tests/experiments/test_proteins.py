"""The programs on proteins, whose lengths differ: train, sample, sweep and evaluate; and a causal block on a frozen backbone."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from dllm.models import esm2
from dllm.train.checkpoint import load_run
from tests.data.test_documents import written
from tests.experiments.programs import SWEEP, complaint, config_text
from tests.train import tiny

LENGTH = 32
MODEL = {"name": "esm2", "length": LENGTH, "width": 16, "n_noncausal": 1, "n_causal": 0, "heads": 2, "mlp": 32}
SAMPLER = {"name": "ancestral", "window": "constant", "rate": 4.0}
TAIL = "^(join|causal|gain)"


def config(place, **more):
    train = {"train__steps": 2, "train__eval_every": 2, "train__sample_every": 2, "train__save_every": 2, "train__eval_batches": 1}
    data = {"name": "uniref50", "path": str(place / "rows"), "length": LENGTH, "buckets": (16,)}
    return config_text(tiny.config(data=data, model=MODEL, sampler=SAMPLER, **train) | more)


@pytest.fixture(scope="module")
def place(tmp_path_factory, programs):
    """Prepared proteins, a masked model of them, and a frozen one with a causal block. No test changes it."""
    place, rng = tmp_path_factory.mktemp("proteins"), np.random.default_rng(0)
    (place / "src").mkdir()
    for split, count in (("train", 40), ("valid", 10), ("test", 9)):
        texts = ("".join(rng.choice(list("LAGVSERT"), rng.integers(5, 30))) for _ in range(count))
        written(place / "src" / f"{split}.fasta.gz", "".join(f">{n}\n{text}\n" for n, text in enumerate(texts)))
    done = programs.run("prepare", "--data=uniref50", f"--src={place / 'src'}", f"--dst={place / 'rows'}", f"--length={LENGTH}")
    assert done.code == 0, done.err
    (place / "backbone.py").write_text(config(place))
    tail = tiny.config(train__steps=2, train__init_from=str(place / "backbone"), optim__train_only=TAIL, train__eval_batches=1)
    (place / "frozen.py").write_text(config(place, model=MODEL | {"n_causal": 1}, train=tail["train"], optim=tail["optim"]))
    for name in ("backbone", "frozen"):
        done = programs.run("train", f"--config={place / name}.py", f"--workdir={place / name}")
        assert done.code == 0, done.err
    return place


def lengths(place, split="valid"):
    return (np.load(place / "rows" / f"{split}.lengths.npy") - 2).tolist()


def test_a_frozen_backbone_is_left_bit_equal(place):
    before, after = (load_run(str(place / name)).variables["params"] for name in ("backbone", "frozen"))
    assert set(after) > set(before)
    for name in before:
        for old, new in zip(*(np_leaves(tree[name]) for tree in (before, after)), strict=True):
            np.testing.assert_array_equal(old, new)
    fresh = esm2.init(esm2.Config(**{k: v for k, v in MODEL.items() if k != "name"} | {"n_causal": 1}), jax.random.key(0))
    moved = [np.abs(a - b).max() for a, b in zip(np_leaves(fresh["params"]["join"]), np_leaves(after["join"]), strict=True)]
    assert max(moved) > 0


def np_leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_samples_are_as_long_as_real_ones(place, programs, tmp_path):
    shown = (place / "backbone" / "samples" / "2.txt").read_text().split()
    assert [len(text) for text in shown] == lengths(place)[:4]
    out = tmp_path / "s.jsonl"
    done = programs.run("sample", f"--workdir={place / 'frozen'}", "--sampler=self_speculative", "--num=10", "--batch=4", f"--out={out}")
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [len(line["text"]) for line in lines] == lengths(place)
    assert [line["new_tokens"] for line in lines] == lengths(place)
    assert set("".join(line["text"] for line in lines)) <= set("LAGVSERTIDPKQNFYMHWC")


def test_a_prompt_tells_the_length(place, programs, tmp_path):
    out, flags = tmp_path / "s.jsonl", (f"--workdir={place / 'backbone'}", "--sampler=ancestral", "--num=3", "--option.rate=1")
    done = programs.run("sample", *flags, "--option.window=constant", "--prompt=M?L????", f"--out={out}", "--data_path=/none")
    assert done.code == 0, done.err
    for line in map(json.loads, out.read_text().splitlines()):
        assert (line["text"][0], line["text"][2], len(line["text"])) == ("M", "L", 7)
        assert (line["new_tokens"], line["nfe"]) == (5, 5)  # a residue a pass, of the text's own open ones
    for prompt, text in (
        ("M" + 31 * "?", "34 tokens, and the model's context is 32"),
        ("MLV", "no open position"),
        ("M?<mask>", "32, MASK"),
        ("M?j", "'j'"),
    ):
        assert text in complaint(programs.run("sample", *flags, f"--prompt={prompt}"))
    assert "/none holds no whole prepared corpus" in complaint(programs.run("sample", *flags, "--data_path=/none"))


def test_sweep_and_evaluate(place, programs, tmp_path):
    points = ({"sampler": "self_speculative", "options": {"window": "constant", "rate": 4.0}, "settings": {}},)
    sweep = SWEEP | {"num_samples": 6, "evals": ("protein",), "judge": str(place / "backbone"), "points": points}
    (tmp_path / "sweep.py").write_text(config_text(sweep))
    done = programs.run("sweep", f"--config={tmp_path / 'sweep.py'}", f"--workdir={place / 'frozen'}", f"--out={tmp_path / 'out'}")
    assert done.code == 0, done.err
    (row,) = map(json.loads, (tmp_path / "out" / "results.jsonl").read_text().splitlines())
    picked = [lengths(place)[n] for n in np.arange(6) * 10 // 6]
    assert row["residues"] == pytest.approx(np.mean(picked))
    assert row["tokens_per_pass"] == pytest.approx(np.sum(picked) / (6 * row["nfe"]))
    reference = json.loads((tmp_path / "out" / "reference.json").read_text())
    assert reference["composition_js"]["ceiling"] == pytest.approx(reference["composition_js"]["floor"])  # the same letters
    assert reference["residues"]["ceiling"] == reference["residues"]["floor"] == pytest.approx(np.mean(lengths(place)))

    done = programs.run("evaluate", f"--workdir={place / 'frozen'}", "--evals=bound,likelihood,protein", "--num=4")
    assert done.code == 0, done.err
    (row,) = map(json.loads, (place / "frozen" / "evals.jsonl").read_text().splitlines())
    assert 4 < row["draft_bpc"] < 6  # log2 of 33, about
    assert 4 < row["elbo_bpc"] < 6
    picked = [lengths(place)[n] for n in np.arange(4) * 10 // 4]
    assert row["residues"] == pytest.approx(np.mean(picked))
    assert row["tokens_per_pass_given_x"] * row["passes_given_x"] == pytest.approx(np.mean(picked), rel=1e-5)
    done = programs.run("ranks", f"--workdir={place / 'frozen'}", "--num=4", "--starts=0,8", f"--out={tmp_path / 'ranks'}")
    assert done.code == 0, done.err
    found = np.load(tmp_path / "ranks.npz")
    assert np.isnan(found["gain"][:, 30:]).all()  # no text is that long
    assert not np.isnan(found["gain"][0, : min(picked)]).any()

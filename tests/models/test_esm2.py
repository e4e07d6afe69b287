"""ESM-2 as a hybrid: order and padding change nothing, verification agrees with training, and a frozen backbone stays as it came.

Its logits against `transformers`: test_hf.py.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.core.paths import named_leaves
from dllm.core.types import UserError
from dllm.evals.generate import generate, make_task
from dllm.models import esm2, gpt2, hf, hybrid
from dllm.samplers.loop import kind
from dllm.train import checkpoint, converted, sharding, step
from dllm.train.state import create
from tests.models.test_decoder import shaken
from tests.train import tiny

CONFIG = esm2.Config(length=12, width=16, n_noncausal=2, n_causal=2, heads=2, mlp=24, causal_mlp=20)
OWN = hybrid.Config(vocab=33, length=12, width=16, n_noncausal=2, n_causal=2, heads=2, mlp=24, pad_id=1)
B, L, D, W = 3, 12, 8, 4  # D: the text's own length
TEXT = jax.random.randint(jax.random.key(0), (B, D), 4, 24)
ORDER = jnp.argsort(jax.random.uniform(jax.random.key(1), (B, D)), 1).astype(jnp.int32)
REVEALED = jnp.array([0, 2, 5], jnp.int32)


@functools.cache
def make(config):
    module = esm2 if isinstance(config, esm2.Config) else hybrid
    variables = {"params": shaken(module.init(config, jax.random.key(2))["params"])}
    call = jax.jit(
        lambda name, *args, **static: getattr(module.bind(config, variables), name)(*args, **static), static_argnames=("name", "window")
    )
    return call


def padded(tokens_BD, order_BD, revealed_B, seed):
    """Returns the same in rows of L, the padding anywhere among the revealed ranks, and how many each row has of it."""
    rng, extra = np.random.default_rng(seed), L - D
    tokens_BL, order_BL = np.ones((B, L), np.int32), np.zeros((B, L), np.int32)
    for b, revealed in enumerate(revealed_B.tolist()):
        ranks = np.arange(extra + revealed)
        text = np.sort(rng.permutation(ranks)[:revealed])
        behind = np.concatenate([text, np.arange(extra + revealed, L)]).astype(int)
        order_BL[b] = D + rng.permutation(L) % extra
        tokens_BL[b, behind], order_BL[b, behind] = tokens_BD[b], order_BD[b]
    return jnp.asarray(tokens_BL), jnp.asarray(order_BL), revealed_B + extra


@pytest.mark.parametrize("config", [CONFIG, OWN], ids=["esm2", "hybrid"])
def test_padding_changes_nothing(config):
    call, (tokens, order, revealed) = make(config), padded(np.asarray(TEXT), np.asarray(ORDER), REVEALED, 0)
    draft, target = call("both", TEXT, ORDER, REVEALED)
    draft_, target_ = call("both", tokens, order, revealed)
    for b in range(B):
        here, there = np.arange(REVEALED[b], D), np.arange(revealed[b], L)
        np.testing.assert_allclose(draft_[b, there], draft[b, here], atol=2e-5)
        real = here > 0  # the target of rank 0 means nothing
        np.testing.assert_allclose(target_[b, there[real]], target[b, here[real]], atol=2e-5)
    assert float(jnp.abs(target - draft).max()) > 0.01

    drafted, hidden = call("draft", tokens, order, revealed, window=W)
    verified = call("verify", hidden, tokens, order, revealed + 1, window=W)
    for b in range(B):
        first = int(REVEALED[b])
        here = np.arange(first, min(first + W, D))
        np.testing.assert_allclose(drafted[b, : len(here)], draft[b, here], atol=2e-5)
        here = np.arange(first + 1, min(first + 1 + W, D))
        np.testing.assert_allclose(verified[b, : len(here)], target[b, here], atol=2e-5)


@pytest.mark.parametrize("config", [CONFIG, OWN], ids=["esm2", "hybrid"])
def test_a_padding_token_that_was_drafted_is_a_token(config):
    """Only revealed ranks hold padding: what a model writes doesn't change what is read of a row."""
    call, tokens = make(config), TEXT.at[:, 6].set(1)
    _, hidden = call("draft", TEXT, ORDER, REVEALED, window=W)
    expect = call("both", tokens, ORDER, REVEALED)[1]
    verified = call("verify", hidden, tokens, ORDER, jnp.full((B,), 6), window=2)
    np.testing.assert_allclose(verified[:2], expect[:2, 6:8], atol=2e-5)


def test_rank_order_is_sequence_order_with_masks():
    """The draft of a rank is ESM-2's prediction at its position, hidden ones being MASK."""
    config = dataclasses.replace(CONFIG, n_causal=0)
    call, place = make(config), jnp.broadcast_to(jnp.arange(D, dtype=jnp.int32)[None], (B, D))
    ranked = jnp.take_along_axis(TEXT, ORDER, 1)
    draft, target = call("both", ranked, ORDER, REVEALED)
    seen = np.zeros((B, D), bool)
    for b, n in enumerate(REVEALED.tolist()):
        seen[b, np.asarray(ORDER)[b, :n]] = True
    plain, _ = call("both", jnp.where(seen, TEXT, config.mask_id), place, jnp.full((B,), D))
    np.testing.assert_allclose(draft, jnp.take_along_axis(plain, ORDER[:, :, None], 1), atol=2e-5)
    assert target is None


def test_draft_and_target_see_no_later_rank():
    call = make(CONFIG)
    draft, target = call("both", TEXT, ORDER, REVEALED)
    changed = TEXT.at[:, 6].set((TEXT[:, 6] + 1 - 4) % 20 + 4)
    draft_, target_ = call("both", changed, ORDER, REVEALED)
    np.testing.assert_array_equal(draft_, draft)
    np.testing.assert_array_equal(target_[:, :7], target[:, :7])
    assert float(jnp.abs(target_ - target)[:, 7:].max(-1).min()) > 1e-5


def test_it_writes_between_given_specials():
    """<cls>, residues, <eos> and padding: what is given stays, and only the rest is paid for."""
    config = dataclasses.replace(CONFIG, n_causal=1)
    variables = esm2.init(config, jax.random.key(3))
    run = types.SimpleNamespace(model_module=esm2, model_config=config, variables=variables)
    assert kind(esm2, config) == "hybrid"
    banned = {"banned": "0,1,2,3,24,25,26,27,28,29,30,31,32"}
    run.tokenizer = types.SimpleNamespace(
        mask=32, bos=0, begins=True, vocab=33, named=lambda text, where: [int(i) for i in text.split(",") if i]
    )
    row = [0, *[None] * 7, 2, 1, 1, 1]
    for sampler, options in (("self_speculative", {"rate": 0.3}), ("ancestral", {"rate": 0.3})):
        found = generate(make_task(run, sampler, options, banned), num=4, batch=4, seed=0, row=row)
        assert (found.tokens_BL[:, [0, 8, 9, 10, 11]] == [0, 2, 1, 1, 1]).all()
        assert ((found.tokens_BL[:, 1:8] >= 4) & (found.tokens_BL[:, 1:8] < 24)).all()
        assert found.new_B.tolist() == [7] * 4


def test_a_frozen_backbone_stays_bit_equal(tmp_path):
    """A converted esm2 without a tail comes in by its names; the tail is trained; everything else keeps its bits, EMA too."""
    plain = esm2.Config(vocab=33, length=16, width=16, n_noncausal=2, heads=2, mlp=24)
    sections = {"data": {}, "model": {"name": "esm2", **dataclasses.asdict(plain)}, "objective": {}}
    with converted.writing(tmp_path / "base", sections, {}, hf.abstract(plain)) as arrays:
        for i, array in enumerate(arrays.values()):
            array[...] = 0.3 * np.random.default_rng(i).normal(size=array.shape)
    model = {"name": "esm2", **dataclasses.asdict(dataclasses.replace(plain, n_causal=1))}
    run = tiny.run(model=model, optim__train_only="^(join|causal|gain)", train__init_from=str(tmp_path / "base"))
    mesh = sharding.make_mesh(run.mesh)
    with jax.set_mesh(mesh):
        state, text = checkpoint.warm_start(create(run, mesh), run, mesh)
        train_step, before = step.make_train_step(run, mesh), jax.device_get(state.params)
        for seed in range(3):
            tokens_BL = np.random.default_rng(seed).integers(4, 24, (8, 16)).astype(np.int32)
            state, metrics = train_step(state, step.put({"tokens": tokens_BL}, mesh))
    assert "new: causal/" in text
    assert "not used" not in text
    base = named_leaves(checkpoint.load_run(tmp_path / "base").variables["params"])
    new = {name for name in named_leaves(before) if re.search(run.optim.train_only, name)}
    for tree in (state.params, state.ema):
        for name, leaf in named_leaves(jax.device_get(tree)).items():
            if name in new:
                assert not np.array_equal(leaf, named_leaves(before)[name]), name
            else:
                np.testing.assert_array_equal(leaf, base[name], err_msg=name)
    assert set(base) == set(named_leaves(before)) - new
    assert np.isfinite(float(metrics["loss"]))


def test_configs_that_make_no_model():
    for module, changes, says in [
        (esm2, {"mask_id": 33}, "model.mask_id is 33; make it an id below model.vocab = 33"),
        (esm2, {"pad_id": -1}, "model.pad_id is -1; make it an id below"),
        (esm2, {"heads": 3}, "model.width is 16; it must be a multiple of 4 x heads = 12"),
        (esm2, {"pairing": "one"}, "model.pairing is 'one'"),
        (hybrid, {"pad_id": 33}, "model.pad_id is 33; make it an id below model.vocab = 33, or -1 for none"),
    ]:
        with pytest.raises(UserError, match=re.escape(says)):
            module.build(dataclasses.replace(CONFIG if module is esm2 else OWN, **changes))


@pytest.mark.parametrize("module, config", [(esm2, CONFIG), (gpt2, gpt2.Config(vocab=27, length=10, width=16, layers=2, heads=2, mlp=24))])
def test_every_parameter_has_a_rule(module, config):
    like = jax.eval_shape(lambda: module.init(config, jax.random.key(0))["params"])
    sharding.shardings(like, module.RULES, sharding.make_mesh(tiny.run().mesh))  # raises for a leaf without one

"""GPT-2: through the cache, behind its last position, as samplers see it. Its logits against `transformers`: test_hf.py."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.data.tokenizers import CHARACTERS
from dllm.evals.generate import generate, make_task
from dllm.models import gpt2
from dllm.ops import masks
from dllm.samplers.loop import kind, lead
from tests.models.test_decoder import shaken

CONFIG = gpt2.Config(vocab=27, length=10, width=16, layers=2, heads=2, mlp=24)
TOKENS = jax.random.randint(jax.random.key(0), (2, 10), 0, 27)
AT = jnp.broadcast_to(jnp.arange(10, dtype=jnp.int32)[None], (2, 10))


@pytest.fixture(scope="module")
def variables():
    return {"params": shaken(gpt2.init(CONFIG, jax.random.key(1))["params"])}


@pytest.fixture(scope="module")
def forward():
    return jax.jit(lambda variables, cache, tokens, at: gpt2.bind(CONFIG, variables).forward(cache, tokens, at, masks.causal))


def test_cached_equals_uncached(variables, forward):
    whole, _ = forward(variables, None, TOKENS, AT)
    cache = gpt2.bind(CONFIG, variables).empty_cache(2, 10)
    for n in range(0, 10, 5):
        part, cache = forward(variables, cache, TOKENS[:, n : n + 5], AT[:, n : n + 5])
        cache = cache.replace(lengths_B=cache.lengths_B + 5)
        np.testing.assert_allclose(part, whole[:, n : n + 5], atol=1e-5)


def test_positions_are_learned_and_no_token_sees_a_later_one(variables, forward):
    whole, _ = forward(variables, None, TOKENS, AT)
    other, _ = forward(variables, None, TOKENS.at[:, 6].set((TOKENS[:, 6] + 1) % 27), AT)
    np.testing.assert_array_equal(other[:, :6], whole[:, :6])
    assert float(jnp.abs(other - whole)[:, 6:].max(-1).min()) > 1e-4
    turned, _ = forward(variables, None, TOKENS, AT[:, ::-1])
    assert float(jnp.abs(turned - whole).max()) > 0.1


def test_rows_behind_the_last_position_are_numbers(variables, forward):
    """Prefill pads prompts to whole chunks. Such rows aren't read, but nought times NaN is NaN."""
    logits, _ = forward(variables, None, TOKENS, AT + 7)
    assert bool(jnp.isfinite(logits).all())


def test_it_samples_like_its_own_law(variables):
    """With temperature 0 each token is the argmax given those before it."""
    run = types.SimpleNamespace(model_module=gpt2, model_config=CONFIG, variables=variables, tokenizer=CHARACTERS)
    assert (kind(gpt2, CONFIG), lead(CONFIG)) == ("autoregressive", 0)
    found = generate(make_task(run, "autoregressive", {}, {"temperature": 0.0}), num=1, batch=1, seed=0, row=[3, 1])
    tokens_L, greedy = (
        found.tokens_BL[0],
        jax.jit(lambda tokens: gpt2.bind(CONFIG, variables).forward(None, tokens, AT[:1], masks.causal)[0]),
    )
    assert found.nfe_B.tolist() == [8]
    np.testing.assert_array_equal(greedy(tokens_L[None])[0, 1:-1].argmax(-1), tokens_L[2:])


def test_a_config_that_makes_no_model():
    for changes, says in [({"heads": 3}, "model.width is 16; it must be a multiple of heads = 3"), ({"length": 0}, "model.length is 0")]:
        with pytest.raises(UserError, match=says):
            gpt2.build(dataclasses.replace(CONFIG, **changes))

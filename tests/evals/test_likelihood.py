"""The eval of the sampler's likelihood on a real network: it is the law of the production sampler, and its figures are what they say."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.data.tokenizers import CHARACTERS
from dllm.evals import likelihood
from dllm.evals.stats import Context
from dllm.models import gpt, hybrid
from dllm.samplers import self_speculative
from dllm.samplers.self_speculative import Options
from tests.samplers.test_laws import MIXED, law, law_ssmd

LENGTH = 12
CONFIG = hybrid.Config(length=LENGTH, width=16, n_noncausal=1, n_causal=1, heads=2, mlp=32)


def run_of(module, config, change=lambda x: x):
    variables = change(module.init(config, jax.random.key(1)))
    return SimpleNamespace(model_module=module, model_config=config, variables=variables, tokenizer=CHARACTERS)


def chunks(count, vocab=27):
    return np.random.default_rng(0).integers(0, vocab, (count, LENGTH)), np.full(count, LENGTH)


def law_by_eval(vocab, length, order, options):
    """Returns (functions, {text in sequence order: p(x | sigma)}) of a small network whose laws are far from uniform."""
    config = hybrid.Config(vocab=vocab, length=length, width=16, n_noncausal=1, n_causal=1, heads=2, mlp=32, gain=1.0)
    functions = hybrid.bind(config, jax.tree.map(lambda x: x * 2.0, hybrid.init(config, jax.random.key(0))))
    texts = list(itertools.product(range(vocab), repeat=length))
    one = lambda x: likelihood.text_likelihood(functions, x, jnp.asarray(order, jnp.int32), options).log_p
    log_p = jax.jit(jax.vmap(one))(jnp.asarray(texts, jnp.int32))
    return functions, dict(zip(texts, np.exp(np.asarray(log_p, np.float64)).tolist()))


@pytest.mark.parametrize("name, n_verify", [("D", 1), pytest.param("D", 2, marks=pytest.mark.slow)])
def test_it_is_the_law_of_the_production_sampler(name, n_verify):
    functions, law = law_by_eval(2, 3, (2, 0, 1), Options("constant", 3.0, n_verify))
    drawn = law_ssmd(functions, name, n_verify, "chain", order=(2, 0, 1), rows=64, tolerance=2e-6)
    assert max(law.values()) > 0.2
    assert law.keys() == drawn.keys()
    assert max(abs(law[x] - drawn[x]) for x in law) < 2e-6


@pytest.mark.parametrize("shape, rate, n_verify", [("linear", 4.0, 2), pytest.param("constant", 4.0, 1, marks=pytest.mark.slow)])
def test_all_texts_sum_to_one(shape, rate, n_verify):
    _, law = law_by_eval(3, 4, (3, 1, 0, 2), Options(shape, rate, n_verify))
    assert len(law) == 81
    assert sum(law.values()) == pytest.approx(1, abs=1e-5)
    assert max(law.values()) > 3 * min(law.values())


@pytest.mark.parametrize("options", [Options("linear", 2.0, 1), pytest.param(Options("constant", 2.0, 2), marks=pytest.mark.slow)])
def test_a_text_among_longer_ones_has_its_own_length(options):
    """A special token, two letters, padding: windows are those of two ranks, and no law gives the special tokens weight."""
    config = hybrid.Config(vocab=4, length=4, width=16, n_noncausal=1, n_causal=1, heads=2, mlp=32, gain=1.0, pad_id=1)
    functions = hybrid.bind(config, jax.tree.map(lambda x: x * 2.0, hybrid.init(config, jax.random.key(0))))
    law_of = dict(prompt=MIXED, settings={"banned": [0, 1]}, rows=64, tolerance=2e-6)
    drawn = law(self_speculative, options, functions, cycles=4 * (options.n_verify + 1), **law_of)
    order_L, given_L = jnp.asarray([0, 3, 1, 2], jnp.int32), MIXED.given
    one = jax.jit(lambda x: likelihood.text_likelihood(functions, x, order_L, options, given_L, (0, 1)).log_p)
    for text in itertools.product((0,), (2, 3), (2, 3), (1,)):
        assert np.exp(one(jnp.asarray(text, jnp.int32))) == pytest.approx(drawn[text], abs=2e-6)
    assert sum(drawn.values()) == pytest.approx(1, abs=1e-5)
    assert len(drawn) == 4
    assert max(drawn.values()) > 1.2 * min(drawn.values())


def test_figures_of_a_model_that_knows_nothing():
    """Draft and target are uniform, hence equal: log2 27 bits a character, every draft accepted, a pass of either kind for each window."""
    run = run_of(hybrid, CONFIG, lambda variables: jax.tree.map(jnp.zeros_like, variables))
    metrics = likelihood.evaluate(*chunks(3), Context(run=run, options=Options(window="constant", rate=5.0, n_verify=3)))
    assert metrics["elbo_bpc"].value == pytest.approx(np.log2(27), rel=1e-5)
    for name, expect in {"passes_given_x": 3, "causal_passes_given_x": 3, "tokens_per_pass_given_x": 4}.items():
        assert metrics[name].value == pytest.approx(expect, rel=1e-5)
        assert metrics[name].stderr == pytest.approx(0, abs=1e-5)


def test_figures_are_means_over_fixed_orders():
    run = run_of(hybrid, CONFIG, lambda variables: jax.tree.map(lambda x: 3.0 * x, variables))
    tokens_BL, lengths_B = chunks(4)
    tokens_BL[3] = tokens_BL[0]
    context = Context(run=run, options=Options(rate=0.3, n_verify=2), seed=5)
    metrics = likelihood.evaluate(tokens_BL, lengths_B, context)
    bpc_B = metrics["elbo_bpc"].numerator_B / LENGTH
    assert bpc_B[0] != bpc_B[3]  # other orders
    again = likelihood.evaluate(tokens_BL[:2], lengths_B[:2], context)
    same_B = metrics["elbo_bpc"].numerator_B[:2]
    assert again["elbo_bpc"].numerator_B.tolist() == same_B.tolist()  # which don't depend on how many chunks there are
    assert again["elbo_bpc"].stderr > 0

    functions = hybrid.bind(CONFIG, run.variables)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(5), 1), likelihood.ORDERS)
    one = jax.jit(lambda x, key: likelihood.text_likelihood(functions, x, jax.random.permutation(key, LENGTH), context.options))
    singles = [one(jnp.asarray(tokens_BL[1], jnp.int32), key) for key in keys]
    assert singles[0].log_p != singles[1].log_p
    mean = lambda field: np.mean([float(getattr(x, field)) for x in singles])
    assert bpc_B[1] == pytest.approx(-mean("log_p") / (LENGTH * np.log(2)), rel=1e-5)
    assert metrics["passes_given_x"].numerator_B[1] == pytest.approx(mean("noncausal"), rel=1e-5)
    assert metrics["causal_passes_given_x"].numerator_B[1] == pytest.approx(mean("causal"), rel=1e-5)
    per_pass = metrics["tokens_per_pass_given_x"]
    assert per_pass.value == pytest.approx(LENGTH / metrics["passes_given_x"].value)


def test_runs_and_options_that_do_not_fit():
    plain = run_of(hybrid, hybrid.Config(length=LENGTH, width=16, n_noncausal=1, n_causal=0, heads=2, mlp=32))
    judge = run_of(gpt, gpt.Config(length=LENGTH, width=16, layers=1, heads=2, mlp=32))
    fits = SimpleNamespace(model_config=CONFIG)
    for run in (plain, judge):
        with pytest.raises(UserError, match=r"needs a hybrid run with n_causal > 0, .* use --evals=bound"):
            likelihood.evaluate(*chunks(1), Context(run=run, options=Options()))
    for options, message in {Options(verification="block"): "option.verification=chain", Options(n_verify=0): "n_verify must be 1"}.items():
        with pytest.raises(UserError, match=message):
            likelihood.evaluate(*chunks(1), Context(run=fits, options=options))
    with pytest.raises(UserError, match="needs the options of a run"):
        likelihood.evaluate(*chunks(1), Context(run=fits))

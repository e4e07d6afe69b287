"""The metrics that run a network: gen_nll and bound; and generate."""

from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.data import tokenizers
from dllm.data.tokenizers import CHARACTERS
from dllm.diffusion import next_token, ssmd
from dllm.evals import bound, entropy, gen_nll
from dllm.evals.generate import check_request, generate, make_task, parse_prompt, stream
from dllm.evals.stats import Context
from dllm.models import gpt, hybrid, qwen3
from dllm.ops import masks
from tests.data.files import scored

LENGTH = 12


def loaded(module, config, tokenizer=CHARACTERS):
    variables = module.init(config, jax.random.key(1))
    return SimpleNamespace(model_module=module, model_config=config, variables=variables, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def judge():
    return loaded(gpt, gpt.Config(length=LENGTH, width=16, layers=1, heads=2, mlp=32))


@pytest.fixture(scope="module")
def run():
    return loaded(hybrid, hybrid.Config(length=LENGTH, width=16, n_noncausal=1, n_causal=1, heads=2, mlp=32))


def test_gen_nll_is_the_judges_log_likelihood(judge):
    tokens_BL = np.random.default_rng(0).integers(0, 27, (5, LENGTH))
    lengths_B = np.array([LENGTH, 1, 4, LENGTH, 7])
    metric = gen_nll.evaluate(tokens_BL, lengths_B, Context(judge=judge))["gen_nll"]
    functions = gpt.bind(judge.model_config, judge.variables)
    forward = jax.jit(lambda read: functions.forward(None, read, jnp.arange(LENGTH)[None], masks.causal)[0])
    for b, length in enumerate(lengths_B):
        logits_LV = np.asarray(forward(jnp.asarray([[27, *tokens_BL[b, :-1]]], jnp.int32))[0], np.float64)
        log_p_LV = logits_LV - np.log(np.exp(logits_LV).sum(axis=1, keepdims=True))
        assert metric.numerator_B[b] == pytest.approx(-log_p_LV[np.arange(length), tokens_BL[b, :length]].sum(), rel=1e-4)
    assert metric.denominator_B.tolist() == lengths_B.tolist()


@pytest.fixture(scope="module")
def reader():
    """An autoregressive qwen3 with a tokenizer of its own."""
    config = qwen3.Config(vocab=40, length=LENGTH, width=16, layers=1, heads=2, kv_heads=1, head_width=8, mlp=32, block=1, mask_id=-1)
    return loaded(qwen3, config)


def test_gen_nll_of_a_qwen3_judge_leaves_the_first_token_out(reader):
    tokens_BL = np.random.default_rng(0).integers(0, 40, (4, LENGTH))
    lengths_B = np.array([LENGTH, 1, 0, 7])
    metric = gen_nll.evaluate(tokens_BL, lengths_B, Context(judge=reader))["gen_nll"]
    functions = qwen3.bind(reader.model_config, reader.variables)
    logits_BLV = jax.jit(lambda x: functions.forward(None, x, jnp.tile(jnp.arange(LENGTH)[None], (4, 1)), masks.causal)[0])(tokens_BL)
    logp_BLV = np.asarray(jax.nn.log_softmax(logits_BLV), np.float64)
    for b, length in enumerate(lengths_B):
        expect = -sum(logp_BLV[b, l - 1, tokens_BL[b, l]] for l in range(1, length))
        assert metric.numerator_B[b] == pytest.approx(expect, rel=1e-4)
    assert metric.denominator_B.tolist() == [LENGTH - 1, 0, 0, 6]


def test_a_judge_of_another_tokenizer_is_refused(judge, tmp_path):
    other = SimpleNamespace(tokenizer=tokenizers.read(scored(tmp_path, {"ab": -1.0})))
    gen_nll.require_same_symbols(judge, judge)
    with pytest.raises(UserError, match="another tokenizer"):
        gen_nll.require_same_symbols(judge, other)


def test_entropy_of_any_vocabulary():
    """A dense table of 151,936 counts a sequence would be a terabyte here."""
    tokens_BL = np.full((100_000, 2), 151_935)
    tokens_BL[::2, 0] = 7
    metrics = entropy.evaluate(tokens_BL, np.full(100_000, 2), Context())
    assert metrics["entropy"].value == pytest.approx(np.log(2) / 2)
    assert metrics["entropy_pooled"].value == pytest.approx(-(0.25 * np.log(0.25) + 0.75 * np.log(0.75)))


def test_the_canvas_is_prompt_and_max_new():
    """A context of 32,768 isn't allocated for a short text, and a block isn't cut: its text would be another."""
    config = qwen3.Config(length=32_768, width=16, layers=1, heads=2, kv_heads=1, head_width=8, mlp=32, block=8)
    task = make_task(loaded(qwen3, config), "block_diffusion", {}, {"max_new": 5})
    prompt = check_request(task, 1, 1, parse_prompt("abc def"))
    assert prompt.tokens.shape == (1, 16)
    g = generate(task, num=2, batch=2, seed=0, row=parse_prompt("abc def"))
    assert g.lengths_B.tolist() == [12, 12]
    assert g.new_B.tolist() == [5, 5]
    assert (g.tokens_BL < 27).all()
    with pytest.raises(UserError, match="a prompt of 32766 and max_new of 5 are 32771 tokens, and the model's context is 32768"):
        check_request(task, 1, 1, [0] * 32_766)
    with pytest.raises(UserError, match="the prompt holds the id 27, MASK"):
        check_request(task, 1, 1, [1, 27])
    with pytest.raises(UserError, match="the prompt holds the id 28, and the model has 28"):
        check_request(task, 1, 1, [1, 28])


def test_an_empty_prompt_begins_with_bos_or_not_at_all(reader, tmp_path):
    with pytest.raises(UserError, match="its tokenizer has none that begins a text: give a prompt"):
        check_request(make_task(reader, "autoregressive", {}, {}), 1, 1, [])
    tokenizer = tokenizers.read(scored(tmp_path, {"ab": -1.0}))
    config = qwen3.Config(vocab=263, length=8, width=16, layers=1, heads=2, kv_heads=1, head_width=8, mlp=32, block=1, mask_id=-1)
    run = loaded(qwen3, config, tokenizer)
    task = make_task(run, "autoregressive", {}, {"max_new": 4, "stop": "ab", "banned": "5,6"})
    g = generate(task, num=3, batch=3, seed=0)
    assert (g.tokens_BL[:, 0] == tokenizer.bos).all()
    assert g.tokens_BL.shape == (3, 5)
    assert parse_prompt("ab", tokenizer) == [1, *tokenizer.encode("ab")]
    for stop, message in [("263", "stop holds an id outside the vocabulary of 263"), ("abab", "not one token")]:
        with pytest.raises(UserError, match=message):
            make_task(run, "autoregressive", {}, {"stop": stop})


def test_gen_nll_refuses_what_the_judge_cannot_read(judge):
    with pytest.raises(UserError, match="judge reads 12"):
        gen_nll.evaluate(np.zeros((2, LENGTH + 1), int), np.array([1, 1]), Context(judge=judge))
    with pytest.raises(UserError, match="not id 27"):
        gen_nll.evaluate(np.full((2, LENGTH), 27), np.array([1, 1]), Context(judge=judge))


def test_bound_scores_each_chunk_with_its_own_fixed_draws():
    module, objective = ModuleType("model"), ModuleType("objective")
    module.bind = lambda config, variables: variables
    objective.loss = lambda functions, tokens_BL, key, config: (0.0, {"mean": tokens_BL.mean(), "noise": jax.random.uniform(key)})
    run = SimpleNamespace(model_module=module, model_config=None, variables=0.0, tokenizer=tokenizers.CHARACTERS)
    context = Context(run=run, objective=(objective, None), seed=3)
    tokens_BL = np.random.default_rng(0).integers(0, 27, (bound.CHUNKS + 3, LENGTH))  # the last pass is not full
    metrics = bound.evaluate(tokens_BL, np.full(len(tokens_BL), LENGTH), context)
    assert metrics["mean"].numerator_B == pytest.approx(tokens_BL.mean(axis=1), rel=1e-6)
    noise_B = metrics["noise"].numerator_B
    assert len(set(noise_B)) == len(noise_B)
    again = bound.evaluate(tokens_BL[:2], np.full(2, LENGTH), context)  # a chunk's draws don't depend on how many there are
    assert again["noise"].numerator_B.tolist() == noise_B[:2].tolist()


def test_bound_of_a_real_run(run, judge):
    tokens_BL = np.random.default_rng(1).integers(0, 27, (9, LENGTH))
    lengths_B = np.full(9, LENGTH)
    metrics = bound.evaluate(tokens_BL, lengths_B, Context(run=run, objective=(ssmd, ssmd.Config())))
    assert {"draft_bpc", "draft_ce", "causal_ce", "causal_gain"} <= set(metrics)
    gain = metrics["causal_gain"]
    assert gain.value == pytest.approx(metrics["draft_ce"].value - metrics["causal_ce"].value, abs=1e-6)
    flat = SimpleNamespace(**vars(run) | {"variables": jax.tree.map(jnp.zeros_like, run.variables)})  # knows nothing: uniform
    blank = bound.evaluate(tokens_BL, lengths_B, Context(run=flat, objective=(ssmd, ssmd.Config())))
    assert blank["draft_bpc"].value == pytest.approx(np.log2(27), rel=1e-5)
    assert blank["causal_gain"].value == pytest.approx(0, abs=1e-5)
    exact = bound.evaluate(tokens_BL, lengths_B, Context(run=judge, objective=(next_token, next_token.Config())))
    nats = gen_nll.evaluate(tokens_BL, lengths_B, Context(judge=judge))["gen_nll"]
    assert exact["bpc"].value == pytest.approx(nats.value / np.log(2), rel=1e-5)
    assert exact["bpc"].stderr == pytest.approx(nats.stderr / np.log(2), rel=1e-4)


def test_samples_do_not_depend_on_the_batch(run):
    task = make_task(run, "self_speculative", {"rate": 0.3, "n_verify": 2}, {"temperature": 0.7})
    row = parse_prompt("ab??c")
    whole = generate(task, num=5, batch=5, seed=1, row=row)
    parts = generate(task, num=5, batch=2, seed=1, row=row)
    assert whole.tokens_BL.tolist() == parts.tokens_BL.tolist()
    assert whole.nfe_B.tolist() == parts.nfe_B.tolist()
    assert len({tuple(x) for x in whole.tokens_BL.tolist()}) > 1
    assert (whole.tokens_BL[:, [0, 1, 4]] == [1, 2, 3]).all()
    assert (whole.new_B == LENGTH - 3).all()
    other = generate(task, num=5, batch=5, seed=2, row=row)
    assert whole.tokens_BL.tolist() != other.tokens_BL.tolist()


def test_weighted_passes_use_the_models_layers(run):
    g = generate(make_task(run, "self_speculative", {"rate": 0.3, "n_verify": 2}, {}), num=4, batch=4, seed=0)
    assert g.nfe_weighted_B == pytest.approx((g.passes.noncausal + g.passes.causal) / 2)  # 1 + 1 layers
    assert (g.passes.causal > 0).all()


@pytest.mark.parametrize(
    ("sampler", "options", "settings", "message"),
    [
        ("nothing", {}, {}, "there are: ancestral"),
        ("autoregressive", {}, {}, "doesn't go with the model hybrid"),
        ("ancestral", {"n_verify": 2}, {}, "n_verify"),
        ("ancestral", {"rate": "fast"}, {}, "rate"),
        ("ancestral", {}, {"heat": 1.0}, "heat"),
        ("ancestral", {}, {"stop": " "}, "left-to-right"),
        ("ancestral", {}, {"max_new": 3}, "left-to-right"),
    ],
)
def test_tasks_that_do_not_fit(run, sampler, options, settings, message):
    with pytest.raises(UserError, match=message):
        make_task(run, sampler, options, settings)


def test_prompts():
    assert parse_prompt("a? b") == [1, None, 0, 2]
    with pytest.raises(UserError, match="the prompt has 'A' at offset 2"):
        parse_prompt("a?A")


def test_prompts_that_do_not_fit(run, judge):
    with pytest.raises(UserError, match="context is 12"):
        generate(make_task(run, "ancestral", {}, {}), num=1, batch=1, seed=0, row=parse_prompt("a" * 13))
    with pytest.raises(UserError, match="prefix"):
        generate(make_task(judge, "autoregressive", {}, {}), num=1, batch=1, seed=0, row=parse_prompt("a?a"))


def test_left_to_right_settings(judge):
    g = generate(make_task(judge, "autoregressive", {}, {"max_new": 3, "stop": "e", "banned": "xyz"}), num=20, batch=20, seed=0, row=[1, 2])
    assert (g.lengths_B <= 5).all()
    assert (g.new_B == g.lengths_B - 2).all()
    assert (g.nfe_B == g.new_B).all()
    stopped_B = g.lengths_B < 5
    assert (g.tokens_BL[stopped_B, g.lengths_B[stopped_B] - 1] == 5).all()


def test_stream_tells_the_text_of_the_first_sample_in_pieces():
    config = qwen3.Config(vocab=28, length=LENGTH, width=16, layers=1, heads=2, kv_heads=1, head_width=8, mlp=32, block=4, mask_id=27)
    run = loaded(qwen3, config)
    task = make_task(run, "block_diffusion", {"select": "static"}, {})
    pieces = list(stream(task, seed=5, row=[1, 2]))
    (whole_L,) = generate(task, num=1, batch=1, seed=5, row=[1, 2]).tokens_BL
    assert "".join(pieces) == CHARACTERS.decode(whole_L.tolist())
    assert pieces[0] == "ab"
    assert len(pieces) > 3
    with pytest.raises(UserError, match="drop --stream"):
        next(stream(make_task(loaded(qwen3, config), "self_verified", {}, {}), seed=5))

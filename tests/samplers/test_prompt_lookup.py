"""Prompt lookup: its law is the model's own, exactly; its tokens are those of `autoregressive` under the same keys."""

from __future__ import annotations

import functools
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.models import gpt, qwen3, uno
from dllm.models.cache import Cache
from dllm.ops.draws import KeyedDraws, enumerate_scripts
from dllm.ops.settings import make_settings, shape_logits
from dllm.samplers import autoregressive, prompt_lookup
from dllm.samplers.loop import compile_sampler, make_prompt
from dllm.samplers.prompt_lookup import Options, look_up

SIZE = 997


class Network:
    """A table model: a row's law is found by the sum of all keys that it read, a key being a number made of token and position. So a key
    too many, too few, or another one gives another law. Keys go through the production cache."""

    stale = 0  # of forwards of so many rows, the first is not written: a mistake

    def __init__(self, vocab, length, lead, seed=0):
        rng = np.random.default_rng(seed)
        self.vocab, self.length, self.lead = vocab, length, lead
        self.keys = rng.integers(1, SIZE, (vocab + 1, 4 * length))
        self.table = np.log(rng.dirichlet(np.full(vocab, 0.7), SIZE))

    def empty_cache(self, batch, slots):
        return Cache.empty(1, batch, slots, 1, 1, jnp.float64)

    def forward(self, cache, tokens_BQ, positions_BQ, mask):
        rows_BQGK = jnp.asarray(self.keys)[tokens_BQ, positions_BQ][:, :, None, None].astype(jnp.float64)
        if self.stale and tokens_BQ.shape[1] == self.stale:
            rows_BQGK = rows_BQGK.at[:, :1].set(jnp.take_along_axis(cache.k[0], cache.lengths_B[:, None, None, None], 1))
        cache, start_B11, rows = cache.write(jnp.int32(0), rows_BQGK, rows_BQGK), cache.lengths_B[:, None, None], tokens_BQ.shape[1]
        query_BQ1, key_11S = start_B11 + jnp.arange(rows)[None, :, None], jnp.arange(cache.k.shape[2])[None, None]
        read_BQS = mask.allowed(query_BQ1, key_11S, start_B11) & (key_11S < start_B11 + rows)
        total_BQ = jnp.where(read_BQS, cache.k[0, :, None, :, 0, 0], 0).sum(-1).astype(jnp.int64)
        return jnp.asarray(self.table)[total_BQ % SIZE], cache

    def law(self, prefix, end, shaped, stop=(), new=False):
        """{text: probability} of what follows `prefix`, from the definition; `shaped`: logits [V] -> probabilities. A prompt may end with a
        stop."""
        if len(prefix) >= end or (new and prefix[-1] in stop):
            return {tuple(prefix): 1.0}
        rows = [self.vocab] * self.lead + list(prefix)
        p = shaped(self.table[sum(int(self.keys[x, i]) for i, x in enumerate(rows)) % SIZE])
        out = defaultdict(float)
        for token in np.flatnonzero(p > 0):
            for text, rest in self.law([*prefix, int(token)], end, shaped, stop, True).items():
                out[text] += p[token] * rest
        return dict(out)


def distance(a, b):
    return sum(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in a.keys() | b.keys()) / 2


def enumerated(network, options, prefix, rows=128, **kwargs):
    """({text: probability} by all scripts through the production loop, the mean of accepted drafts)."""
    settings, prompt = make_settings(rows, network.vocab, **kwargs), make_prompt([list(prefix)] * rows, network.length)

    @jax.jit
    def run(draws):
        samples = prompt_lookup.sample(network, options, settings, draws, prompt)
        return (samples.tokens, samples.lengths, samples.accepted), samples.draws

    out, accepted = defaultdict(float), 0.0
    for probability, (tokens, end, count) in enumerate_scripts(run, length=network.length, cycles=1, vocab=network.vocab, rows=rows):
        out[tuple(tokens[: int(end)].tolist())] += probability
        accepted += probability * count
    assert abs(sum(out.values()) - 1) < 1e-10, "wrong law, none at all: it depends on what is no draw"
    return dict(out), accepted


def softmax(logits):
    p = np.exp(logits - logits.max())
    return p / p.sum()


CASES = [
    (1, (), Options(length=3, ngram=2)),
    (1, (1, 0, 1), Options(length=3, ngram=1)),
    (0, (1, 0, 1), Options(length=4, ngram=3)),
    (0, (2, 2), Options(length=2, ngram=2)),
    (0, (0, 1, 2, 0, 1, 2, 0), Options(length=3, ngram=2)),  # full: nothing to draw
]


@pytest.mark.parametrize("lead, prefix, options", CASES)
def test_law_is_the_models(float64, lead, prefix, options):
    """V = 3, all texts up to seven tokens. Each slot is used once at most: see enumerate_scripts."""
    network = Network(3, max(4 + len(prefix) - 3 * (len(prefix) == 7), 4), lead)
    got, accepted = enumerated(network, options, prefix)
    assert distance(got, network.law(prefix, network.length, softmax)) <= 1e-10
    assert accepted > 0.1 or len(prefix) == 7


@pytest.mark.parametrize("kwargs", [dict(max_new=1), dict(max_new=3), dict(max_new=9), dict(stop=[1]), dict(stop=[0, 2], max_new=3)])
def test_law_with_stops_and_budgets(float64, kwargs):
    network = Network(3, 6, 1)
    got, _ = enumerated(network, Options(length=4), (0, 1), **kwargs)
    assert distance(got, network.law((0, 1), min(6, 2 + kwargs.get("max_new", 9)), softmax, kwargs.get("stop", ()))) <= 1e-10


FOUR = dict(temperature=[1.0, 0.0, 0.5, 2.0], top_k=[0, 0, 2, 0], top_p=[1.0, 1.0, 1.0, 0.6], max_new=[3, 2, 3, 1])


def test_settings_of_a_row(float64):
    """Every row of a batch has settings of its own: the law of each is that of the model under them, and its log-probabilities too."""
    network, prefix, rows = Network(3, 5, 0), (1, 1), 128
    shape = jax.jit(lambda logits, settings: jnp.exp(shape_logits(logits[:, None], settings))[:, 0])
    four = make_settings(4, 3, **FOUR)
    for row in range(4):
        # This request in row 0, the others beside it.
        order = [row, *(r for r in range(4) if r != row)]
        mixed = make_settings(rows, 3, **{key: [value[r] for r in order] * (rows // 4) for key, value in FOUR.items()})

        @jax.jit
        def run(draws, mixed=mixed):
            samples = prompt_lookup.sample(network, Options(length=3), mixed, draws, make_prompt([list(prefix)] * rows, 5))
            return (samples.tokens, samples.lengths, samples.logprobs), samples.draws

        out = defaultdict(float)
        for probability, (tokens, end, logprobs) in enumerate_every_fourth(run, rows, 5):
            out[tuple(tokens[: int(end)].tolist())] += probability
            np.testing.assert_allclose(np.exp(logprobs.sum()), probability, rtol=1e-5)
        shaped = lambda logits, row=row: np.asarray(shape(jnp.asarray(np.broadcast_to(logits, (4, 3))), four))[row]
        assert distance(dict(out), network.law(prefix, 2 + FOUR["max_new"][row], shaped)) <= 1e-10


def enumerate_every_fourth(run, rows, length):
    """enumerate_scripts over rows 0, 4, 8, ...: the rows between them run silent scripts, with other settings."""
    every = slice(None, None, 4)

    def spread(draws):
        wide = jax.tree.map(lambda x: jnp.repeat(x, 4, 0), draws)
        output, after = run(wide)
        return jax.tree.map(lambda x: x[every], output), jax.tree.map(lambda x: x[every], after)

    return enumerate_scripts(spread, length=length, cycles=1, vocab=3, rows=rows // 4)


def broken_walk(monkeypatch):
    """The draft is taken as it is."""
    right = prompt_lookup._walk
    monkeypatch.setattr(prompt_lookup, "_walk", lambda *a: (jnp.where(a[3] >= 0, a[3], right(*a)[0]), right(*a)[1]))


def broken_shift(monkeypatch):
    """A row is drawn from the law of the row before."""
    right = prompt_lookup._walk
    monkeypatch.setattr(prompt_lookup, "_walk", lambda d, at, law, *rest: right(d, at, jnp.roll(law, 1, 1), *rest))


def broken_frontier(monkeypatch):
    """The seed's keys are taken to be cached: what lies there are those of the draft that was refused."""
    monkeypatch.setattr(Network, "stale", 4)


def broken_slots(monkeypatch):
    """The draws behind the first that differs are draws too: their noise is used again by the next cycle."""
    right = prompt_lookup.categorical

    def draw(draws, slot, law):
        return right(draws, slot._replace(where=slot.where | (slot.position < 5)), law)

    monkeypatch.setattr(prompt_lookup, "categorical", draw)


@pytest.mark.parametrize("broken", [broken_walk, broken_shift, broken_frontier, broken_slots], ids=lambda f: f.__name__)
def test_broken_variants_are_caught(broken, monkeypatch, float64):
    broken(monkeypatch)
    network = Network(3, 5, 0)
    with pytest.raises(AssertionError, match=r"wrong law|used twice"):
        assert distance(enumerated(network, Options(length=4), (1, 1))[0], network.law((1, 1), 5, softmax)) < 1e-3, "wrong law"


@pytest.mark.parametrize(
    "text, ngram, draft",
    [
        ([0, 1, 2, 3, 0, 1, 2], 3, [3, 0, 1, 2, 3]),
        ([5, 1, 2, 9, 4, 1, 7, 5, 1], 3, [2, 9, 4, 1, 7]),  # the longer match, not the later one
        ([5, 1, 2, 9, 4, 1, 7, 5, 1], 1, [7, 5, 1, 7, 5]),  # the later one
        ([1, 1, 1], 2, [1, 1, 1, 1, 1]),
        ([3, 1, 3], 3, [1, 3, 1, 3, 1]),
        ([0, 0, 1, 0], 2, [1, 0, 1, 0, 1]),  # two tokens can't match at the text's first
        ([1, 2, 3], 3, None),
        ([1], 3, None),
        ([], 3, None),
    ],
)
def test_look_up(text, ngram, draft):
    row = jnp.asarray([[*text, *[7] * (12 - len(text))]])  # what lies behind the text is not looked at
    drafted, found = look_up(row, jnp.asarray([len(text)]), ngram, 5)
    assert found.tolist() == [draft is not None]
    assert draft is None or drafted.tolist() == [draft]


# On networks.

SHAPE = dict(vocab=7, length=24, width=16, layers=2, heads=2, mlp=20)
MODELS = {
    "gpt": (gpt, gpt.Config(**SHAPE)),
    "qwen3": (qwen3, qwen3.Config(**SHAPE, kv_heads=1, head_width=8, block=1, mask_id=-1)),
    "uno": (uno, uno.Config(**SHAPE, kv_heads=2, head_width=8, begins=True, rank=2)),
}
PROMPTS = [[2], [1, 2, 3, 1, 2], [4] * 6, [0] * 23, [5, 6], [3] * 24]


@functools.cache
def program(name, sampler):
    module, config = MODELS[name]
    options = Options(length=5) if sampler is prompt_lookup else autoregressive.Options()
    return compile_sampler(sampler, module, config, options), jax.tree.map(lambda x: 2.0 * x, module.init(config, jax.random.key(0)))


def draw(name, sampler, order=range(6), **settings):
    run, variables = program(name, sampler)
    settings = {key: [value[i] for i in order] if isinstance(value, list) and key != "stop" else value for key, value in settings.items()}
    doors = KeyedDraws(jax.random.key(3), jnp.asarray(list(order), jnp.int32))
    return run(variables, make_settings(len(list(order)), 7, **settings), doors, make_prompt([PROMPTS[i] for i in order], 24))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.7])
def test_tokens_are_those_of_autoregressive(name, temperature):
    """Greedy, or with the same keys: token for token, with the same log-probabilities and fewer passes
    (https://github.com/ml-explore/mlx-lm/issues/1423: greedy output that changes when speculation is on)."""
    settings = dict(temperature=[temperature] * 4 + [1.3 * temperature, 1.0], max_new=[99, 99, 12, 99, 9, 99])
    settings |= dict(stop=[6]) if temperature else {}
    fast, plain = draw(name, prompt_lookup, **settings), draw(name, autoregressive, **settings)
    np.testing.assert_array_equal(fast.tokens, plain.tokens)
    np.testing.assert_array_equal(fast.lengths, plain.lengths)
    np.testing.assert_allclose(fast.logprobs, plain.logprobs, atol=2e-5)
    np.testing.assert_array_equal(fast.passes.prefill, plain.passes.prefill)
    new = fast.lengths - jnp.asarray([len(row) for row in PROMPTS])
    np.testing.assert_array_equal(plain.passes.ar, new)
    cut = fast.passes.verify + fast.accepted - new  # a cycle emits one token more than it accepts, but for a last one, cut at the end
    assert ((cut == 0) | (cut == 1)).all()
    assert (fast.accepted <= fast.proposed).all()
    assert fast.accepted.sum() > 0


def test_a_request_does_not_depend_on_its_neighbours():
    """Alone, and in another order, with neighbours that end early: the same tokens and passes."""
    settings = dict(temperature=[1.0, 0.5, 0.7, 1.0, 0.9, 1.0], max_new=[99, 3, 12, 99, 9, 99])
    together = draw("qwen3", prompt_lookup, **settings)
    for order in ([3, 0, 5, 1, 4, 2], *([r] for r in range(6))):
        other = draw("qwen3", prompt_lookup, order, **settings)
        for new, old in enumerate(order):
            np.testing.assert_array_equal(other.tokens[new], together.tokens[old])
            for count in ("verify", "prefill", "query_tokens"):
                np.testing.assert_array_equal(getattr(other.passes, count)[new], getattr(together.passes, count)[old])


def test_no_square_of_the_length_and_one_loop():
    """The text is looked through by arrays of its own size: none has two axes of the length."""
    module, config = MODELS["qwen3"]
    variables, settings = module.init(config, jax.random.key(0)), make_settings(2, 7)
    doors, prompt = KeyedDraws(jax.random.key(0), jnp.arange(2)), make_prompt([[1], [2]], 24)
    run = jax.jit(lambda v: prompt_lookup.sample(module.bind(config, v), Options(length=5), settings, doors, prompt).tokens)
    text = run.lower(variables).as_text()
    assert "24x24" not in text
    assert "callback" not in text


def test_bad_options():
    functions = qwen3.bind(MODELS["qwen3"][1], None)
    for bad, words in ((dict(length=1), "length is 1; make it 2 or more, or use autoregressive"), (dict(ngram=0), "ngram is 0; make it 1")):
        with pytest.raises(UserError, match=words):
            prompt_lookup.sample(functions, Options(**bad), make_settings(1, 7), KeyedDraws(jax.random.key(0), None), make_prompt([[1]], 8))
    with pytest.raises(UserError, match="doesn't go with the model"):
        compile_sampler(prompt_lookup, qwen3, qwen3.Config(), Options())

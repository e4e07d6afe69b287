"""Self-verified decoding: its law is that of block length 1, exactly; on a network, what a target may and may not read."""

from __future__ import annotations

import functools
import itertools
import types
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.models import qwen3
from dllm.models.cache import Cache
from dllm.ops import masks
from dllm.ops.draws import KeyedDraws, enumerate_scripts
from dllm.ops.settings import make_settings
from dllm.samplers import accept, self_verified
from dllm.samplers.loop import compile_sampler, empty_prompt, make_prompt
from dllm.samplers.self_verified import Options

SIZE = 997


class Network:
    """A table model of two layers that is as exact about what a row may read as a transformer is.

    A row's key in the first layer is a number made of its token and position; in the second, of that and of all first-layer keys that
    the row read; its law is an entry of a table, found by all second-layer keys that it read. So another K/V, and one K/V too many or too
    few, gives another law. Keys go through the production cache.
    """

    def __init__(self, vocab, length, block, seed=0):
        rng = np.random.default_rng(seed)
        self.vocab, self.length, self.block, self.mask_id = vocab + 1, length, block, vocab
        self.first = rng.integers(1, SIZE, (vocab + 1, 8 * length))  # by token and position
        self.second = rng.integers(1, SIZE, SIZE)
        self.table = np.log(rng.dirichlet(np.full(vocab + 1, 0.7), SIZE))  # the MASK has some mass: it must not be drawn

    def empty_cache(self, batch, slots):
        return Cache.empty(2, batch, slots, 1, 1, jnp.float64)

    def forward(self, cache, tokens_BQ, positions_BQ, mask, at_BW=None):
        first_BQ = jnp.asarray(self.first)[tokens_BQ, positions_BQ]
        start_B11, rows = cache.lengths_B[:, None, None], tokens_BQ.shape[1]
        query_BQ1, key_11S = start_B11 + jnp.arange(rows)[None, :, None], jnp.arange(cache.k.shape[2])[None, None]
        read_BQS = mask.allowed(query_BQ1, key_11S, start_B11) & (key_11S < start_B11 + rows)
        keys = first_BQ
        for layer in range(2):
            rows_BQGK = keys[:, :, None, None].astype(jnp.float64)
            cache = cache.write(jnp.int32(layer), rows_BQGK, rows_BQGK)
            total_BQ = jnp.where(read_BQS, cache.k[layer, :, None, :, 0, 0], 0).sum(-1).astype(jnp.int64)
            keys = jnp.asarray(self.second)[(total_BQ + first_BQ) % SIZE]
        logits_BQV = jnp.asarray(self.table)[keys]
        return logits_BQV if at_BW is None else jnp.take_along_axis(logits_BQV, at_BW[:, :, None], 1), cache

    def next(self, prefix):
        """The law of the next token at block length 1, from the definition: clean rows read causally, a MASK row reads them and itself."""
        rows = [*prefix, self.mask_id]
        first = [int(self.first[x, i]) for i, x in enumerate(rows)]
        second = [int(self.second[(sum(first[: i + 1]) + first[i]) % SIZE]) for i in range(len(rows))]
        law = np.exp(self.table[self.second[(sum(second) + first[-1]) % SIZE]][: self.mask_id])
        return law / law.sum()

    def law(self, prefix=()):
        """{text: probability} of what follows `prefix`, token by token."""
        if len(prefix) == self.length:
            return {tuple(prefix): 1.0}
        return {x: p * q for token, p in enumerate(self.next(prefix)) for x, q in self.law((*prefix, token)).items()}


def distance(a, b):
    """Total variation."""
    return sum(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in a.keys() | b.keys()) / 2


def enumerated(network, options, prefix=(), rows=512, **kwargs):
    """The law by all scripts through the production loop: {(tokens, number of tokens that count): probability}."""
    length, vocab = network.length, network.vocab
    settings = make_settings(rows, vocab, **kwargs)
    prompt = make_prompt([list(prefix)] * rows, length)

    @jax.jit
    def run(draws, prompt):
        samples = self_verified.sample(network, options, settings, draws, prompt)
        return (samples.tokens, samples.lengths), samples.draws

    out = defaultdict(float)
    bound = functools.partial(run, prompt=prompt)
    for probability, (tokens, end) in enumerate_scripts(bound, length=length, cycles=length, vocab=vocab, rows=rows):
        out[tuple(tokens[: int(end)].tolist())] += probability
    assert abs(sum(out.values()) - 1) < 1e-10, "wrong law, none at all: it depends on what is no draw"
    return dict(out)


@pytest.mark.parametrize("verification", ["chain", "block"])
@pytest.mark.parametrize(
    "vocab, length, block, passes, prefix",
    [
        (3, 3, 3, 2, ()),
        (2, 4, 2, 1, ()),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(3, 3, 3, 1, ()), (2, 4, 3, 3, (1,)), (2, 4, 1, 1, (1, 0)), (2, 3, 3, 1, (1, 1, 0))]
        ),
        (3, 3, 3, 1, (2,)),
    ],
)
def test_law_is_that_of_block_length_1(float64, vocab, length, block, passes, prefix, verification):
    network = Network(vocab, length, block)
    got = enumerated(network, Options(draft_passes=passes, verification=verification), prefix)
    assert distance(got, network.law(prefix)) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("verification", ["chain", "block"])
def test_law_of_four_symbols_and_a_block_of_four(float64, verification, monkeypatch):
    """The tree of all scripts has 10^8 leaves here, so one cycle of the production loop from every text, and these composed.

    (What the cache holds after a cycle isn't in this one: the smaller models above run their cycles through one cache.)
    """
    network, rows = Network(4, 4, 4), 512
    once = types.SimpleNamespace(while_loop=lambda more, body, state: body(state), cond=jax.lax.cond)
    monkeypatch.setattr(self_verified, "lax", once)
    settings = make_settings(rows, network.vocab)

    @jax.jit
    def run(draws, prompt):
        samples = self_verified.sample(network, Options(verification=verification), settings, draws, prompt)
        return (samples.tokens, samples.lengths), samples.draws

    @functools.cache
    def law(prefix):
        if len(prefix) == 4:
            return {prefix: 1.0}
        out, prompt = defaultdict(float), make_prompt([list(prefix)] * rows, 4)
        steps = enumerate_scripts(functools.partial(run, prompt=prompt), length=4, cycles=1, vocab=network.vocab, rows=rows)
        for probability, (tokens, end) in steps:
            for text, p in law(tuple(tokens[: int(end)].tolist())).items():
                out[text] += probability * p
        return dict(out)

    assert distance(law(()), network.law()) <= 1e-10


def test_law_of_four_symbols_with_few_likely_ones(float64):
    """V = 4, block 4, all cycles through one cache: each law of the table allows two of the four symbols."""
    network = Network(4, 4, 4)
    order = np.random.default_rng(1).permuted(np.tile(np.arange(4), (SIZE, 1)), axis=1)
    allowed = np.concatenate([order < 2, np.ones((SIZE, 1), bool)], 1)
    network.table = np.where(allowed, network.table, -np.inf)
    got = enumerated(network, Options(verification="block"))
    assert 4 < len(got) <= 16
    assert distance(got, network.law()) <= 1e-10


def shaped(p):
    """Temperature 1/2, token 1 banned."""
    p = np.where(np.arange(len(p)) == 1, 0, p) ** 2
    return p / p.sum()


def test_settings_shape_draft_and_target_alike(float64):
    network = Network(3, 3, 3)
    got = enumerated(network, Options(), temperature=0.5, banned=[1])
    network.next = lambda prefix, right=network.next: shaped(right(prefix))
    assert distance(got, network.law()) < 1e-6  # the settings themselves are float32


@pytest.mark.parametrize("verification", ["chain", "block"])
def test_ends_at_the_first_stop_and_after_max_new(float64, verification):
    """The law of the cut text, not only its length; a stop in the prompt ends nothing."""
    network = Network(2, 4, 3)
    got = enumerated(network, Options(verification=verification), (1,), stop=[1], max_new=2)
    expect = defaultdict(float)
    for text, p in network.law((1,)).items():
        end = 2 if text[1] == 1 else 3
        expect[text[:end]] += p
    assert distance(got, expect) <= 1e-10


# Mistakes, each of which the comparison must see.


def broken_own_row(monkeypatch):
    """The row that holds a draft judges it."""
    right = Network.forward

    def forward(self, cache, tokens, positions, mask, at=None):
        mine = isinstance(mask, masks.CleanNoisy) and at is not None
        return right(self, cache, tokens, positions, mask, at - at.shape[1] if mine else at)

    monkeypatch.setattr(Network, "forward", forward)


def broken_shift(monkeypatch):
    """A target is read one row earlier, as from an autoregressive model."""
    right = Network.forward

    def forward(self, cache, tokens, positions, mask, at=None):
        mine = isinstance(mask, masks.CleanNoisy)
        return right(self, cache, tokens, positions, mask, jnp.maximum(at - 1, 0) if mine else at)

    monkeypatch.setattr(Network, "forward", forward)


def broken_rejected_kv(monkeypatch):
    """The K/V of a rejected draft stay in the cache as those of the token that replaced it."""
    right = Network.forward

    def forward(self, cache, tokens, positions, mask, at=None):
        logits, after = right(self, cache, tokens, positions, mask, at)
        if mask == masks.tail:
            row, slot = jnp.arange(len(tokens)), cache.lengths_B
            old = jnp.where((positions[:, 0] > 0)[None, :, None, None], cache.k[:, row, slot], after.k[:, row, slot])
            after = after.replace(k=after.k.at[:, row, slot].set(old))
        return logits, after

    monkeypatch.setattr(Network, "forward", forward)


def broken_draft_kv(monkeypatch):
    """Clean rows are written block by block, not causally: the cache is that of a longer block."""
    right = Network.forward

    def forward(self, cache, tokens, positions, mask, at=None):
        window = tokens.shape[1] // 2
        wide = masks.CleanNoisy(8, window)
        both = right(self, cache, tokens, positions, mask, at)
        return (both[0], right(self, cache, tokens, positions, wide, at)[1]) if isinstance(mask, masks.CleanNoisy) else both

    monkeypatch.setattr(Network, "forward", forward)


def broken_ratio(monkeypatch):
    """The ratio is upside down."""
    right = accept.log_ratio
    monkeypatch.setattr(accept, "log_ratio", lambda tokens, draft, target: right(tokens, target, draft))


def broken_residual(monkeypatch):
    """After a rejection, a draw from the target in place of (target - draft)+."""
    monkeypatch.setattr(accept, "residual", lambda draft, target, scale: target)


def broken_cycle(monkeypatch):
    """Every cycle uses the noise of the first."""
    monkeypatch.setattr(
        self_verified, "Slot", lambda purpose, at, cycle, where, right=self_verified.Slot: right(purpose, at, cycle * 0, where)
    )


BROKEN = [broken_own_row, broken_shift, broken_rejected_kv, broken_draft_kv, broken_ratio, broken_residual, broken_cycle]


@pytest.mark.parametrize("verification", ["chain", "block"])
@pytest.mark.parametrize("broken", BROKEN, ids=lambda f: f.__name__)
def test_broken_variants_are_caught(broken, verification, monkeypatch, float64):
    network = Network(2, 4, 2)
    broken(monkeypatch)
    with pytest.raises(AssertionError, match=r"wrong law|used twice"):
        assert distance(enumerated(network, Options(verification=verification)), network.law()) < 1e-3, "wrong law"


# On the network.

CONFIG = qwen3.Config(vocab=7, length=12, width=16, layers=2, heads=2, kv_heads=1, head_width=8, mlp=24, block=4, mask_id=6)
CHAIN = Options()
PROMPTS = [[], [1], [1, 2, 3, 4, 5], [0] * 11, [2, 3], [4] * 4]


@functools.cache
def weights():
    return jax.tree.map(lambda x: 2.0 * x, qwen3.init(CONFIG, jax.random.key(0)))


@functools.cache
def program(options):
    return compile_sampler(self_verified, qwen3, CONFIG, options)


def draw(prompts=PROMPTS, requests=None, options=CHAIN, seed=0, **settings):
    requests = jnp.arange(len(prompts), dtype=jnp.int32) if requests is None else jnp.asarray(requests, jnp.int32)
    prompt = make_prompt(prompts, CONFIG.length)
    return program(options)(weights(), make_settings(len(prompts), 7, **settings), KeyedDraws(jax.random.key(seed), requests), prompt)


def one_at_a_time(functions, tokens):
    """The logits of every token at block length 1 [B L V], each from a forward of its own: clean rows, a MASK in its place, all causal."""
    batch, length = tokens.shape
    texts = jnp.where(jnp.eye(length, dtype=bool)[None], functions.mask_id, tokens[:, None]).reshape(-1, length)
    position = jnp.broadcast_to(jnp.arange(length)[None], texts.shape)
    logits = functions.forward(None, texts, position, masks.causal)[0].reshape(batch, length, length, -1)
    return jnp.diagonal(logits, axis1=1, axis2=2).transpose(0, 2, 1)


def filled(functions, tokens, slots):
    position = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    return functions.forward(functions.empty_cache(len(tokens), slots), tokens, position, masks.causal)[1]


@pytest.mark.parametrize("settled", [0, 3])
def test_verified_laws_are_those_of_block_length_1_one_at_a_time(settled):
    """After a draft pass over the same cache, so that nothing the draft wrote is read."""
    tokens = jax.random.randint(jax.random.key(1), (2, settled + 4), 0, 6)

    @jax.jit
    def both(variables):
        functions, at = qwen3.bind(CONFIG, variables), jnp.full((2,), settled, jnp.int32)
        cache = filled(functions, tokens, 20)
        last = tokens[:, max(settled - 1, 0)][:, None]
        _, cache = self_verified.draft(functions, cache, last, jnp.full((2, 4), 6, jnp.int32), at)
        logits, cache = self_verified.verify(functions, cache, tokens[:, settled:], at)
        return logits, one_at_a_time(functions, tokens)[:, settled:]

    np.testing.assert_allclose(*both(weights()), atol=1e-5)


def test_a_draft_does_not_judge_itself():
    """Changing draft i leaves the targets up to i unchanged, and changes those behind it."""
    tokens = jnp.asarray([[1, 2, 3, 4, 5, 0]] * 6)

    @jax.jit
    def targets(variables, drafted):
        functions = qwen3.bind(CONFIG, variables)
        return self_verified.verify(functions, filled(functions, tokens[:, :2], 20), drafted, jnp.full((6,), 2, jnp.int32))[0]

    base = targets(weights(), tokens[:, 2:])
    for i in range(4):
        changed = targets(weights(), tokens[:, 2:].at[:, i].set(jnp.arange(6)))
        np.testing.assert_array_equal(changed[:, : i + 1], base[:, : i + 1])
        if i < 3:
            assert (jnp.abs(changed - base)[:, i + 1 :].max((1, 2)) > 1e-3).sum() >= 5  # one of the six is the draft that was there


@pytest.mark.parametrize("verification", ["chain", "block"])
def test_law_on_the_network(float64, verification):
    """V = 2, three tokens, window 3, a qwen3 model in float64: the enumerated law is that of its one-at-a-time forwards."""
    config = qwen3.Config(
        vocab=3, length=3, width=8, layers=2, heads=2, kv_heads=1, head_width=4, mlp=12, block=3, mask_id=2, dtype="float64"
    )
    variables = jax.tree.map(lambda x: 3.0 * x, qwen3.init(config, jax.random.key(0)))
    functions = qwen3.bind(config, variables)
    got = enumerated(functions, Options(verification=verification), rows=64)
    texts = jnp.asarray(list(itertools.product(range(2), repeat=3)))
    laws = jax.jit(lambda: jax.nn.softmax(one_at_a_time(functions, texts)[:, :, :2]))()
    expect = {tuple(x): float(np.prod([laws[r, i, x[i]] for i in range(3)])) for r, x in enumerate(texts.tolist())}
    assert max(expect.values()) > 0.2
    assert distance(got, expect) <= 1e-10


BLOCKS = pytest.param(Options(window=5, draft_passes=2, verification="block"), marks=pytest.mark.slow)


@pytest.mark.parametrize("options", [CHAIN, BLOCKS], ids=["chain", "block"])
def test_a_row_does_not_depend_on_its_neighbours(options):
    """A ragged batch, permuted, and each prompt alone: the same tokens and passes; the logprobs are those of block length 1."""
    together = draw(options=options)
    order = [3, 0, 5, 1, 4, 2]
    permuted = draw([PROMPTS[i] for i in order], order, options)
    for new, old in enumerate(order):
        np.testing.assert_array_equal(permuted.tokens[new], together.tokens[old])
        np.testing.assert_array_equal(permuted.passes.verify[new], together.passes.verify[old])
    for r, row in enumerate(PROMPTS):
        alone = draw([row], [r], options)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[r])
        np.testing.assert_array_equal(alone.passes.draft[0], together.passes.draft[r])
        assert together.tokens[r, : len(row)].tolist() == row
    np.testing.assert_array_equal(together.passes.draft, options.draft_passes * together.passes.verify)
    expect = jax.jit(lambda v, x: jax.nn.log_softmax(one_at_a_time(qwen3.bind(CONFIG, v), x)[:, :, :6]))(weights(), together.tokens)
    expect = np.take_along_axis(np.asarray(expect), np.asarray(together.tokens)[:, :, None], 2)[:, :, 0]
    given = jnp.arange(12)[None] < jnp.asarray([len(row) for row in PROMPTS])[:, None]
    np.testing.assert_allclose(together.logprobs, jnp.where(given, 0, expect), atol=1e-4)


def test_counts_and_ends():
    """Passes add up, max_new is exact, the MASK is never written."""
    samples = draw(max_new=5)
    begin = np.asarray([len(row) for row in PROMPTS])
    np.testing.assert_array_equal(samples.lengths, np.minimum(begin + 5, 12))
    np.testing.assert_array_equal(samples.proposed, samples.lengths - begin)
    np.testing.assert_array_equal(samples.passes.draft, samples.passes.verify)
    np.testing.assert_array_equal(samples.passes.query_tokens, samples.passes.verify * (5 + 8) + 12 * (begin > 1))
    rejections = np.asarray(samples.proposed - samples.accepted)
    assert ((rejections >= 0) & (rejections <= samples.passes.verify)).all()
    assert (samples.tokens < 6).all()


def test_greedy_is_the_greedy_text_of_block_length_1():
    samples = draw(temperature=0.0)
    best = jax.jit(lambda v, x: one_at_a_time(qwen3.bind(CONFIG, v), x)[:, :, :6].argmax(-1))(weights(), samples.tokens)
    given = np.arange(12)[None] < np.asarray([len(row) for row in PROMPTS])[:, None]
    np.testing.assert_array_equal(np.where(given, samples.tokens, best), samples.tokens)
    np.testing.assert_array_equal(samples.tokens, draw(temperature=0.0, seed=3).tokens)


def test_bad_options():
    functions = qwen3.bind(CONFIG, weights())
    run = lambda functions, **options: self_verified.sample(
        functions, Options(**options), make_settings(1, 7), KeyedDraws(jax.random.key(0), jnp.arange(1)), empty_prompt(1, 12)
    )
    for bad, words in [(dict(draft_passes=5), "1 to the window's 4"), (dict(draft_passes=0), "got 0"), (dict(window=-1), "window")]:
        with pytest.raises(UserError, match=words):
            run(functions, **bad)
    with pytest.raises(UserError, match="MASK"):
        run(functions._replace(mask_id=-1))

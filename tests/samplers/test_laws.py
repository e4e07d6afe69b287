"""The exact law of every sampler: the sum over scripts through the production loop against direct enumeration, to 1e-10 in float64."""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.models.cache import Cache
from dllm.ops import draws as doors
from dllm.ops.draws import KeyedDraws, Purpose, enumerate_scripts
from dllm.ops.settings import make_settings, shape_logits
from dllm.samplers import accept, ancestral, autoregressive, confidence, self_speculative
from dllm.samplers.loop import Prompt, compile_sampler, empty_prompt
from tests.samplers.tables import Functions, Tables, distance, law_ancestral, law_of_target, law_self_speculative, make_tables

WINDOWS = {"1": ("constant", 1.0), "2": ("constant", 2.0), "i+1": ("linear", None), "D": ("constant", None)}


pytestmark = pytest.mark.usefixtures("float64")


def options_window(name, length):
    shape, rate = WINDOWS[name]
    return dict(window=shape, rate=float(length) if rate is None else rate)


def window(name, length):
    return {"1": lambda i: 1, "2": lambda i: 2, "i+1": lambda i: i + 1, "D": lambda i: length}[name]


def law(sampler, options, functions, *, cycles, order=None, prompt=None, rows=512, settings=None, tolerance=1e-10):
    """The law of a sampler in sequence order, by all scripts through its jitted program."""
    length, vocab = functions.length, functions.vocab
    order_BL = jnp.tile(jnp.arange(length) if order is None else jnp.asarray(order), (rows, 1))
    prompt = empty_prompt(rows, length) if prompt is None else jax.tree.map(lambda x_L: jnp.tile(x_L, (rows, 1)), prompt)
    settings = make_settings(rows, vocab, **(settings or {}))

    @jax.jit
    def run(draws):
        samples = sampler.sample(functions, options, settings, draws, prompt, order_BL)
        return samples.replace(draws=None), samples.draws

    out, total = defaultdict(float), 0.0
    for probability, samples in enumerate_scripts(run, length=length, cycles=cycles, vocab=vocab, rows=rows):
        out[tuple(samples.tokens.tolist())] += probability
        total += probability
    assert abs(total - 1) < tolerance
    return dict(out)


def law_ssmd(functions, name, n_verify, verification, **kwargs):
    options = self_speculative.Options(**options_window(name, functions.length), n_verify=n_verify, verification=verification)
    return law(self_speculative, options, functions, cycles=functions.length * (n_verify + 1), **kwargs)


# All of V = 2..3, D = 3..4; the largest holds every branch of the smaller ones.
SIZES = [(3, 4), *(pytest.param(v, d, marks=pytest.mark.slow) for v, d in [(2, 3), (2, 4), (3, 3)])]


@pytest.mark.parametrize("vocab, length", SIZES)
@pytest.mark.parametrize("name", WINDOWS)
def test_ancestral(vocab, length, name):
    tables = make_tables(vocab, length)
    options = ancestral.Options(**options_window(name, length))
    assert distance(law(ancestral, options, Functions(tables), cycles=length), law_ancestral(tables, window(name, length))) < 1e-10


@pytest.mark.parametrize("vocab, length", SIZES)
@pytest.mark.parametrize("verification", ["chain", "block"])
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("n_verify", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_self_speculative(vocab, length, name, n_verify, verification):
    tables = make_tables(vocab, length)
    got = law_ssmd(Functions(tables), name, n_verify, verification)
    assert distance(got, law_self_speculative(tables, window(name, length), n_verify, verification)) < 1e-10
    if n_verify >= window(name, length)(length - 1):  # the widest window
        assert distance(got, law_of_target(tables, window(name, length))) < 1e-10


@pytest.mark.parametrize("verification", ["chain", "block"])
def test_target_with_forbidden_tokens(verification):
    tables = make_tables(3, 3, seed=1, sparse=True)
    got = law_ssmd(Functions(tables), "D", 2, verification)
    assert distance(got, law_self_speculative(tables, window("D", 3), 2, verification)) < 1e-10


@pytest.mark.parametrize("verification", ["chain", "block"])
def test_target_equal_to_draft_is_ancestral(verification):
    """Every draft is accepted, in one verification, whatever the window."""
    tables = make_tables(3, 3)
    functions = dataclasses.replace(Functions(tables), target_is_draft=True)
    for name in ("2", "i+1"):
        assert distance(law_ssmd(functions, name, 1, verification), law_ancestral(tables, window(name, 3))) < 1e-10


def test_order_of_reveal():
    """Rank d of the tables is position order[d] of what comes out."""
    tables, order = make_tables(2, 3), (2, 0, 1)
    expect = {}
    for x, p in law_self_speculative(tables, window("2", 3), 1, "chain").items():
        y = [None] * 3
        for rank, token in enumerate(x):
            y[order[rank]] = token
        expect[tuple(y)] = p
    assert distance(law_ssmd(Functions(tables), "2", 1, "chain", order=order), expect) < 1e-10


@pytest.mark.parametrize("verification", ["chain", "block"])
def test_given_tokens_are_revealed_first(verification):
    """Position 2 is given: it has rank 0, and the sampler's law is that of the tables from one revealed token on."""
    tables = make_tables(2, 3)
    prompt = Prompt(jnp.asarray([0, 0, 1]), jnp.asarray([False, False, True]))
    got = law_ssmd(Functions(tables), "D", 1, verification, prompt=prompt)
    certain = np.broadcast_to(np.eye(2)[1], (*tables.draft.shape[:2], 2))
    conditioned = Tables(tables.draft.copy(), tables.target)
    conditioned.draft[:, :, 0] = certain  # rank 0 surely holds the given token
    first_alone = lambda i: 1 if i == 0 else 3
    expect = {(b, c, a): p for (a, b, c), p in law_self_speculative(conditioned, first_alone, 1, verification).items()}
    assert distance(got, expect) < 1e-10


MIXED = Prompt(  # a special token, two positions of text, padding: ranks 2 and 3 are to be drawn, windows are those of a text of 2
    jnp.asarray([0, 0, 0, 1]), jnp.asarray([True, False, False, True]), jnp.asarray([True, False, False, True])
)


def with_given_ranks(tables):
    """Returns the tables of a text whose ranks 0 and 1 hold the tokens 0 and 1 for sure."""
    certain = Tables(tables.draft.copy(), tables.target.copy())
    for rank, token in enumerate((0, 1)):
        for law in (certain.draft, certain.target):
            law[:, :, rank] = np.eye(2)[token]
    return certain


def in_sequence(ranks):
    return {(a, c, d, b): p for (a, b, c, d), p in ranks.items()}


@pytest.mark.parametrize("name, n_verify, verification", [("chain", 1, "chain"), ("block", 2, "block"), ("ancestral", 0, "")])
def test_a_text_among_longer_ones_is_drawn_by_its_own_length(name, n_verify, verification):
    """W(i) = i + 1 of the text's own two positions: one token, then the other. By the batch's length both would be drawn at once."""
    tables = make_tables(2, 4)
    width = lambda i: 2 if i == 0 else i - 1
    if name == "ancestral":
        got = law(ancestral, ancestral.Options("linear", 2.0), Functions(tables), cycles=4, prompt=MIXED)
        want, other = (law_ancestral(with_given_ranks(tables), w) for w in (width, lambda i: 2))
    else:
        options = self_speculative.Options("linear", 2.0, n_verify, verification)
        got = law(self_speculative, options, Functions(tables), cycles=4 * (n_verify + 1), prompt=MIXED)
        want, other = (law_self_speculative(with_given_ranks(tables), w, n_verify, verification) for w in (width, lambda i: 2))
    assert distance(got, in_sequence(want)) < 1e-10
    assert distance(got, in_sequence(other)) > 1e-3


@pytest.mark.parametrize("sampler", [ancestral, confidence, self_speculative])
def test_passes_are_those_of_a_row_s_own_length(sampler):
    """One token a pass: as many passes as a row has positions of its own."""
    tables, lengths = make_tables(2, 4), (4, 2, 3, 1)
    outside = jnp.arange(4)[None] >= jnp.asarray(lengths)[:, None]
    prompt, draws = Prompt(jnp.zeros((4, 4), jnp.int32), outside, outside), KeyedDraws(jax.random.key(0), jnp.arange(4, dtype=jnp.int32))
    options = sampler.Options(window="constant", rate=1.0)
    samples = jax.jit(lambda: sampler.sample(Functions(tables), options, make_settings(4, 2), draws, prompt))()
    assert samples.passes.noncausal.tolist() == list(lengths)


def test_settings_shape_draft_and_target_alike():
    """With temperature and a banned token, many verifications give the tempered target, not something between."""
    tables = make_tables(3, 3)
    got = law_ssmd(Functions(tables), "D", 3, "chain", settings=dict(temperature=0.5, banned=[1]))

    def shaped(p):
        p = np.where(np.arange(3) == 1, 0, p) ** 2
        return p / p.sum(-1, keepdims=True)

    expect = law_of_target(Tables(shaped(tables.draft), shaped(tables.target)), window("D", 3))
    assert distance(got, expect) < 1e-7  # the settings themselves are float32
    greedy = law_ssmd(Functions(tables), "D", 1, "chain", settings=dict(temperature=0.0))
    assert len(greedy) == 1 or sorted(greedy.values())[-2] == 0


# Each of these is a mistake that somebody's implementation made. All must be seen by the comparisons above.


def broken_leak(monkeypatch):
    """The target of a rank has read the token of that rank."""

    class Leaky(Functions):
        def verify(self, hidden, tokens_BL, order_BL, start_B, window):
            logits_BWV = super().verify(hidden, tokens_BL, order_BL, start_B, window)
            rank_BW = jnp.minimum(start_B[:, None] + jnp.arange(window)[None], self.length - 1)
            return logits_BWV + 2.0 * jax.nn.one_hot(jnp.take_along_axis(tokens_BL, rank_BW, 1), self.vocab)

    return Leaky


def broken_ratio(monkeypatch):
    """The ratio is upside down."""
    right = accept.log_ratio
    monkeypatch.setattr(accept, "log_ratio", lambda tokens, draft, target: right(tokens, target, draft))


def broken_residual(monkeypatch):
    """After a rejection, a draw from the target in place of (target - draft)+."""
    monkeypatch.setattr(accept, "residual", lambda draft, target, scale: target)


def broken_draft(monkeypatch):
    """Drafts come from a sharper law than the one in the ratio."""
    right = doors.categorical
    sharper = lambda draws, slot, logits: right(draws, slot, logits * 1.5 if slot.purpose == Purpose.DRAFT else logits)
    monkeypatch.setattr(self_speculative, "categorical", sharper)


def broken_noise(monkeypatch):
    """Every cycle uses the noise of the first."""
    right_draw, right_first = doors.categorical, doors.first
    still = lambda slot: slot._replace(cycle=slot.cycle * 0)
    monkeypatch.setattr(self_speculative, "categorical", lambda d, slot, x: right_draw(d, still(slot), x))
    monkeypatch.setattr(accept, "categorical", lambda d, slot, x: right_draw(d, still(slot), x))
    monkeypatch.setattr(accept, "first", lambda d, slot, x, outcome: right_first(d, still(slot), x, outcome))


def broken_settings(monkeypatch):
    """The temperature reaches the draft but not the target's own law: the wrong law is verified."""
    calls = itertools.count()
    monkeypatch.setattr(self_speculative, "shape_logits", lambda x, s: shape_logits(x * (0.5 if next(calls) % 2 else 1.0), s))


def broken_first_rank(monkeypatch):
    """The first rank of all is verified against a target that has read nothing."""
    monkeypatch.setattr(
        self_speculative.jnp, "where", lambda c, a, b, where=jnp.where: b if getattr(b, "ndim", 0) == 3 and c.ndim == 3 else where(c, a, b)
    )


BROKEN = [broken_leak, broken_ratio, broken_residual, broken_draft, broken_noise, broken_settings, broken_first_rank]


@pytest.mark.parametrize("verification", ["chain", "block"])
@pytest.mark.parametrize("broken", BROKEN, ids=lambda f: f.__name__)
def test_broken_variants_are_caught(broken, verification, monkeypatch):
    tables = make_tables(2, 3)
    expect = law_self_speculative(tables, window("D", 3), 1, verification)
    functions = (broken(monkeypatch) or Functions)(tables)
    with pytest.raises(AssertionError, match=r"wrong law|used twice"):
        assert distance(law_ssmd(functions, "D", 1, verification), expect) < 1e-10, "wrong law"


def test_drafts_kept_behind_a_block_rejection_are_caught(monkeypatch):
    """Block verification has looked at the drafts behind a rejection; keeping them gives another law."""
    right = doors.categorical

    def keep(draws, slot, logits):
        if slot.purpose == Purpose.DRAFT and keep.calls:  # the second draft of a trace is the one behind a rejection
            slot = slot._replace(where=slot.where & False)
            return keep.tokens, draws
        keep.calls += 1
        keep.tokens, draws = right(draws, slot, logits)
        return keep.tokens, draws

    keep.calls = 0
    monkeypatch.setattr(self_speculative, "categorical", keep)
    tables = make_tables(2, 3)
    got = law_ssmd(Functions(tables), "D", 2, "block")
    assert distance(got, law_self_speculative(tables, window("D", 3), 2, "block")) > 1e-3


def test_confidence():
    """Most confident first, against a direct enumeration with tables that depend on which positions are known."""
    vocab, length = 2, 3
    rng = np.random.default_rng(0)
    tables = rng.dirichlet(np.full(vocab, 0.7), (3**length, length))  # by the state of each position: a token, or open

    class ByState:
        def draft(self, tokens_BL, order_BL, revealed_B, window):
            open_BL = jnp.arange(length)[None] >= revealed_B[:, None]
            state_BL = jnp.where(open_BL, vocab, tokens_BL)
            code_B = (state_BL * 3**order_BL).sum(1)
            rank_BW = jnp.minimum(revealed_B[:, None] + jnp.arange(window)[None], length - 1)
            return jnp.log(jnp.asarray(tables)[code_B[:, None], jnp.take_along_axis(order_BL, rank_BW, 1)]), None

    functions = ByState()
    functions.vocab, functions.length = vocab, length

    def expect(width):
        out = defaultdict(float)

        def walk(state, weight):
            spots = [k for k in range(length) if state[k] == vocab]
            if not spots:
                out[state] += weight
                return
            laws = tables[sum(s * 3**k for k, s in enumerate(state))]
            for tokens in itertools.product(range(vocab), repeat=len(spots)):
                probs = [laws[k][t] for k, t in zip(spots, tokens, strict=True)]
                best = sorted(range(len(spots)), key=lambda j: -probs[j])[:width]
                new = list(state)
                for j in best:
                    new[spots[j]] = tokens[j]
                walk(tuple(new), weight * float(np.prod(probs)))

        walk((vocab,) * length, 1.0)
        return dict(out)

    for width in (1, 2):
        got = law(confidence, confidence.Options(window="constant", rate=float(width)), functions, cycles=length)
        assert distance(got, expect(width)) < 1e-10


class Markov:
    """A left-to-right model from a table: next[a, b] = P(b | a), row `vocab` for the first token. Its cache only counts."""

    length, lead = 3, 1

    def __init__(self, table):
        self.table, self.vocab = table, table.shape[1]

    def empty_cache(self, batch, slots):
        return Cache.empty(1, batch, slots, 1, 1, jnp.float32)

    def forward(self, cache, tokens_BQ, positions_BQ, mask):
        return jnp.log(jnp.asarray(self.table))[tokens_BQ], cache


def test_autoregressive():
    table = np.random.default_rng(0).dirichlet(np.ones(3), 4)
    chain = lambda x: float(np.prod([table[a, b] for a, b in zip((3, *x), x)]))
    run = lambda **kwargs: law(autoregressive, autoregressive.Options(), Markov(table), cycles=1, **kwargs)
    assert distance(run(), {x: chain(x) for x in itertools.product(range(3), repeat=3)}) < 1e-10
    prompt = Prompt(jnp.asarray([2, 0, 0]), jnp.asarray([True, False, False]))
    assert distance(run(prompt=prompt), {(2, *x): chain((2, *x)) / table[3, 2] for x in itertools.product(range(3), repeat=2)}) < 1e-10


def test_autoregressive_stops():
    table = np.random.default_rng(0).dirichlet(np.ones(3), 4)
    rows = 64
    run = lambda **kwargs: autoregressive.sample(
        Markov(table),
        autoregressive.Options(),
        make_settings(rows, 3, **kwargs),
        KeyedDraws(jax.random.key(0), jnp.arange(rows)),
        empty_prompt(rows, 3),
    )
    stopped = jax.jit(lambda: run(stop=[1]))()
    free = jax.jit(run)()
    for tokens, length, whole in zip(stopped.tokens.tolist(), stopped.lengths.tolist(), free.tokens.tolist()):
        end = whole.index(1) + 1 if 1 in whole else 3
        assert length == end
        assert tokens[:end] == whole[:end]
    assert set(jax.jit(lambda: run(max_new=2))().lengths.tolist()) == {2}


def test_keyed_draws_follow_the_law():
    """40,000 keyed samples against the enumerated law of 27 strings. Chi-square: false alarms 1 in 10^6, and a law that is
    off by 3 % in total variation is missed less than once in 10^3 (noncentrality 4 n tv^2 = 144 at least)."""
    tables, n = make_tables(3, 3), 40_000
    expect = law_self_speculative(tables, window("D", 3), 2, "block")

    @jax.jit
    def run(key):
        options = self_speculative.Options(window="constant", rate=3.0, n_verify=2, verification="block")
        doors_ = KeyedDraws(key, jnp.arange(n, dtype=jnp.int32))
        order_BL = jnp.tile(jnp.arange(3), (n, 1))
        return self_speculative.sample(Functions(tables), options, make_settings(n, 3), doors_, empty_prompt(n, 3), order_BL).tokens

    tokens = np.asarray(run(jax.random.key(0)))
    seen = np.bincount(tokens @ np.asarray([9, 3, 1]), minlength=27)
    mean = n * np.asarray([expect.get(x, 0.0) for x in itertools.product(range(3), repeat=3)])
    assert ((seen - mean) ** 2 / mean).sum() < 78.4  # chi-square with 26 degrees of freedom, upper 1e-6


def test_a_request_does_not_depend_on_its_neighbours():
    tables = make_tables(3, 4)
    options = self_speculative.Options(window="linear", rate=4.0, n_verify=2)
    module = types.ModuleType("model")
    module.Functions, module.bind = Functions, lambda config, variables: Functions(tables)
    run = compile_sampler(self_speculative, module, None, options)
    alone = lambda r: run({}, make_settings(1, 3), KeyedDraws(jax.random.key(1), jnp.asarray([r])), empty_prompt(1, 4))
    together = run({}, make_settings(6, 3), KeyedDraws(jax.random.key(1), jnp.arange(6)), empty_prompt(6, 4))
    for r in range(6):
        np.testing.assert_array_equal(alone(r).tokens[0], together.tokens[r])
        np.testing.assert_array_equal(alone(r).passes.causal[0], together.passes.causal[r])

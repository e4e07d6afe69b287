"""Uno's Psi-Spec: its law is the frozen model's, exactly, through the program of production; on a network, the frozen model's own text."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jax.experimental import checkify

from dllm.core.types import UserError
from dllm.evals.speed import leaves_device
from dllm.models import uno
from dllm.ops.draws import KeyedDraws, Purpose, Slot, categorical, enumerate_scripts
from dllm.ops.settings import make_settings
from dllm.samplers import accept, autoregressive, psi_spec
from dllm.samplers.loop import compile_sampler, make_prompt
from dllm.samplers.psi_spec import Options
from tests.samplers.uno_tables import (
    autoregressive_law,
    distance,
    enumerated,
    enumerated_batch,
    make_functions,
    shaped,
)

ADAPTIVE = dict(lengths=(1, 2, 3), costs=(1.0, 1.9, 2.1))


def check_law(options, prefix=(1,), neighbour=None, model=None, **settings):
    functions = make_functions(**(model or {}))
    got = enumerated(functions, Options(**options), prefix, neighbour=neighbour, **settings)
    assert distance(got, autoregressive_law(functions, prefix, **settings)) <= 1e-10, "wrong law"
    return got


def wrap(monkeypatch, module, name, changed):
    right = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kwargs: changed(right, *args, **kwargs))


# Texts of four tokens, of which three are new; or of five and four. What begins a sequence by itself has no prompt.
FIVE, BOS = dict(length=5), dict(model=dict(lead=1), prefix=())
CASES = {
    "L1": (dict(length=1), {}),
    "chain_bos": (dict(length=3), BOS),
    "block": (dict(length=3, verification="block"), dict(model=FIVE)),
    "two_steps_block": (dict(length=3, steps=2, verification="block"), {}),
    "single": (dict(length=3, single_pass=True), dict(model=FIVE)),
    # The end falls on a drafted token, or a stop does.
    "two_new_block": (dict(length=3, verification="block"), dict(model=FIVE, max_new=2)),
    "single_stop_block": (dict(length=3, single_pass=True, verification="block"), dict(model=FIVE, stop=[2], max_new=3)),
}
MORE = {
    "chain": (dict(length=3), dict(model=FIVE)),
    "block_bos": (dict(length=3, verification="block"), BOS),
    "two_steps": (dict(length=3, steps=2), {}),
    "mask_noise": (dict(length=3, steps=2), dict(model=dict(lead=1, mask=True), prefix=())),
    "greedy": (dict(length=3, draft="greedy"), dict(model=FIVE)),
    "single_greedy": (dict(length=3, single_pass=True, draft="greedy"), dict(model=FIVE)),
    "single_block_bos": (dict(length=2, single_pass=True, verification="block"), BOS),
    "one_new": (dict(length=3), dict(max_new=1)),
    "three_new_block": (dict(length=3, verification="block"), dict(model=FIVE, max_new=3)),
    "long_draft_block": (dict(length=4, verification="block"), dict(model=dict(drafts=3))),
    "stop": (dict(length=3), dict(model=FIVE, stop=[0], prefix=(0,))),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_law(float64, name):
    """https://github.com/vllm-project/vllm/issues/34497: the log-probabilities of emitted tokens are checked too."""
    options, more = (CASES | MORE)[name]
    check_law(options, **more)


FOUR = dict(vocab=4, zeros=0.0, good=0.3)


@pytest.mark.parametrize(
    "options", [dict(verification="block"), *(pytest.param(x, marks=pytest.mark.slow) for x in (dict(), dict(single_pass=True)))], ids=str
)
@pytest.mark.parametrize(
    "settings",
    [
        dict(top_k=2),  # draft and target need not have a token in common
        pytest.param(dict(temperature=0.5, top_k=3, top_p=0.75), marks=pytest.mark.slow),
        pytest.param(dict(temperature=0.0), marks=pytest.mark.slow),
        pytest.param(dict(banned=[2], top_p=0.5), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_law_under_filters(float64, options, settings):
    """One law shapes clean token, draft, target and bonus: https://github.com/vllm-project/vllm/issues/9834,
    https://github.com/vllm-project/vllm/issues/42744"""
    check_law(dict(length=3, **options), model=FOUR, **settings)


def test_top_k_leaves_draft_and_target_no_token_in_common(float64):
    """What the test above rests on: its tables have such places, and such with one."""
    functions = make_functions(**FOUR)
    shared = {
        sum((shaped(functions.drafted((1,), (z,)), top_k=2) > 0) & (shaped(functions.next((1, c)), top_k=2) > 0))
        for z, c in itertools.product((1, 2), range(4))
    }
    assert shared >= {0, 1}


@pytest.mark.parametrize("swap", [False, pytest.param(True, marks=pytest.mark.slow)], ids=str)
def test_each_row_of_a_batch_has_its_own_settings(float64, swap):
    """Half of the batch with other filters, prompts and ends: https://github.com/vllm-project/vllm/issues/6993. The released engine
    refuses such a batch."""
    one = (1,), dict(temperature=0.5, top_p=0.75, max_new=3)
    two = (2, 0, 1), dict(top_k=2)
    mine, theirs = (two, one) if swap else (one, two)
    check_law(dict(length=3, verification="block"), mine[0], theirs, dict(length=5, vocab=4, zeros=0.0), **mine[1])


@pytest.mark.slow
@pytest.mark.parametrize("options", [dict(), dict(verification="block"), dict(single_pass=True), dict(draft="greedy")], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_law_of_four_symbols(float64, options, seed):
    """V = 4, two drafts, four new tokens, a stop: the oracle's size."""
    check_law(dict(length=3, **options), (2,), model=dict(vocab=4, length=5, seed=seed, zeros=0.2), stop=[0])


@pytest.mark.slow
@pytest.mark.parametrize("steps", [2, 3])
def test_law_after_steps_whose_draft_excludes_what_it_wrote(float64, steps):
    """With filters, a later step may give no chance to the token that a row holds from an earlier one."""
    for mask in (True, False):
        check_law(dict(length=3, steps=steps), (), model=dict(vocab=3, length=3, lead=1, mask=mask), top_k=1)
        check_law(dict(length=2, steps=steps), (), model=dict(vocab=3, length=3, lead=1, mask=mask), top_k=2)


@pytest.mark.parametrize("mask", [False, True], ids=["uniform", "mask"])
def test_the_state_between_two_steps_is_the_diffusions(mask):
    """By Bayes' rule from z_s = token of the draft with chance alpha_s, else noise; z_t = z_s with chance alpha_t / alpha_s, else noise.
    (No law of a text shows it: whatever noise a draft is read from, the text is the target's.)"""
    functions = make_functions(lead=1, mask=mask)
    draft = np.asarray([0.5, 0.3, 0.2, 0.0])  # BOS is no token
    noise = np.isin(np.arange(4), [3] if mask else [1, 2]) / (1 if mask else 2)
    for number, steps in ((0, 2), (0, 3), (1, 3), (2, 3)):
        later, sooner = number / steps, (number + 1) / steps
        marginal = sooner * draft + (1 - sooner) * noise
        joint = marginal[:, None] * (later / sooner * np.eye(4) + (1 - later / sooner) * noise[None])  # [z_s z_t]
        for z in np.flatnonzero(joint.sum(0)):
            got = psi_spec._renoise(functions, jnp.asarray([[z]]), jnp.log(jnp.asarray(draft[:3]))[None, None], number, steps)
            np.testing.assert_allclose(jax.nn.softmax(got)[0, 0], joint[:, z] / joint[:, z].sum(), atol=1e-6)


# How much is accepted.


@functools.cache
def first_cycle_program(drafts, verification, rows):
    """A program for models of any tables: what the first cycle accepts behind the text (1,)."""
    functions, options = make_functions(length=drafts + 3, drafts=drafts), Options(length=drafts + 1, verification=verification)
    settings, prompt = make_settings(rows, functions.vocab), make_prompt([[1]] * rows, functions.length)

    @jax.jit
    def run(draws, tables):
        model = dataclasses.replace(functions, **tables)
        state = psi_spec.step(model, options, settings, psi_spec.begin(model, options, settings, draws, prompt))
        return state.accepted, state.draws

    return run


def first_cycle(functions, verification, rows=256):
    """The expected number of accepted drafts, by all scripts."""
    run = first_cycle_program(functions.block, verification, rows)
    bound = functools.partial(run, tables=dict(target=functions.target, draft=functions.draft))
    every = enumerate_scripts(bound, length=functions.length, cycles=1, vocab=functions.ids, rows=rows)
    return sum(probability * int(accepted) for probability, accepted in every)


def expected_accepts(functions, drafts, prefix=(1,)):
    """The same of a chain, from E[A] = sum_i sum_x prod_{j <= i} min(draft_j(x_j), target(x_j | x_<j)), over noise and clean token."""
    total = 0.0
    for noise in itertools.product((1, 2), repeat=drafts):
        laws = [functions.drafted(prefix, noise[: j + 1]) for j in range(drafts)]
        for clean, weight in enumerate(functions.next(prefix)):
            for i in range(1, drafts + 1):
                for x in itertools.product(range(functions.vocab), repeat=i):
                    both = [min(laws[j][x[j]], functions.next((*prefix, clean, *x[:j]))[x[j]]) for j in range(i)]
                    total += weight * np.prod(both) / 2**drafts
    return total


@pytest.mark.parametrize("drafts, seeds", [(2, range(4)), pytest.param(3, range(8), marks=pytest.mark.slow)], ids=str)
def test_block_accepts_at_least_what_chain_does(float64, drafts, seeds):
    """And chain what the closed form says."""
    gains = []
    for seed in seeds:
        functions = make_functions(length=drafts + 3, drafts=drafts, seed=seed)
        chain, block = (first_cycle(functions, kind) for kind in ("chain", "block"))
        assert abs(chain - expected_accepts(functions, drafts)) < 1e-10
        assert block >= chain - 1e-12
        gains.append(block - chain)
    assert max(gains) > 1e-3


@pytest.mark.parametrize("single", [False, pytest.param(True, marks=pytest.mark.slow)], ids=str)
def test_the_draft_is_the_models(float64, monkeypatch, single):
    """What is judged was drawn from the laws of (settled text, noise), and the cache holds the text without its last token, each row the
    frozen model's: after every cycle of a run."""
    judged = []

    def spy(right, draws, slot, tokens, draft, *rest):
        judged.append((slot.where, jnp.exp(draft)))
        return right(draws, slot, tokens, draft, *rest)

    wrap(monkeypatch, psi_spec, "judge", spy)
    functions = make_functions(length=6, lead=1, good=0.8)
    options, settings = Options(length=3, single_pass=single), make_settings(8, 3)
    prompt = make_prompt([[], [2, 0], [1, 1, 0], [2]] * 2, 6)
    state = psi_spec.begin(functions, options, settings, KeyedDraws(jax.random.key(3), jnp.arange(8)), prompt)
    step = jax.jit(lambda state: (psi_spec.step(functions, options, settings, state), *judged.pop()))
    seen = 0
    while (state.settled < state.end).any():
        before, (state, where, draft) = state, step(state)
        for row in range(8):
            tokens, settled = state.tokens[row].tolist(), int(state.settled[row])
            assert state.cache.lengths_B[row] == settled
            assert state.cache.tokens[row, :settled].tolist() == [3, *tokens[: settled - 1]]
            assert not state.cache.gates[row, :settled].any()
            # In a single pass the draft is of a cycle earlier. It had read what has been accepted since, but for the last token.
            text = tuple(tokens[: int(before.settled[row]) - single])
            for column in range(int(where[row].sum())):
                every = [functions.drafted(text, z) for z in itertools.product((1, 2), repeat=column + 1)]
                assert min(abs(law - draft[row, column]).max() for law in every) < 1e-12
                seen += 1
    assert seen > 15


# Mistakes, each of which the comparison must see.


def lossy(monkeypatch):
    """The published I-DLM sampler: argmax drafts, judged as if they were sampled."""
    return dict(draft="risd_lossy")


def unfiltered_ratio(monkeypatch):
    """The draft is drawn from the filtered law and judged by the unfiltered one."""
    seen = []

    def shape(right, logits, settings):
        seen.append(jax.nn.log_softmax(logits))
        return right(logits, settings)

    def draft(right, options, draws, slot, law):
        drafted, _, draws = right(options, draws, slot, law)
        return drafted, seen[-1], draws

    wrap(monkeypatch, psi_spec, "shape_logits", shape)
    wrap(monkeypatch, psi_spec, "_draft", draft)


def residual_is_target(monkeypatch):
    """After a rejection, a draw from the target in place of (target - draft)+."""
    monkeypatch.setattr(accept, "residual", lambda draft, target, scale: target)


def bonus_from_draft(monkeypatch):
    """The token behind an accepted draft is of the last draft row's law."""

    def judge(right, draws, slot, tokens, draft, target, verification, bonus):
        return right(draws, slot, tokens, draft, target, verification, (draft[:, -1], bonus[1]))

    wrap(monkeypatch, psi_spec, "judge", judge)


def gated_seed_law(monkeypatch):
    """The clean token is drawn from a seed row on which the adapter acts. (The cache gets the right row.)"""

    def rows(right, functions, cache, tokens, gate=None):
        logits, cache_after = right(functions, cache, tokens, gate)
        if gate is not None:
            logits = right(functions, cache, tokens, jnp.ones_like(gate))[0].at[:, 1:].set(logits[:, 1:])
        return logits, cache_after

    wrap(monkeypatch, psi_spec, "_rows", rows)


def gated_seed_cached(monkeypatch):
    """The law is right, and the seed's row in the cache is one on which the adapter acts."""

    def rows(right, functions, cache, tokens, gate=None):
        logits, cache_after = right(functions, cache, tokens, gate)
        return logits, cache_after if gate is None else right(functions, cache, tokens, jnp.ones_like(gate))[1]

    wrap(monkeypatch, psi_spec, "_rows", rows)


def best_of_two(monkeypatch):
    """Two drafts of each token, of which the likelier is kept."""

    def draft(right, options, draws, slot, law):
        one, law, draws = right(options, draws, slot, law)
        two, draws = categorical(draws, slot._replace(purpose=Purpose.TOKEN), law)
        at = lambda token: jnp.take_along_axis(law, token[:, :, None], 2)[:, :, 0]
        return jnp.where(at(two) > at(one), two, one), law, draws

    wrap(monkeypatch, psi_spec, "_draft", draft)


def shared_uniform(monkeypatch):
    """One uniform number for all accept tests of a cycle: the first failure is where the running minimum of the chances falls below it."""

    def first(right, draws, slot, log_p, outcome):
        chance = jnp.where(slot.where, jnp.exp(log_p), 1)
        least = jax.lax.cummin(chance, axis=1)
        law = jnp.concatenate([jnp.ones_like(least[:, :1]), least], 1) - jnp.concatenate([least, jnp.zeros_like(least[:, :1])], 1)
        one = Slot(Purpose.ACCEPT, slot.position[:, :1], slot.cycle, slot.where.any(1, keepdims=True))
        column, draws = categorical(draws, one, jnp.log(law)[:, None])
        return jnp.where(slot.where.any(1), column[:, 0], log_p.shape[1]), draws

    wrap(monkeypatch, accept, "first", first)


def reused_noise(monkeypatch):
    """Every cycle uses the noise of the first."""
    wrap(monkeypatch, psi_spec, "Slot", lambda right, purpose, at, cycle, where: right(purpose, at, cycle * 0, where))
    return dict(single_pass=True)


def no_roll_back(monkeypatch):
    """The verified rows are written behind the noise, not over it."""

    def rows(right, functions, cache, tokens, gate=None):
        behind = 0 if gate is not None else tokens.shape[1] - 1
        return right(functions, cache.replace(lengths_B=cache.lengths_B + behind), tokens, gate)

    wrap(monkeypatch, psi_spec, "_rows", rows)


def frontier_ahead(monkeypatch):
    """The frontier is moved behind the seed, whose row isn't in the cache: what lies there is the rejected draft's."""

    def join(right, state, *rest):
        after = right(state, *rest)
        ahead = ((state.cycle == 0) & (after.settled < after.end)).astype(jnp.int32)
        return after.replace(cache=after.cache.replace(lengths_B=after.cache.lengths_B + ahead))

    wrap(monkeypatch, psi_spec, "_join", join)


def seed_forgotten(monkeypatch):
    """The verified rows are written over the seed's."""

    def rows(right, functions, cache, tokens, gate=None):
        back = 0 if gate is not None else 1
        return right(functions, cache.replace(lengths_B=cache.lengths_B - back), tokens, gate)

    wrap(monkeypatch, psi_spec, "_rows", rows)


def adapter_in_verify(monkeypatch):
    """The adapter acts on the verified rows."""

    def rows(right, functions, cache, tokens, gate=None):
        return right(functions, cache, tokens, jnp.ones(tokens.shape, bool) if gate is None else gate)

    wrap(monkeypatch, psi_spec, "_rows", rows)


BROKEN = [
    lossy,
    unfiltered_ratio,
    bonus_from_draft,
    gated_seed_law,
    reused_noise,
    frontier_ahead,
    *(
        pytest.param(broken, marks=pytest.mark.slow)
        for broken in (
            residual_is_target,
            gated_seed_cached,
            best_of_two,
            shared_uniform,
            no_roll_back,
            seed_forgotten,
            adapter_in_verify,
        )
    ),
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda f: f.__name__)
def test_broken_variants_are_caught(broken, monkeypatch, float64):
    options, settings = broken(monkeypatch) or {}, {}
    if broken is unfiltered_ratio:
        settings = dict(top_k=2)
    with pytest.raises(AssertionError, match=r"wrong law|used twice"):
        check_law(dict(length=3, **options), model=FIVE, **settings)


# The adaptive length.


def hindsight(monkeypatch):
    """A length of 1 wherever the longer cycle turned out to accept nothing."""

    def cycle(right, functions, options, settings, state):
        long = psi_spec._two_pass(functions, dataclasses.replace(options, length=3), settings, state)
        short = psi_spec._one(functions, settings, state.replace(cycle=state.cycle + 4, draws=long.draws))
        pick = lambda a, b: jnp.where((long.accepted > state.accepted).reshape(-1, *[1] * (a.ndim - 1)), a, b)
        rest = jax.tree.map(pick, long.replace(draws=None, record=None), short.replace(draws=None, record=None, cycle=long.cycle))
        return rest.replace(draws=short.draws, record=state.record)

    wrap(monkeypatch, psi_spec, "_adaptive", cycle)


def check_batch(prefixes, options=ADAPTIVE, model=None, cycles=None, **settings):
    functions = make_functions(**(model or {}))
    got, runs = enumerated_batch(functions, Options(**options), prefixes, cycles=cycles, **settings)
    expect = {(): 1.0}
    for prefix in prefixes:
        row = autoregressive_law(functions, prefix, **settings)
        expect = {(*texts, text): p * q for texts, p in expect.items() for text, q in row.items()}
    assert distance(got, expect) <= 1e-10, "wrong law"
    return runs


@pytest.mark.slow
def test_adaptive_law(float64):
    """Of one row; what was accepted before decides the lengths."""
    runs = check_batch([(1,)], dict(ADAPTIVE, costs=(1.0, 2.0, 2.2)), dict(length=7, zeros=0.0, good=0.3))
    assert len(runs) > 3


@pytest.mark.parametrize("verification", ["chain", pytest.param("block", marks=pytest.mark.slow)])
def test_adaptive_law_of_a_batch(float64, verification):
    """The lengths tie the rows together, and yet their texts are independent, each of its own law."""
    model = dict(length=6, vocab=2, zeros=0.0, mask=True)
    assert len(check_batch([(1,), (0, 1)], dict(ADAPTIVE, verification=verification), model)) > 3


@pytest.mark.slow
def test_adaptive_in_hindsight_is_caught(monkeypatch, float64):
    hindsight(monkeypatch)
    with pytest.raises(AssertionError, match="wrong law"):
        check_batch([(1,)], model=dict(length=4, vocab=2, zeros=0.0), cycles=8)


def test_the_choice_reads_no_draws():
    """It is made from the state before the cycle, draws left out."""
    functions, settings = make_functions(), make_settings(2, 3)
    draws = KeyedDraws(jax.random.key(0), jnp.arange(2))
    state = psi_spec.begin(functions, Options(**ADAPTIVE), settings, draws, make_prompt([[1], [2]], 4))
    number, loss = psi_spec._choose(Options(**ADAPTIVE), state.replace(draws=None))
    assert (int(number), float(loss)) == (1, 0.0)  # 1, 2.5 and 2.75 tokens at first, for 1, 1.9 and 2.1


@struct.dataclass
class NoCache:
    lengths_B: Any


@dataclasses.dataclass(frozen=True)
class Constant:
    """A target that is one law throughout, and a draft that is that law at good positions, and shares no token with it elsewhere."""

    good_L: Any

    vocab, lead, noise_range = 4, 1, 1
    make_noise = staticmethod(jnp.zeros_like)

    def empty_cache(self, batch, slots):
        return NoCache(jnp.zeros((batch,), jnp.int32))

    def forward(self, cache, tokens_BQ, positions_BQ, mask, gate_BQ=None):
        gate_BQ = jnp.zeros(tokens_BQ.shape, bool) if gate_BQ is None else gate_BQ
        away_BQ1 = (gate_BQ & ~self.good_L[jnp.minimum(positions_BQ, TEXT - 1)])[:, :, None]
        laws = (jnp.asarray(x)[None, None] for x in ([0.0, 0.0, 0.5, 0.5], [0.5, 0.5, 0.0, 0.0]))
        return jnp.log(jnp.where(away_BQ1, *laws)), cache


TEXT, LENGTHS = 300, (1, 2, 4, 8)


@functools.cache
def adaptive_program(costs, rows=4):
    """The production loop on texts of 300 tokens, to its last state."""

    @jax.jit
    def run(good_L):
        functions, options, settings = Constant(good_L), Options(lengths=LENGTHS, costs=costs), make_settings(rows, 4)
        draws, prompt = KeyedDraws(jax.random.key(0), jnp.arange(rows, dtype=jnp.int32)), make_prompt([[]] * rows, TEXT)
        more = lambda state: (state.settled < state.end).any()
        step = lambda state: psi_spec.step(functions, options, settings, state)
        return jax.lax.while_loop(more, step, psi_spec.begin(functions, options, settings, draws, prompt))

    return run


@pytest.mark.parametrize(
    "costs, best",
    [
        pytest.param((1.0, 2.1, 2.2, 2.6), 8, id="rows cost little"),
        pytest.param((1.0, 2.6, 4.0, 8.0), 4, id="a row costs half a pass", marks=pytest.mark.slow),
    ],
)
def test_adaptive_finds_what_pays(costs, best):
    """A useless drafter is dropped at next to no cost, a perfect one used at the length that costs least, and one that changes on the way
    is noticed: https://github.com/vllm-project/vllm/issues/4565"""
    least = costs[LENGTHS.index(best)] / (best + 1)  # passes a token of a perfect drafter
    position = np.arange(TEXT)
    spent = {}
    for name, good_L in dict(never=position < 0, always=position >= 0, late=position >= 100, early=position < 200).items():
        state = adaptive_program(costs)(jnp.asarray(good_L))
        assert (state.settled == TEXT).all()
        assert state.record.explored <= 0.02 * state.record.spent
        spent[name] = float(state.record.spent)
    assert spent["never"] <= 1.04 * TEXT
    assert spent["always"] <= 1.1 * least * TEXT
    assert spent["late"] <= 1.04 * (100 + least * 200) + 25
    assert spent["early"] <= 1.04 * (100 + least * 200) + 25


# The frontier of the cache, and what is in the program.


EVERY_KIND = [dict(length=3), dict(length=1), dict(length=3, single_pass=True), ADAPTIVE]


@pytest.mark.parametrize("options", [EVERY_KIND[0], *(pytest.param(x, marks=pytest.mark.slow) for x in EVERY_KIND[1:])], ids=str)
def test_the_frontier_is_asserted_where_checks_are_on(float64, options):
    """https://github.com/vllm-project/vllm/pull/9730, https://github.com/vllm-project/vllm/pull/54288"""
    functions, settings, options = make_functions(length=5), make_settings(2, 3), Options(**options)
    draws, prompt = KeyedDraws(jax.random.key(0), jnp.arange(2)), make_prompt([[1], [2, 0]], 5)
    prompt_state = psi_spec.begin(functions, options, settings, draws, prompt)
    ahead = prompt_state.replace(cache=prompt_state.cache.replace(lengths_B=prompt_state.cache.lengths_B + jnp.asarray([0, 1], jnp.int32)))
    checked = jax.jit(checkify.checkify(lambda state: psi_spec.run(functions, options, settings, state)))
    assert checked(prompt_state)[0].get() is None
    assert "frontier" in checked(ahead)[0].get()


# On the network.

CONFIG = uno.Config(vocab=7, length=24, width=16, layers=2, heads=2, kv_heads=1, head_width=8, mlp=24, rank=3, alpha=6.0)
BEGINS = dataclasses.replace(CONFIG, begins=True, noise="mask")
CHAIN = Options(length=4)
SINGLE = Options(length=4, single_pass=True, verification="block")
PROMPTS = [[3], [1, 2, 3, 4, 5], [0] * 23, [2, 3], [4] * 9, [6] * 24]


@functools.cache
def weights(config):
    """Random ones, the adapter's too, with laws far from uniform."""
    variables = jax.tree.map(lambda x: 2.0 * x, uno.init(config, jax.random.key(0)))
    draw = lambda path, x: 0.2 * jax.random.normal(jax.random.key(len(str(path))), x.shape) if path[-1].key == "b" else x
    return {"params": {**variables["params"], "lora": jax.tree_util.tree_map_with_path(draw, variables["params"]["lora"])}}


@functools.cache
def program(sampler, config, options):
    return compile_sampler(sampler, uno, config, options)


def sampled(options, config=CONFIG, prompts=PROMPTS, requests=None, sampler=psi_spec, stop=(4,), **settings):
    requests = jnp.arange(len(prompts), dtype=jnp.int32) if requests is None else jnp.asarray(requests, jnp.int32)
    draws, prompt = KeyedDraws(jax.random.key(0), requests), make_prompt(prompts, config.length)
    return program(sampler, config, options)(weights(config), make_settings(len(prompts), 7, stop=stop, **settings), draws, prompt)


ADAPTS = Options(lengths=(1, 2, 5), costs=(1.0, 1.2, 1.4))
EVERY = [
    pytest.param(CONFIG, CHAIN, id="chain"),
    pytest.param(CONFIG, SINGLE, id="single-block"),
    pytest.param(BEGINS, ADAPTS, id="bos-adaptive", marks=pytest.mark.slow),
    *(
        pytest.param(config, Options(**options), id="-".join([name, *map(str, options.values())]), marks=pytest.mark.slow)
        for name, config in (("lead0", CONFIG), ("lead1", BEGINS))
        for options in (
            dict(length=1),
            dict(length=9, verification="block"),
            dict(length=3, steps=3, verification="block"),
            dict(draft="greedy"),
            dict(length=2, single_pass=True),
            dict(draft="greedy", single_pass=True),
        )
    ),
]


@pytest.mark.parametrize("config, options", EVERY)
def test_greedy_text_is_that_of_plain_autoregression(config, options):
    """Token by token, with a stop, with budgets, and up to the last slot of the cache: https://github.com/vllm-project/vllm/issues/54506,
    https://github.com/ggml-org/llama.cpp/issues/26478"""
    prompts = [[] if config.begins and row == [3] else row for row in PROMPTS]
    ends = set()
    for settings in (dict(stop=[0]), dict(stop=[4]), dict(max_new=[24, 1, 24, 2, 7, 3])):
        got = sampled(options, config, prompts, temperature=0.0, **settings)
        plain = sampled(autoregressive.Options(), config, prompts, sampler=autoregressive, temperature=0.0, **settings)
        np.testing.assert_array_equal(got.lengths, plain.lengths)
        count = jnp.arange(24)[None] < plain.lengths[:, None]
        np.testing.assert_array_equal(jnp.where(count, got.tokens, 0), jnp.where(count, plain.tokens, 0))
        np.testing.assert_allclose(got.logprobs, plain.logprobs, atol=1e-5)
        ends |= set(plain.lengths[:2].tolist())
    assert 24 in ends
    assert len(ends) > 1


@pytest.mark.parametrize("options", [CHAIN, pytest.param(SINGLE, marks=pytest.mark.slow)], ids=["chain", "single"])
def test_a_request_does_not_depend_on_its_neighbours(options):
    """In a batch, permuted, alone, beside others that end earlier: the same tokens and passes."""
    together = sampled(options)
    assert together.accepted.sum() > 0
    assert (together.accepted < together.proposed).any()
    order = [3, 0, 5, 1, 4, 2]
    permuted = sampled(options, prompts=[PROMPTS[i] for i in order], requests=order)
    short = sampled(options, max_new=[2, 30, 1, 30, 3, 1])
    for new, old in enumerate(order):
        np.testing.assert_array_equal(permuted.tokens[new], together.tokens[old])
        np.testing.assert_array_equal(permuted.passes.verify[new], together.passes.verify[old])
    for row, ids in enumerate(PROMPTS):
        alone = sampled(options, prompts=[ids], requests=[row])
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        np.testing.assert_array_equal(alone.passes.verify[0], together.passes.verify[row])
        end = int(short.lengths[row])
        assert end == min(int(together.lengths[row]), len(ids) + [2, 30, 1, 30, 3, 1][row])
        np.testing.assert_array_equal(short.tokens[row, :end], together.tokens[row, :end])


def test_counts():
    """Passes, their rows and the tokens that they settle add up."""
    begin = np.asarray([len(row) for row in PROMPTS])
    for options, rows in ((CHAIN, 8), (SINGLE, 7)):
        got = sampled(options)
        cycles, new, prefill = np.asarray(got.passes.verify), np.asarray(got.lengths) - begin, 24 * ((begin > 1) & (begin < 24))
        np.testing.assert_array_equal(got.passes.draft, 0 if options.single_pass else cycles)
        np.testing.assert_array_equal(got.passes.query_tokens, rows * cycles + prefill)
        least = 1 if options.single_pass else 2
        assert ((least * (cycles - 1) <= new) & (new <= (4 if options.single_pass else 5) * cycles)).all()
        assert (got.accepted <= got.proposed).all()
        assert (got.accepted <= new).all()
        assert (got.proposed <= 3 * cycles).all()


@pytest.mark.parametrize("config, options", EVERY[:3])
def test_one_program_that_never_leaves_the_device(config, options):
    prompts = [[] if config.begins and row == [3] else row for row in PROMPTS]
    sampled(options, config, prompts, temperature=0.0)
    compiled = program(psi_spec, config, options)._cache_size()
    sampled(options, config, prompts, temperature=0.7)
    assert program(psi_spec, config, options)._cache_size() == compiled
    draws, prompt = KeyedDraws(jax.random.key(0), jnp.arange(6, dtype=jnp.int32)), make_prompt(prompts, 24)
    lowered = program(psi_spec, config, options).lower(weights(config), make_settings(6, 7, stop=[4]), draws, prompt)
    assert leaves_device(lowered.compile().as_text()) == []


def test_bad_options():
    functions = make_functions()
    run = lambda **options: psi_spec.sample(
        functions, Options(**options), make_settings(1, 3), KeyedDraws(jax.random.key(0), jnp.arange(1)), make_prompt([[1]], 4)
    )
    for bad, words in [
        (dict(length=0), "length is 0"),
        (dict(steps=0), "steps is 0"),
        (dict(single_pass=True, length=1), "single_pass drafts"),
        (dict(single_pass=True, steps=2), "single_pass drafts"),
        (dict(single_pass=True, **ADAPTIVE), "single_pass drafts"),
        (dict(lengths=(2, 4), costs=(1.0, 2.0)), "begin with 1"),
        (dict(lengths=(1, 4, 4), costs=(1.0, 2.0, 2.0)), "ascend"),
        (dict(lengths=(1, 4)), "give each length the cost"),
        (dict(lengths=(1, 4), costs=(1.0, 0.0)), "above 0"),
        (dict(costs=(1.0,)), "give each length"),
    ]:
        with pytest.raises(UserError, match=words):
            run(**bad)

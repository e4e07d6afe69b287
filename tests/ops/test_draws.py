from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.ops import draws as doors
from dllm.ops.draws import KeyedDraws, Purpose, Slot, categorical, enumerate_scripts, first, permutation, uniform


def slot(purpose, rows, columns, cycle=0, where=None):
    position = jnp.broadcast_to(jnp.arange(columns, dtype=jnp.int32)[None], (rows, columns))
    where = jnp.ones((rows, columns), bool) if where is None else where
    return Slot(purpose, position, jnp.full((rows,), cycle, jnp.int32), where)


def keyed(rows, seed=0, first_request=0):
    return KeyedDraws(jax.random.key(seed), first_request + jnp.arange(rows, dtype=jnp.int32))


def test_a_slot_names_its_draw():
    """The same slot gives the same draw whatever stands beside it; any other purpose, request, position or cycle another one."""
    logits = jnp.zeros((4, 8, 1000))
    draw = jax.jit(lambda draws, s, x: categorical(draws, s, x)[0])
    base = draw(keyed(4), slot(Purpose.DRAFT, 4, 8), logits)
    np.testing.assert_array_equal(draw(keyed(2, first_request=2), slot(Purpose.DRAFT, 2, 8), logits[:2]), base[2:])
    shifted = slot(Purpose.DRAFT, 4, 3)._replace(position=jnp.broadcast_to(jnp.arange(5, 8, dtype=jnp.int32)[None], (4, 3)))
    np.testing.assert_array_equal(draw(keyed(4), shifted, logits[:, :3]), base[:, 5:])
    assert len(np.unique(base)) > 25
    for other in (slot(Purpose.RESIDUAL, 4, 8), slot(Purpose.DRAFT, 4, 8, cycle=1)):
        assert (draw(keyed(4), other, logits) == base).mean() < 0.2
    assert (draw(keyed(4, seed=1), slot(Purpose.DRAFT, 4, 8), logits) == base).mean() < 0.2


def test_categorical_frequencies():
    """20,000 draws, chi-square with 3 degrees of freedom: a false alarm once in 10^6."""
    p = np.asarray([0.5, 0.3, 0.15, 0.05])
    n = 20_000
    logits = jnp.broadcast_to(jnp.log(p), (n, 1, 4))
    seen = np.bincount(categorical(keyed(n), slot(Purpose.DRAFT, n, 1), logits)[0][:, 0], minlength=4)
    assert ((seen - n * p) ** 2 / (n * p)).sum() < 30.7


def test_wide_vocabularies(monkeypatch):
    """Two stages draw from the same law, forbidden ids and whole forbidden groups left out: 20,000 draws of 23 ids, chi-square with 16
    degrees of freedom, a false alarm once in 10^6; a rare id beside certain ones, and a slot's draw is its own."""
    monkeypatch.setattr(doors, "WIDE", 8)
    p = np.random.default_rng(0).dirichlet(np.ones(23))
    p[[0, 8, 9, 10, 11, 22]] = 0  # of groups of 4
    p, n = p / p.sum(), 20_000
    logits = jnp.broadcast_to(jnp.log(p), (n, 1, 23))
    drawn = categorical(keyed(n), slot(Purpose.DRAFT, n, 1), logits)[0][:, 0]
    seen, may = np.bincount(drawn, minlength=23), p > 0
    assert not seen[~may].any()
    assert ((seen - n * p)[may] ** 2 / (n * p[may])).sum() < 59.5
    np.testing.assert_array_equal(categorical(keyed(5, first_request=9), slot(Purpose.DRAFT, 5, 1), logits[:5])[0][:, 0], drawn[9:14])
    sure = jnp.broadcast_to(jnp.where(jnp.arange(23) == 13, 0.0, -jnp.inf), (n, 1, 23))
    assert (categorical(keyed(n), slot(Purpose.DRAFT, n, 1), sure)[0] == 13).all()


def test_noise_is_of_full_range():
    """The draw is that of JAX's high-range Gumbel noise under the slot's own key. (Low-range noise ends at 16 and loses what is rarer
    than 1e-7; to see that by counting takes 10^9 draws.)"""
    logits = jax.random.normal(jax.random.key(3), (2, 3, 100))
    got = categorical(keyed(2), slot(Purpose.DRAFT, 2, 3, cycle=5), logits)[0]
    for row in range(2):
        for column in range(3):
            key = jax.random.key(0)
            for name in (row, int(Purpose.DRAFT), 5, column):
                key = jax.random.fold_in(key, name)
            assert got[row, column] == jax.random.categorical(key, logits[row, column], mode="high")


def test_uniform():
    """20,000 draws of 7 numbers, chi-square with 6 degrees of freedom: a false alarm once in 10^6. A slot names its draw, and a script
    has each number once."""
    n = 20_000
    drawn = np.asarray(uniform(keyed(n), slot(Purpose.NOISE, n, 2), 7)[0])
    for column in range(2):
        seen = np.bincount(drawn[:, column], minlength=7)
        assert len(seen) == 7
        assert ((seen - n / 7) ** 2 / (n / 7)).sum() < 38.3
    assert abs((drawn[:, 0] == drawn[:, 1]).mean() - 1 / 7) < 0.02
    np.testing.assert_array_equal(uniform(keyed(5, first_request=9), slot(Purpose.NOISE, 5, 2), 7)[0], drawn[9:14])
    assert (np.asarray(uniform(keyed(n), slot(Purpose.NOISE, n, 2, cycle=1), 7)[0]) == drawn).mean() < 0.2
    assert (uniform(keyed(4), slot(Purpose.NOISE, 4, 2), 1)[0] == 0).all()
    leaves = enumerate_program(lambda draws: uniform(draws, slot(Purpose.NOISE, 8, 2), 3), length=2, cycles=1, vocab=3)
    assert {tuple(x.tolist()) for _, x in leaves} == set(itertools.product(range(3), repeat=2))
    assert all(abs(weight - 1 / 9) < 1e-12 for weight, _ in leaves)


@pytest.mark.parametrize("outcome", [True, False])
def test_first_trial(outcome):
    """The column of the first success or failure, against the geometric law; 20,000 rows, five standard errors."""
    p, n = np.asarray([0.5, 0.8, 0.1, 0.6]), 20_000
    where = jnp.asarray([True, True, False, True])
    column, _ = first(
        keyed(n),
        slot(Purpose.ACCEPT, n, 4, where=jnp.broadcast_to(where[None], (n, 4))),
        jnp.broadcast_to(jnp.log(p)[None], (n, 4)),
        outcome,
    )
    hit = np.where(outcome, p, 1 - p) * np.asarray(where)
    law = np.append(hit, 1) * np.append(1, np.cumprod(1 - hit))
    seen = np.bincount(column, minlength=5) / n
    assert (np.abs(seen - law) <= 5 * np.sqrt(law * (1 - law) / n)).all()


def test_certain_trials():
    """Probability 1 never fails, probability 0 never succeeds."""
    n = 50_000
    one = lambda log_p, outcome: first(keyed(n), slot(Purpose.ACCEPT, n, 1), jnp.full((n, 1), log_p), outcome)[0]
    assert (one(0.0, False) == 1).all()
    assert (one(-jnp.inf, True) == 1).all()


def test_permutations_are_uniform():
    n = 6000
    order = np.asarray(jax.jit(lambda d: permutation(d, 3))(keyed(n)))
    seen = np.unique(order @ np.asarray([9, 3, 1]), return_counts=True)[1]
    assert len(seen) == 6
    assert ((seen - n / 6) ** 2 / (n / 6)).sum() < 35.9  # 5 degrees of freedom, a false alarm once in 10^6


def enumerate_program(program, **kwargs):
    with jax.enable_x64(True):
        run = jax.jit(program)
        return list(enumerate_scripts(run, rows=8, **kwargs))


def test_scripts_cover_the_law():
    """Two tokens, then Bernoulli trials whose probabilities depend on them: every leaf once, probabilities as by hand."""
    p = np.asarray([0.2, 0.3, 0.5])
    accept = np.asarray([0.25, 0.5, 1.0])

    def program(draws):
        logits = jnp.broadcast_to(jnp.log(p), (8, 2, 3))
        tokens, draws = categorical(draws, slot(Purpose.DRAFT, 8, 2), logits)
        column, draws = first(draws, slot(Purpose.ACCEPT, 8, 2), jnp.log(jnp.asarray(accept))[tokens], False)
        return (tokens, column), draws

    leaves = enumerate_program(program, length=2, cycles=1, vocab=3)
    expect = {}
    for a, b in itertools.product(range(3), repeat=2):
        for column, weight in enumerate([1 - accept[a], accept[a] * (1 - accept[b]), accept[a] * accept[b]]):
            if weight > 0:
                expect[a, b, column] = p[a] * p[b] * weight
    got = {(*tokens.tolist(), int(column)): weight for weight, (tokens, column) in leaves}
    assert len(leaves) == len(got) == len(expect)
    assert all(abs(got[k] - expect[k]) < 1e-12 for k in expect)


def test_scripts_refuse_a_slot_used_twice():
    def program(draws):
        for _ in range(2):
            tokens, draws = categorical(draws, slot(Purpose.DRAFT, 8, 1), jnp.zeros((8, 1, 2)))
        return tokens, draws

    with pytest.raises(AssertionError, match="used twice"):
        enumerate_program(program, length=1, cycles=1, vocab=2)


def test_scripts_refuse_a_slot_outside():
    program = lambda draws: categorical(draws, slot(Purpose.DRAFT, 8, 1, cycle=1), jnp.zeros((8, 1, 2)))
    with pytest.raises(AssertionError, match="beyond"):
        enumerate_program(program, length=1, cycles=1, vocab=2)


def test_what_is_no_draw_leaves_no_trace():
    where = jnp.broadcast_to(jnp.asarray([[True, False]]), (8, 2))
    program = lambda draws: categorical(draws, slot(Purpose.DRAFT, 8, 2, where=where), jnp.zeros((8, 2, 2)))
    assert len(enumerate_program(program, length=2, cycles=1, vocab=2)) == 2


def test_float32_at_least():
    assert doors.float32_at_least(jnp.zeros(1, jnp.bfloat16)).dtype == jnp.float32

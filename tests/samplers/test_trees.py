"""Tree verification: its exact law by all scripts through the production loop, what the broken ones do, and a real network's rows."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jax import lax

from dllm.core.types import UserError
from dllm.models import uno
from dllm.models.cache import Cache
from dllm.ops import masks, trees
from dllm.ops.draws import KeyedDraws, Purpose, Slot, enumerate_scripts
from dllm.ops.settings import make_settings, shape_logits
from dllm.samplers import accept, autoregressive, psi_spec
from dllm.samplers.loop import compile_sampler, make_prompt
from tests.samplers import uno_tables
from tests.samplers.uno_tables import autoregressive_law, distance, enumerated

TREES = ("tree", "tree_rejection")


@struct.dataclass
class TreeCache(uno_tables.RowCache):
    def keep(self, rows_BQ, n_B):
        column_1Q = jnp.arange(rows_BQ.shape[1])[None]
        to_BQ = jnp.where(column_1Q < n_B[:, None], self.lengths_B[:, None] + column_1Q, self.tokens.shape[1])
        at = jnp.arange(len(rows_BQ))[:, None]
        move = lambda x: x.at[at, to_BQ].set(x.at[at, self.lengths_B[:, None] + rows_BQ].get(mode="clip"), mode="drop")
        return TreeCache(move(self.tokens), move(self.positions), move(self.gates), self.lengths_B + n_B)


class Functions(uno_tables.Functions):
    def empty_cache(self, batch, slots):
        return TreeCache(**vars(super().empty_cache(batch, slots)))


def table(**shape):
    return Functions(**vars(uno_tables.make_functions(**shape)))


def tree(verification="tree", length=3, **options):
    return psi_spec.Options(length=length, verification=verification, **options)


def check(functions, options, prefix=(), neighbour=None, **settings):
    got = enumerated(functions, options, prefix, neighbour=neighbour, **settings)
    assert distance(got, autoregressive_law(functions, prefix, **settings)) < TOLERANCE, "wrong law"


TOLERANCE = 1e-7  # the settings are float32; without any, 1e-12


@pytest.mark.parametrize(
    "options, shape",
    [
        (tree(children=3, nodes=7), dict(length=4)),
        (tree(children=1, nodes=3), dict(length=4, lead=1, mask=True)),  # a chain of tokens, judged by draws from the target
        (tree("tree_rejection", children=2, nodes=7), dict(length=3, lead=1, mask=True, good=0.0)),
        (tree("tree_rejection", children=2, nodes=7), dict(length=4, lead=1, mask=True, good=0.0)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (tree(children=2, nodes=4), dict(length=4, lead=1)),
                (tree(children=2, nodes=2), dict(length=3)),
                (tree(children=3, nodes=40, steps=2), dict(length=3, lead=1, zeros=0.4)),
                (tree(length=4, children=2, nodes=8), dict(length=5, drafts=3, mask=True)),
                (tree("tree_rejection", children=3, nodes=40, steps=2), dict(length=3, mask=True, zeros=0.5)),  # more rows than nodes
                (tree("tree_rejection", children=2, nodes=7), dict(length=3)),
                (tree("tree_rejection", children=3, nodes=7), dict(length=3, lead=1, mask=True)),
                (tree("tree_rejection", children=1, nodes=3), dict(length=3)),
                (tree("tree_rejection", children=2, nodes=6), dict(length=4, lead=1)),
            ]
        ),
    ],
)
def test_any_tree_is_exact(options, shape, float64):
    """https://github.com/SafeAILab/EAGLE/issues/183: which rule is lossless with which candidates."""
    functions = table(**shape)
    prefix = () if functions.lead else (1,)
    got = enumerated(functions, options, prefix)
    assert distance(got, autoregressive_law(functions, prefix)) < 1e-12


SETTINGS = [
    (dict(top_k=2, temperature=0.7, stop=(1,)), False),
    (dict(banned=(0,), max_new=3), False),
    (dict(top_p=0.6, stop=(0, 2)), True),
    (dict(top_k=2, top_p=0.7, max_new=2), True),
    (dict(temperature=0.0), True),
]


@pytest.mark.parametrize("verification", TREES)
@pytest.mark.parametrize("settings", [pytest.param(x, marks=pytest.mark.slow) if slow else x for x, slow in SETTINGS], ids=str)
def test_settings_stops_and_budgets(settings, verification, float64):
    """Filters whose supports differ on the two sides, T = 0, a stop or the end inside the path."""
    check(table(length=4, lead=1, mask=True, seed=1), tree(verification, children=2, nodes=6), **settings)


@pytest.mark.parametrize("verification", [pytest.param("tree", marks=pytest.mark.slow), "tree_rejection"])
def test_neighbours_with_other_settings(verification, float64):
    functions, options = table(length=3, lead=1, mask=True, seed=2), tree(verification, children=2, nodes=5)
    mine, theirs = dict(temperature=0.6, top_k=2), dict(temperature=0.0)
    check(functions, options, (2,), neighbour=((), theirs), **mine)


@pytest.mark.slow
def test_a_tree_of_adaptive_length(float64):
    """What a path accepted is noted, and the law stays, whatever length is chosen."""
    functions = table(length=4, mask=True)
    law, rows = uno_tables.enumerated_batch(functions, tree(children=2, nodes=4, lengths=(1, 2, 3), costs=(1.0, 1.1, 1.2)), [(1,)])
    assert len(rows) > 1
    assert distance({text: p for (text,), p in law.items()}, autoregressive_law(functions, (1,))) < 1e-12


def broken_prune(monkeypatch):
    """One candidate more is drawn than used, and the likeliest are kept, judged as if all that was drawn were used."""

    def pruned(draws, slot, law, children):
        drawn, there, draws = accept.draw_candidates(draws, slot._replace(cycle=slot.cycle * 2), law, children + 1)
        score = jnp.where(there, jnp.take_along_axis(law, drawn, 2), -jnp.inf)
        kept = lax.top_k(score, children)[1]
        return jnp.take_along_axis(drawn, kept, 2), jnp.take_along_axis(there, kept, 2), draws

    monkeypatch.setattr(psi_spec, "draw_candidates", pruned)


def broken_removal(monkeypatch):
    """Children that were drawn without replacement are judged as if with it."""
    right = accept.without

    def judged(*arguments):
        monkeypatch.setattr(accept, "without", lambda law, token: law)
        out = accept.walk_rejecting(*arguments)
        monkeypatch.setattr(accept, "without", right)
        return out

    monkeypatch.setattr(psi_spec, "walk_rejecting", judged)


def broken_shape(monkeypatch):
    """Likelier draws get more children, and go first: how many siblings are tried hangs on which were drawn."""
    right = psi_spec.draw_candidates

    def drawn(draws, slot, law, children):
        tokens, there, draws = right(draws, slot, law, children)
        return tokens, there & ((jnp.arange(children) == 0)[None, None] | (tokens[:, :, 1:2] == 0)), draws

    monkeypatch.setattr(psi_spec, "draw_candidates", drawn)


def broken_residual(monkeypatch):
    """After a rejection the next child is judged by the target."""
    monkeypatch.setattr(accept, "residual", lambda draft, target, scale: target)


def broken_keep(monkeypatch):
    """The rows of the pass are kept as they lie."""
    monkeypatch.setattr(TreeCache, "keep", lambda self, rows_BQ, n_B: self.replace(lengths_B=self.lengths_B + n_B))


def broken_names(monkeypatch):
    """All accept tests of a depth go by one name."""
    right = accept.first
    same = lambda draws, slot, log_p, outcome: right(draws, slot._replace(cycle=slot.cycle // 2), log_p, outcome)
    monkeypatch.setattr(accept, "first", same)


BROKEN = [broken_prune, broken_removal, broken_shape, broken_residual, broken_keep, broken_names]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda f: f.__name__)
def test_broken_variants_are_caught(broken, monkeypatch, float64):
    """The same run without the mistake is among those above."""
    length = 4 if broken is broken_keep else 3
    broken(monkeypatch)
    with pytest.raises(AssertionError, match=r"wrong law|used twice"):
        check(table(length=length, lead=1, mask=True, good=0.0), tree("tree_rejection", children=2, nodes=7))


@functools.cache
def judging(rule, children, nodes, rows):
    """Returns a jitted run(logs of the draft [D V], logs of the target by the path's length and code, draws)."""

    @jax.jit
    def run(draft, table, draws):
        (depths, vocab), cycle_B = draft.shape, jnp.zeros((rows,), jnp.int32)
        law_BDV = jnp.broadcast_to(draft[None], (rows, depths, vocab))
        at_BE = jnp.broadcast_to(jnp.arange(depths + 1)[None], (rows, depths + 1))
        if rule == "walk":
            weight_BDK, tokens_BDK = lax.top_k(law_BDV, children)
        else:
            slot = Slot(Purpose.DRAFT, at_BE[:, 1:], cycle_B, at_BE[:, 1:] > 0)
            tokens_BDK, there_BDK, draws = accept.draw_candidates(draws, slot, law_BDV, children)
            weight_BDK = jnp.where(there_BDK, -jnp.arange(1.0, children + 1)[None, None], -jnp.inf)
        tree = trees.best_first(weight_BDK, nodes)
        tokens_BN = trees.tokens_at(tree, jnp.zeros((rows, 1), jnp.int32), tokens_BDK)
        power_BN = jnp.where(tree.depth_BN > 0, vocab ** jnp.maximum(tree.depth_BN - 1, 0), 0)
        code_BN = (tree.ancestors_BNN * (tokens_BN * power_BN)[:, None]).sum(-1)
        slot = Slot(Purpose.TOKEN, at_BE, cycle_B, at_BE >= 0)
        if rule == "walk":
            path = accept.walk(draws, slot, tree, tokens_BN, table[tree.depth_BN, code_BN])
        else:
            path = accept.walk_rejecting(draws, slot, tree, tokens_BN, law_BDV, table[tree.depth_BN, code_BN], children)
        return (path.accepted_B, path.token_B, jnp.take_along_axis(tokens_BN, path.nodes_BE, 1)), path.draws

    return run


def judged(rule, draft, target, children, nodes, rows=512):
    """[(probability, accepted, last token, the path's tokens)] of one judgement: draft [D V] and target (a function of the path)."""
    depths, vocab = draft.shape
    table = np.zeros((depths + 1, vocab**depths, vocab))
    for size in range(depths + 1):
        for path in itertools.product(range(vocab), repeat=size):
            table[size, sum(token * vocab**i for i, token in enumerate(path))] = target(path)
    run = functools.partial(judging(rule, children, nodes, rows), jnp.log(draft), jnp.log(table))
    every = enumerate_scripts(run, length=depths + 1, cycles=children, vocab=vocab, rows=rows)
    return [(p, int(n), int(token), tuple(path[1 : int(n) + 1].tolist())) for p, (n, token, path) in every]


def laws(seed, vocab=3, depths=2, zeros=0.25):
    rng = np.random.default_rng(seed)
    draw = lambda: uno_tables.sparse(law := rng.dirichlet(np.ones(vocab)), rng.random(law.shape) < zeros)
    every = {path: draw() for size in range(depths + 1) for path in itertools.product(range(vocab), repeat=size)}
    return np.stack([draw() for _ in range(depths)]), every.__getitem__


@pytest.mark.parametrize("rule", ["walk", "walk_rejecting"])
@pytest.mark.parametrize("children, nodes", [(2, 7), (2, 5), (3, 13), (3, 6)])
def test_what_a_judgement_emits_is_drawn_from_the_target(rule, children, nodes, float64):
    """Completed by the target to three tokens, the law is the target's own."""
    draft, target = laws(seed=children)
    got, want = defaultdict(float), {}
    for p, _, token, path in judged(rule, draft, target, children, nodes):
        for rest in itertools.product(range(3), repeat=2 - len(path)):
            text = (*path, token, *rest)
            got[text] += p * np.prod([target(text[:i])[text[i]] for i in range(len(path) + 1, 3)])
    for text in itertools.product(range(3), repeat=3):
        want[text] = np.prod([target(text[:i])[text[i]] for i in range(3)])
    assert distance(got, want) < 1e-12


def test_of_candidates_that_are_no_matter_of_chance_both_rules_accept_the_same(float64):
    """Each is accepted with the target's mass of them, the most that any rule can. Log-weights far apart make draws without replacement a
    certain list."""
    for seed, rule in itertools.product(range(20), ("walk", "walk_rejecting")):
        _, target = laws(seed, vocab=4, depths=1)
        order = np.random.default_rng(seed).permutation(4)
        listed = np.exp(-np.asarray([0.0, 200.0, 400.0, 600.0]))[np.argsort(order)][None]
        accepted = sum(p for p, n, _, _ in judged(rule, listed, target, 2, 3, rows=16) if n)
        assert abs(accepted - target(())[order[:2]].sum()) < 1e-12


def test_rejection_accepts_more_than_a_chain_and_no_less_than_fewer_children(float64):
    """Of accepted tokens, expected over all scripts, where the draft is near the target."""
    _, target = laws(seed=7, zeros=0)
    once = sum(target(())[token] * target((token,)) for token in range(3))
    draft = np.stack([target(()), once]) * 0.6 + 0.4 / 3
    mean = lambda rule, children, nodes: sum(p * n for p, n, _, _ in judged(rule, draft, target, children, nodes))
    one, two, three = (mean("walk_rejecting", k, nodes) for k, nodes in ((1, 3), (2, 7), (3, 13)))
    assert one + 0.1 < two < three
    assert three == pytest.approx(2, abs=1e-9)  # every token is a child
    assert mean("walk", 3, 13) == pytest.approx(2, abs=1e-9)


# A real network.

CONFIG = uno.Config(vocab=31, length=40, width=16, layers=2, heads=2, kv_heads=1, head_width=8, mlp=24, rank=3, alpha=6.0, block=6)
ROWS = 4
PROMPTS = [[3], [5, 6, 7, 1], [30, 2], [9] * 9]


@functools.cache
def network(config=CONFIG):
    """Fresh variables with b drawn too: as made, the adapter adds nothing."""
    variables = uno.init(config, jax.random.key(0))
    draw = lambda path, x: 0.3 * jax.random.normal(jax.random.key(len(str(path))), x.shape) if path[-1].key == "b" else x
    return {"params": {**variables["params"], "lora": jax.tree_util.tree_map_with_path(draw, variables["params"]["lora"])}}


def keyed(rows=range(ROWS)):
    return KeyedDraws(jax.random.key(0), jnp.asarray(rows, jnp.int32))


@pytest.mark.parametrize("slots", [40, pytest.param(600, marks=pytest.mark.slow)])
def test_a_verifying_pass_runs_each_path_as_a_sequence(slots):
    """Logits of every node, and keys and values after keep, against a plain pass over the path; the longer cache is read in chunks."""
    functions = uno.bind(CONFIG, network())
    forward, keep, path_to = jax.jit(functions.forward), jax.jit(Cache.keep), jax.jit(trees.path_to, static_argnums=2)
    lengths = jnp.asarray([0, 1, 7, 20], jnp.int32)
    tokens = jax.random.randint(jax.random.key(1), (ROWS, 20), 0, CONFIG.vocab)
    at = lambda start_B, n: start_B[:, None] + jnp.arange(n, dtype=jnp.int32)[None]
    _, cache = forward(functions.empty_cache(ROWS, slots), tokens, at(lengths * 0, 20), masks.causal)
    cache = cache.replace(lengths_B=lengths)

    weights = -jnp.sort(-jax.random.normal(jax.random.key(2), (ROWS, 5, 3)), -1)
    tree = jax.jit(trees.best_first, static_argnums=1)(weights, 12)
    candidates = jax.random.randint(jax.random.key(3), (ROWS, 5, 3), 0, CONFIG.vocab)
    nodes = trees.tokens_at(tree, tokens[:, :1], candidates)
    logits, after = forward(cache, nodes, lengths[:, None] + tree.depth_BN, masks.Ancestors(tree.ancestors_BNN))
    for node in range(12):
        end = jnp.full((ROWS, 1), node, jnp.int32)
        path, depth = path_to(tree, end, 5), tree.depth_BN[:, node]
        plain, want = forward(cache, jnp.take_along_axis(nodes, path, 1), at(lengths, 6), masks.causal)
        here = jnp.take_along_axis(plain, depth[:, None, None], 1)[:, 0]
        np.testing.assert_allclose(logits[:, node], here, atol=1e-5)
        kept = keep(after, path, depth + 1)
        np.testing.assert_array_equal(kept.lengths_B, lengths + depth + 1)
        for b, filled in enumerate(kept.lengths_B.tolist()):
            for mine, theirs in ((kept.k, want.k), (kept.v, want.v)):
                np.testing.assert_allclose(mine[:, b, :filled], theirs[:, b, :filled], atol=1e-5)


SAMPLERS = {
    "tree": tree(length=6, children=3, nodes=14),
    "tree_rejection": tree("tree_rejection", length=6, children=3, nodes=14),
    "two_steps": tree(length=4, children=2, nodes=9, steps=2),
}


@functools.cache
def program(name):
    return compile_sampler(psi_spec, uno, CONFIG, SAMPLERS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
def test_greedy_text_is_that_of_plain_decoding(name):
    """https://github.com/vllm-project/vllm/issues/54506: greedy outputs that change where speculation is on. Token-exact in float32."""
    settings, prompt = (
        make_settings(ROWS, CONFIG.vocab, temperature=0.0, max_new=[31, 36, 1, 12], stop=[4]),
        make_prompt(PROMPTS, CONFIG.length),
    )
    want = compile_sampler(autoregressive, uno, CONFIG, autoregressive.Options())(network(), settings, keyed(), prompt)
    got = program(name)(network(), settings, keyed(), prompt)
    np.testing.assert_array_equal(got.lengths, want.lengths)
    for b, end in enumerate(want.lengths.tolist()):
        np.testing.assert_array_equal(got.tokens[b, :end], want.tokens[b, :end])
    assert (got.passes.verify == got.passes.draft / SAMPLERS[name].steps).all()


@pytest.mark.parametrize("name", [TREES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in TREES[1:])])
def test_a_request_does_not_depend_on_its_neighbours(name):
    """Alone (in a batch of copies of itself), in another order, and among others with other settings."""
    temperature = [1.0, 0.7, 0.0, 1.3]
    run = lambda rows: program(name)(
        network(),
        make_settings(ROWS, CONFIG.vocab, temperature=[temperature[b] for b in rows], max_new=[[30, 9, 30, 20][b] for b in rows], top_k=20),
        keyed(rows),
        make_prompt([PROMPTS[b] for b in rows], CONFIG.length),
    )
    together = run([0, 1, 2, 3])
    for rows in ([3, 2, 1, 0], [1, 1, 1, 1], [0, 0, 2, 2]):
        other = run(rows)
        for at, b in enumerate(rows):
            np.testing.assert_array_equal(other.tokens[at], together.tokens[b])


def test_a_text_up_to_the_last_token_of_the_context():
    """The last cycles' rows are more than what is left of the text."""
    settings = make_settings(ROWS, CONFIG.vocab)
    samples = program("tree")(network(), settings, keyed(), make_prompt([[1] * 39, [2] * 40, [3] * 37, [4]], CONFIG.length))
    assert samples.lengths.tolist() == [40] * 4
    tokens = samples.tokens
    logits = jax.jit(lambda v: uno.bind(CONFIG, v).forward(None, tokens, tokens * 0 + jnp.arange(40)[None], masks.causal)[0])(network())
    law = shape_logits(logits[:, :-1], settings)
    here = jnp.take_along_axis(law, tokens[:, 1:, None], 2)[:, :, 0]
    for b, given in enumerate((39, 40, 37, 1)):
        np.testing.assert_allclose(samples.logprobs[b, given:], here[b, given - 1 :], atol=1e-4)


@pytest.mark.slow
def test_a_tree_with_room_accepts_what_the_chain_accepts_at_temperature_0():
    """From the same states, with the same noise."""
    functions = table(length=8, lead=1, mask=True, good=0.7)
    rows = 64
    settings, draws = make_settings(rows, functions.vocab, temperature=0.0), keyed(range(rows))
    prompt = make_prompt([[b % functions.vocab] * (b % 3) for b in range(rows)], functions.length)
    chain, full = psi_spec.Options(length=3), tree(children=2, nodes=7)
    step = {o: jax.jit(lambda state, o=o: psi_spec.step(functions, o, settings, state)) for o in (chain, full)}
    state = psi_spec.begin(functions, full, settings, draws, prompt)
    more = 0
    while (state.settled < state.end).any():
        live = state.settled < state.end
        after, tree_after = step[chain](state), step[full](state)
        same = (after.tokens == tree_after.tokens) | (jnp.arange(functions.length)[None] >= after.settled[:, None])
        assert (tree_after.settled >= after.settled).all()
        assert same.all()
        more += int((tree_after.settled - after.settled)[live].sum())
        state = after
    assert more > 0


@pytest.mark.parametrize("verification", [TREES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in TREES[1:])])
def test_decoding_holds_no_second_cache(verification):
    config = dataclasses.replace(CONFIG, length=2048, layers=8)
    options = tree(verification, length=4, children=2, nodes=8)
    variables = jax.eval_shape(lambda key: uno.init(config, key), jax.random.key(0))
    settings, prompt = make_settings(ROWS, config.vocab), make_prompt(PROMPTS, config.length)
    start = lambda variables, *rest: psi_spec.begin(uno.bind(config, variables), options, *rest).replace(draws=None)
    state = jax.eval_shape(start, variables, settings, keyed(), prompt)

    def run(variables, state):
        functions = uno.bind(config, variables)
        state = state.replace(draws=keyed())
        live = lambda state: (state.settled < state.end).any()
        return lax.while_loop(live, lambda state: psi_spec.step(functions, options, settings, state), state).replace(draws=None)

    memory = jax.jit(run, donate_argnums=1).lower(variables, state).compile().memory_analysis()
    size = sum(x.size * x.dtype.itemsize for x in (state.cache.k, state.cache.v))
    assert memory.temp_size_in_bytes < 0.2 * size
    assert memory.alias_size_in_bytes >= size


@pytest.mark.parametrize(
    "options, message",
    [
        (tree(children=0), "children is 0 and nodes 16; make them 1 or more, and 2 or more"),
        (tree("tree_rejection", nodes=1), "children is 4 and nodes 1"),
        (tree(draft="greedy"), "verification=tree has a draft and passes of its own: leave out draft and single_pass"),
        (tree("tree_rejection", single_pass=True), "verification=tree_rejection has a draft"),
    ],
)
def test_bad_options(options, message):
    arguments = make_settings(1, 3), keyed([0]), make_prompt([[1]], 3)
    with pytest.raises(UserError, match=message):
        psi_spec.sample(table(length=3), options, *arguments)

"""The drafter's objective: its rows against plain passes of the model, its numbers against numpy, and its weighted losses against E[A]."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.data.packing import pack
from dllm.diffusion import uno as objective
from dllm.models import uno
from dllm.ops import masks
from tests.models.test_decoder import shaken

V, BLOCK, LENGTH = 11, 4, 14
SHAPE = dict(width=16, layers=2, heads=2, kv_heads=1, head_width=8, mlp=24, rank=3, alpha=6.0, remat=False)
MODEL = uno.Config(vocab=V, length=32, block=BLOCK, noise_low=2, noise_high=5, **SHAPE)
MODELS = {0: MODEL, 1: dataclasses.replace(MODEL, begins=True)}  # by lead
DOUBLE = dict(dtype="float64", param_dtype="float64")
TOKENS = jax.random.randint(jax.random.key(0), (3, LENGTH), 0, V)
KEY = jax.random.key(1)


@functools.cache
def variables(model):
    made = uno.init(model, jax.random.key(2))["params"]
    return {"params": shaken(made, 0.2)}


def spied(model, **fields):
    """Returns (what `hidden` was called with, its result's logits) in a call of the loss."""
    functions, seen = uno.bind(model, variables(model)), {}

    def hidden(cache, tokens_BQ, positions_BQ, mask, segment_BQ=None, gate_BQ=None):
        h_BQD, cache = functions.hidden(cache, tokens_BQ, positions_BQ, mask, segment_BQ, gate_BQ)
        seen.update(tokens=tokens_BQ, positions=positions_BQ, mask=mask, gate=gate_BQ, logits=functions.logits(h_BQD))
        return h_BQD, cache

    @jax.jit
    def run(tokens, fields):
        objective.loss(functions._replace(hidden=hidden), tokens, KEY, objective.Config(), **fields)
        return {name: x for name, x in seen.items() if name != "mask"}

    return run(TOKENS, fields), functions


@functools.cache
def whole_texts(lead):
    return spied(dataclasses.replace(MODELS[lead], **DOUBLE))


def halves(x, length=16):
    assert x.shape[1] == 2 * length
    return x[:, :length], x[:, length:]


@pytest.mark.parametrize("lead", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_clean_rows_are_the_frozen_models(lead, float64):
    seen, functions = whole_texts(lead)
    read = TOKENS if lead == 0 else jnp.pad(TOKENS, ((0, 0), (1, 0)), constant_values=V)[:, :-1]
    positions = jnp.broadcast_to(jnp.arange(LENGTH)[None], read.shape)
    plain = functions.forward(None, read, positions, masks.causal)[0]
    np.testing.assert_allclose(halves(seen["logits"])[0][:, :LENGTH], plain, atol=1e-6)
    np.testing.assert_array_equal(halves(seen["tokens"])[0][:, :LENGTH], read)
    assert not halves(seen["gate"])[0].any()


def passes(seen, functions, first, upto, rows=slice(None)):
    """Returns the logits of the draft pass that has noise in rows first .. upto - 1, behind the clean half's in the cache."""
    clean, noisy = (x[rows] for x in halves(seen["tokens"]))
    at = jnp.broadcast_to(jnp.arange(16)[None], clean.shape)
    _, cache = functions.forward(functions.empty_cache(len(clean), 32), clean, at, masks.causal)
    cache = cache.replace(lengths_B=jnp.full((len(clean),), first - 1, jnp.int32))
    ids = jnp.concatenate([clean[:, first - 1 : first], noisy[:, first:upto]], 1)  # the seed, and noise behind it
    gate = jnp.broadcast_to(jnp.arange(ids.shape[1])[None] > 0, ids.shape)
    return functions.forward(cache, ids, at[:, first - 1 : upto], masks.causal, gate_BQ=gate)[0]


@pytest.mark.parametrize("lead", [0, 1])
def test_a_block_is_a_draft_pass_of_one_more_row(lead, float64):
    """All blocks: of the first the seed is the document's first row, and of the last, rows that end the text.

    https://github.com/vllm-project/vllm/pull/55947: in a port whose pass began at another row, one draft in a hundred was accepted.
    """
    seen, functions = whole_texts(lead)
    logits, gate = halves(seen["logits"])[1], halves(seen["gate"])[1]
    for block in range(4):
        first, upto = max(BLOCK * block, 1), min(BLOCK * (block + 1), LENGTH)
        np.testing.assert_array_equal(gate[:, BLOCK * block : upto], np.arange(BLOCK * block, upto)[None].repeat(3, 0) >= first)
        drafted = passes(seen, functions, first, upto)
        np.testing.assert_allclose(logits[:, first:upto], drafted[:, 1:], atol=1e-6)
        np.testing.assert_allclose(halves(seen["logits"])[0][:, first - 1], drafted[:, 0], atol=1e-6)  # the clean token's law
    wrong = passes(seen, functions, BLOCK + 1, 2 * BLOCK)
    assert np.abs(logits[:, BLOCK + 1 : 2 * BLOCK] - wrong[:, 1:]).max() > 1e-2


@pytest.mark.parametrize("lead", [0, 1])
def test_behind_a_prompt_too_a_draft_begins_where_the_prompt_ends(lead, float64):
    model = dataclasses.replace(MODELS[lead], **DOUBLE)
    trained = jnp.arange(LENGTH)[None] >= jnp.array([6, 0, 9])[:, None]
    seen, functions = spied(model, trained_BL=trained)
    clean, noisy = halves(seen["tokens"])
    gate = halves(seen["gate"])[1]
    begins = [6 + lead, 1, 9 + lead]
    np.testing.assert_array_equal(gate[:, :LENGTH], np.arange(LENGTH)[None] >= np.array(begins)[:, None])
    np.testing.assert_array_equal(noisy[~gate], clean[~gate])
    assert np.unique(noisy[gate]).tolist() == [2, 3, 4]
    for row, first in enumerate(begins):
        upto = -(-(first + 1) // BLOCK) * BLOCK
        one = slice(row, row + 1)
        drafted = passes(seen, functions, first, upto, one)
        np.testing.assert_allclose(halves(seen["logits"])[1][one, first:upto], drafted[:, 1:], atol=1e-6)


def test_an_inverted_gate_is_another_model(float64):
    """The article's own snippet has the two halves' comments the wrong way round."""
    seen, functions = whole_texts(0)
    mask = masks.CleanNoisy(BLOCK, 16, causal=True)
    with_gate = lambda gate: functions.forward(None, seen["tokens"], seen["positions"], mask, gate_BQ=gate)[0]
    np.testing.assert_allclose(with_gate(seen["gate"]), seen["logits"], atol=1e-12)
    assert np.abs(with_gate(~seen["gate"]) - seen["logits"])[:, :16].max() > 1e-2
    assert np.abs(with_gate(~seen["gate"]) - seen["logits"])[:, 16:].max() > 1e-2


def test_layout_of_a_chat_and_of_packed_documents():
    """Prompt a b, answer C D, prompt e, answer F G H in blocks of 4: F G H stand in a block of which a noise row and the prompt e were read
    before. Documents from 1 on; a row's first begins with a row of its own."""
    trained = jnp.array([[0, 0, 1, 1, 1, 0, 1, 1, 1, 1]], bool)
    tokens = jnp.arange(10)[None]
    rows = objective.layout(tokens, 4, 0, 99, None, trained)
    marks = lambda x: "".join(".x"[bool(i)] for i in np.asarray(x)[0])
    assert marks(rows.noise_BR) == "..xxx.xxxx.."
    assert marks(rows.scored_BR) == "..xx....x..."  # 4 predicts the prompt, 6 and 7 are late, 9 predicts nothing
    assert np.asarray(rows.depth_BR)[0, [2, 3, 8]].tolist() == [1, 2, 1]

    segment = jnp.array([[1, 1, 1, 2, 2, 2, 2, 2, 0, 0]])
    for lead, held, noise, scored in [
        (0, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], ".xx.xxxx....", ".x..xxx....."),
        (1, [99, 0, 1, 99, 3, 4, 5, 6, 99, 8], ".xx.xxxx....", ".xx.xxxx...."),
    ]:
        rows = objective.layout(tokens, 4, lead, 99, segment)
        assert np.asarray(rows.held_BR)[0, :10].tolist() == held
        assert (marks(rows.noise_BR), marks(rows.scored_BR)) == (noise, scored)
        assert np.asarray(rows.position_BR)[0, :8].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
        predicts = np.asarray(rows.next_BR)[0][np.asarray(rows.scored_BR)[0]]
        assert predicts.tolist() == [i + 1 - lead for i, mark in enumerate(scored) if mark == "x"]


@dataclasses.dataclass(frozen=True)
class Given:
    """A model whose "hidden states" are logits, given: draft [B R V] of the noisy rows, and target [B R V] of the clean ones."""

    draft: jax.Array
    target: jax.Array
    block: int
    lead: int = 0
    vocab: int = V
    noise_range: int = 5

    def make_noise(self, ids):
        return ids

    def hidden(self, cache, tokens_BQ, positions_BQ, mask, segment_BQ=None, gate_BQ=None):
        return jnp.concatenate([self.target, self.draft], 1), cache

    def logits(self, h):
        return h


def by_numpy(draft, target, tokens, block):
    """Returns the terms of the module's head, row by row; lead 0, whole rows."""
    softmax = lambda z: np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    sums, depths, n = dict.fromkeys(["tv", "kl", "ce_teacher", "ce_data", "prefix", "length"], 0.0), {}, 0
    for b, row in enumerate(tokens):
        survived, depth = 1.0, 0
        for i in range(1, len(row) - 1):
            if i % block == 0:
                survived, depth = 1.0, 0
            depth, n = depth + 1, n + 1
            q, p, y = softmax(draft[b, i]), softmax(target[b, i]), row[i + 1]
            tv = np.abs(q - p).sum()
            sums["tv"] += tv
            sums["kl"] += (q * np.log(q / p)).sum()
            sums["ce_teacher"] -= np.log(q[p.argmax()])
            sums["ce_data"] -= np.log(q[y])
            sums["prefix"] += survived * tv
            sums["length"] -= survived * (1 - tv / 2)
            depths.setdefault(depth, []).append((1 - tv / 2, survived * (1 - tv / 2)))
            survived *= min(1, q[y] / p[y])
    accept = {depth: np.mean(rows, 0) for depth, rows in depths.items()}
    return {name: x / n for name, x in sums.items()}, accept, n


@pytest.mark.parametrize("chunk", [0, 5])
def test_terms_and_metrics_are_numpys(chunk, float64):
    rng = np.random.default_rng(0)
    draft, target = 2 * rng.normal(size=(2, 3, 12, V))
    tokens = rng.integers(0, V, (3, 12))
    wanted, accept, n = by_numpy(draft, target, tokens, 4)
    functions = Given(jnp.asarray(draft), jnp.asarray(target), 4)
    for weights in (
        dict(tv=2.0, kl=0.5, ce=0.25),
        dict(ce=1.0, ce_target="data"),
        dict(survival="prefix"),
        dict(survival="length", kl=1.0),
    ):
        config = objective.Config(chunk=chunk, **weights)
        loss, metrics = objective.loss(functions, jnp.asarray(tokens), KEY, config)
        first = wanted["tv" if config.survival == "none" else config.survival]
        ce = wanted[f"ce_{config.ce_target}"]
        assert float(loss) == pytest.approx(config.tv * first + config.kl * wanted["kl"] + config.ce * ce, abs=1e-12)
        for name in ("tv", "kl", "ce_teacher", "ce_data"):
            assert float(metrics[name]) == pytest.approx(wanted[name], abs=1e-12)
        assert [float(metrics[f"accept_{d}"]) for d in (1, 2, 4)] == pytest.approx([accept[d][0] for d in (1, 2, 4)], abs=1e-12)
        assert float(metrics["accepted"]) == pytest.approx(sum(x[1] for x in accept.values()), abs=1e-12)
        assert float(metrics["tokens"]) == n == 3 * 10
        assert metrics.keys() == {"loss", "tv", "kl", "ce_teacher", "ce_data", "accept_1", "accept_2", "accept_4", "accepted", "tokens"}


@functools.partial(jax.jit, static_argnums=(0, 1))
def graded(model, config, params, tokens, segment=None, trained=None):
    """Returns ((loss, metrics), gradients of the adapter), of the real model."""

    def run(lora):
        functions = uno.bind(model, {"params": {**params, "lora": lora}})
        return objective.loss(functions, tokens, KEY, config, segment_BL=segment, trained_BL=trained)

    return jax.value_and_grad(run, has_aux=True)(params["lora"])


def close(a, b, rtol=1e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * float(jnp.abs(y).max()))


def test_chunks_change_nothing():
    """Six columns at a time, which don't divide the rows; and no array of all rows' logits is made."""
    params, config = variables(MODEL)["params"], objective.Config(kl=0.3, ce=0.2, survival="length", chunk=6)
    at_once = dataclasses.replace(config, chunk=0)
    whole, parts = (graded(MODEL, c, params, TOKENS) for c in (at_once, config))
    close(parts, whole)
    assert all(jnp.abs(x).max() > 0 for x in jax.tree.leaves(whole[1]))
    program = lambda config: str(jax.make_jaxpr(lambda params: graded(MODEL, config, params, TOKENS))(params))
    assert f"f32[3,16,{V}]" in program(at_once)
    assert f"f32[3,16,{V}]" not in program(config)
    assert f"f32[3,6,{V}]" in program(config)


def test_the_target_has_no_gradient():
    draft, target = jax.random.normal(KEY, (2, 3, 16, V))
    tokens = jax.random.randint(KEY, (3, 16), 0, V)
    config = objective.Config(kl=1.0, ce=1.0, survival="length")
    run = lambda draft, target: objective.loss(Given(draft, target, 4), tokens, KEY, config)[0]
    of_draft, of_target = jax.grad(run, (0, 1))(draft, target)
    assert jnp.abs(of_draft).max() > 1e-3
    assert not of_target.any()


# A law of four tokens that begin with a given one, and a draft of the last three: V = 3, a block of 3.
SYMBOLS, SEED = 3, (0, 1, 2, 0)  # the last is the clean token


def table(seed=0):
    """Returns ({texts so far: law of the next}, logits [3 V] of the drafts)."""
    rng = np.random.default_rng(seed)
    laws = {x: rng.dirichlet(np.ones(SYMBOLS)) for n in range(3) for x in itertools.product(range(SYMBOLS), repeat=n)}
    return laws, rng.normal(size=(3, SYMBOLS))


def accepted_drafts(laws, logits):
    """E[A] by its first closed form, sum over prefixes of prod min(q, p): no text is drawn from the target."""
    q = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)

    def rest(x):
        if len(x) == 3:
            return 0.0
        return sum(min(q[len(x), v], laws[x][v]) * (1 + rest((*x, v))) for v in range(SYMBOLS))

    return rest(())


def of_all_texts(laws, config):
    """Returns logits -> (mean loss, mean metrics) over the texts of the target's law, each through the objective as a batch of its own."""
    texts = list(itertools.product(range(SYMBOLS), repeat=3))
    weight = jnp.asarray([np.prod([laws[x[:i]][x[i]] for i in range(3)]) for x in texts])
    tokens = jnp.asarray([[*SEED, *x] for x in texts])
    target = np.zeros((len(texts), 9, SYMBOLS))
    for t, x in enumerate(texts):
        target[t, 3:6] = [np.log(laws[x[:i]]) for i in range(3)]
    trained = jnp.arange(7)[None] >= 3

    def mean(logits):
        draft = jnp.zeros((1, 9, SYMBOLS)).at[0, 3:6].set(logits)

        def one(tokens, target):
            functions = Given(draft, target[None], 3, vocab=SYMBOLS, noise_range=3)
            return objective.loss(functions, tokens[None], KEY, config, trained_BL=trained)

        loss, metrics = jax.vmap(one)(tokens, jnp.asarray(target))
        return weight @ loss, jax.tree.map(lambda x: weight @ x, metrics)

    return jax.jit(jax.value_and_grad(mean, has_aux=True))


def slopes(laws, logits):
    """Returns the gradient of E[A] by central differences."""
    found = np.zeros_like(logits)
    for at in np.ndindex(*logits.shape):
        step = np.zeros_like(logits)
        step[at] = 1e-6
        found[at] = (accepted_drafts(laws, logits + step) - accepted_drafts(laws, logits - step)) / 2e-6
    return found


@pytest.mark.parametrize("seed", range(3))
def test_form_length_has_the_gradient_of_the_accepted_length(seed, float64):
    laws, logits = table(seed)
    (loss, metrics), gradient = of_all_texts(laws, objective.Config(survival="length"))(jnp.asarray(logits))
    assert float(metrics["tokens"]) == pytest.approx(3)
    assert -3 * float(loss) == pytest.approx(accepted_drafts(laws, logits), abs=1e-12)
    assert float(metrics["accepted"]) == pytest.approx(accepted_drafts(laws, logits), abs=1e-12)
    np.testing.assert_allclose(-3 * gradient, slopes(laws, logits), atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_form_prefix_is_biased_at_all_drafts_but_the_last(seed, float64, record_property):
    """Its gradient, halved since it holds 2 TV, lacks what a draft does for those behind it. The last has none behind it."""
    laws, logits = table(seed)
    _, gradient = of_all_texts(laws, objective.Config(survival="prefix"))(jnp.asarray(logits))
    ours, true = -3 / 2 * np.asarray(gradient), slopes(laws, logits)
    np.testing.assert_allclose(ours[2], true[2], atol=1e-6)
    bias = np.linalg.norm(ours - true, axis=1) / np.linalg.norm(true, axis=1)
    record_property("bias", bias.tolist())
    assert bias[0] > 0.1 < bias[1]
    cosine = (ours * true).sum() / np.linalg.norm(ours) / np.linalg.norm(true)
    assert 0.8 < cosine < 0.999  # it still climbs
    _, plain = of_all_texts(laws, objective.Config())(jnp.asarray(logits))
    plain = -3 / 2 * np.asarray(plain)
    assert np.linalg.norm(plain[2] - true[2]) > 10 * np.linalg.norm(ours[2] - true[2]) + 1e-3


MASKED = dataclasses.replace(MODEL, noise="mask", noise_mask=0)  # noise that doesn't depend on where a document lies


@pytest.mark.slow
def test_gradients_of_micro_batches_add_up():
    """Weighted by their tokens: the mean of the micro-batches' own means would be another."""
    config, params = objective.Config(kl=0.1, survival="length"), variables(MASKED)["params"]
    trained = jnp.arange(LENGTH)[None] >= jnp.array([0, 5, 9])[:, None]
    (_, metrics), whole = graded(MASKED, config, params, TOKENS, None, trained)
    parts = [graded(MASKED, config, params, TOKENS[i : i + 1], None, trained[i : i + 1]) for i in range(3)]
    counts = [float(part[0][1]["tokens"]) for part in parts]
    assert sum(counts) == float(metrics["tokens"])
    assert len(set(counts)) == 3
    close(jax.tree.map(lambda *leaves: sum(c * x for c, x in zip(counts, leaves)) / sum(counts), *[part[1] for part in parts]), whole)


@pytest.mark.parametrize("lead", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_packing_changes_nothing(lead):
    model = dataclasses.replace(MASKED, begins=bool(lead))
    config, params = objective.Config(kl=0.1, survival="prefix"), variables(model)["params"]
    rng = np.random.default_rng(1)
    documents = [
        (rng.integers(1, V, prompt).tolist(), rng.integers(1, V, answer).tolist()) for prompt, answer in [(2, 5), (0, 4), (5, 6), (1, 3)]
    ]
    packed = pack(documents, 24, BLOCK, 0, False)
    alone = {k: np.concatenate([pack([d], 24, BLOCK, 0, False)[k] for d in documents]) for k in packed}
    assert len(packed["tokens"]) == 2
    one, other = (graded(model, config, params, *(jnp.asarray(x[k]) for k in ("tokens", "segment", "trained"))) for x in (packed, alone))
    close(one, other)
    assert float(one[0][1]["tokens"]) > 10


@pytest.mark.parametrize(
    "bad, text",
    [
        (dict(tv=0.0), "objective.tv, kl and ce are the weights 0.0, 0.0 and 0.0"),
        (dict(kl=-1.0), "make them 0 or more"),
        (dict(tv=0.0, kl=1.0, survival="prefix"), "objective.survival=prefix weighs the term tv"),
        (dict(chunk=-1), "objective.chunk is -1"),
        (dict(blocks="2;4"), "objective.blocks is '2;4'"),
        (dict(blocks="0,4"), "objective.blocks is '0,4'"),
    ],
)
def test_bad_configs_are_refused(bad, text):
    with pytest.raises(UserError, match=text):
        objective.Config(**bad)


def test_stages_share_the_steps():
    config = objective.Config(blocks="2,4,8")
    assert objective.stages(config, 8, 10) == ((0, 2), (3, 4), (6, 8))
    assert objective.stages(objective.Config(), 8, 10) == ((0, 8),)
    with pytest.raises(UserError, match=r"objective.blocks=2,4,8 ends with 8, and model.block is 4"):
        objective.stages(config, 4, 10)

"""What is measured of drafters: figures by hand, and by drafts whose figures are known without measuring."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.evals import speculation, speculation_rows
from dllm.evals.speculation import Setup, Turns, make_way
from dllm.models import uno
from dllm.ops.passes import no_passes
from dllm.samplers import autoregressive, prompt_lookup, psi_spec
from dllm.samplers.loop import Samples
from dllm.train.checkpoint import Loaded

CONFIG = uno.Config(vocab=5, length=24, width=16, layers=1, heads=2, kv_heads=1, head_width=8, mlp=20, rank=2, block=3)
ABOUT = {"model": "m", "step": 3, "config_hash": "c"}


@functools.cache
def setup():
    variables = {"params": jax.tree.map(lambda x: 1.5 * x, uno.init(CONFIG, jax.random.key(1))["params"])}
    prompts = np.random.default_rng(0).integers(0, 5, (4, 2))
    return Setup(Loaded({}, uno, CONFIG, variables, 3, Path()), prompts, new=10, temperature=1.0, seed=0)


def samples(tokens, verify, ar=None, accepted=None, proposed=None):
    """Samples of so many cycles a row."""
    tokens = np.asarray(tokens)
    batch, length = tokens.shape
    zero = np.zeros(batch, int)
    counts = jax.tree.map(np.asarray, no_passes(batch)).replace(verify=np.asarray(verify), ar=zero if ar is None else np.asarray(ar))
    judged = [zero if x is None else np.asarray(x) for x in (proposed, accepted)]
    return Samples(tokens, np.full(batch, length), np.zeros(tokens.shape), counts, *judged, None)


def test_ways():
    assert make_way("one", 6).options == psi_spec.Options(length=1)
    assert make_way("tree", 6, (2, 9)).setting() == {"way": "tree", "length": 6, "children": 2, "nodes": 9}
    assert make_way("chain", 6, (2, 9)).setting() == {"way": "chain", "length": 6}
    assert make_way("adaptive", costs={1: 1.0, 4: 2.5}).options == psi_spec.Options(1, lengths=(1, 4), costs=(1.0, 2.5))
    assert make_way("prompt_lookup", 6).options == prompt_lookup.Options(length=6)
    assert make_way("autoregressive", 6).options == autoregressive.Options()


def test_figures_a_cycle_by_hand():
    """Ratio of sums, and its linearised standard error."""
    found = speculation.a_cycle(samples(np.zeros((3, 12)), [4, 5, 2], [0, 0, 1], [2, 0, 5], [8, 10, 6]), given=2)
    cycles, accepted = np.array([4, 5, 3]), np.array([2, 0, 5])
    assert found["tokens_per_cycle"].value == 30 / 12
    assert found["accepted_per_cycle"].value == 7 / 12
    assert found["accept_rate"].value == 7 / 24
    residual = accepted - 7 / 12 * cycles
    assert found["accepted_per_cycle"].stderr == pytest.approx(np.sqrt(3 / 2 * (residual**2).sum()) / 12)


def test_perfect_marginals_at_temperature_0_are_accepted_whole():
    """Then every cycle of L rows writes L + 1 tokens: 10 new ones are 2 cycles of 5. A draft that says always the same writes fewer."""
    cold = dataclasses.replace(setup(), temperature=0.0)
    drafts = speculation.make_drafts(("unigram", "perfect"), [np.array([4, 4, 4, 1])], 5, 3, paths=2)
    rows = {}
    for unit in speculation.length_units(cold, ["chain"], [4], drafts, batch=3, ceiling=(2, 2), tree=(2, 4)):
        (setting,), (row,) = unit.settings, unit.measure()
        rows[setting["drafter"]] = ABOUT | {"table": "length", "setting": setting} | row
    assert rows["perfect"]["tokens_per_cycle"] == 5
    assert rows["perfect"]["accepted_per_cycle"] == 3
    assert rows["perfect"]["accept_rate"] == 1
    assert rows["perfect"]["cycles"] == 2 * 2
    assert (rows["perfect"]["setting"]["num"], rows["unigram"]["setting"]["num"]) == (2, 4)
    assert rows["unigram"]["tokens_per_cycle"] < 5
    assert speculation_rows.share_of_ceiling(rows["unigram"], [*rows.values()]) == rows["unigram"]["accepted_per_cycle"] / 3
    worse = rows["perfect"] | {"setting": rows["perfect"]["setting"] | {"paths": 1}, "accepted_per_cycle": 2.5}
    assert speculation_rows.share_of_ceiling(rows["perfect"], [worse, rows["perfect"]]) == 1
    assert speculation_rows.share_of_ceiling(rows["perfect"] | {"step": 9}, [worse, rows["perfect"]]) is None


def test_which_drafters_go_where():
    """Those of two passes have all drafters, other ways one row."""
    drafts = {"adapter": None, "perfect": None}
    units = speculation.length_units(setup(), ["block", "single_pass", "prompt_lookup"], [2, 4], drafts, 4, (2, 9), (2, 4))
    assert [(s["way"], s["length"], s.get("drafter"), s.get("paths")) for u in units for s in u.settings] == [
        each
        for length in (2, 4)
        for each in (
            ("block", length, "adapter", None),
            ("block", length, "perfect", 9),
            ("single_pass", length, "adapter", None),
            ("prompt_lookup", length, None, None),
        )
    ]


def test_turns():
    """All programs get the same requests, other ones in each repetition, and begin in turn; the first isn't counted; the loop runs to its
    slowest row."""
    seen = []

    def program(name):
        def run(settings, draws, prompt):
            seen.append((name, int(settings.max_new[0]), draws.request.tolist(), np.asarray(prompt.tokens)[:, :2].tolist()))
            return samples(np.zeros((2, 12)), verify=[2, 1], ar=[3, 7])

        return run

    turns = speculation.take_turns(setup(), {"a": program("a"), "b": program("b")}, 2, (1, 10), repetitions=2)
    assert [(name, new) for name, new, *_ in seen] == [(name, new) for names in ("ab", "ba", "ab") for new in (1, 10) for name in names]
    assert [requests for *_, requests, _ in seen[::4]] == [[0, 1], [2, 3], [4, 5]]
    assert [prompts for *_, prompts in seen[::4]] == [setup().prompts_NG[[r % 4, (r + 1) % 4]].tolist() for r in (0, 2, 4)]
    assert turns["b", 10].cycles_R.tolist() == [8, 8]
    assert turns["b", 10].seconds_2R.shape == (2, 2)


def turns(costs, tokens=2.0, prompt=0.5, new=20):
    """Turns of 3 repetitions in which a plain pass takes .01 s, .02 and .04: a busy machine."""
    pace = np.array([0.01, 0.02, 0.04])
    found = {}
    for name, cost in costs.items():
        a_cycle = 1 if name in speculation.PLAIN else tokens
        for n in (1, new):
            cycles = np.ceil(np.full(3, n) / a_cycle)
            found[name, n] = Turns(np.array([1, 2])[:, None] * pace * (prompt + cycles * cost), cycles)
    return found


def test_speed_by_hand():
    """The faster plain way is the baseline; a cycle's cost is without the prompt, a speed-up with it."""
    found = turns({"autoregressive": 1.0, "one": 1.25, "chain 4": 1.6})
    steady = {which: t._replace(seconds_2R=t.seconds_2R[:, [1, 1, 1]]) for which, t in found.items()}
    assert speculation.baseline(found, 20) == "autoregressive"
    assert speculation.cycle_seconds(steady, "chain 4", 20) == pytest.approx(0.02 * 1.6)
    row = speculation.speed_row(found, "chain 4", batch=2, new=20)
    assert row["speedup"] == pytest.approx(20.5 / 16.5)
    assert row["speedup_quartiles"] == pytest.approx([20.5 / 16.5] * 2)
    assert row["speedup_cpu"] == pytest.approx(20.5 / 16.5)
    assert row["ms_per_token"] == pytest.approx(1e3 * 0.02 * 16.5 / 40)
    assert row["tokens_per_cycle"] == 2
    assert speculation.speed_row(turns({"autoregressive": 1.0, "one": 0.9}), "one", 1, 20)["baseline"] == "one"


def test_cost_line():
    assert speculation.fit({2: 1.3, 4: 1.7, 8: 2.5}) == pytest.approx((0.9, 0.2))
    assert speculation.fit({8: 2.5}) == (2.5, 0.0)


def test_a_speed_unit(monkeypatch):
    """Rows in the order of their settings; `adaptive` gets the costs that were measured, and the line is that of the chains."""
    cost = {"autoregressive": 1.2, "one": 1.0, "chain 2": 1.5, "chain 4": 2.0, "block 2": 1.7, "block 4": 2.5, "adaptive": 0.8}
    made = {}
    monkeypatch.setattr(speculation, "compile_way", lambda setup, way, batch: made.update({way.label(): way}) or print)
    by_length = {"1": "one", "2": "chain 2", "4": "chain 4"}
    known = turns({**cost, **{number: cost[name] for number, name in by_length.items()}}, new=10)
    known |= {("1", n): known["one", n] for n in (1, 10)}
    monkeypatch.setattr(
        speculation, "take_turns", lambda setup, programs, batch, news, _: {(name, n): known[name, n] for name in programs for n in news}
    )
    unit = speculation.speed_unit(setup(), ["block"], [2, 4], batch=3, repetitions=3, tree=(2, 4))
    rows = dict(zip([(s.get("way"), s.get("length")) for s in unit.settings], unit.measure(), strict=True))
    for name in ("autoregressive", "one", "adaptive"):
        assert rows[name, 1 if name == "one" else None]["cost"] == pytest.approx(cost[name])
    for name, length in itertools.product(("chain", "block"), (2, 4)):
        assert rows[name, length]["cost"] == pytest.approx(cost[f"{name} {length}"])
        assert rows[name, length]["baseline"] == "one"
    assert made["adaptive"].options.costs == pytest.approx((1.0, 1.5, 2.0))
    assert rows["adaptive", None]["costs"] == pytest.approx([1.0, 1.5, 2.0])
    line = rows[None, None]
    assert (line["costs"], line["level"], line["slope"]) == (pytest.approx([1.5, 2.0]), pytest.approx(1.0), pytest.approx(0.25))
    with pytest.raises(UserError, match="a cycle of length 9 may write 10 tokens, and a reply has 10"):
        speculation.speed_unit(setup(), ["block"], [2, 9], batch=3, repetitions=3, tree=(2, 4))


def fake_program(setup, way, batch):
    """Writes independent uniform ids, by draws of its own; rISD leaves out the last id, and its greedy text has another token."""

    def run(settings, draws, prompt):
        seed = np.asarray(jax.random.key_data(draws.key)).tolist() + np.asarray(draws.request).tolist()
        length = prompt.tokens.shape[1]
        tokens = np.random.default_rng(seed).integers(0, 4 if way.name == "risd_lossy" else 5, (batch, length))
        if float(settings.temperature[0]) == 0:
            tokens = np.broadcast_to(np.arange(length) % 5, (batch, length)) + np.zeros((batch, 1), int)
            tokens[0, 7] = (tokens[0, 7] + (way.name == "risd_lossy")) % 5
        tokens = np.where(prompt.given, prompt.tokens, tokens)
        return samples(tokens, np.full(batch, 5), accepted=np.full(batch, 2), proposed=np.full(batch, 9))

    return run


def test_lossless_units(monkeypatch):
    """Every way is compared with the reference, by other draws. The lossy one is caught, and its greedy text told, with the margin."""
    monkeypatch.setattr(speculation, "compile_way", fake_program)
    units = speculation.lossless_units(setup(), ["tree"], 4, [4], batch=2, each=12, permutations=199, tree=(2, 4))
    rows = {unit.settings[0]["way"]: unit.measure()[0] for unit in units}
    assert list(rows) == ["autoregressive", "one", "tree", "adaptive", "greedy", "risd_lossy"]
    assert rows["risd_lossy"]["p_value"] == 1 / 200
    assert min(row["p_value"] for name, row in rows.items() if name != "risd_lossy") > 0.02
    assert rows["tree"]["features"]["tokens"]["p_value"] > 0.02
    assert [row["greedy_mismatches"] for row in rows.values()] == [0] * 5 + [2]  # a row of each of two batches
    assert (rows["risd_lossy"]["greedy_prompts"], rows["risd_lossy"]["texts"]) == (4, 48)
    text = np.concatenate([setup().prompts_NG[0], np.arange(2, 12) % 5])[None]
    position = jnp.arange(12)[None]
    logits = uno.bind(CONFIG, setup().run.variables).forward(None, jnp.asarray(text, jnp.int32), position, speculation.masks.causal)[0]
    best = np.sort(np.asarray(logits)[0, 6])[::-1]  # the row before position 7
    assert rows["risd_lossy"]["greedy_margins"][0] == pytest.approx(best[0] - best[1], abs=1e-5)
    assert rows["risd_lossy"]["greedy_ties"] == 0


def test_ties_are_told():
    """Of a model that gives every token one logit, texts part at ties."""
    flat = jax.tree.map(jnp.zeros_like, setup().run.variables)
    tied = dataclasses.replace(setup(), run=dataclasses.replace(setup().run, variables=flat))
    text = np.zeros((3, 12), int)
    other = text.copy()
    other[1, 5] = 2
    found = speculation.greedy_differences(tied, samples(other, [1] * 3), samples(text, [1] * 3))
    assert found == {"greedy_prompts": 3, "greedy_mismatches": 1, "greedy_ties": 1, "greedy_margins": [0.0]}


def row(table, setting, **measured):
    return ABOUT | {"table": table, "setting": setting} | measured


def test_rows_are_known_by_what_they_measure(tmp_path):
    path, one, two = tmp_path / "rows.jsonl", row("length", {"a": 1}, x=1), row("length", {"a": 2}, x=1)
    assert speculation_rows.read_rows(path) == {}
    path.write_text("".join(json.dumps(r) + "\n" for r in (one, two, one | {"x": 5})) + '{"table": "len')
    assert [*speculation_rows.read_rows(path).values()] == [one | {"x": 5}, two]
    path.write_text('{"table": "length"}\n')
    with pytest.raises(UserError, match=r"line 1 of .* is not a row of speculate\.py"):
        speculation_rows.read_rows(path)


def test_acceptance_is_the_last_one_logged(tmp_path):
    lines = [{"step": n, "valid_accepted": n / 10, "valid_accept_1": 0.5, "valid_accept_2": n / 20} for n in (2, 4, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in [*lines, {"step": 7, "loss": 1.0}]) + '{"step')
    assert speculation_rows.logged_acceptance(tmp_path, 5) == {"logged_step": 4, "accept": {"1": 0.5, "2": 0.2}, "accepted": 0.4}
    assert speculation_rows.logged_acceptance(tmp_path, 1) is None
    assert speculation_rows.logged_acceptance(tmp_path / "none", 9) is None


def test_curves():
    """A curve joins the rows that agree in all but x; floor and ceiling are yardsticks; what is the same in all isn't in a label."""
    a_cycle = {"tokens_per_cycle": 2.5, "tokens_per_cycle_stderr": 0.1}
    rows = [
        row("length", {"way": way, "length": length, "drafter": drafter, "temperature": 1.0}, **a_cycle)
        for way in ("chain", "block")
        for drafter in ("adapter", "perfect")
        for length in (4, 2)
    ]
    rows += [row("length", {"way": "single_pass", "length": 2, "drafter": "adapter"}, **a_cycle)]
    timed = {"speedup": 1.5, "speedup_quartiles": [1.25, 2.0]}
    rows += [row("speed", {"way": "chain", "length": 2, "batch": batch}, **timed) for batch in (1, 4)]
    rows += [row("speed", {"batch": 1, "lengths": [2, 4]}, costs=[1.0, 2.0], level=0.0, slope=0.5)]
    rows += [row("acceptance", {}, accept={"1": 0.5, "2": 0.25, "10": 0.125})]
    cycle, depth, cost, speed = speculation_rows.panels(rows)
    assert [(c.label, c.yardstick, c.x.tolist()) for c in cycle.curves] == [
        ("chain, adapter", False, [2, 4]),
        ("chain, perfect", True, [2, 4]),
        ("block, adapter", False, [2, 4]),
    ]
    np.testing.assert_allclose(cycle.curves[0].error, 0.1)
    assert depth.curves[0].x.tolist() == [1, 2, 10]
    assert cost.curves[0].line == (0.0, 0.5)
    assert (speed.curves[0].x.tolist(), speed.curves[0].error.tolist()) == ([1, 4], [[0.25] * 2, [0.5] * 2])

"""What is timed of attention: rivals' values, the counts of work, and rows for whatever can't be served."""

from __future__ import annotations

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from dllm.core.types import UserError
from dllm.evals import attention_speed
from dllm.evals.attention_speed import RIVALS, Case
from dllm.kernels.block_attention import arg_specs, block_attention
from dllm.kernels.block_attention.arg_specs import ArgSpec
from dllm.ops import masks

SQUARE = ArgSpec("square", masks.CleanNoisy(4, 64), 2, 128, 128, 4, 2, 16)
CACHED = ArgSpec("cached", masks.BlockCausal(4), 2, 8, 0, 4, 2, 16, slots=64)
ON_CPU = ("xla", "two_call", "dense")


def measure(case, rivals, limit=None, started=None):
    starts = (lambda names: None) if started is None else started.append
    rows = list(attention_speed.measure(case, rivals, 2, 0.01, starts, limit))
    assert sorted(row["rival"] for row in rows) == sorted(rivals)
    return {row["rival"]: row for row in rows}


def spec(name):
    return next(s for s in (*arg_specs.SMALL, *arg_specs.SMALL_DECODE) if s.name == name)


def test_the_most_telling_shapes_come_first():
    names = [s.name for s in attention_speed.find_specs(None, on_cpu=False)]
    assert len(names) == len(arg_specs.TRAINING) + len(arg_specs.DECODE)
    assert names[:2] == ["sdar_4k_b4", "uno_4k_b4"]
    assert {name[-3:] for name in names[2:7]} == {"b64"}
    assert names[7:11] == ["sdar_2k_b4", "uno_2k_b4", "sdar_8k_b4", "uno_8k_b4"]
    assert [str(c) for c in attention_speed.cases([SQUARE, CACHED])] == ["square both", "square forward", "cached decode"]
    with pytest.raises(UserError, match=r"no shape 'sdar_3k_b4'; there are: sdar_2k_b4, .*decode_tree$"):
        attention_speed.find_specs(["sdar_2k_b4", "sdar_3k_b4"], on_cpu=True)


@pytest.mark.parametrize("s", [*arg_specs.SMALL, *arg_specs.SMALL_DECODE], ids=lambda s: s.name)
def test_pairs_are_those_that_the_mask_allows(s):
    """Counted without an array of them; and the share of tiles visited is no less than that of pairs, nor more than all."""
    if not s.slots:
        allow_QS = np.asarray(jax.jit(lambda: s.mask.dense(s.queries, s.keys))())
        assert attention_speed.pairs(s) == s.batch * allow_QS.sum()
        assert isinstance(s.mask, masks.Ancestors) or attention_speed.pairs(s, 10) == s.batch * allow_QS[10:].sum()
    else:

        @jax.jit
        def allowed():
            start = s.arrays()["lengths_B"][:, None, None]
            query, key = start + jnp.arange(s.queries)[None, :, None], jnp.arange(s.slots)[None, None]
            return jnp.broadcast_to(s.mask.allowed(query, key, start) & (key < start + s.queries), (s.batch, s.queries, s.slots))

        # Of trees the first row's count goes for all.
        assert attention_speed.pairs(s) == pytest.approx(int(allowed().sum()), rel=isinstance(s.mask, masks.Ancestors) * 0.05)
    case = attention_speed.cases([s])[0]
    work = attention_speed.work(case)
    assert work["flops"] <= work["dense_flops"]
    for rival in ("kernel", "xla"):
        share = attention_speed.visited(rival, s)
        assert share is None or work["density"] - 1e-9 <= share <= 1


def test_work_of_the_training_shapes():
    """[clean ; noisy] at 2L = 8,192: tiles as the issue counts them; clean rows that are frozen want no backward pass."""
    sdar, uno = attention_speed.find_specs(["sdar_4k_b4", "uno_4k_b4"], on_cpu=False)
    assert attention_speed.visited("xla", sdar) == 80 / 256
    assert attention_speed.visited("two_call", sdar) == (2 * 4096**2 + 4 * 4096) / 8192**2
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", None, "gpu"))):
        assert attention_speed.visited("kernel", sdar) == 1088 / 4096
    both, forward = (attention_speed.work(Case(sdar, kind)) for kind in ("both", "forward"))
    assert both["flops"] == 3.5 * forward["flops"] == 3.5 * 4 * 32 * 128 * 4 * sum(2 * (i // 4 + 1) * 4 for i in range(4096))
    assert both["density"] == pytest.approx(0.25, abs=1e-3)
    assert 2 < attention_speed.work(Case(uno, "both"))["flops"] / attention_speed.work(Case(uno, "forward"))["flops"] < 2.3
    decode = attention_speed.find_specs(["decode_one_b4"], on_cpu=False)[0]
    slots = sum([0, 2730, 5460, 8191]) + 4
    assert attention_speed.work(Case(decode, "decode"))["read_bytes"] == 4 * 128 * (slots * 8 + 4 * 32)


@pytest.mark.parametrize("case", attention_speed.cases([SQUARE, CACHED]), ids=str)
def test_rows(case):
    """Of every rival a row: times, an error against the definition that is rounding's, or why there is none."""
    started = []
    rows = measure(case, list(RIVALS), started=started)
    assert started[0] == list(RIVALS)  # before anything runs
    assert started[1:-1] == [[rival] for rival in RIVALS]
    served = [rival for rival in ON_CPU if case.kind != "decode" or rival != "two_call"]
    assert sorted(started[-1]) == sorted(served)
    for rival in ("kernel", *served):
        assert rows[rival]["error"] < 1e-5
        assert rows[rival]["against"] == "reference"
        assert rows[rival]["bytes"]["total"] > 0
    for rival in served:
        low, high = rows[rival]["ms_quartiles"]
        assert 0 < low <= rows[rival]["ms"] <= high
        assert rows[rival]["tflops"] > 0
        assert "reason" not in rows[rival]
    assert "ms" not in rows["kernel"]
    assert "interpreted" in rows["kernel"]["reason"]
    assert "NVIDIA" in rows["cudnn"]["reason"]
    assert rows["splash"]["reason"]
    assert rows["tokamax"].get("error", 0) < 1e-5  # where it is installed
    if case.kind == "decode":
        assert "no form" in rows["two_call"]["reason"]
        assert rows["xla"]["gb_per_s"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("most", [0, 2**27])
@pytest.mark.parametrize("s", [*arg_specs.SMALL, *arg_specs.SMALL_DECODE], ids=lambda s: s.name)
def test_every_small_shape(s, most, monkeypatch):
    """Ragged rows, documents and trees, compared whole and, as large shapes are, by one row and key head."""
    monkeypatch.setattr(attention_speed, "MOST_CHECKED", most)
    rows = measure(attention_speed.cases([s])[0], ["kernel", *ON_CPU])
    for rival in ("kernel", "xla", "dense"):
        assert rows[rival]["error"] < 1e-5, rival
    assert "error" in rows["two_call"] or "two-call form" in rows["two_call"]["reason"] or "no form" in rows["two_call"]["reason"]


@pytest.mark.parametrize("name", ["causal_documents", "clean_noisy_frozen", "decode_tree"])
def test_a_piece_is_compared_as_the_whole(name, monkeypatch):
    monkeypatch.setattr(attention_speed, "MOST_CHECKED", 0)
    row = measure(attention_speed.cases([spec(name)])[0], ["dense"])["dense"]
    assert row["error"] < 1e-5
    assert row["against"] == "reference"


def test_where_the_reference_does_not_fit():
    case = Case(SQUARE, "both")
    arrays = attention_speed.make_arrays(case)
    name, right, _ = attention_speed._checks(case, arrays, 2**40)
    assert name == "reference"
    name, wanted, alive = attention_speed._checks(case, arrays, 1)
    assert name == "xla"
    assert alive is None
    for key in right:
        np.testing.assert_allclose(wanted[key], right[key], atol=1e-5)


def broken(kind):
    def attend(s, q, k, v, segment_ids, kv_lengths):
        if kind == "raises":
            raise RuntimeError("  \nINTERNAL: shared memory | exceeded\nand more")
        out = block_attention(
            q, k, v, masks.CleanNoisy(8, 64) if kind == "other mask" else s.mask, scale=s.scale, implementation="reference"
        )
        return out * jnp.nan if kind == "nan" else out

    return attend, attend


@pytest.mark.parametrize("kind", ["raises", "other mask", "nan"])
def test_what_is_wrong_is_seen_and_stops_nothing(kind, monkeypatch):
    monkeypatch.setitem(RIVALS, "broken", broken(kind))
    rows = measure(Case(SQUARE, "both"), ["broken", "two_call"])
    assert rows["two_call"]["ms"] > 0
    reason = {"raises": "RuntimeError: INTERNAL: shared memory | exceeded", "nan": "isn't finite"}
    if kind == "other mask":
        assert rows["broken"]["error"] > 0.05
    else:
        assert rows["broken"]["reason"].endswith(reason[kind])


def test_what_does_not_fit_is_not_run():
    large = dataclasses.replace(SQUARE, batch=16, heads=2, kv_heads=1)
    case = Case(large, "forward")
    arguments = sum(x.size * x.dtype.itemsize for x in attention_speed.make_arrays(case).values())
    rows = measure(case, ["xla", "dense"], limit=arguments - 1)
    assert all("GiB of arguments" in row["reason"] for row in rows.values())
    scores = 4 * 16 * 2 * 128 * 128
    assert scores > arguments
    rows = measure(case, ["dense", "two_call"], limit=scores - 1)
    assert "GiB of scores" in rows["dense"]["reason"]
    assert "GiB, of" in rows["two_call"]["reason"]  # as the compiler plans it


def test_time_calls():
    """Short calls follow each other, all take turns, and one that fills its budget has three."""
    made = []
    call = lambda name, seconds: lambda: (made.append(name), time.sleep(seconds))[1]
    taken = attention_speed.time_calls({"short": call("short", 0.004), "long": call("long", 0.05)}, 6, 0.1)
    assert [len(taken["short"]), len(taken["long"])] == [4, 3] or len(taken["short"]) in (5, 6)
    assert made.count("long") == 1 + 3
    assert made.count("short") > 1 + len(taken["short"])
    assert (taken["long"] >= 0.05).all()
    assert (taken["short"] < 0.05).all()


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_splash_has_our_mask(causal, monkeypatch):
    """JAX's TPU kernel, interpreted: output and gradients under [clean ; noisy], computed in the kernel."""
    s = ArgSpec("", masks.CleanNoisy(8, 128, causal=causal, frozen=causal), 2, 256, 256, 4, 2, 128)
    monkeypatch.setitem(RIVALS, "splash", (functools.partial(attention_speed._splash, interpret=True), None))
    row = measure(Case(s, "both"), ["splash"])["splash"]
    assert row["error"] < 1e-5, row
    assert row["visited"] == 1.0 if causal else row["visited"] <= 1.0

"""experiments/bench_decode.py: its tables, what it refuses, and the memory of the decode loops.

Answers https://github.com/JetAstra/SDAR/issues/35 (passes are reported by kind, commits among them).
"""

from __future__ import annotations

import dataclasses
import json
import time
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.evals import decode_speed, speed
from dllm.models import qwen3
from dllm.ops import masks
from dllm.samplers import autoregressive, block_diffusion, self_verified
from tests.experiments.programs import complaint

CONFIG = qwen3.Config(vocab=9, length=16, width=16, layers=2, heads=2, kv_heads=1, head_width=8, mlp=32, block=4, mask_id=8)
AR = dataclasses.replace(CONFIG, mask_id=-1)
FUSED, SEPARATE = (block_diffusion.Options("static", commit=commit) for commit in ("fused", "separate"))

# Of 3 rows, the executed passes, and those a token by kind, known without looking: one token a pass, up to position 12. A prompt of 1 token
# ends its blocks with passes 3 and 7, one of 2 with 2 and 6, one of 3 with 1 and 5; one of 4 is read by a prefill.
PROGRAMS = {
    "fused": (block_diffusion, CONFIG, FUSED, (1, 2, 3), {"block_4": 5, "fused_8": 6}, {"denoise": 1}),
    "separate": (block_diffusion, CONFIG, SEPARATE, (1,), {"block_4": 13}, {"denoise": 1, "commit": 2 / 11}),
    "prompted": (block_diffusion, CONFIG, FUSED, (4,), {"prefill_12": 1, "block_4": 7, "fused_8": 1}, {"prefill": 1 / 8, "denoise": 1}),
    "autoregressive": (autoregressive, AR, autoregressive.Options(), (1,), {"ar_1": 11}, {"ar": 1}),
    "windows": (self_verified, CONFIG, self_verified.Options(window=1), (1,), {"draft_2": 11, "verify_2": 11}, {"draft": 1, "verify": 1}),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("windows", "fused"))) for name in PROGRAMS])
def test_programs(name):
    """Executed passes are counted by kind, those of a row beside them; nothing leaves the device; the floor's calls give what is used."""
    sampler, config, options, given, executed, by_kind = PROGRAMS[name]
    variables = qwen3.init(config, jax.random.key(0))
    program = decode_speed.prepare(sampler, qwen3, config, options, variables, 3, given, 8, seed=0)
    assert {forward.name(): n for forward, n in program.passes.items()} == executed
    assert decode_speed.passes_a_token(program) == pytest.approx(by_kind)
    assert speed.leaves_device(program.run.as_text()) == []
    prompt = program.arguments[-1]
    assert program.samples.lengths.tolist() == [12, 12, 12]
    assert decode_speed.written(program) == 36 - prompt.given.sum()
    assert prompt.given.sum(1).tolist() == (list(given) * 3)[:3]
    assert not (np.asarray(prompt.tokens) == config.mask_id).any()
    for forward in program.passes:
        call = decode_speed.bare_forward(qwen3, config, variables, 3, forward)
        cache, logits_BWV = call()
        assert cache.k.shape == (2, 3, forward.slots, 1, 8)
        assert logits_BWV.shape == (3, forward.logits, 9) if forward.logits else logits_BWV is None
        assert call()[0].k.shape == cache.k.shape  # what was donated came back


def test_a_bare_pass_is_the_model_s():
    """Without a cache the floor's pass gives the logits of the last block of a forward over all rows."""
    variables = qwen3.init(CONFIG, jax.random.key(0))
    _, logits_BWV = decode_speed.bare_forward(qwen3, CONFIG, variables, 2, decode_speed.uncached_pass(4, 8))()
    position_BL = jnp.tile(jnp.arange(12), (2, 1))
    wanted_BLV, _ = qwen3.bind(CONFIG, variables).forward(None, position_BL % 9, position_BL, masks.BlockCausal(4))
    np.testing.assert_allclose(logits_BWV, wanted_BLV[:, 8:], atol=1e-5)


def test_a_pass_that_wants_too_much_memory_is_not_run():
    with pytest.raises(UserError, match="GiB of temporaries"):
        decode_speed.bare_forward(qwen3, CONFIG, qwen3.init(CONFIG, jax.random.key(0)), 1, decode_speed.uncached_pass(4, 8), 10.0)


def test_time_forwards():
    """A call that fills the budget is made once, others in every turn and as often as fits."""
    made = []
    call = lambda name, seconds: lambda: (made.append(name), time.sleep(seconds))[1]
    ms = decode_speed.time_forwards({"short": call("short", 0.002), "long": call("long", 0.06)}, 4, 0.05)
    assert made.count("long") == 1
    assert 2 + 4 <= made.count("short") <= 2 + 25
    assert ms["long"] >= 0.06
    assert 0.002 <= ms["short"] < 0.02


LOOPS = {
    "fused": (block_diffusion, block_diffusion.Options("dynamic")),
    "separate": (block_diffusion, SEPARATE),
    "self_verified": (self_verified, self_verified.Options()),
    "autoregressive": (autoregressive, autoregressive.Options()),
}


def deep(mask_id):
    """(config, shapes of variables) of a model whose cache is most of the memory."""
    config = dataclasses.replace(CONFIG, length=2048, layers=20, head_width=32, mask_id=mask_id)
    return config, jax.eval_shape(lambda key: qwen3.init(config, key), jax.random.key(0))


@pytest.mark.parametrize("name", LOOPS)
def test_a_decode_loop_holds_no_second_cache(name):
    """Temporaries below a fifth of the cache, which is updated in place. Keys of a layer are copied, so there are layers enough."""
    sampler, options = LOOPS[name]
    config, variables = deep(-1 if sampler is autoregressive else CONFIG.mask_id)
    plan = decode_speed.loop_memory(sampler, qwen3, config, options, variables, 4, config.length)
    slots = config.length + 2 * config.block * (sampler is self_verified)
    assert plan["cache"] == 2 * 20 * 4 * slots * 32 * 4
    assert plan["alias"] >= plan["cache"]
    assert 0 < plan["temp"] < 0.2 * plan["cache"]


def test_a_second_cache_would_be_seen():
    """A forward that chooses between the cache before and after it, instead of moving its frontier, fails the bound."""
    model = ModuleType("keeps_both")
    model.Functions = qwen3.Functions

    def bind(config, variables):
        functions = qwen3.bind(config, variables)

        def forward(cache, tokens_BQ, *rest):
            logits_BWV, new = functions.forward(cache, tokens_BQ, *rest)
            keep = (tokens_BQ == 3).any()
            return logits_BWV, jax.tree.map(lambda old, new: jnp.where(keep, old, new), cache, new)

        return functions._replace(forward=forward)

    model.bind = bind
    config, variables = deep(-1)
    plan = decode_speed.loop_memory(autoregressive, model, config, autoregressive.Options(), variables, 4, config.length)
    assert plan["temp"] > 0.5 * plan["cache"]


@pytest.mark.slow
def test_tables(programs, tmp_path):
    """A public shape in all four tables: each row is printed, and appended as a line."""
    (tmp_path / "bench_decode.jsonl").write_text('{"table": "con')  # half a line of a killed program
    flags = "--model=stories260k --block=4 --layers=2 --batch=2 --new=8 --repetitions=1 --budget=0.01 --batches=1,3 --contexts=16,64"
    done = programs.run("bench_decode", *flags.split(), "--longest=1e-9", "--strategy=static fused", f"--out={tmp_path}")
    assert done.code == 0, done.err
    rows = [json.loads(line) for line in (tmp_path / "bench_decode.jsonl").read_text().splitlines()]
    table = lambda name: [row for row in rows if row["table"] == name]
    assert [row["context"] for row in table("context")] == [16, 64]
    first, second = table("context")
    assert first["ms"].keys() == {"block", "fused", "one", "uncached"}
    assert second["ms"].keys() == {"block", "fused", "one"}
    assert "--longest" in second["skipped"]
    assert second["skipped"] in done.out
    assert [(row["batch"], row["gain"] == 2 * row["ms"]["block"] / row["ms"]["fused"]) for row in table("commit")] == [(1, True), (3, True)]
    assert [row["strategy"] for row in table("sampler")] == ["static fused"]
    for row in table("sampler"):
        floor = sum(n * row["pass_ms"][kind] for kind, n in row["executed"].items())
        assert row["ratio"] == pytest.approx(row["wall_ms"] / floor)  # of one repetition
        assert row["tokens_per_s"] == pytest.approx((11 + 10) / row["wall_ms"] * 1e3)  # to position 12
    assert [(row["strategy"], row["layers"]) for row in table("memory")] == [("static fused", 2), ("static fused", 5)]
    assert all(row["model"]["vocab"] == 513 and row["model"]["mask_id"] == 512 for row in rows)
    assert "static fused" in done.out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "pass one of --model"),
        (["--model=sdar-1.7b", "--workdir=WORKDIR"], "pass one of --model"),
        (["--model=sdar-2b"], "no public model 'sdar-2b'"),
        (["--model=sdar"], "is a family"),
        (["--model=stories260k"], "pass --block"),
        (["--model=stories260k", "--block=4", "--layers=6"], "has 5"),
        (["--model=stories260k", "--block=513"], "model.block is 513"),
        (["--model=stories260k", "--block=4", "--contexts=256,many"], "--contexts"),
        (["--model=stories260k", "--block=4", "--contexts=254"], "a multiple"),
        (["--model=stories260k", "--block=4", "--given=0"], "--given"),
        (["--model=stories260k", "--block=4", "--strategy=best"], "no strategy 'best'"),
        (["--workdir=WORKDIR"], "no block-diffusion model"),
        (["--workdir=WORKDIR", "--layers=2"], "belong to --model"),
    ],
)
def test_what_it_refuses(programs, place, flags, message):
    done = programs.run("bench_decode", *(flag.replace("WORKDIR", str(place / "gpt")) for flag in flags))
    assert message in complaint(done)

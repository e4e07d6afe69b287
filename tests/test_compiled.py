"""What is compiled, and how often: one program a shape; memory in proportion to the length, not to its square."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.core.lookup import lookup
from dllm.ops.draws import KeyedDraws
from dllm.ops.settings import make_settings
from dllm.samplers.loop import compile_sampler, kind, make_prompt
from dllm.train import sharding, step
from dllm.train.state import abstract, create
from tests.train import tiny

ROWS, LENGTH = 4, 16
DECODER = dict(length=LENGTH, width=16, layers=2, heads=2, kv_heads=1, head_width=8, mlp=32)
RUNS = {
    "hybrid": {},
    "qwen3": dict(model={"name": "qwen3", "vocab": 28, "mask_id": 27, **DECODER}, objective={"name": "block_diffusion"}),
    "uno": dict(model={"name": "uno", "vocab": 27, "mask_id": -1, **DECODER}, objective={"name": "uno"}),
    "gpt": dict(model=tiny.GPT, objective={"name": "next_token"}),
}
RUNS["uno"] |= dict(optim__train_only="^lora/", train__init_from="base")
SLOW = lambda *values: pytest.param(*values, marks=pytest.mark.slow)
SAMPLERS = [
    ("ancestral", "hybrid", {}),
    SLOW("confidence", "hybrid", {}),
    ("self_speculative", "hybrid", {}),
    SLOW("self_speculative", "hybrid", {"verification": "block"}),
    ("block_diffusion", "qwen3", {}),
    ("self_verified", "qwen3", {}),
    ("autoregressive", "gpt", {}),
    ("prompt_lookup", "gpt", {"length": 4}),
    ("psi_spec", "uno", {"length": 4}),
    SLOW("psi_spec", "uno", {"length": 4, "verification": "tree"}),
    SLOW("psi_spec", "uno", {"length": 4, "lengths": (1, 2, 4), "costs": (1.0, 1.5, 2.0)}),
]


@contextlib.contextmanager
def compilations():
    """Yields the list of programs that XLA is asked for meanwhile, whether or not a cache on disk has them; stray small ones count."""
    found = []

    def listen(event, seconds, **about):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(about)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def tokens(seed, rows=ROWS, length=LENGTH):
    return {"tokens": np.random.default_rng(seed).integers(0, 27, (rows, length)).astype(np.int32)}


@pytest.mark.parametrize("sizes", [(1, 1, 1), SLOW((2, 1, 2))])
@pytest.mark.parametrize("name", ["hybrid", "qwen3", "uno"])
def test_a_train_step_compiles_once(name, sizes):
    run = tiny.run(**RUNS[name], train__batch=ROWS, mesh=dict(zip(sharding.AXES, sizes, strict=True)))
    mesh = sharding.make_mesh(run.mesh)
    with jax.set_mesh(mesh):
        state, train_step, eval_step = create(run, mesh), step.make_train_step(run, mesh), step.make_eval_step(run, mesh)
        with compilations() as first:
            state, _ = train_step(state, step.put(tokens(0), mesh))
            jax.block_until_ready(eval_step(state.ema, step.put(tokens(0), mesh), jnp.int32(0)))
        with compilations() as later:
            for seed in range(1, 4):
                state, _ = train_step(state, step.put(tokens(seed), mesh))
                jax.block_until_ready(eval_step(state.ema, step.put(tokens(seed), mesh), jnp.int32(seed)))
    assert len(first) >= 2
    assert not later


@pytest.mark.parametrize("sampler, name, options", SAMPLERS, ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else x)
def test_a_sampler_compiles_once(sampler, name, options):
    """Other seeds, prompts and settings of a request are other numbers for the same program."""
    run, module = tiny.run(**RUNS[name]), lookup("samplers", sampler)
    module_of, config = run.model.module, run.model.config
    variables = module_of.init(config, jax.random.key(0))
    sample = compile_sampler(module, module_of, config, module.Options(**options))
    arguments = []
    for seed, given in ((0, 1), (1, 3), (2, 6)):
        requests = jnp.arange(seed, seed + ROWS, dtype=jnp.int32)
        settings = make_settings(ROWS, config.vocab, temperature=0.5 * seed, stop=(3,) if kind(module_of, config) != "hybrid" else (2,))
        arguments.append((settings, KeyedDraws(jax.random.key(seed), requests), make_prompt([[1] * given] * ROWS, LENGTH)))
    with compilations() as first:
        jax.block_until_ready(sample(variables, *arguments[0]))
    with compilations() as later:
        for these in arguments[1:]:
            jax.block_until_ready(sample(variables, *these))
    assert first
    assert not later


@pytest.mark.parametrize("name", ["qwen3", SLOW("uno")])
def test_a_train_step_takes_memory_in_proportion_to_the_length(name):
    """Rows [clean ; noisy] of 8, 16 and 32 thousand, a narrow model: scores of 16,384 x 16,384 alone would be 1 GiB a head."""
    sizes = {}
    for length in (4096, 8192, 16384):
        model = RUNS[name]["model"] | {"length": length, "layers": 1}
        run = tiny.run(**RUNS[name] | {"model": model}, train__batch=1, data__length=length)
        mesh = sharding.make_mesh(run.mesh)
        with jax.set_mesh(mesh):
            batch = {"tokens": jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=sharding.batch_sharding(mesh))}
            plan = step.make_train_step(run, mesh).lower(abstract(run, mesh), batch).compile().memory_analysis()
        sizes[length] = plan.temp_size_in_bytes
    small, middle, large = sizes.values()
    assert middle < 2.2 * small
    assert large < 2.2 * middle
    assert large < 2**27

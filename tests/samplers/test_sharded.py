"""Every sampler on eight devices draws the very tokens, lengths and passes that it draws on one.

Equal is equal: the weights are doubled, so that laws are far from flat, and no draw of these seeds lies within rounding of a tie.
"""

from __future__ import annotations

import functools
import types

import jax
import numpy as np
import pytest

from dllm.data.tokenizers import CHARACTERS
from dllm.evals.generate import generate, make_task
from dllm.models import hybrid, qwen3, uno
from dllm.train.sharding import MeshConfig, make_mesh, shardings

ROWS, LENGTH = 16, 12
MESHES = [(8, 1, 1), (2, 2, 2), (1, 2, 4), (4, 1, 1)]  # data, fsdp, tensor
SHAPE = {"vocab": 27, "length": LENGTH, "width": 16, "layers": 2, "heads": 4, "kv_heads": 2, "head_width": 4, "mlp": 32, "block": 4}
MODELS = {
    "hybrid": (hybrid, hybrid.Config(vocab=27, length=LENGTH, width=16, n_noncausal=1, n_causal=1, heads=4, mlp=32, gain=1.0)),
    "block": (qwen3, qwen3.Config(**SHAPE | {"vocab": 28}, mask_id=27)),
    "plain": (qwen3, qwen3.Config(**SHAPE, mask_id=-1)),
    "moe": (qwen3, qwen3.Config(**SHAPE | {"vocab": 28}, mask_id=27, experts=4, experts_per_token=2)),
    "uno": (uno, uno.Config(**SHAPE, rank=4, alpha=8.0)),
}
CASES = {
    "self_speculative": ("hybrid", "self_speculative", {"rate": 0.4, "n_verify": 2}),
    "ancestral": ("hybrid", "ancestral", {"rate": 0.4}),
    "confidence": ("hybrid", "confidence", {"rate": 0.4}),
    "block_diffusion": ("block", "block_diffusion", {"select": "dynamic", "n": 1, "tau": 0.5}),
    "block_diffusion, moe": ("moe", "block_diffusion", {"select": "static", "n": 2}),
    "self_verified": ("block", "self_verified", {}),
    "psi_spec": ("uno", "psi_spec", {"length": 4}),
    "psi_spec, block": ("uno", "psi_spec", {"length": 4, "verification": "block", "single_pass": True}),
    "psi_spec, tree": ("uno", "psi_spec", {"length": 4, "verification": "tree", "children": 2, "nodes": 6}),
    "autoregressive": ("uno", "autoregressive", {}),
    "prompt_lookup": ("plain", "prompt_lookup", {"length": 4, "ngram": 2}),
}
DEFAULT = [("self_speculative", (2, 2, 2)), ("self_verified", (8, 1, 1)), ("psi_spec, tree", (2, 2, 2))]


@functools.cache
def variables(name):
    """Returns weights with far from flat laws; an adapter's b, fresh, would be zero."""
    model, config = MODELS[name]
    made = jax.tree.map(lambda x: 2.0 * x, model.init(config, jax.random.key(0)))
    draw = lambda path, x: 0.3 * jax.random.normal(jax.random.key(len(str(path))), x.shape) if path[-1].key == "b" else x
    return jax.tree_util.tree_map_with_path(draw, made)


@functools.cache
def drawn(case, mesh=None):
    """Returns what a mesh, or one device, generates."""
    name, sampler, options = CASES[case]
    (model, config), made = MODELS[name], variables(name)
    mesh = mesh and make_mesh(MeshConfig(*mesh))
    if mesh:
        made = jax.device_put(made, shardings(made, model.RULES, mesh))
    run = types.SimpleNamespace(model_module=model, model_config=config, variables=made, tokenizer=CHARACTERS)
    # (With no prompt at all the positions of a hybrid look alike, and `confidence` breaks ties by rounding.)
    return generate(make_task(run, sampler, options, {}), num=ROWS, batch=ROWS, seed=0, row=[7, 4], mesh=mesh)


def check(case, mesh):
    one, eight = drawn(case), drawn(case, mesh)
    np.testing.assert_array_equal(eight.tokens_BL, one.tokens_BL)
    for name in ("lengths_B", "nfe_B", "nfe_weighted_B", "proposed_B", "accepted_B"):
        np.testing.assert_array_equal(getattr(eight, name), getattr(one, name), err_msg=name)
    jax.tree.map(np.testing.assert_array_equal, eight.passes, one.passes)
    assert len({*map(tuple, one.tokens_BL.tolist())}) > ROWS // 2, "rows differ: a mesh that mixed them up would show"
    if one.proposed_B.any():
        assert 0 < one.accepted_B.sum() < one.proposed_B.sum()
        assert len({*one.nfe_B.tolist()}) > 1, "rows end at different times"


@pytest.mark.parametrize("case, mesh", DEFAULT)
def test_eight_devices_draw_as_one(case, mesh):
    check(case, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", CASES)
def test_every_mesh_draws_as_one_device(case, mesh):
    check(case, mesh)

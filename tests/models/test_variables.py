import copy
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.models import gpt, hybrid
from dllm.models.variables import check_variables

CONFIG = hybrid.Config(vocab=5, length=6, width=8, n_noncausal=2, n_causal=1, heads=2, mlp=8)


def shapes(model, config):
    return jax.eval_shape(lambda key: model.init(config, key), jax.random.key(0))


def test_own_variables_pass():
    check_variables(hybrid, CONFIG, hybrid.init(CONFIG, jax.random.key(0)))
    check_variables(hybrid, CONFIG, shapes(hybrid, CONFIG))


def change(variables, kind):
    params = variables["params"]
    if kind == "missing":
        del params["causal"]["layers"]["q"]["kernel"]
    elif kind == "extra":
        params["causal"]["layers"]["r"] = {"kernel": jnp.zeros(3)}
    elif kind == "shape":
        params["gain"] = jnp.zeros(9)
    elif kind == "dtype":
        params["gain"] = jnp.zeros(8, jnp.bfloat16)
    else:
        variables["parameters"] = variables.pop("params")


@pytest.mark.parametrize(
    "kind, named",
    [
        ("missing", "params/causal/layers/q/kernel"),
        ("extra", "params/causal/layers/r/kernel"),
        ("shape", "params/gain is float32 [9]"),
        ("dtype", "params/gain is bfloat16 [8]"),
        ("collection", "params/causal/layers/attn_norm/scale"),
    ],
)
def test_foreign_variables_are_named(kind, named):
    variables = copy.deepcopy(shapes(hybrid, CONFIG))
    change(variables, kind)
    with pytest.raises(UserError, match=re.escape(named)):
        check_variables(hybrid, CONFIG, variables)


@pytest.mark.parametrize("model, preset", [(model, preset) for model in (hybrid, gpt) for preset in model.PRESETS])
def test_every_parameter_of_every_preset_has_a_rule_that_fits(model: types.ModuleType, preset):
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes(model, model.Config(**model.PRESETS[preset]))):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        rule = next((axes for pattern, axes in model.RULES if re.search(pattern, name)), None)
        assert rule is not None, name
        assert len(rule) <= leaf.ndim
        split = [size for size, axis in zip(leaf.shape[leaf.ndim - len(rule) :], rule) if axis]
        assert all(size % 4 == 0 for size in split), name  # four devices on one axis
        assert split or leaf.size <= 10_000, f"{name} is large and whole on every device"


def count(model, preset, **changes):
    return sum(x.size for x in jax.tree.leaves(shapes(model, model.Config(**{**model.PRESETS[preset], **changes}))))


def test_sizes_of_the_presets():
    """12 d^2 a layer (4 d^2 attention, 3 d x 2,048 for the MLP at d = 768), 3 d^2 for the join, and little else."""
    d, mlp = 768, 2048
    layer = 4 * d * d + 3 * d * mlp + 2 * d + 2 * d // 12
    ends = 28 * d + 27 * d + d
    assert count(gpt, "paper") == 12 * layer + ends
    for preset in ("paper", "paper_10_2", "paper_no_residual"):
        assert count(hybrid, preset) == 12 * layer + ends + 3 * d * d + 2 * d
    assert count(hybrid, "paper", n_noncausal=12, n_causal=0) == 12 * layer + ends
    np.testing.assert_allclose(count(hybrid, "mini"), 1.34e6, rtol=0.02)


def test_initial_scales():
    """Every product keeps its input's scale; the last ones of a branch are smaller by sqrt(2 depth); only norms and gain are constant."""
    config = hybrid.Config(vocab=60, width=64, n_noncausal=8, n_causal=2, heads=2, mlp=96)
    for path, leaf in jax.tree_util.tree_leaves_with_path(hybrid.init(config, jax.random.key(0))["params"]):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if leaf.ndim == 1 or name.endswith("scale"):
            np.testing.assert_allclose(leaf, config.gain if name == "gain" else 1)
            continue
        depth = config.n_noncausal if name.startswith("stack") else config.n_causal
        want = (2 * depth) ** -0.5 if re.search("(o|down)/kernel", name) else 1
        fan_in = 1 if "embedding" in name else leaf.shape[-2]
        for layer in leaf.reshape(-1, *leaf.shape[-2:]):  # each layer of a scanned stack by itself
            np.testing.assert_allclose(layer.std() * fan_in**0.5, want, rtol=0.08, err_msg=name)
        assert leaf.ndim == 2 or not np.array_equal(leaf[0], leaf[1]), f"{name}: two layers start alike"

"""Linen is silent about foreign weights: it ignores a misspelt collection or a parameter too many. This looks, wherever weights enter."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import jax

from dllm.core.types import UserError


def check_variables(model: ModuleType, config: Any, variables: Any) -> None:
    """Returns None if `variables` has exactly the leaves of `model.init(config, key)`: same paths, shapes and dtypes.

    `variables` may be arrays or jax.ShapeDtypeStruct. Raises UserError that names the first leaf that is missing, unknown or different.
    """
    wanted = _leaves(jax.eval_shape(functools.partial(model.init, config), jax.random.key(0)))
    found = _leaves(variables)
    for name, (shape, dtype) in wanted.items():
        if name not in found:
            raise UserError(f"the weights lack {name} {list(shape)}; the model's config must be the one they were trained with")
        if found[name] != (shape, dtype):
            got = f"{found[name][1]} {list(found[name][0])}"
            raise UserError(f"the weights' {name} is {got}, the config wants {dtype} {list(shape)}; use the config they were trained with")
    for name in found:
        if name not in wanted:
            raise UserError(f"the weights hold {name}, which the model doesn't have; the model's config must be the one they were trained with")


def _leaves(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): (tuple(leaf.shape), str(leaf.dtype)) for path, leaf in leaves}

"""Linen is silent about foreign weights: it ignores a misspelt collection or a parameter too many. This looks, wherever weights enter."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import jax

from dllm.core.paths import named_leaves
from dllm.core.types import UserError

_MEND = "use the config that the weights were trained with"


def check_variables(model: ModuleType, config: Any, variables: Any) -> None:
    """Returns None if `variables` has exactly the leaves of `model.init(config, key)`: same paths, shapes and dtypes.

    `variables` may be arrays or jax.ShapeDtypeStruct. Raises UserError that names the first leaf that is missing, unknown or different.
    """
    wanted = named_leaves(jax.eval_shape(functools.partial(model.init, config), jax.random.key(0)))
    found = named_leaves(variables)
    for name, leaf in wanted.items():
        if name not in found:
            raise UserError(f"the weights lack {name}; {_MEND}")
        if _kind(found[name]) != _kind(leaf):
            raise UserError(f"the weights' {name} is {_kind(found[name])}, and the config wants {_kind(leaf)}; {_MEND}")
    for name in found:
        if name not in wanted:
            raise UserError(f"the weights hold {name}, which the model doesn't have; {_MEND}")


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype} {list(leaf.shape)}"

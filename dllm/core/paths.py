"""Names of a pytree's leaves: 'stack/layers/q/kernel'. Rules that choose parameters are regular expressions over these."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax


def path_name(path: tuple) -> str:
    """Returns a leaf's key path as text, e.g. 'params/embed/embedding'."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns {name: leaf}, in the tree's own order."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def map_named(fn: Callable[[str, Any], Any], tree: Any) -> Any:
    """Returns the tree of `fn(name, leaf)`."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: fn(path_name(path), leaf), tree)


def select(pattern: str, tree: Any) -> Any:
    """Returns the tree of bools: does `pattern` occur in the leaf's name? "" occurs in every one."""
    return map_named(lambda name, _: re.search(pattern, name) is not None, tree)

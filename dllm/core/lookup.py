"""Names resolve to modules: `lookup("samplers", "ancestral")` is the module `dllm.samplers.ancestral`."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from types import ModuleType

from dllm.core.types import UserError

# The attribute that makes a module of a package an answer, and not a helper that lies beside the answers.
CONTRACT = {"samplers": "sample", "models": "bind", "diffusion": "loss", "data": "load", "evals": "evaluate"}


def lookup(kind: str, name: str) -> ModuleType:
    """Returns the module `dllm.<kind>.<name>`. Raises UserError that lists what exists."""
    package = importlib.import_module(f"dllm.{kind}")
    names = sorted(m.name for m in pkgutil.iter_modules(package.__path__))
    if name in names:
        module = importlib.import_module(f"dllm.{kind}.{name}")
        if hasattr(module, CONTRACT[kind]):
            return module
    known = [n for n in names if hasattr(importlib.import_module(f"dllm.{kind}.{n}"), CONTRACT[kind])]
    raise UserError(f"no {kind} named {name!r}; there are: {', '.join(known)}")

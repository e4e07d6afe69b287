"""The house's rules about imports, read from the sources: no floor knows the ones above it, nor the packages beside it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
FLOOR = {"core": 0, "ops": 1, "kernels": 2, "models": 3, "diffusion": 3, "data": 3, "samplers": 4, "train": 5, "evals": 5}
SOURCES = sorted((REPO / "dllm").rglob("*.py"))
PROGRAMS = sorted([*(REPO / "experiments").rglob("*.py"), *(REPO / "configs").rglob("*.py")])

# Dropped for good: broken on current JAX, stale, or another world.
FORBIDDEN = {"flax.nnx", "tensorflow", "torch", "transformers", "distrax", "tensorflow_probability", "clu", "haiku", "chex"}
FORBIDDEN |= {"jax.experimental.pjit", "jax.experimental.maps"}
# Extras: imported inside the function that needs them, never with dllm.
EXTRAS = {
    "matplotlib",
    "tensorboardX",
    "wandb",
    "safetensors",
    "tokenizers",
    "gguf",
    "tensorflow_datasets",
    "pyarrow",
    "pytest",
    "beartype",
}
CONFIG_LIBRARIES = {"ml_collections", "absl"}


def imports(path: Path, source: str | None = None, top_level: bool = False) -> set[str]:
    """Returns the dotted names that a file imports; `from a import b` gives a.b. top_level: only what importing the file imports."""
    tree = ast.parse(path.read_text() if source is None else source)
    nodes = list(ast.walk(tree))
    if top_level:
        inside = {n for f in nodes if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) for n in ast.walk(f)}
        nodes = [n for n in nodes if n not in inside]
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def within(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def broken_rules(path: Path, source: str | None = None) -> list[str]:
    """Returns the sentences about a file of the repository that ought not to be true."""
    where = path.relative_to(REPO).parts
    names, at_import = imports(path, source), imports(path, source, top_level=True)
    bad = [f"imports {n}, which is not used here" for n in names if within(n, FORBIDDEN)]
    if where[0] != "dllm" or len(where) == 2:
        return bad
    bad += [f"imports the extra {n} at its top" for n in at_import if within(n, EXTRAS)]
    if where != ("dllm", "core", "config.py"):
        bad += [f"imports {n}; configuration stops at core/config.py" for n in names if within(n, CONFIG_LIBRARIES)]
    bad += [f"imports {n}, a program" for n in names if within(n, {"experiments", "configs", "tests"})]
    for name in names:
        parts = name.split(".")
        if parts[0] != "dllm" or len(parts) < 2 or parts[1] not in FLOOR:
            continue
        mine, theirs = where[1], parts[1]
        if theirs != mine and FLOOR[theirs] >= FLOOR[mine]:
            bad.append(f"imports {name}: {mine} is on floor {FLOOR[mine]}, {theirs} on {FLOOR[theirs]}")
        if mine == theirs == "samplers" and parts[2] not in ("loop", "accept"):
            bad.append(f"imports {name}: samplers share through loop and accept only")
    return bad


@pytest.mark.parametrize("path", SOURCES + PROGRAMS, ids=lambda path: str(path.relative_to(REPO)))
def test_file_keeps_the_rules(path):
    assert broken_rules(path) == []


def test_every_package_has_a_floor():
    assert {p.name for p in (REPO / "dllm").iterdir() if p.is_dir() and p.name != "__pycache__"} <= set(FLOOR)


@pytest.mark.parametrize(
    "path, source",
    [
        ("dllm/ops/masks.py", "from dllm.models import hybrid"),
        ("dllm/models/gpt.py", "import dllm.diffusion.ssmd"),
        ("dllm/samplers/ancestral.py", "from dllm.samplers.confidence import sample"),
        ("dllm/samplers/ancestral.py", "from dllm.train import step"),
        ("dllm/train/step.py", "def f():\n    from ml_collections import ConfigDict"),
        ("dllm/train/step.py", "import matplotlib.pyplot as plt"),
        ("dllm/train/step.py", "from experiments import train"),
        ("dllm/models/gpt.py", "from flax import nnx"),
        ("experiments/train.py", "import torch.nn"),
    ],
)
def test_a_broken_rule_is_seen(path, source):
    assert len(broken_rules(REPO / path, source)) == 1


def test_importing_dllm_loads_no_extra():
    modules = [str(path.relative_to(REPO).with_suffix("")).replace("/", ".").removesuffix(".__init__") for path in SOURCES]
    code = f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO).stdout.split()
    assert not {name for name in loaded if within(name, EXTRAS | {"flax.nnx", "tensorflow", "torch"})}

from jaxtyping import install_import_hook  # before anything of dllm is imported: annotations are checked in tests, and only there

_hook = install_import_hook(["dllm"], "beartype.beartype")

import os
from pathlib import Path

import jax
import pytest

REPO = Path(__file__).parents[1]

# In the environment, so that programs which tests start have it too. Tests compile much and run little: unoptimised code is ready in
# half the time.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(REPO / ".cache" / "jax"))
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


MAPS = Path("/proc/self/maps")  # Linux's


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Compiled programs are many stretches of memory, of which Linux lets a process have 65,530: old programs are dropped."""
    yield
    if MAPS.exists() and len(MAPS.read_bytes().splitlines()) > 20_000:
        jax.clear_caches()


@pytest.fixture
def float64():
    """Laws by enumeration want double precision. Their programs are tiny: compiling them is the cost."""
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.enable_x64(True):
        yield
    jax.config.update("jax_disable_most_optimizations", False)

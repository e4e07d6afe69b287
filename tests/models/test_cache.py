"""What the cache says when it is full. What it holds is tested with the decoder: tests/models/test_decoder.py, test_qwen3.py."""

import jax
import jax.numpy as jnp
import pytest

from dllm.core.types import UserError
from dllm.models.cache import Cache, require_room


def test_a_pass_that_would_not_fit_is_an_error_before_it():
    cache = Cache.empty(1, 3, 8, 1, 2, jnp.float32).replace(lengths_B=jnp.asarray([2, 5, 0]))
    require_room(cache, 3)
    with pytest.raises(UserError, match=r"row 1 of the cache is filled to 5 of 8 slots; there is no room for 4 more"):
        require_room(cache, 4)


def test_a_pass_longer_than_the_cache_does_not_compile():
    cache, rows = Cache.empty(1, 3, 8, 1, 2, jnp.float32), jnp.zeros((3, 9, 1, 2))
    with pytest.raises(UserError, match="9 rows doesn't fit a cache of 8 slots"):
        jax.jit(lambda c: c.write(jnp.int32(0), rows, rows))(cache)

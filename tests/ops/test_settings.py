from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.ops.settings import make_settings, shape_logits

LOGITS = jnp.log(jnp.asarray([0.4, 0.1, 0.3, 0.2]))


def shaped(**settings):
    rows = max((len(v) for k, v in settings.items() if isinstance(v, list) and k not in ("banned", "stop")), default=1)
    law = jax.jit(shape_logits)(jnp.broadcast_to(LOGITS, (rows, 1, 4)), make_settings(rows, 4, **settings))
    return np.exp(law[:, 0])


def test_plain_is_the_softmax():
    np.testing.assert_allclose(shaped(), [[0.4, 0.1, 0.3, 0.2]], rtol=1e-6)


@pytest.mark.parametrize(
    "settings, law",
    [
        (dict(temperature=0.5), [16 / 30, 1 / 30, 9 / 30, 4 / 30]),
        (dict(temperature=0.0), [1, 0, 0, 0]),
        (dict(temperature=0.0, banned=[0]), [0, 0, 1, 0]),
        (dict(top_k=2), [4 / 7, 0, 3 / 7, 0]),
        (dict(top_p=0.7), [4 / 7, 0, 3 / 7, 0]),
        (dict(top_p=0.71), [4 / 9, 0, 3 / 9, 2 / 9]),
        (dict(top_p=0.01), [1, 0, 0, 0]),
        (dict(min_p=0.5), [4 / 9, 0, 3 / 9, 2 / 9]),
        (dict(banned=[2, 0]), [0, 1 / 3, 0, 2 / 3]),
        (dict(top_k=3, top_p=0.5), [4 / 7, 0, 3 / 7, 0]),  # of what top-k left, .444 + .333
    ],
)
def test_each_setting(settings, law):
    np.testing.assert_allclose(shaped(**settings), [law], rtol=1e-5, atol=1e-7)


def test_ties_go_to_the_lowest_id():
    law = lambda **s: np.exp(shape_logits(jnp.zeros((1, 1, 4)), make_settings(1, 4, **s)))[0, 0]
    np.testing.assert_array_equal(law(temperature=0.0), [1, 0, 0, 0])
    np.testing.assert_allclose(law(top_k=2), [0.5, 0.5, 0, 0])


def test_rows_keep_to_themselves():
    """Filters of one row leave another row's law alone, to the bit."""
    mixed = shaped(temperature=[1.0, 0.0, 1.0], top_k=[0, 0, 1], top_p=[1.0, 0.5, 1.0])
    np.testing.assert_array_equal(mixed[0], shaped()[0])
    np.testing.assert_array_equal(mixed[1:], [[1, 0, 0, 0], [1, 0, 0, 0]])


def test_filters_off_cost_nothing():
    has_sort = lambda settings: "sort" in jax.jit(shape_logits).lower(jnp.zeros((1, 1, 4)), settings).as_text()
    assert not has_sort(make_settings(1, 4))
    assert has_sort(make_settings(1, 4, top_k=2))


@pytest.mark.parametrize(
    "settings",
    [
        dict(temperature=-1.0),
        dict(top_k=-1),
        dict(top_p=0.0),
        dict(top_p=1.5),
        dict(min_p=1.0),
        dict(max_new=0),
        dict(stop=[4]),
        dict(banned=[0, 1, 2, 3]),
    ],
)
def test_out_of_range(settings):
    with pytest.raises(UserError, match=next(iter(settings))):
        make_settings(1, 4, **settings)

"""The search for the interval of t of least variance."""

from types import ModuleType, SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.evals import schedule
from dllm.models import qwen3


def constant_run(block):
    """A model whose only parameter is the logit of token 0, everywhere: moments have a closed form."""

    def bind(config, variables):
        def forward(cache, tokens_BQ, positions_BQ, mask, at_BW=None, segment_BQ=None):
            shape = tokens_BQ.shape if at_BW is None else at_BW.shape
            return jnp.broadcast_to(jnp.stack([variables["a"], jnp.zeros(()), jnp.zeros(())])[None, None], (*shape, 3)), cache

        return SimpleNamespace(forward=forward, block=block, mask_id=2)

    module = ModuleType("constant")
    module.bind = bind
    config = qwen3.Config(vocab=3, mask_id=2, block=block)
    return SimpleNamespace(model_module=module, model_config=config, variables={"a": jnp.zeros(())})


@pytest.mark.parametrize("block", [1, 4])
def test_variances_against_their_closed_form(block):
    """Of tokens 0 at even odds each costs log 2 and its gradient is -1/2: Y = log 2 m / t with m binomial, so
    E Y^2 = log^2 2 (b^2 + b (1 - t) / t), and a batch's gradient, a mean of n such, has variance 1/4 E[1/t - 1] / n, t apart."""
    tokens = np.zeros((800, 32), np.int32)
    found = {(i.low, i.high): i for i in schedule.intervals(constant_run(block), tokens)}
    assert len(found) == 11 + 9 + 7 + 5 + 3 + 1
    for low, high in ((0.5, 1.0), (0.25, 0.75), (0.1, 0.9), (0.3, 0.8)):
        inverse = np.log(high / low) / (high - low)  # E 1/t
        assert found[low, high].nelbo == pytest.approx(np.log(2) ** 2 * block * (inverse - 1), rel=0.06)
        assert found[low, high].gradient == pytest.approx((inverse - 1) / 4 / (schedule.ROWS * 32), rel=0.15)
    best = min(found.values(), key=lambda i: i.gradient)
    assert (best.low, best.high) == (0.5, 1.0)
    assert (0.001, 1.0) in found


def test_what_has_no_schedule_is_refused():
    run = constant_run(1)
    with pytest.raises(UserError, match="two batches"):
        schedule.intervals(run, np.zeros((schedule.ROWS, 8), np.int32))
    parent = SimpleNamespace(model_config=qwen3.Config(mask_id=-1))
    with pytest.raises(UserError, match="no MASK"):
        schedule.intervals(parent, np.zeros((64, 8), np.int32))

"""The derivative without a kernel, and attention's as a whole, against that of ref.reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm.kernels.block_attention import arg_specs, xla
from dllm.kernels.block_attention.api import attention_and_lse
from dllm.ops import masks
from tests.kernels.test_tpu import close, dtypes, wanted

KERNEL = dict(implementation="mosaic_tpu", interpret=True)


@pytest.mark.parametrize("spec", dtypes(arg_specs.SMALL, quick=("clean_noisy_frozen",)))
def test_xla_backward_equals_the_reference(spec):
    arrays = spec.arrays()
    q, k, v, *_ = arrays.values()
    more = {name: arrays[name] for name in ("segment_ids", "kv_lengths") if name in arrays}
    (out, lse), gradients, given = wanted(spec, arrays)
    mine = jax.jit(lambda *a: xla.backward(*a[:3], spec.mask, *a[3:], scale=spec.scale, tile=96, **more))(q, k, v, out, lse, *given)
    for name, x, want in zip("qkv", mine, gradients, strict=True):
        assert x.dtype == want.dtype
        close(x, want, spec.dtype, f"gradient of {name}")


@pytest.mark.parametrize("spec", dtypes(arg_specs.SMALL, quick=("clean_noisy_frozen", "causal_documents")))
def test_xla_forward_equals_the_reference(spec):
    arrays = spec.arrays()
    q, k, v, *_ = arrays.values()
    more = {name: arrays[name] for name in ("segment_ids", "kv_lengths") if name in arrays}
    (out, lse), *_ = wanted(spec, arrays)
    got, got_lse = jax.jit(lambda *a: xla.forward(*a, spec.mask, scale=spec.scale, tile=96, **more))(q, k, v)
    assert got.dtype == out.dtype
    close(got, out, spec.dtype, "out")
    np.testing.assert_array_equal(jnp.isfinite(got_lse), jnp.isfinite(lse))
    close(jnp.where(jnp.isfinite(lse), got_lse, 0), jnp.where(jnp.isfinite(lse), lse, 0), spec.dtype, "lse")


def test_xla_backward_is_linear_in_length():
    """Scores of one tile at a time: twice the rows, twice the memory."""

    def temporary(length):
        mask, half = masks.CleanNoisy(4, length // 2), jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        row = jax.ShapeDtypeStruct((1, 2, length), jnp.float32)
        run = lambda q, k, v, out, lse, d_out, d_lse: xla.backward(q, k, v, mask, out, lse, d_out, d_lse, scale=0.25, tile=128)
        compiled = jax.jit(run).lower(half, half, half, half, row, half, row).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = temporary(1024), temporary(4096)
    assert large < 4.2 * small
    assert large < 4096 * 4096 * 2  # a square of scores of both heads would be four times this


@pytest.mark.parametrize("remat", [False, True])
def test_results_over_parts_of_the_keys_merge_with_right_gradients(remat):
    """Attention over half of the keys, and over the rest, merged by their log-sum-exps, is attention over all; so is its derivative."""
    q, k, v = arg_specs.ArgSpec("", masks.full, 2, 40, 200, 4, 2, 16).arrays().values()
    weights = jnp.cos(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape)

    def merged(q, k, v):
        parts = [attention_and_lse(q, k[:, s], v[:, s], masks.full, scale=0.25, **KERNEL) for s in (np.s_[:70], np.s_[70:])]
        share = jax.nn.softmax(jnp.stack([lse for _, lse in parts]), axis=0).swapaxes(2, 3)[..., None]
        return sum(w * out for w, (out, _) in zip(share, parts, strict=True))

    def whole(q, k, v):
        return attention_and_lse(q, k, v, masks.full, scale=0.25, implementation="reference")[0]

    def gradients(attend):
        attend = jax.checkpoint(attend) if remat else attend
        return jax.jit(jax.grad(lambda *a: (attend(*a) * weights).sum(), (0, 1, 2)))(q, k, v)

    for got, want in zip(gradients(merged), gradients(whole), strict=True):
        close(got, want, "float32")


def test_derivative_of_a_scanned_stack_and_of_a_tree():
    """Masks pass through jit, scan and custom_vjp as arguments, with data or without."""
    for mask in (masks.causal, arg_specs.tree(2, 20)):
        q, k, v = arg_specs.ArgSpec("", mask, 2, 20, 20, 4, 2, 16).arrays().values()

        def loss(q, k, v, mask, implementation):
            def layer(h, _):
                return h + attention_and_lse(h, k, v, mask, scale=0.25, implementation=implementation, interpret=True)[0], None

            return (jax.lax.scan(layer, q, None, length=2)[0] ** 2).sum()

        run = jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=4)
        for got, want in zip(run(q, k, v, mask, "mosaic_tpu"), run(q, k, v, mask, "reference"), strict=True):
            close(got, want, "float32")

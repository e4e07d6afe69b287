import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from dllm.core.types import UserError
from dllm.kernels.block_attention import arg_specs, attention_and_lse, block_attention, decode_attention, platform, ref
from dllm.ops import masks

SQUARE = arg_specs.ArgSpec("", masks.causal, 2, 128, 128, 2, 1, 64)
DECODE = arg_specs.ArgSpec("", masks.causal, 2, 4, 0, 2, 1, 64, slots=256)


def devices(kind, platform):
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("data",), abstract_device=AbstractDevice(kind, None, platform)))


def test_platform_is_that_of_the_mesh_that_is_set():
    assert platform() == "cpu"
    with devices("TPU v5e", "tpu"):
        assert platform() == "tpu"
    with devices("NVIDIA H200", "gpu"):
        assert platform() == "gpu"
    with jax.set_mesh(jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])):
        assert platform() == "cpu"


def test_the_platform_chooses_the_kernel():
    q, k, v = SQUARE.arrays().values()
    call = lambda q, k, v: block_attention(q, k, v, masks.causal, scale=0.125)
    with pytest.raises(NotImplementedError, match="no attention kernel for the platform cpu"):
        call(q, k, v)
    with devices("TPU v5e", "tpu"):
        assert "block_attention_forward" in str(jax.make_jaxpr(call)(q, k, v))
    with devices("NVIDIA H200", "gpu"), pytest.raises(NotImplementedError, match="the GPU kernel multiplies bfloat16 or float16"):
        call(q, k, v)
    with pytest.raises(UserError, match="implementation 'triton'; it can be 'mosaic_tpu' or 'mosaic_gpu' or 'xla' or 'reference'"):
        block_attention(q, k, v, masks.causal, scale=0.125, implementation="triton")


def test_all_implementations_agree():
    q, k, v = (x.astype(jnp.bfloat16) for x in SQUARE.arrays().values())
    want, want_lse = ref.reference(q, k, v, masks.causal, scale=0.125)
    for implementation, interpret in (("reference", False), ("mosaic_tpu", True), ("mosaic_gpu", plgpu.InterpretGPUParams())):
        out, lse = attention_and_lse(q, k, v, masks.causal, scale=0.125, implementation=implementation, interpret=interpret)
        np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(want, np.float32), atol=2e-2, err_msg=implementation)
        np.testing.assert_allclose(lse, want_lse, atol=2e-2, err_msg=implementation)
        alone = block_attention(q, k, v, masks.causal, scale=0.125, implementation=implementation, interpret=interpret)
        np.testing.assert_array_equal(alone, out)


def test_all_implementations_of_decoding_agree():
    arrays = DECODE.arrays() | {name: DECODE.arrays()[name].astype(jnp.bfloat16) for name in ("q_BQHK", "k_NBSGK", "v_NBSGK")}
    call = lambda implementation, interpret: np.asarray(
        decode_attention(**arrays, mask=masks.causal, scale=0.125, implementation=implementation, interpret=interpret), np.float32
    )
    want = call("reference", False)
    np.testing.assert_allclose(call("mosaic_tpu", True), want, atol=2e-2)
    np.testing.assert_allclose(call("mosaic_gpu", plgpu.InterpretGPUParams()), want, atol=2e-2)
    with pytest.raises(NotImplementedError, match="no attention kernel for the platform cpu"):
        call(None, False)


def test_the_gpu_forward_has_a_derivative():
    q, k, v = (x.astype(jnp.bfloat16) for x in SQUARE.arrays().values())

    def gradients(**how):
        loss = lambda q, k, v: (block_attention(q, k, v, masks.causal, scale=0.125, **how).astype(jnp.float32) ** 2).sum()
        return jax.block_until_ready(jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v))  # interpreters wait for ever behind many programs

    got = gradients(implementation="mosaic_gpu", interpret=plgpu.InterpretGPUParams())
    want = gradients(implementation="reference")
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.linalg.norm(a - b) <= 1e-2 * np.linalg.norm(b)


@pytest.mark.parametrize("specs", ["SMALL", "SMALL_DECODE", "TRAINING", "DECODE"])
def test_specs_have_names_of_their_own_and_masks_that_fit(specs):
    specs = getattr(arg_specs, specs)
    assert len({spec.name for spec in specs}) == len(specs)
    for spec in specs:
        assert spec.heads % spec.kv_heads == 0
        if isinstance(spec.mask, masks.CleanNoisy):
            assert spec.queries == 2 * spec.mask.length

"""What the benchmark times, through the real compilers of H200 and TPU: one training shape in both directions, and a decode shape."""

from __future__ import annotations

import json

import pytest

from tests import aot

pytestmark = [pytest.mark.slow, aot.needs_compilers]
CODE = """
import json, sys
from pathlib import Path
import jax, numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec
from dllm.evals import attention_speed

if sys.argv[1] == "gpu":
    config = Path("experiments/devices/h200.txtpb").read_text()
    topology = topologies.get_topology_desc(topology_name="h200", platform="cuda", target_config=config, topology="1x1x1")
else:
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
device = topology.devices[0]
sharding = NamedSharding(Mesh(np.array([device]), ("data",)), PartitionSpec())
here = AbstractMesh((), (), abstract_device=AbstractDevice(device.device_kind, 1, sys.argv[1]))
for case in attention_speed.cases(attention_speed.find_specs(["uno_2k_b4", "decode_fused_commit_b4"], False)):
    shapes = jax.eval_shape(lambda: attention_speed.make_arrays(case))
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in shapes.items()}
    for rival in attention_speed.RIVALS:
        try:
            with jax.sharding.use_abstract_mesh(here):
                compiled = jax.jit(attention_speed.program(rival, case)).lower(shapes).compile()
                share = attention_speed.visited(rival, case.spec)
        except (NotImplementedError, RuntimeError) as e:
            print(json.dumps([case.kind, rival, str(e)]), flush=True)
            continue
        text = compiled.as_text()
        kernels = sum(text.count(f'custom_call_target="{name}') for name in ("mosaic_gpu", "tpu_custom_call"))
        print(json.dumps([case.kind, rival, kernels, share, attention_speed.memory(compiled)["temp"]]), flush=True)
"""


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_every_rival_compiles_or_says_why(platform):
    lines = [json.loads(line) for line in aot.run(CODE, platform).splitlines() if line.startswith("[")]
    found = {(kind, rival): rest for kind, rival, *rest in lines}
    assert len(found) == 3 * 7
    passes = ("both", "forward", "decode")
    for kind in passes:
        kernels = 3 if platform == "tpu" and kind == "both" else 1  # the GPU's backward pass is no kernel
        assert found[kind, "kernel"][0] == kernels
        assert found[kind, "xla"][0] == found[kind, "dense"][0] == 0
        assert found[kind, "kernel"][2] < found[kind, "dense"][2]
        assert "cuDNN" in found[kind, "cudnn"][0]  # which isn't there without its device
        assert len(found[kind, "splash"]) == (3 if platform == "tpu" and kind != "decode" else 1)
    assert "no form" in found["decode", "two_call"][0]
    for kind in ("both", "forward"):
        assert found[kind, "two_call"][0] == 0
        assert found[kind, "kernel"][1] < 0.45
        assert platform == "gpu" or found[kind, "splash"][:2] == found[kind, "kernel"][:2]  # both visit the same tiles

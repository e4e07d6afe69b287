"""Compiled programs taken apart: loops multiplied through, slices, collectives on four devices, and the texts of other compilers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dllm.evals.hlo import Collective, Program

N = 32
SQUARE = jax.ShapeDtypeStruct((N, N), jnp.float32)
ONE = 2 * N**3  # operations of a product


def program(f, *arguments):
    return Program(jax.jit(f).lower(*arguments).compile().as_text())


def times(n, f):
    return lambda x: lax.scan(lambda x, _: (f(x), None), x, None, length=n)[0]


@pytest.mark.parametrize("f, products", [(lambda x: x @ x, 1), (times(7, lambda x: x @ x), 7), (times(3, times(5, lambda x: x @ x)), 15)])
def test_a_loop_counts_as_often_as_it_runs(f, products):
    cost = program(f, SQUARE).cost()
    assert cost.flops == products * ONE
    assert cost.loops == 0
    assert products * 2 * 4 * N * N <= cost.moved <= products * 12 * 4 * N * N  # a factor read and a product written each, and copies


def test_batched_products():
    cost = program(lambda x, y: jnp.einsum("bij,bkj->bik", x, y), jnp.ones((3, 5, 7)), jnp.ones((3, 11, 7))).cost()
    assert cost.flops == 2 * 3 * 5 * 11 * 7


def test_a_loop_reads_a_slice_of_the_stack_at_a_time():
    layers = 64
    stack = jax.ShapeDtypeStruct((layers, N, N), jnp.float32)
    moved = program(lambda x, w: lax.scan(lambda x, w: (x @ w, None), x, w)[0], SQUARE, stack).cost().moved
    assert layers * 3 * 4 * N * N <= moved <= layers * 12 * 4 * N * N  # the whole stack each time would be 64 times as much


def test_a_loop_writes_a_slice_of_the_stack_at_a_time():
    layers = 64
    moved = program(lambda x: lax.scan(lambda x, _: (x @ x, x), x, None, length=layers)[1], SQUARE).cost().moved
    assert layers * 4 * 4 * N * N <= moved <= layers * 14 * 4 * N * N


def test_a_loop_of_unknown_length_is_a_cycle():
    def sampler(x, end):
        first = lax.while_loop(lambda s: s.sum() < end, lambda s: s @ s @ s, x)  # a prefill
        return lax.while_loop(lambda s: s.sum() < end, times(4, lambda s: s @ s), times(9, lambda s: s @ s)(first))

    read = program(sampler, SQUARE, jnp.float32(3))
    assert read.cost().loops == 2
    assert read.cost().flops == (2 + 9 + 4) * ONE
    assert read.cycle().flops == 4 * ONE
    assert program(times(3, lambda x: x @ x), SQUARE).cycle() is None


def test_of_branches_the_one_with_most_counts():
    cost = program(lambda x, c: lax.cond(c, lambda x: x @ x @ x, lambda x: x @ x, x), SQUARE, jnp.bool_(True)).cost()
    assert cost.flops == 2 * ONE


@pytest.fixture
def mesh():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


def on(mesh, *spec):
    return jax.ShapeDtypeStruct((N, N), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


WHOLE = PartitionSpec()


def divided(f, into, out=WHOLE):
    return jax.shard_map(f, in_specs=into, out_specs=out, check_vma=False)


def test_collectives_are_counted_by_kind_size_and_group(mesh):
    rows, both = PartitionSpec("data"), PartitionSpec(("data", "tensor"))
    size = 4.0 * N * N
    one = lambda f, *spec: program(f, on(mesh, *spec)).cost()

    sums = one(divided(times(6, lambda x: lax.psum(x, "data") / 2), rows), "data")
    assert sums.collectives == {Collective("all-reduce", size / 2, 2): 6}
    assert sums.received == 6 * size / 2

    gathered = one(divided(lambda x: lax.all_gather(x, ("data", "tensor"), tiled=True), both), ("data", "tensor"))
    assert gathered.collectives == {Collective("all-gather", size, 4): 1}
    assert gathered.received == size * 3 / 4

    scattered = one(divided(lambda x: lax.psum_scatter(x, "tensor", tiled=True), PartitionSpec(), PartitionSpec("tensor")))
    assert scattered.collectives == {Collective("reduce-scatter", size, 2): 1}
    assert scattered.received == size / 2

    moved = one(divided(lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)]), rows, rows), "data")
    assert moved.collectives == {Collective("collective-permute", size / 2, 2): 1}

    turned = one(divided(lambda x: lax.all_to_all(x, "data", 1, 0, tiled=True), rows, PartitionSpec(None, "data")), "data")
    assert [(c.kind, c.group) for c in turned.collectives] == [("all-to-all", 2)]
    assert turned.received == size / 4


def test_products_are_those_of_one_device(mesh):
    """Divided along rows each device has a half, and along rows and columns a quarter; nothing asked for of it, all."""
    x = on(mesh, "data")
    assert program(lambda x, y: x @ y, x, on(mesh)).cost().flops == ONE / 2
    assert program(lambda x, y: x @ y, x, on(mesh, None, "tensor")).cost().flops == ONE / 4
    assert program(lambda x, y: x @ y, on(mesh), on(mesh)).cost().flops == ONE


GROUPS = (
    ("replica_groups={{0,1,2},{3,4,5}}", 3),
    ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
    ("replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp'}", 4),
    ("replica_groups=mesh['data'=2,'fsdp'=4] {'data','fsdp':(1)2}", 4),
    ("replica_groups={}", 8),
)


@pytest.mark.parametrize("text, group", GROUPS)
def test_groups_in_every_spelling(text, group):
    cost = Program(_module(f"ROOT %r = f32[64]{{0}} all-reduce(%p), channel_id=1, {text}, to_apply=%add")).cost()
    assert cost.collectives == {Collective("all-reduce", 256.0, group): 1}


def test_a_collective_spread_over_fusions_counts_once():
    """As TPUs have it: begun in one fusion, done in another, with the same channel."""
    text = """
%begin (p0: f32[16]) -> (f32[16], f32[64]) {
  %p0 = f32[16]{0} parameter(0)
  %g0 = f32[64]{0} all-gather(%p0), channel_id=3, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  ROOT %t0 = (f32[16]{0}, f32[64]{0}) custom-call(%g0), custom_call_target="AsyncCollectiveStart"
}

%end (p1: f32[16], p2: f32[64]) -> f32[64] {
  %p1 = f32[16]{0} parameter(0)
  %p2 = f32[64]{0} parameter(1)
  %g1 = f32[64]{0} all-gather(%p1), channel_id=3, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  ROOT %d1 = f32[64]{0} custom-call(%p1, %p2, %g1), custom_call_target="AsyncCollectiveDone"
}
"""
    body = """%s = f32[16]{0} slice(%p), slice={[0:16]}
  %a = (f32[16]{0}, f32[64]{0}) fusion(%s), kind=kCustom, calls=%begin
  %a0 = f32[16]{0} get-tuple-element(%a), index=0
  %a1 = f32[64]{0} get-tuple-element(%a), index=1
  ROOT %r = f32[64]{0} fusion(%a0, %a1), kind=kCustom, calls=%end"""
    assert Program(_module(body, text)).cost().collectives == {Collective("all-gather", 256.0, 4): 1}


WINDOWS = (  # products as TPUs write them: a plain one, one in two parts, one with a batch of 12 as window, and a gradient's
    ("bf16[128,256,27]{1,2,0}", "bf16[128,256,768]{1,2,0}", "bf16[768,27,1]{0,1,2}", "size=1", "0bf_io0->0bf", 32768 * 768 * 27),
    ("bf16[64,2,192]", "bf16[64,768,1]", "bf16[768,2,192]", "size=2 pad=1_1 rhs_reversal=1", "bf0_i0o->b0f", 64 * 768 * 384),
    ("bf16[32,12,64,1]", "bf16[32,2,192,1]", "bf16[12,64,2,192]", "size=12x2 pad=11_11x0_0 rhs_reversal=1x0", "b1f0_0o1i->b0f1", 9437184),
    ("bf16[2,192,2048,1]", "bf16[128,256,2,192]", "bf16[128,256,2048,1]", "size=1x128", "1f0b_1io0->0bf1", 384 * 2048 * 32768),
    ("f32[8,5,7]", "f32[8,5,3]", "f32[8,3,7]", "size=8 stride=7 lhs_dilate=8", "0bf_0io->0bf", 8 * 5 * 3 * 7),
)  # fmt: skip


@pytest.mark.parametrize("out, left, right, window, labels, products", WINDOWS)
def test_products_written_as_convolutions(out, left, right, window, labels, products):
    body = f"""%a = {left} parameter(1)
  %b = {right} parameter(2)
  ROOT %r = {out} convolution(%a, %b), window={{{window}}}, dim_labels={labels}"""
    assert Program(_module(body)).cost().flops == 2 * products


def test_kernels_tell_their_own_cost_and_near_memory_is_free():
    near, far = "f32[64]{0:T(128)S(1)}", "f32[64]{0:T(128)}"
    config = '{"custom_call_config":{"body":"x","cost_estimate":{"flops":"1000","transcendentals":"5","bytes_accessed":"70"}}}'
    body = f"""%c = ({near}, {far}, u32[]{{:S(2)}}) copy-start(%p)
  %d = {near} copy-done(%c)
  %k.7 = {near} custom-call(%d), custom_call_target="tpu_custom_call", backend_config={config}
  ROOT %r = {far} add(%k.7, %k.7)"""
    cost = Program(_module(body)).cost()
    assert cost.flops == 1000
    assert cost.kernels == {"k": 1}
    assert cost.moved == 256 + 70 + 256  # the copy reads, the kernel says so, the sum is written


def test_a_gpus_kernel_tells_nothing():
    body = 'ROOT %mpmd_map.3 = f32[64]{0} custom-call(%p), custom_call_target="mosaic_gpu_v2"'
    cost = Program(_module(body)).cost()
    assert (cost.flops, cost.moved, dict(cost.kernels)) == (0, 0, {"mpmd_map": 1})


def test_a_tpus_loop_has_its_length_in_its_condition():
    loop = """
%turn (s: (s32[], f32[64])) -> (s32[], f32[64]) {
  %s = (s32[], f32[64]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[64]{0} get-tuple-element(%s), index=1
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  %y = f32[64]{0} all-reduce(%x), channel_id=1, replica_groups={}, to_apply=%add
  ROOT %u = (s32[], f32[64]{0}) tuple(%j, %y)
}

%more (v: (s32[], f32[64])) -> pred[] {
  %v = (s32[], f32[64]{0}) parameter(0)
  %k = s32[] get-tuple-element(%v), index=0
  %end = s32[] constant(11)
  ROOT %t = pred[] compare(%k, %end), direction=LT
}
"""
    body = """%zero = s32[] constant(START)
  %start = s32[] copy(%zero)
  %in = (s32[], f32[64]{0}) tuple(%start, %p)
  ROOT %w = (s32[], f32[64]{0}) while(%in), condition=%more, body=%turn"""
    for start, trips in ((0, 11), (3, 8)):
        cost = Program(_module(body.replace("START", str(start)), loop)).cost()
        assert sum(cost.collectives.values()) == trips
        assert cost.loops == 0
    unknown = Program(_module(body.replace("START", "0"), loop.replace("constant(11)", "get-tuple-element(%v), index=0"))).cost()
    assert unknown.loops == 1


def _module(body, more=""):
    head = "HloModule jit_f, is_scheduled=true, num_partitions=8"
    add = "%add (x: f32[], y: f32[]) -> f32[] {\n  %x = f32[] parameter(0)\n  %y = f32[] parameter(1)\n  ROOT %z = f32[] add(%x, %y)\n}\n"
    return f"{head}\n\n{add}{more}\nENTRY %main (p: f32[64]) -> f32[64] {{\n  %p = f32[64]{{0}} parameter(0)\n  {body}\n}}\n"


def test_the_law_of_received_bytes():
    """All-reduce as reduce-scatter and all-gather, each of (n - 1) / n; what is sent on, whole."""
    received = {kind: Collective(kind, 100.0, 5).received for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")}
    np.testing.assert_allclose(list(received.values()), [160, 80, 80, 80])
    assert Collective("collective-permute", 100.0, 2).received == 100

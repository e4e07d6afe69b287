"""What attention costs, and what else computes it: time, error, memory and work of each rival, at the shapes of block_attention/arg_specs.

A rival that can't serve a case gives its row all the same, with the reason in place of figures.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from dllm.core.types import UserError
from dllm.evals import speed, unattended
from dllm.kernels.block_attention import arg_specs, block_attention, decode_attention, gpu, platform, ref, tpu, xla
from dllm.kernels.block_attention.arg_specs import ArgSpec
from dllm.kernels.block_attention.tiles import visits
from dllm.models import attention
from dllm.models.cache import Cache
from dllm.ops.masks import Ancestors, Causal, CleanNoisy, Full

PASSES = 16  # of the decode form to a program, each with the last one's output for its queries, as layers follow one another
SHORT = 0.02  # seconds: a call that takes less is made several times between two looks at the clock
MOST_CHECKED = 2**27  # scores; of a larger case one batch row and one key head are compared with the reference
INTERPRETED = "interpreted, on a CPU: its values were checked, its time would tell nothing"


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape, and what is timed at it: "forward", "both" (forward and backward), or "decode", one pass over a cache."""

    spec: ArgSpec
    kind: str

    def __str__(self) -> str:
        return f"{self.spec.name} {self.kind}"


def cases(specs: Iterable[ArgSpec]) -> list[Case]:
    """Returns what there is to time at the shapes."""
    return [Case(spec, kind) for spec in specs for kind in (("decode",) if spec.slots else ("both", "forward"))]


def find_specs(names: Sequence[str] | None, on_cpu: bool) -> list[ArgSpec]:
    """Returns the shapes of these names; None: the small ones on a CPU, else those of training and decoding.

    The most telling come first. Raises UserError, with the names there are, for another.
    """
    large, small = (*arg_specs.TRAINING, *arg_specs.DECODE), (*arg_specs.SMALL, *arg_specs.SMALL_DECODE)
    if names is None:
        return list(small) if on_cpu else sorted(large, key=importance)
    known = {spec.name: spec for spec in (*large, *small)}
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"no shape {unknown[0]!r}; there are: {', '.join(known)}")
    return [known[name] for name in names]


def importance(spec: ArgSpec) -> int:
    """4k rows of each half at batch 4, the decode form at batch 64, other lengths, larger batches, the decode form at batch 4."""
    if spec.slots:
        return 1 if spec.batch == 64 else 4
    return 3 if spec.batch > 4 else 0 if spec.queries == 8192 else 2


# The rivals. Of each an `attend(spec, q, k, v, segment_ids, kv_lengths)` and a `decode(spec, q, k, v, layer, lengths)`. They raise
# NotImplementedError, with the reason, for a case that they don't serve; what else is raised becomes a reason too.


def _kernel(spec, q, k, v, segment_ids, kv_lengths):
    more = dict(scale=spec.scale, segment_ids=segment_ids, kv_lengths=kv_lengths)
    return block_attention(q, k, v, spec.mask, **more, **_on_cpu())


def _kernel_decode(spec, q, k, v, layer, lengths):
    return decode_attention(q, k, v, layer, lengths, spec.mask, scale=spec.scale, **_on_cpu())


def _on_cpu() -> dict[str, Any]:
    return dict(implementation="mosaic_tpu", interpret=True) if platform() == "cpu" else {}


def _xla(spec, q, k, v, segment_ids, kv_lengths):
    more = dict(scale=spec.scale, segment_ids=segment_ids, kv_lengths=kv_lengths)
    return block_attention(q, k, v, spec.mask, implementation="xla", **more)


def _xla_decode(spec, q, k, v, layer, lengths):
    """The models' own form, chunk by chunk, as where there is no kernel."""
    return attention.cached_in_xla(q, Cache(k, v, lengths), layer, spec.mask)


def _two_call(spec, q, k, v, segment_ids, kv_lengths):
    if not isinstance(spec.mask, CleanNoisy) or spec.mask.length % spec.mask.block:
        raise NotImplementedError("the two-call form is of [clean ; noisy] rows of whole blocks")
    if kv_lengths is not None:
        raise NotImplementedError("the two-call form has no lengths by row")
    return attention.clean_noisy_in_xla(q, k, v, spec.mask, segment_ids)


def _dense(attend: Callable[..., Array], spec, q, k, v, segment_ids, kv_lengths):
    """By a function of jax.nn.dot_product_attention's signature, with a dense mask where it has no word for ours."""
    (Q, S), mask = (q.shape[1], k.shape[1]), spec.mask
    if isinstance(mask, Causal | Full) and Q == S and segment_ids is None and kv_lengths is None:
        return attend(q, k, v, scale=spec.scale, is_causal=isinstance(mask, Causal))
    query, key = jnp.arange(Q, dtype=jnp.int32)[None, :, None], jnp.arange(S, dtype=jnp.int32)[None, None]
    allow_BQS = mask.allowed(query, key, jnp.zeros((1, 1, 1), jnp.int32))
    if segment_ids is not None:
        allow_BQS &= segment_ids[:, :Q, None] == segment_ids[:, None]
    if kv_lengths is not None:
        allow_BQS &= key < kv_lengths[:, None, None]
    allow_BQS = jnp.broadcast_to(allow_BQS, (*allow_BQS.shape[:1], Q, S))
    return attend(q, k, v, mask=allow_BQS[:, None], scale=spec.scale)


def _dense_decode(attend: Callable[..., Array], spec, q, k, v, layer, lengths):
    (Q, S), mask = (q.shape[1], k.shape[2]), spec.mask
    k, v = (lax.dynamic_index_in_dim(c, layer, 0, keepdims=False) for c in (k, v))
    if Q == 1 or isinstance(mask, Full):
        return attend(q, k, v, scale=spec.scale, key_value_seq_lengths=lengths + Q)
    start_B11, key = lengths[:, None, None], jnp.arange(S, dtype=jnp.int32)[None, None]
    query = start_B11 + jnp.arange(Q, dtype=jnp.int32)[None, :, None]
    allow_BQS = mask.allowed(query, key, start_B11) & (key < start_B11 + Q)
    return attend(q, k, v, mask=allow_BQS[:, None], scale=spec.scale)


def _jax_nn(*arrays: Array, **options: Any) -> Array:
    return jax.nn.dot_product_attention(*arrays, implementation="xla", **options)


def _cudnn(*arrays: Array, **options: Any) -> Array:
    if platform() not in ("gpu", "cuda"):
        raise NotImplementedError("cuDNN is for NVIDIA GPUs")
    return jax.nn.dot_product_attention(*arrays, implementation="cudnn", **options)


def _tokamax(*arrays: Array, **options: Any) -> Array:
    try:
        import tokamax
    except ImportError as e:
        raise NotImplementedError(f"tokamax can't be imported: {e}") from None
    return tokamax.dot_product_attention(*arrays, implementation="xla_chunked" if platform() == "cpu" else "mosaic", **options)


def _splash(spec, q, k, v, segment_ids, kv_lengths, interpret: bool = False):
    """JAX's own block-sparse kernel for TPUs, with our mask computed inside it."""
    if platform() != "tpu" and not interpret:
        raise NotImplementedError("splash attention is for TPUs")
    if kv_lengths is not None or isinstance(spec.mask, Ancestors):
        raise NotImplementedError("splash attention has no lengths by row, nor a mask that is data")
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    tile = _splash_tile(spec)
    sizes = {f"block_{name}": tile for name in ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")}
    heads = splash.MultiHeadMask([_splash_mask(spec)] * q.shape[2])
    attend = splash.make_splash_mha(heads, head_shards=1, q_seq_shards=1, block_sizes=splash.BlockSizes(**sizes), interpret=interpret)
    arrays = [x.swapaxes(1, 2) for x in (q * spec.scale, k, v)]
    segments = () if segment_ids is None else (splash.SegmentIds(segment_ids[:, : q.shape[1]], segment_ids),)
    return jax.vmap(attend)(*arrays, *segments).swapaxes(1, 2).astype(q.dtype)


def _splash_tile(spec: ArgSpec) -> int:
    for tile in (512, 256, 128):
        if spec.queries % tile == spec.keys % tile == 0:
            return tile
    raise NotImplementedError("splash attention takes lengths that are multiples of 128")


def _splash_mask(spec: ArgSpec) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask

    some = [spec.mask.ranges(at, at) for at in range(spec.queries)]
    most = max(map(len, some))
    low_RQ, high_RQ = np.asarray([(*ranges, *[(0, 0)] * (most - len(ranges))) for ranges in some]).transpose(2, 1, 0)

    def allowed(query: Any, key: Any) -> Any:
        if isinstance(query, np.ndarray):  # outside of the kernel, where it lists the tiles
            return ((low_RQ[:, query] <= key) & (key < high_RQ[:, query])).any(0)
        return spec.mask.allowed(query, key, jnp.int32(0))

    class Ours(splash_attention_mask._ComputableMask):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Ours)

        def __hash__(self) -> int:
            return hash(spec.mask)

    return Ours((spec.queries, spec.keys), allowed)


def _no_decode(*_: Any) -> Array:
    raise NotImplementedError("it has no form for few queries over a cache")


RIVALS: dict[str, tuple[Callable[..., Array], Callable[..., Array]]] = {
    "kernel": (_kernel, _kernel_decode),
    "xla": (_xla, _xla_decode),
    "two_call": (_two_call, _no_decode),
    "dense": (functools.partial(_dense, _jax_nn), functools.partial(_dense_decode, _jax_nn)),
    "cudnn": (functools.partial(_dense, _cudnn), functools.partial(_dense_decode, _cudnn)),
    "splash": (_splash, _no_decode),
    "tokamax": (functools.partial(_dense, _tokamax), functools.partial(_dense_decode, _tokamax)),
}


def program(rival: str, case: Case) -> Callable[[dict[str, Array]], dict[str, Array]]:
    """Returns the function of make_arrays' that is timed, to be jitted: -> {"out"}, and with both directions {"out", "q", "k", "v"}, the
    last three gradients. A decode program makes PASSES passes, and returns the first one's output."""
    attend, decode = RIVALS[rival]
    if case.kind == "decode":
        return functools.partial(_decode_passes, functools.partial(decode, case.spec))

    def run(arrays):
        def of(q, k, v):
            frozen = case.spec.mask.length if isinstance(case.spec.mask, CleanNoisy) and case.spec.mask.frozen else 0
            if frozen and rival not in ("kernel", "xla", "two_call"):  # those know
                q, k, v = (jnp.concatenate([lax.stop_gradient(x[:, :frozen]), x[:, frozen:]], 1) for x in (q, k, v))
            return attend(case.spec, q, k, v, arrays.get("segment_ids"), arrays.get("kv_lengths"))

        return _results(case, of, arrays)

    return run


def _results(case: Case, of: Callable[..., Array], arrays: dict[str, Array]) -> dict[str, Array]:
    if case.kind == "forward":
        return {"out": of(arrays["q"], arrays["k"], arrays["v"])}
    out, vjp = jax.vjp(of, arrays["q"], arrays["k"], arrays["v"])
    return {"out": out} | dict(zip("qkv", vjp(arrays["d_out"])))


def _decode_passes(decode: Callable[..., Array], arrays: dict[str, Array]) -> dict[str, Array]:
    q, k, v, layer, lengths = (arrays[name] for name in ("q_BQHK", "k_NBSGK", "v_NBSGK", "layer", "lengths_B"))

    def step(q, layer):
        out = decode(q, k, v, layer, lengths)
        return out, out

    layer_X = lax.rem(layer + jnp.arange(PASSES, dtype=jnp.int32), jnp.int32(k.shape[0]))
    return {"out": lax.scan(step, q, layer_X)[1][0]}


def make_arrays(case: Case) -> dict[str, Array]:
    """Returns the case's arrays by name: those of its shape, and with both directions `d_out`, zero where a query reads nothing."""
    arrays = case.spec.arrays()
    if case.kind != "decode":
        arrays["d_out"] = jax.random.normal(jax.random.key(1), arrays["q"].shape, arrays["q"].dtype)
        if case.spec.ragged:
            arrays["d_out"] *= _alive(case, arrays)[..., None].astype(arrays["q"].dtype)
    return arrays


def _alive(case: Case, arrays: dict[str, Array]) -> Array:
    """Returns which queries read something, [B Q H]."""
    more = {name: arrays[name] for name in ("segment_ids", "kv_lengths") if name in arrays}
    lse = ref.reference(*(arrays[name] for name in "qkv"), case.spec.mask, scale=case.spec.scale, **more)[1]
    return jnp.isfinite(lse).swapaxes(1, 2)


def _piece(case: Case, arrays: dict[str, Any]) -> dict[str, Any]:
    """Returns what is compared of arrays or results: all; of a large case the last batch row, and of that the first key head's share."""
    spec = case.spec
    if spec.batch * spec.heads * spec.queries * max(spec.keys, spec.slots) <= MOST_CHECKED:
        return arrays
    group = spec.heads // spec.kv_heads
    of_q, of_k, of_cache = np.s_[-1:, :, :group], np.s_[-1:, :, :1], np.s_[:, -1:, :, :1]
    cuts = dict(q=of_q, k=of_k, v=of_k, out=of_q, d_out=of_q, q_BQHK=of_q, k_NBSGK=of_cache, v_NBSGK=of_cache, layer=...)
    return {name: x[cuts.get(name, np.s_[-1:])] for name, x in arrays.items()}


def _checks(case: Case, arrays: dict[str, Array], limit: int) -> tuple[str, dict[str, Array], Array | None]:
    """Returns (name of what the rivals are compared with, its results of a piece of the arrays, which queries of it read something).

    That is the reference, in float32; or, where its squares of scores don't fit, the form without a kernel that works tile by tile.
    """
    mask, spec, piece = case.spec.mask, case.spec, _piece(case, arrays)
    if isinstance(mask, Ancestors):  # its data are the batch rows', of which the piece may be one
        mask = Ancestors(jnp.asarray(_piece(case, {"mask": mask.ancestors_BNN})["mask"]))

    def run(implementation, arrays):
        how = dict(scale=spec.scale, implementation=implementation)
        if implementation == "reference":
            arrays = {name: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for name, x in arrays.items()}
        if spec.slots:
            return {"out": decode_attention(**arrays, mask=mask, **how)}
        more = {name: arrays[name] for name in ("segment_ids", "kv_lengths") if name in arrays}
        return _results(case, lambda q, k, v: block_attention(q, k, v, mask, **how, **more), arrays)

    compiled, name = jax.jit(functools.partial(run, "reference")).lower(piece).compile(), "reference"
    if memory(compiled)["total"] > limit and not spec.slots:
        compiled, name = jax.jit(functools.partial(run, "xla")), "xla"
    alive = _piece(case, {"out": _alive(case, arrays)})["out"] if spec.ragged else None
    return name, jax.block_until_ready(compiled(piece)), alive


def error(got: dict[str, Array], want: dict[str, Array], alive: Array | None = None) -> float:
    """Returns the largest error of any result, over that result's largest value. alive: queries of whose output this is asked.

    Raises ValueError where a result isn't finite.
    """
    errors = []
    for name, right in want.items():
        a, b = (np.asarray(x.astype(jnp.float32)) for x in (got[name], right))
        if name == "out" and alive is not None:
            a, b = (np.where(np.asarray(alive)[..., None], x, 0) for x in (a, b))
        if not np.isfinite(a).all():
            raise ValueError(f"{name if name == 'out' else 'the gradient of ' + name} isn't finite")
        errors.append(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))
    return float(max(errors))


def memory(compiled: Any) -> dict[str, int]:
    """Returns bytes as the compiler planned them: argument, output, temp, and in total what has to be there at once, at most."""
    plan = compiled.memory_analysis()
    found = {kind: int(getattr(plan, f"{kind}_size_in_bytes")) for kind in ("argument", "output", "temp")}
    return found | {"total": sum(found.values()) - int(plan.alias_size_in_bytes)}


def memory_limit() -> int:
    """Returns the bytes that the device grants this process; on a CPU the machine's."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def pairs(spec: ArgSpec, first: int = 0) -> int:
    """Returns how many (query, key) pairs the mask allows in one head, over the batch, of the queries from `first` on."""
    own = None
    if spec.slots or isinstance(spec.mask, Ancestors):
        own = int(spec.mask.dense(spec.queries, spec.queries).sum())
    if spec.slots:
        return int(np.sum(_lengths(spec))) * spec.queries + spec.batch * own
    if own is None:
        ranges = (spec.mask.ranges(at, at) for at in range(first, spec.queries))
        own = sum(min(high, spec.keys) - low for some in ranges for low, high in some if low < spec.keys)
    return spec.batch * own


def work(case: Case) -> dict[str, Any]:
    """Returns what is to be done: `density`, the share of pairs that the mask allows; `flops` of these, and `dense_flops`, of all pairs
    in both directions (two products forward, five backward; clean rows without gradient want none); with a cache `read_bytes`."""
    spec = case.spec
    every, wanted = spec.batch * spec.queries * (spec.slots or spec.keys), pairs(spec)
    a_pair = 4 * spec.heads * spec.head_width
    found = {"density": wanted / every, "flops": a_pair * wanted, "dense_flops": a_pair * every}
    if case.kind == "both":
        frozen = spec.mask.length if isinstance(spec.mask, CleanNoisy) and spec.mask.frozen else 0
        found["flops"] += int(2.5 * a_pair * pairs(spec, frozen))
        found["dense_flops"] += int(2.5 * a_pair * every)
    if spec.slots:
        row = 2 * spec.head_width * jnp.dtype(spec.dtype).itemsize  # keys and values; queries and output
        slots = int(np.sum(_lengths(spec))) + spec.batch * spec.queries
        found["read_bytes"] = row * (slots * spec.kv_heads + spec.batch * spec.queries * spec.heads)
    return found


def visited(rival: str, spec: ArgSpec) -> float | None:
    """Returns the share of all pairs that lie in tiles which the rival computes; None where that isn't known."""
    group, itemsize = spec.heads // spec.kv_heads, jnp.dtype(spec.dtype).itemsize
    if spec.slots:
        tile = {"xla": min(attention.CHUNK, spec.slots), "kernel": gpu.TILES.get(spec.head_width, gpu.Tile(0, 0)).keys}.get(rival, 0)
        if rival in ("dense", "cudnn", "tokamax"):
            return 1.0 if rival == "dense" else None
        if not tile or (rival == "kernel" and platform() not in ("gpu", "cuda")):
            return None
        end_B = np.asarray(_lengths(spec)) + spec.queries
        end_B = np.full_like(end_B, end_B.max()) if rival == "xla" else end_B  # all rows go as far as the longest
        return float(np.mean(np.minimum(-(-end_B // tile) * tile, spec.slots)) / spec.slots)
    if rival == "two_call":
        return (2 * spec.mask.length**2 + spec.mask.length * spec.mask.block) / spec.queries**2
    if rival == "xla":
        tile_q, tile_k = min(xla.TILE, spec.queries), min(xla.TILE, spec.keys)
    elif rival == "splash":
        tile_q = tile_k = _splash_tile(spec)
    elif rival == "kernel" and platform() in ("gpu", "cuda"):
        tile_q, tile_k = 2 * gpu.ROWS, gpu.TILES[spec.head_width].keys
    elif rival == "kernel":
        chosen = tpu.choose(spec.queries, spec.keys, group, spec.head_width, itemsize)
        tile_q, tile_k = chosen.query, chosen.key
    else:
        return 1.0 if rival == "dense" else None
    return visits(spec.mask, spec.queries, spec.keys, tile_q, tile_k).total / (-(-spec.queries // tile_q) * -(-spec.keys // tile_k))


def _lengths(spec: ArgSpec) -> Any:
    return jax.jit(lambda: spec.arrays()["lengths_B"])()  # alone


def _least_bytes(rival: str, spec: ArgSpec) -> int:
    """Returns what a rival's scores alone take, where it makes them all: asked before it is compiled, which takes seconds."""
    scores = 4 * spec.batch * spec.heads * spec.queries * (spec.slots or spec.keys)
    return {"dense": scores, "two_call": scores // 4}.get(rival, 0)


def measure(
    case: Case,
    rivals: Sequence[str],
    repetitions: int,
    budget: float,
    starts: Callable[[Sequence[str]], None],
    limit: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Yields a row for each rival: "rival", and either a "reason", or "ms" of a call (or pass), with "ms_quartiles", "tflops" of the pairs
    that the mask allows, and what it was found to do. Rivals that fail come first; the others take turns.

    repetitions  turns of each, fewer of one that would fill `budget` seconds
    starts       is called with the rivals that are about to run: what then kills the process was one of these
    limit        bytes that may be used; those of the device if None
    Raises unattended.DeviceLost, after the row of the rival that lost it.
    """
    limit = memory_limit() if limit is None else limit
    todo = work(case)
    shapes = jax.eval_shape(lambda: make_arrays(case))
    if (size := sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))) > limit:
        for rival in rivals:
            yield {"rival": rival, "reason": f"{size / 2**30:.1f} GiB of arguments, of {limit / 2**30:.1f} that there are"} | todo
        return

    starts(rivals)
    arrays = jax.block_until_ready(jax.jit(lambda: make_arrays(case))())
    against, wanted, alive = _checks(case, arrays, limit)
    calls: dict[str, Callable[[], Any]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for rival in rivals:
        row = {"rival": rival} | todo
        starts([rival])
        try:
            if (size := _least_bytes(rival, case.spec)) > limit:
                raise MemoryError(f"{size / 2**30:.1f} GiB of scores, of {limit / 2**30:.1f} that there are")
            compiled = jax.jit(program(rival, case)).lower(shapes).compile()
            row |= {"bytes": memory(compiled), "visited": visited(rival, case.spec)}
            if row["bytes"]["total"] > limit:
                raise MemoryError(f"{row['bytes']['total'] / 2**30:.1f} GiB, of {limit / 2**30:.1f} that there are")
            row |= {"error": error(_piece(case, compiled(arrays)), wanted, alive), "against": against}
        except Exception as e:  # of whatever kind, of code that isn't ours: the others are to be timed
            yield row | {"reason": unattended.reason(e)}
            unattended.check_device()
            continue
        if rival == "kernel" and platform() == "cpu":
            yield row | {"reason": INTERPRETED}
        else:
            rows[rival], calls[rival] = row, functools.partial(compiled, arrays)

    starts(list(calls))
    passes = PASSES if case.kind == "decode" else 1
    for rival, seconds in time_calls(calls, repetitions, budget).items():
        low, mid, high = np.quantile(seconds / passes, (0.25, 0.5, 0.75)).tolist()
        row = rows[rival] | {"ms": 1e3 * mid, "ms_quartiles": [1e3 * low, 1e3 * high], "repetitions": len(seconds)}
        row["tflops"] = todo["flops"] / mid / 1e12
        yield row | ({"gb_per_s": todo["read_bytes"] / mid / 1e9} if case.kind == "decode" else {})


def time_calls(calls: dict[str, Callable[[], Any]], repetitions: int, budget: float) -> dict[str, np.ndarray]:
    """Returns the wall seconds of each call, over up to `repetitions` turns that the calls take; one that would fill `budget` seconds gets
    fewer, three at least. Calls are warm. Several short ones follow each other before their results are waited for."""

    def burst(name):
        for _ in range(times[name]):
            out = calls[name]()
        return out

    took = {name: speed.seconds(call, 1)[0] for name, call in calls.items()}
    times = {name: int(np.clip(SHORT / once, 1, 100)) for name, once in took.items()}
    turns = {name: int(np.clip(budget / (took[name] * times[name]), min(3, repetitions), repetitions)) for name in calls}
    taken = {name: [] for name in calls}
    for turn in range(repetitions):
        for name in calls:
            if turn < turns[name]:
                taken[name].append(speed.seconds(functools.partial(burst, name), 1)[0] / times[name])
    return {name: np.asarray(each) for name, each in taken.items()}

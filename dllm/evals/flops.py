"""The matrix products that a program asks for, counted in its jaxpr: over all devices, before any compiler has seen it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.interpreters import partial_eval

from dllm.kernels.block_attention.gpu import TILES


@dataclasses.dataclass(frozen=True)
class Work:
    """Operations: 2 for a multiplication and its addition.

    products      of matrix products, XLA's
    kernels       of Pallas kernels: their own estimates (pl.CostEstimate); of Mosaic GPU's, which have none, by the tiles that they visit
    unread        of `kernels`, those without an estimate: the compiled program doesn't tell of them
    unread_bytes  that these read and write
    """

    products: float = 0.0
    kernels: float = 0.0
    unread: float = 0.0
    unread_bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def __mul__(self, times: int) -> Work:
        return Work(*(times * a for a in dataclasses.astuple(self)))

    @property
    def flops(self) -> float:
        return self.products + self.kernels


def work(traced: ClosedJaxpr, platform: str = "cpu") -> Work:
    """Returns the work of one call: a scan's body by its length, a while's once, of a cond's branches the one with most.

    What no result hangs on isn't counted. `platform` chooses among the branches of lax.platform_dependent.
    """
    return _Walk(platform).body(*_used(traced))


def cycle(traced: ClosedJaxpr, platform: str = "cpu") -> Work | None:
    """Returns the work of one turn of the program's last outermost while loop; None where there is none."""
    jaxpr, known = _used(traced)
    walk = _Walk(platform)
    loops = list(walk.loops(jaxpr, known, 1))
    if not loops:
        return None
    loop, times, known = loops[-1]
    return walk.loop(loop, known) * times


def _used(body: Jaxpr | ClosedJaxpr) -> tuple[Jaxpr, dict[Any, Any]]:
    """Returns (the equations that the results hang on, the constants that it closes over)."""
    jaxpr = body.jaxpr if isinstance(body, ClosedJaxpr) else body
    known = dict(zip(jaxpr.constvars, body.consts)) if isinstance(body, ClosedJaxpr) else {}
    return partial_eval.dce_jaxpr_consts(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0], known


class _Walk:
    """`known`: the values of variables that are constants, or the platform's number in a platform_dependent."""

    def __init__(self, platform: str):
        self.platform = {"gpu": "cuda"}.get(platform, platform)

    def body(self, jaxpr: Jaxpr, known: Mapping[Any, Any]) -> Work:
        known, total = dict(known), Work()
        for eqn in jaxpr.eqns:
            total += self.equation(eqn, known)
        return total

    def equation(self, eqn: JaxprEqn, known: dict[Any, Any]) -> Work:
        name, params = eqn.primitive.name, eqn.params
        if name == "platform_index":
            places = [i for i, some in enumerate(params["platforms"]) if some is None or self.platform in some]
            known[eqn.outvars[0]] = places[0]
        elif name in ("convert_element_type", "clamp", "copy") and (value := _value(eqn.invars[name == "clamp"], known)) is not None:
            known[eqn.outvars[0]] = value
        elif name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            sizes = eqn.invars[0].aval.shape
            return Work(2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(sizes[a] for a in contracted))
        elif name.startswith("ragged_dot"):
            return Work(_ragged(eqn))
        elif name == "pallas_call":
            cost = params["cost_estimate"]
            return Work(kernels=float(cost.flops)) if cost else Work()
        elif name == "mpmd_map":
            return _mosaic_gpu(eqn, known)
        elif name == "while":
            return self.loop(eqn, known)
        elif name == "cond":
            branches, chosen = params["branches"], _value(eqn.invars[0], known)
            if chosen is not None:
                branches = (branches[int(np.clip(chosen, 0, len(branches) - 1))],)
            return max((self.inner(b, eqn.invars[1:], known) for b in branches), key=lambda some: some.flops)
        else:
            times = params["length"] if name == "scan" else _shards(params) if name == "shard_map" else 1
            operands = eqn.invars
            if name == "scan":  # a number that it carries may begin as a constant, and not stay one
                operands = [o if o.aval.ndim else None for o in operands]
            parts = [self.inner(b, operands, known) for b in _bodies(eqn)]
            return max(parts, key=lambda some: some.flops, default=Work()) * times
        return Work()

    def inner(self, body: Any, operands: Any, known: Mapping[Any, Any]) -> Work:
        """Returns the work of an equation's body. Constants among its operands are constants inside."""
        jaxpr, inside = _used(body)
        if len(jaxpr.invars) == len(operands):
            values = ((v, _value(o, known)) for v, o in zip(jaxpr.invars, operands))
            inside |= {v: value for v, value in values if value is not None}
        return self.body(jaxpr, inside)

    def loop(self, eqn: JaxprEqn, known: Mapping[Any, Any]) -> Work:
        """Returns the work of one turn of a while loop."""
        first, second, params = eqn.params["cond_nconsts"], eqn.params["body_nconsts"], eqn.params
        carry = [None] * (len(eqn.invars) - first - second)
        body = self.inner(params["body_jaxpr"], [*eqn.invars[first : first + second], *carry], known)
        return body + self.inner(params["cond_jaxpr"], [*eqn.invars[:first], *carry], known)

    def loops(self, jaxpr: Jaxpr, known: Mapping[Any, Any], times: int) -> Iterator[tuple[JaxprEqn, int, Mapping[Any, Any]]]:
        """Yields (equation, shards that run it, known constants) of each outermost while loop, in the program's order."""
        known = dict(known)
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "while":
                yield eqn, times, known
            elif eqn.primitive.name in ("jit", "pjit", "closed_call", "shard_map", "custom_vjp_call"):
                for body in _bodies(eqn):
                    yield from self.loops(*_used(body), times * (_shards(eqn.params) if eqn.primitive.name == "shard_map" else 1))


def _bodies(eqn: JaxprEqn) -> list[Any]:
    """Returns the programs among an equation's parameters, those that run when it does."""
    skipped = {"jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "jvp_jaxpr_thunk", "rule"}
    values = (v for key, v in eqn.params.items() if key not in skipped)
    return [b for v in values for b in (v if isinstance(v, (tuple, list)) else (v,)) if isinstance(b, (Jaxpr, ClosedJaxpr))]


def _shards(params: Mapping[str, Any]) -> int:
    return math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])


def _value(operand: Any, known: Mapping[Any, Any]) -> Any:
    if isinstance(operand, Literal):
        return operand.val if np.ndim(operand.val) == 0 else None
    return None if operand is None else known.get(operand)


def _ragged(eqn: JaxprEqn) -> float:
    """Returns the operations of a ragged product. A row meets one group's matrix: groups along the rows add nothing."""
    left, right = (v.aval.shape for v in eqn.invars[:2])
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted_l, contracted_r), (batch_l, batch_r) = numbers.dot_dimension_numbers
    groups = numbers.rhs_group_dimensions
    free = [n for axis, n in enumerate(right) if axis not in (*contracted_r, *batch_r, *groups)]
    del contracted_l, batch_l
    return 2.0 * math.prod(left) * math.prod(free)


def _mosaic_gpu(eqn: JaxprEqn, known: Mapping[Any, Any]) -> Work:
    """Returns the work of kernels/block_attention/gpu.py: the forward form's by its list of tiles, of which a line repeats its last; the
    decode form's, whose cache is [planes, slots, heads, width], at the full cache."""
    q, k = (v.aval for v in eqn.invars[:2])
    size = lambda *arrays: float(sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays))
    if eqn.invars[4].aval.ndim < 2:  # queries [B, G, rows, K]
        (B, G, rows, width), slots = q.shape, k.shape[1]
        flops = 4.0 * B * G * rows * slots * width
        return Work(kernels=flops, unread=flops, unread_bytes=2 * size(q) + 2.0 * B * slots * G * width * k.dtype.itemsize)
    (B, queries, H, width), G = q.shape, k.shape[2]
    lists = eqn.invars[4]
    lines, most = lists.aval.shape
    found = known.get(lists)
    visited = lines * most if found is None else sum(len({*line}) for line in np.asarray(found).tolist())
    tile_q, tile_k = queries // lines, TILES[width].keys
    flops = 4.0 * B * H * visited * tile_q * tile_k * width
    return Work(
        kernels=flops, unread=flops, unread_bytes=2 * size(q) + 2.0 * B * H * visited * tile_k * width * k.dtype.itemsize * min(1, G / H)
    )

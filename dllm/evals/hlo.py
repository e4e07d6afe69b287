"""What a compiled program does on one device, read from its HLO text: products, bytes, collectives and kernels, loops multiplied through.

XLA's own cost_analysis counts a loop's body once, and a kernel that it didn't write not at all.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id", "while", "conditional"}
FREE |= {"call", "async-start", "opt-barrier"}  # what these call is counted by itself
SLICES = {"slice", "dynamic-slice", "gather", "slice-start"}  # of their first operand they read what they give
SIZES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f8e4m3fn": 1, "f8e5m2": 1, "token": 0, "opaque": 0}


@dataclasses.dataclass(frozen=True)
class Collective:
    """Of each device: `size` bytes go in, or, of an all-gather, come out; `group` devices take part."""

    kind: str
    size: float
    group: int

    @property
    def received(self) -> float:
        """Bytes that a device receives at least, whatever the algorithm."""
        others = (self.group - 1) / self.group
        return self.size * {"all-reduce": 2 * others, "collective-permute": 1.0}.get(self.kind, others)


@dataclasses.dataclass
class Cost:
    """What is done once by one device.

    flops        of matrix products, and what TPU kernels estimate of themselves; elementwise work isn't counted
    moved        bytes read from and written to the device's memory (HBM; not VMEM) by each operation that isn't fused into another
    collectives  Collective -> how often
    kernels      name of a Pallas kernel -> how often
    loops        loops of unknown length, whose bodies count once
    """

    flops: float = 0.0
    moved: float = 0.0
    collectives: Counter = dataclasses.field(default_factory=Counter)
    kernels: Counter = dataclasses.field(default_factory=Counter)
    loops: int = 0

    def add(self, other: Cost, times: int = 1) -> None:
        """Adds the other's cost, `times` times."""
        self.flops += times * other.flops
        self.moved += times * other.moved
        self.loops += other.loops
        for mine, theirs in ((self.collectives, other.collectives), (self.kernels, other.kernels)):
            for key, count in theirs.items():
                mine[key] += times * count

    @property
    def received(self) -> float:
        """Bytes that collectives bring to the device."""
        return float(sum(count * collective.received for collective, count in self.collectives.items()))


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array of an instruction's result."""

    dtype: str
    dims: tuple[int, ...]
    near: bool  # in a TPU's VMEM or SMEM: reading it is no traffic

    @property
    def size(self) -> float:
        """Bytes, without the padding of tiles."""
        width = SIZES.get(self.dtype)
        if width is None:
            width = int(re.sub(r"\D", "", self.dtype.split("e")[0]) or 0) / 8
        return float(math.prod(self.dims) * width)

    @property
    def far(self) -> float:
        """Bytes, where they lie in the device's memory."""
        return 0.0 if self.near else self.size


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    root: bool
    shapes: tuple[Shape, ...]
    op: str
    operands: tuple[str, ...]
    literal: str  # what stands in the operands' place: a parameter's number, a constant's value
    attributes: str

    def called(self, key: str) -> list[str]:
        """Returns the computations that the attribute names."""
        found = re.search(rf"\b{key}=(?:%?([\w.\-]+)|\{{([^}}]*)\}})", self.attributes)
        return re.findall(r"[\w.\-]+", found[1] or found[2]) if found else []


Computation = dict[str, Instruction]


class Program:
    """A compiled program's text, `compiled.as_text()`, taken apart."""

    def __init__(self, text: str):
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        devices = re.search(r"num_partitions=(\d+)", text[: text.find("\n")])
        self.devices = int(devices[1]) if devices else 1
        here: Computation = {}
        for line in text.split("\n"):
            if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
                here = self.computations[head[2]] = {}
                self.entry = head[2] if head[1] else self.entry
            elif instruction := _parse(line):
                here[instruction.name] = instruction

    def cost(self) -> Cost:
        """Returns the cost of one call of the program."""
        return self._cost(self.entry)

    def cycle(self) -> Cost | None:
        """Returns the cost of one turn of the program's last outermost loop of unknown length, a sampler's; None where there is none."""
        loops = [i for here, i in self._outer(self.entry) if i.op == "while" and self._trips(here, i) is None]
        return self._turn(loops[-1]) if loops else None

    def _outer(self, name: str) -> Iterator[tuple[Computation, Instruction]]:
        """Yields a computation's instructions, each with its computation, and behind a call those of what it calls."""
        for instruction in self.computations[name].values():
            yield self.computations[name], instruction
            for callee in instruction.called("to_apply") if instruction.op == "call" else ():
                yield from self._outer(callee)

    def _turn(self, loop: Instruction) -> Cost:
        turn = Cost()
        for part in (*loop.called("body"), *loop.called("condition")):
            turn.add(self._cost(part))
        return turn

    @functools.cache  # noqa: B019  (a Program lives as long as its costs are asked for)
    def _cost(self, name: str) -> Cost:
        total, here, channels = Cost(), self.computations[name], set()
        for instruction in here.values():
            op = instruction.op
            if op == "while":
                trips = self._trips(here, instruction)
                total.add(self._turn(instruction), 1 if trips is None else trips)
                total.loops += trips is None
            elif op == "conditional":
                branches = instruction.called("branch_computations")
                branches = branches or [*instruction.called("true_computation"), *instruction.called("false_computation")]
                total.add(max(map(self._cost, branches), key=lambda cost: (cost.flops, cost.moved)))
            elif op in ("call", "async-start"):
                for callee in (*instruction.called("to_apply"), *instruction.called("calls")):
                    total.add(self._cost(callee))
            elif "tpu_custom_call" in instruction.attributes and op == "custom-call":
                number = lambda key, text=instruction.attributes: float((re.search(rf'"{key}":"(\d+)"', text) or [0, 0])[1])
                total.flops += number("flops")
                total.moved += number("bytes_accessed")
            elif 'custom_call_target="mosaic_gpu' not in instruction.attributes:  # such a kernel tells nothing: flops.Work.unread
                total.moved += self._moved(here, instruction)
            for inner, where in self._inside(here, instruction):
                total.flops += self._flops(where, inner)
                kind = inner.op.removesuffix("-start")
                channel = re.search(r"channel_id=(\d+)", inner.attributes)
                if kind in KINDS and (channel is None or channel[1] not in channels):  # parts of one that is spread over fusions share it
                    channels |= {channel[1]} if channel else set()
                    size = sum(s.size for name in inner.operands for s in where[name].shapes)
                    group = self._group(inner)
                    if group > 1:
                        total.collectives[Collective(kind, size * group if kind == "all-gather" else size, group)] += 1
                if inner.op == "custom-call" and re.search(r'custom_call_target="(tpu_custom_call|mosaic_gpu)', inner.attributes):
                    total.kernels[re.sub(r"\.\d+$", "", inner.name)] += 1
        return total

    def _inside(self, here: Computation, instruction: Instruction) -> Iterator[tuple[Instruction, Computation]]:
        """Yields (instruction, its computation): of a fusion all that is in it, else the instruction itself."""
        callees = instruction.called("calls") if instruction.op in ("fusion", "fusion-start") else []
        if not callees:
            yield instruction, here
        for callee in callees:
            for inner in self.computations[callee].values():
                yield from self._inside(self.computations[callee], inner)

    def _trips(self, here: Computation, loop: Instruction) -> int | None:
        """Returns how often a loop's body runs: as the compiler notes, or, its condition being counter < constant, by the
        body's steps from where it starts; None if neither tells."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(known[1])
        condition = self.computations[loop.called("condition")[0]]
        test = next(i for i in condition.values() if i.root)
        if test.op != "compare" or "direction=LT" not in test.attributes:
            return None
        counter, end = (condition[name] for name in test.operands)
        if counter.op != "get-tuple-element" or end.op != "constant":
            return None
        at = int(re.search(r"index=(\d+)", counter.attributes)[1])
        step = self._step(loop, at)
        if not step:
            return None
        first = here[loop.operands[0]]
        if first.op == "tuple":
            first = here[first.operands[at]]
            while first.op in ("copy", "bitcast", "copy-done", "copy-start"):
                first = here[first.operands[0]]
        return max(-(-(int(end.literal) - (int(first.literal) if first.op == "constant" else 0)) // step), 0)

    def _step(self, loop: Instruction, at: int) -> int:
        """Returns by how much a loop's body raises the counter, element `at` of what it carries; 0 if that isn't told."""
        body = self.computations[loop.called("body")[0]]
        root = next(i for i in body.values() if i.root)
        raised = body.get(root.operands[at]) if root.op == "tuple" else None
        while raised and raised.op in ("copy", "bitcast", "copy-done", "copy-start"):
            raised = body[raised.operands[0]]
        if raised and raised.op == "fusion":  # of an addition, the constant inside it or handed to it
            inner = self.computations[raised.called("calls")[0]]
            by = [i for i in (*inner.values(), *(body[name] for name in raised.operands if name in body)) if i.op == "constant"]
        else:
            by = [body[name] for name in raised.operands if body[name].op == "constant"] if raised and raised.op == "add" else []
        return int(by[0].literal) if len(by) == 1 and by[0].literal.isdecimal() else 0

    def _group(self, instruction: Instruction) -> int:
        text = instruction.attributes
        if instruction.op.startswith("collective-permute"):
            return 1 if "source_target_pairs={}" in text else 2
        if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]", text):
            return int(iota[2])
        if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", text):
            return listed[1].count(",") + 1
        if named := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text):
            sizes = dict(re.findall(r"'([^']+)'=(\d+)", named[1]))
            parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", named[2])
            return math.prod(int(part or sizes[axis]) for axis, part in parts)
        return self.devices

    def _flops(self, here: Computation, instruction: Instruction) -> float:
        if instruction.op == "dot":
            left = here[instruction.operands[0]].shapes[0].dims
            contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
            axes = [int(a) for a in contracted[1].split(",") if a] if contracted else []
            return 2.0 * math.prod(instruction.shapes[0].dims) * math.prod(left[a] for a in axes)
        return _convolution(here, instruction) if instruction.op == "convolution" else 0.0

    def _moved(self, here: Computation, instruction: Instruction) -> float:
        """Returns the bytes that an instruction reads from and writes to the device's memory."""
        op, arrays = instruction.op, [here[name].shapes for name in instruction.operands if name in here]
        out, read = sum(s.far for s in instruction.shapes), [sum(s.far for s in shapes) for shapes in arrays]
        if op in FREE or op.endswith("-done") or not instruction.shapes:
            return 0.0
        if op in SLICES:
            part = instruction.shapes[0] if op != "slice-start" else instruction.shapes[-1 if len(instruction.shapes) < 3 else 1]
            return part.far + (0.0 if arrays[0][0].near else part.size)
        if op == "dynamic-update-slice":
            return read[1] + (0.0 if instruction.shapes[0].near else arrays[1][0].size)
        if op == "scatter":
            return sum(read[1:]) + (0.0 if instruction.shapes[0].near else arrays[-1][0].size)
        if op.removesuffix("-start") in ("copy", *KINDS):
            size = sum(s.size for shapes in arrays for s in shapes)
            whole = instruction.shapes if not op.endswith("-start") else instruction.shapes[:1]
            return sum(read) + (0.0 if all(s.near for s in whole) else size)
        if op in ("fusion", "fusion-start"):
            inner = self.computations[instruction.called("calls")[0]]
            inputs = sum(
                min(self._read(inner, k), sum(s.size for s in shapes)) * (not shapes[0].near) for k, shapes in enumerate(arrays) if shapes
            )
            root = next(i for i in inner.values() if i.root)
            outputs = [inner[name] for name in root.operands] if root.op == "tuple" else [root]
            places = instruction.shapes if op == "fusion" else instruction.shapes[-len(outputs) :]
            return inputs + sum(
                self._written(inner, o) for o, place in itertools.zip_longest(outputs, places) if o and not (place and place.near)
            )
        return out + sum(read)

    def _read(self, inner: Computation, number: int) -> float:
        """Returns how many bytes of its parameter `number` a fusion reads: where it takes slices, these; what it passes on, nothing."""
        parameter = next((i for i in inner.values() if i.op == "parameter" and int(i.literal) == number), None)
        total, seen = 0.0, {parameter.name} if parameter else set()
        for user in inner.values():  # in order of dependence
            at = [k for k, name in enumerate(user.operands) if name in seen]
            if not at or (user.root and user.op == "tuple"):
                continue
            if user.op in ("bitcast", "reshape") and not user.root:
                seen.add(user.name)
            elif user.op in SLICES and at == [0]:
                total += user.shapes[0].size
            elif user.op in ("fusion", "fusion-start"):
                total += sum(self._read(self.computations[user.called("calls")[0]], k) for k in at)
            elif (user.op in ("dynamic-update-slice", "scatter") and at == [0]) or _is_collective(user):
                continue
            else:
                total += sum(s.size for s in parameter.shapes)
        return total

    def _written(self, inner: Computation, output: Instruction) -> float:
        """Returns how many bytes of a fusion's output are written: of an update in place, those of the update."""
        while output.op == "bitcast" and output.operands[0] in inner:
            output = inner[output.operands[0]]
        if output.op == "parameter" or _is_collective(output):
            return 0.0
        if output.op in ("dynamic-update-slice", "scatter"):
            return inner[output.operands[1 if output.op == "dynamic-update-slice" else -1]].shapes[0].size
        if output.op == "fusion":
            deeper = self.computations[output.called("calls")[0]]
            root = next(i for i in deeper.values() if i.root)
            return sum(self._written(deeper, o) for o in ([deeper[name] for name in root.operands] if root.op == "tuple" else [root]))
        return sum(s.size for s in output.shapes)


def _is_collective(instruction: Instruction) -> bool:
    return instruction.op.removesuffix("-start") in KINDS or "AsyncCollective" in instruction.attributes


def _parse(line: str) -> Instruction | None:
    head = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if not head:
        return None
    shape, rest = _upto(line, head.end(), " ")
    op, rest = line[rest:].split("(", 1)[0].strip(), line.index("(", rest)
    inside, end = _upto(line, rest, "")
    shapes = tuple(
        Shape(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d), bool(re.search(r"S\([1-9]", layout or "")))
        for dtype, dims, layout in re.findall(r"([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\})?", shape)
    )
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(head[2], bool(head[1]), shapes, op, operands, inside[1:-1], line[end:])


def _upto(line: str, start: int, end: str) -> tuple[str, int]:
    """Returns (what stands from `start` to the bracket's end, or to `end` where none opens, the place behind it)."""
    if line[start] != "(":
        stop = line.index(end, start)
        return line[start:stop], stop
    depth = 0
    for at in range(start, len(line)):
        depth += (line[at] == "(") - (line[at] == ")")
        if depth == 0:
            return line[start : at + 1], at + 1
    raise ValueError(f"no end of the bracket in {line[:200]!r}")


def _convolution(here: Computation, instruction: Instruction) -> float:
    """Returns the operations of a convolution, as which TPUs write matrix products; what of the window lies outside the input is none."""
    left, right = (here[name].shapes[0].dims for name in instruction.operands[:2])
    labels_l, labels_r, labels_o = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes).groups()
    window = dict(re.findall(r"(\w+)=([\w\-]+)", (re.search(r"window=\{([^}]*)\}", instruction.attributes) or ["", ""])[1]))
    field = lambda key, axis, default: int(window[key].split("x")[axis]) if key in window else default
    out = instruction.shapes[0].dims
    total = 2.0 * out[labels_o.index("b")] * out[labels_o.index("f")] * right[labels_r.index("i")]
    for axis in range(sum(c.isdigit() for c in labels_o)):
        low = int(window["pad"].split("x")[axis].split("_")[0]) if "pad" in window else 0
        stride, left_gap, right_gap = (field(key, axis, 1) for key in ("stride", "lhs_dilate", "rhs_dilate"))
        there = (left[labels_l.index(str(axis))] - 1) * left_gap
        total *= _positions(out[labels_o.index(str(axis))], right[labels_r.index(str(axis))], stride, low, left_gap, right_gap, there)
    return total / int((re.search(r"batch_group_count=(\d+)", instruction.attributes) or [0, 1])[1])


@functools.cache
def _positions(outs: int, taps: int, stride: int, low: int, left_gap: int, right_gap: int, there: int) -> int:
    places = (o * stride + k * right_gap - low for o in range(outs) for k in range(taps))
    return sum(0 <= place <= there and place % left_gap == 0 for place in places)

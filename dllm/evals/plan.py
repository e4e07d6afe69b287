"""What a compiled program needs of a device, and how fast it can run there at best: chips by their published rates, rooflines, tables."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from dllm.core.config import read_json, to_dataclass
from dllm.core.types import UserError
from dllm.evals.flops import Work
from dllm.evals.hlo import KINDS, Cost

DEVICES = Path(__file__).parents[2] / "experiments" / "devices"
GIB = 2**30
SHORT = {"all-reduce": "AR", "all-gather": "AG", "reduce-scatter": "RS", "all-to-all": "A2A", "collective-permute": "CP"}
FULL = 0.95  # of a GPU's memory is what a program may take (XLA_PYTHON_CLIENT_MEM_FRACTION); a TPU's compiler knows its limit


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of device, by its maker's figures."""

    platform: str
    flops: float  # a second, of bfloat16 matrix products
    memory: float  # bytes
    bandwidth: float  # bytes a second, of that memory
    interconnect: float  # bytes a second that all links of a chip together bring to it: half of what counts both ways
    slices: tuple[str, ...]  # the usual ones, by size
    source: str


def chips() -> dict[str, Chip]:
    """Returns the chips of experiments/devices/rates.json."""
    return {name: to_dataclass(Chip, row, name) for name, row in read_json(DEVICES / "rates.json").items()}


def chip(topology: str) -> Chip:
    """Returns the chip of a topology, CHIP:SHAPE. Raises UserError for an unknown one."""
    known, name = chips(), topology.partition(":")[0]
    if name not in known:
        raise UserError(f"no chip {name!r} in {DEVICES / 'rates.json'}; there are: {', '.join(known)}")
    return known[name]


def devices(topology: str) -> list[Any]:
    """Returns the devices of a topology that isn't here, such as v5e:4x4, v5p:2x2x2 or h200:8, for programs to be compiled for.

    Raises UserError for one that doesn't exist, and without the makers' compilers.
    """
    here, shape = chip(topology), topology.partition(":")[2]
    needs = "libtpu" if here.platform == "tpu" else "jax_plugins.xla_cuda13"
    with contextlib.suppress(ModuleNotFoundError):
        if importlib.util.find_spec(needs):
            needs = ""
    if needs:
        raise UserError(
            f"there is no compiler for {topology} in this environment: `make .aot/.ready`, then .aot/bin/python in python's place"
        )
    some = " ".join(f"{topology.partition(':')[0]}:{s}" for s in here.slices)
    if not re.fullmatch(r"\d+" if here.platform == "gpu" else r"\d+(x\d+)+", shape) or (
        here.platform == "gpu" and shape not in here.slices
    ):
        raise UserError(f"no topology {topology!r}; there are for example: {some}")
    # Else libtpu looks for the machine that it is on, and lets one process at a time have its chips, which aren't there.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    try:
        if here.platform == "tpu":
            return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
        config = (DEVICES / f"{topology.partition(':')[0]}.txtpb").read_text()
        found = topologies.get_topology_desc(topology_name=topology, platform="cuda", target_config=config, topology=f"1x1x{shape}")
        return list(found.devices)
    except jax.errors.JaxRuntimeError as e:
        raise UserError(f"no topology {topology!r} ({str(e).splitlines()[0]}); there are for example: {some}") from None


def memory(compiled: Any, here: Chip) -> dict[str, Any]:
    """Returns the bytes a device: of arguments; `peak`, all that is held at once at most; and `temporary`, what that has besides
    arguments: activations, gradients, results that take no argument's place."""
    stats = compiled.memory_analysis()
    new = stats.output_size_in_bytes - stats.alias_size_in_bytes
    # A TPU's temp_size holds more than is there at any one time.
    peak = stats.peak_memory_in_bytes or stats.argument_size_in_bytes + new + stats.temp_size_in_bytes
    excess = max(0, peak - int(FULL * here.memory)) if here.platform == "gpu" else 0
    return {"arguments": stats.argument_size_in_bytes, "temporary": peak - stats.argument_size_in_bytes, "peak": peak, "excess": excess}


def overflow(error: Exception, held: int) -> dict[str, Any] | None:
    """Returns the bytes that a TPU program would take, how many are too many, and its largest arrays; None of another error.

    held: bytes of its arguments. A compiler that gives up early tells of temporaries alone.
    """
    text, word = str(error), r"([\d.]+[KMGT]?)"
    number = lambda word: int(float(word.rstrip("KMGT")) * 2 ** (10 * " KMGT".index(word[-1] if word[-1] in "KMGT" else " ")))
    if early := re.search(rf"HLO temporaries \({word}\) exceeds available HBM \({word}\)", text):
        peak = number(early[1]) + held
        return {"peak": peak, "excess": peak - number(early[2]), "largest": []}
    if found := re.search(rf"Used {word} of {word} hbm. Exceeded hbm capacity by {word}", text):
        arrays = re.findall(r"Size: ([\d.]+[KMGT])\s+(?:Operator: op_name=\"([^\"]*)\".*\s+)?Shape: (\S+)", text)
        return {
            "peak": number(found[1]),
            "excess": number(found[3]),
            "largest": [" ".join(filter(None, (a, c, b))) for a, b, c in arrays[:8]],
        }
    return None


def roofline(here: Chip, flops: float, moved: float, received: float) -> dict[str, float]:
    """Returns the seconds that each of three would take alone: the products, the memory's traffic, the links' (Williams et al. 2009).

    The largest is a bound from below, what runs if all else hides behind it; the sum, if nothing does.
    """
    return {"compute": flops / here.flops, "memory": moved / here.bandwidth, "links": received / here.interconnect}


def counted(cost: Cost, asked: Work, devices: int) -> dict[str, Any]:
    """Returns what a row tells of a program's cost, with that of kernels which only the jaxpr knows, and of what the jaxpr asks for."""
    some = sorted(cost.collectives.items(), key=lambda each: (KINDS.index(each[0].kind), -each[0].size, each[0].group))
    return {
        "flops": cost.flops + asked.unread / devices,
        "asked": asked.flops / devices,
        "moved": cost.moved + asked.unread_bytes / devices,
        "received": cost.received,
        "collectives": [{**dataclasses.asdict(key), "times": times} for key, times in some],
        "kernels": dict(sorted(cost.kernels.items())),
        "uncounted_loops": cost.loops,
    }


def by_kind(row: Mapping[str, Any]) -> dict[str, tuple[int, float, float]]:
    """Returns of each kind of collective (how many, bytes in all, bytes of the largest)."""
    found: dict[str, tuple[int, float, float]] = {}
    for each in row["collectives"]:
        count, total, largest = found.get(each["kind"], (0, 0.0, 0.0))
        size, times = each["size"], each["times"]
        found[each["kind"]] = count + times, total + size * times, max(largest, size)
    return found


def remedy(row: Mapping[str, Any], most_heads: int) -> dict[str, Any] | None:
    """Returns the next change to try on a program that doesn't fit, None where there is none left. What it costs least comes first:

    training  slices of the parameters in place of copies; recomputing activations; a batch in parts; a larger slice of the machine
    decoding  more devices to a copy; a larger slice; half the rows
    """
    here = chip(row["topology"])
    name, _, shape = row["topology"].partition(":")
    data, fsdp, tensor = row["mesh"]
    larger = here.slices[here.slices.index(shape) + 1 :] if shape in here.slices else ()
    limit = row["peak"] - row["excess"]
    fixed = row["parameters"] + row["ema"] + row["optimizer"]
    if row["what"] == "decode":
        if data > 1 and 2 * tensor <= most_heads and 4 * fixed > limit:
            return {"mesh.data": data // 2, "mesh.tensor": 2 * tensor}
        if larger:
            return {"topology": f"{name}:{larger[0]}", "mesh.data": data * ratio(shape, larger[0])}
        return {"rows": row["rows"] // 2} if row["rows"] >= 2 * data * fsdp else None
    if data > 1:
        return {"mesh.data": 1, "mesh.fsdp": data * fsdp}
    if not row["remat"]:
        return {"model.remat": True}
    parts = row["rows"] // (data * fsdp * row["accumulate"])  # rows of a device at a time
    if fixed < 0.9 * limit and parts > 1:
        wanted = 2 ** math.ceil(math.log2(max(2, (row["peak"] - fixed) / (limit - fixed))))
        return {"train.accumulate": row["accumulate"] * min(wanted, parts)}
    if larger and row["rows"] % (fsdp * ratio(shape, larger[0])) == 0:
        grown = {"topology": f"{name}:{larger[0]}", "mesh.fsdp": fsdp * ratio(shape, larger[0])}
        return grown | {"train.accumulate": max(1, row["accumulate"] // ratio(shape, larger[0]))}
    return None


def ratio(small: str, large: str) -> int:
    """Returns how many times as many chips the second shape has."""
    chips_of = lambda shape: math.prod(map(int, shape.split("x")))
    return chips_of(large) // chips_of(small)


def show(row: Mapping[str, Any]) -> str:
    """Returns a row in some lines."""
    gib = lambda key: f"{key} {row[key] / GIB:.2f}"
    mesh = " x ".join(map(str, row["mesh"]))
    lines = [
        f"{row['name']}, {row['what']}: {row['topology']} as {mesh}, {row['rows']} rows of {row['length']} in {row['accumulate']} parts"
    ]
    lines += ["  GiB a device: " + ", ".join(gib(key) for key in ("parameters", "ema", "optimizer", "temporary", "peak") if key in row)]
    if row["excess"] or row["error"]:
        lines += [f"  doesn't fit: {row['excess'] / GIB:.2f} GiB too many" if row["excess"] else f"  doesn't compile: {row['error']}"]
        return "\n    ".join(["\n".join(lines), *row["largest"]])
    text = f"{row['flops'] / 1e12:.4f} TFLOP, {row['asked'] / 1e12:.4f} asked for; {row['moved'] / 1e9:.3f} GB moved"
    lines += [f"  a {'step' if row['what'] == 'train' else 'cycle'}: {text}"]
    lines += [f"  {n} {kind}: {total / 1e9:.3f} GB, at most {most / 1e6:.1f} MB" for kind, (n, total, most) in by_kind(row).items()]
    lines += [f"  {times} {name}" for name, times in row["kernels"].items()]
    seconds = row["seconds"]
    lines += [
        "  ms at least: " + ", ".join(f"{key} {1e3 * s:.2f}" for key, s in seconds.items()) + f"; in all {1e3 * sum(seconds.values()):.2f}"
    ]
    loops = f"; {row['uncounted_loops']} loops of unknown length in it count once" * bool(row["uncounted_loops"])
    return "\n".join([*lines, f"  compiled in {row['compile_s']:.0f} s of CPU, {row['instructions']} instructions{loops}"])


HEAD = (
    "case", "devices", "mesh", "rows", "parameters", "optimizer, EMA", "temporary", "peak", "TFLOP", "asked", "GB moved", "GB received",
    "collectives", "kernels", "compute", "memory", "links", "ms", "compiled",
)  # fmt: skip


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Returns the rows as a Markdown table."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    return "\n".join([*lines, *("| " + " | ".join(_cells(row)) + " |" for row in rows)])


def _cells(row: Mapping[str, Any]) -> list[str]:
    gib = lambda *keys: f"{sum(row[key] for key in keys) / GIB:.2f}"
    parts = f" / {row['accumulate']}" * (row["accumulate"] > 1)
    cells = [
        row["name"],
        row["topology"],
        "x".join(map(str, row["mesh"])),
        f"{row['rows']}{parts}",
        gib("parameters"),
        gib("optimizer", "ema"),
    ]
    if row["excess"] or row["error"]:
        text = f"**{gib('excess')} too many**" if row["excess"] else f"**doesn't compile**: {row['error']}"
        cells += ["", f"{gib('peak')}: {text}" if row["peak"] else text]
        return cells + [""] * (len(HEAD) - len(cells) - 1) + [f"{row['compile_s']:.0f} s"]
    ms = {key: 1e3 * s for key, s in row["seconds"].items()}
    cells += [gib("temporary"), gib("peak"), f"{row['flops'] / 1e12:.2f}", f"{100 * row['asked'] / row['flops']:.0f} %"]
    cells += [f"{row['moved'] / 1e9:.1f}", f"{row['received'] / 1e9:.3f}"]
    cells += [
        "; ".join(f"{n} {SHORT[kind]} {total / 1e9:.2f} GB (to {most / 1e6:.0f} MB)" for kind, (n, total, most) in by_kind(row).items())
    ]
    cells += [str(sum(row["kernels"].values())), *(f"{ms[key]:.1f}" for key in ("compute", "memory", "links"))]
    return [*cells, f"{max(ms.values()):.1f} .. {sum(ms.values()):.1f}", f"{row['compile_s']:.0f} s"]


PAGE = """# What training and decoding at full size take of devices that weren't here

    make .aot/.ready
    .aot/bin/python experiments/plan.py --config=configs/plan.py --out=experiments/results/plan

A row is a run's own train step, or its sampler, compiled whole by the maker's compiler for a slice of devices ({versions}). Nothing was
run: times are bounds from below, at the makers' rates. Figures are of one device, and of one step, or one turn of the sampler's loop (of
Uno, a draft and a verifying pass; of SDAR, a denoising pass, fused with the commit of the block before; of SSMD, a draft and one
verification). What stands there isn't compiled again: to measure anew, delete its lines of rows.jsonl.

- rows: sequences of the whole step; behind the slash the parts in which they are computed, one after the other (train.accumulate)
- parameters, optimizer and EMA, temporary, peak: GiB. Temporary is the peak less what is handed in: activations, gradients, the cache
- TFLOP: matrix products and kernels, from the compiled program, every loop multiplied by its length. asked: the share of these that the
  program asks for, were all devices to divide it; what is missing to 100 % several devices compute alike
- GB moved: from and to the device's memory, by each operation of the compiled program; GB received: over the links, with the collectives
  that bring it: all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute; how many, their bytes, and the largest
- kernels: calls of block attention's. compute, memory, links: milliseconds of each alone; ms: the largest of them, if all else hides behind
  it, to their sum, if nothing does
- compiled: seconds of CPU

{tables}

## What did not fit

{mends}

## Rates

{rates}
"""


def page(rows: Iterable[Mapping[str, Any]]) -> str:
    """Returns the table's page."""
    rows = list(rows)
    titles = {"train": "Training", "decode": "Decoding"}
    parts = [f"## {title}\n\n{table([row for row in rows if row['what'] == what])}" for what, title in titles.items()]
    rates = [f"- {name}: {some.source}" for name, some in chips().items()]
    versions = ", ".join(sorted({f"jax {row['jax']}" for row in rows}))
    return PAGE.format(versions=versions, tables="\n\n".join(parts), mends=_mends(rows), rates="\n".join(rates))


def _mends(rows: list[Mapping[str, Any]]) -> str:
    """Returns, of each row that doesn't fit, what was tried next: the row behind it."""
    lines = []
    for row, then in zip(rows, [*rows[1:], None]):
        if row["excess"] and then and (then["name"], then["what"]) == (row["name"], row["what"]):
            now = {**then["changes"], "topology": then["topology"]} | ({"rows": then["rows"]} if then["what"] == "decode" else {})
            before = {**row["changes"], "topology": row["topology"]} | ({"rows": row["rows"]} if row["what"] == "decode" else {})
            change = ", ".join(f"{key}={value}" for key, value in now.items() if before.get(key) != value)
            result = f"still {then['excess'] / GIB:.2f} too many" if then["excess"] else "that fits"
            largest = f" (the largest array: {row['largest'][0]})" if row["largest"] else ""
            lines.append(
                f"- {row['name']}, {row['what']}, {row['topology']}: {row['excess'] / GIB:.2f} GiB too many{largest}; {change}: {result}"
            )
        elif row["excess"]:
            lines.append(f"- {row['name']}, {row['what']}, {row['topology']}: {row['excess'] / GIB:.2f} GiB too many; nothing made it fit")
    return "\n".join(lines) or "Everything fitted."

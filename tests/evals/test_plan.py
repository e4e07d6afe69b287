"""Plans: rates, rooflines, what is said of a program that doesn't fit, what is tried next, and the page that is made of it all."""

import json
from collections import Counter

import pytest

from dllm.core.types import UserError
from dllm.evals import plan
from dllm.evals.flops import Work
from dllm.evals.hlo import Collective, Cost

ROW = dict(name="some", what="train", topology="v5e:4x4", mesh=[1, 16, 1], rows=64, length=4096, accumulate=1, remat=True)
ROW |= dict(parameters=2**30, ema=2**30, optimizer=2**31, temporary=2**32, peak=2**33, excess=0, error="", largest=[])
ROW |= dict(compile_s=12.0, instructions=1000)
FULL = {"peak": 20 * 2**30, "excess": 4 * 2**30}


def row(**changes):
    sizes = (("all-gather", 3e6, 10), ("all-gather", 1e6, 2), ("all-reduce", 4e6, 1))
    collectives = Counter({Collective(kind, size, 16): times for kind, size, times in sizes})
    cost = Cost(2e12, 3e10, collectives, Counter(kernel=24), 1)
    counted = plan.counted(cost, Work(products=1.6e13, kernels=1.6e13, unread=1.6e13, unread_bytes=1.6e11), 16)
    seconds = plan.roofline(plan.chip("v5e:4x4"), counted["flops"], counted["moved"], counted["received"])
    return ROW | counted | {"seconds": seconds} | changes


def test_rates_are_the_makers():
    chips = plan.chips()
    assert set(chips) == {"v5e", "v5p", "v6e", "h200"}
    assert all(chip.source.startswith("https://") and chip.flops > 1e14 and chip.slices for chip in chips.values())
    sizes = [[plan.ratio(chip.slices[0], shape) for shape in chip.slices] for chip in chips.values()]
    assert all(some == sorted(some) for some in sizes)


def test_a_roofline_is_three_times():
    assert plan.roofline(plan.chip("v5e:2x2"), 197e12, 819e9 / 2, 400e9) == {"compute": 1.0, "memory": 0.5, "links": 2.0}


def test_a_count_has_what_only_the_jaxpr_knows():
    found = row()
    assert (found["flops"], found["moved"], found["asked"]) == (3e12, 4e10, 2e12)
    assert plan.by_kind(found) == {"all-reduce": (1, 4e6, 4e6), "all-gather": (12, 32e6, 3e6)}
    assert found["received"] == pytest.approx(32e6 * 15 / 16 + 2 * 4e6 * 15 / 16)
    json.dumps(found, allow_nan=False)


def test_a_row_in_lines_and_in_the_table():
    said = plan.show(row())
    for text in ("v5e:4x4 as 1 x 16 x 1", "temporary 4.00", "3.0000 TFLOP, 2.0000 asked for", "12 all-gather: 0.032 GB", "24 kernel"):
        assert text in said
    assert "1 loops of unknown length" in said
    head, _, line, full, broken = plan.table([row(), row(**FULL), row(error="INTERNAL: no", peak=0)]).splitlines()
    assert len({text.count(" | ") for text in (head, line, full, broken)}) == 1
    assert "20.00: **4.00 too many**" in full
    assert "**doesn't compile**: INTERNAL: no" in broken
    assert "4.00 GiB too many" in plan.show(row(**FULL))


def test_the_page_has_both_programs_and_what_did_not_fit():
    some = dict(jax="0.12.0", changes={"mesh.fsdp": 16})
    mended = row(**some | {"changes": {"mesh.fsdp": 16, "train.accumulate": 4}, "accumulate": 4})
    other = row(what="decode", name="other", **some)
    text = plan.page([row(**FULL, **some | {"largest": ["2.32G f32[4] head"]}), mended, other, row(**FULL, **some, name="last")])
    training, decoding = text.split("## Decoding")
    assert training.count("| some |") == 2
    assert "| other |" in decoding
    assert "- some, train, v5e:4x4: 4.00 GiB too many (the largest array: 2.32G f32[4] head); train.accumulate=4: that fits" in text
    assert "- last, train, v5e:4x4: 4.00 GiB too many; nothing made it fit" in text
    assert text.count("https://") == len(plan.chips())
    assert "Everything fitted." in plan.page([other])


OVERFLOW = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 23.50G of 15.75G hbm. \
Exceeded hbm capacity by 7.75G.

  Largest program allocations in hbm:

  1. Size: 2.32G
     Operator: op_name="jit(train_step)/jvp(Decoder)/head/dot_general" source_file="a.py" source_line=1
     Shape: f32[4,4096,151936]{2,1,0:T(8,128)}
     Unpadded size: 2.32G
     ==========================

  2. Size: 64.0M
     Shape: bf16[4,8192]{1,0:T(8,128)}
"""


def test_what_does_not_fit_says_by_how_much():
    found = plan.overflow(ValueError(OVERFLOW), 2**30)
    assert (found["peak"], found["excess"]) == (int(23.5 * 2**30), int(7.75 * 2**30))
    assert found["largest"][0] == "2.32G f32[4,4096,151936]{2,1,0:T(8,128)} jit(train_step)/jvp(Decoder)/head/dot_general"
    assert found["largest"][1] == "64.0M bf16[4,8192]{1,0:T(8,128)}"
    assert plan.overflow(ValueError("INTERNAL: another"), 0) is None


def test_a_compiler_that_gives_up_early_leaves_out_the_arguments():
    text = (
        "E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO temporaries (37.00G) exceeds available HBM "
    )
    found = plan.overflow(ValueError(text + "(15.75G). HLO module: jit_train_step."), 5 * 2**30)
    assert (found["peak"], found["excess"], found["largest"]) == (42 * 2**30, 26.25 * 2**30, [])


REMEDIES = (
    (dict(mesh=[4, 4, 1]), {"mesh.data": 1, "mesh.fsdp": 16}),
    (dict(remat=False), {"model.remat": True}),
    (dict(), {"train.accumulate": 2}),  # 16 GiB less the state's 4 take half of the 16 that the rest has
    (dict(excess=12 * 2**30), {"train.accumulate": 4}),
    (dict(accumulate=4), {"topology": "v5e:4x8", "mesh.fsdp": 32, "train.accumulate": 2}),  # a row of each device at a time
    (dict(optimizer=13 * 2**30), {"topology": "v5e:4x8", "mesh.fsdp": 32, "train.accumulate": 1}),  # no room for anything but the state
    (dict(topology="v5e:16x16", mesh=[1, 256, 1], rows=256), None),
    (dict(topology="v5e:4x8", mesh=[1, 32, 1], rows=32), None),  # more devices than rows
    (dict(what="decode", mesh=[4, 1, 4], optimizer=0, ema=0, parameters=2**33), {"mesh.data": 2, "mesh.tensor": 8}),
    (dict(what="decode", mesh=[4, 1, 4], optimizer=0, ema=0), {"topology": "v5e:4x8", "mesh.data": 8}),  # the weights are little
    (dict(what="decode", topology="h200:8", mesh=[1, 1, 8]), {"rows": 32}),
    (dict(what="decode", topology="h200:8", mesh=[8, 1, 1], rows=8, parameters=0, ema=0, optimizer=0), None),
)


@pytest.mark.parametrize("changes, wanted", REMEDIES)
def test_what_is_tried_next(changes, wanted):
    assert plan.remedy(row(**FULL | changes), 32) == wanted


def test_an_unknown_chip_is_refused():
    with pytest.raises(UserError, match=r"no chip 'v9'.*v5e, v5p, v6e, h200"):
        plan.devices("v9:2x2")


def test_without_the_compilers_it_says_what_installs_them(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for topology in ("v5e:2x2", "h200:8"):
        with pytest.raises(UserError, match=r"no compiler for .*`make .aot/.ready`"):
            plan.devices(topology)


@pytest.mark.parametrize("topology", ["v5e", "v5e:", "v5e:4", "v5e:4xx4", "h200:3", "h200:2x2"])
def test_a_shape_that_is_none_is_refused(monkeypatch, topology):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    with pytest.raises(UserError, match=f"no topology '{topology}'; there are for example: "):
        plan.devices(topology)

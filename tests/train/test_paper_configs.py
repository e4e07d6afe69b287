"""configs/owt.py, configs/uniref50.py and their sweeps: every preset is a run, of the paper's shape at full size, with equal layers."""

import runpy
from pathlib import Path

import pytest

from dllm.core.types import UserError
from dllm.models import public
from dllm.train.run import run_config

CONFIGS = Path(__file__).parents[2] / "configs"
OWT, UNIREF50 = (runpy.run_path(str(CONFIGS / f"{name}.py")) for name in ("owt", "uniref50"))
SWEEPS = {name: runpy.run_path(str(CONFIGS / "sweeps" / f"{name}.py")) for name in ("owt", "proteins")}


def run(config, preset):
    return run_config(config["get_config"](preset).to_dict())


@pytest.mark.parametrize("size, layers", [("", 12), ("mini_", 6)])
def test_what_is_compared_has_equal_layers_and_tokens(size, layers):
    runs = {name: run(OWT, size + name) for name in ("ssmd", "mdm", "block", "gpt", "ssmd,no_residual", "ssmd,two_causal", "ssmd,paired")}
    counts = {getattr(r.model.config, "layers", 0) or r.model.config.n_noncausal + r.model.config.n_causal for r in runs.values()}
    assert counts == {layers}
    assert len({(r.data.length, r.train.steps, r.train.batch, r.train.seed) for r in runs.values()}) == 1
    assert len({getattr(r.model.config, key) for r in runs.values() for key in ("width",)}) == 1
    assert (runs["ssmd"].model.config.n_causal, runs["ssmd,two_causal"].model.config.n_causal, runs["mdm"].model.config.n_causal) == (
        1,
        2,
        0,
    )
    assert not runs["ssmd,no_residual"].model.config.residual
    assert runs["ssmd,paired"].model.config.pairing == "paired"
    assert runs["block"].model.config.mask_id == runs["mdm"].model.config.vocab == runs["gpt"].model.config.vocab


def test_the_paper_s_sizes():
    own = run(OWT, "ssmd")
    assert (own.train.steps, own.train.batch, own.data.length, own.optim.lr, own.optim.warmup) == (1_000_000, 256, 1024, 1.5e-4, 10_000)
    frozen = run(UNIREF50, "frozen")
    backbone = public.MODELS["dplm-150m"]
    for key in ("width", "n_noncausal", "heads", "mlp", "length", "vocab"):
        assert getattr(frozen.model.config, key) == getattr(backbone, key)
    assert frozen.model.config.n_causal == 1
    assert frozen.optim.train_only == "^(join|causal|gain)"


def test_protein_twins():
    backbone, frozen, scratch, judge = (run(UNIREF50, f"mini_{name}") for name in ("backbone", "frozen", "scratch", "judge"))
    assert frozen.model.config.n_noncausal == backbone.model.config.n_noncausal
    assert scratch.model.config.n_noncausal + scratch.model.config.n_causal == backbone.model.config.n_noncausal
    assert (scratch.optim.train_only, backbone.optim.train_only) == ("", "")
    assert judge.train.seed != backbone.train.seed
    assert all(r.data.buckets and max(r.data.buckets) < r.data.length for r in (backbone, frozen, scratch, judge))


@pytest.mark.parametrize("config, preset, text", [(OWT, "huge", "no preset 'huge'"), (OWT, "mdm,paired", "no ablation 'paired' of mdm"),
    (OWT, "ssmd,x", "no ablation 'x'"), (UNIREF50, "mini", "no preset 'mini'"), (SWEEPS["owt"], "x", "no settings"),
    (SWEEPS["proteins"], "x", "no settings")])  # fmt: skip
def test_unknown_ones_are_refused(config, preset, text):
    with pytest.raises(UserError, match=text):
        config["get_config"](preset)


def test_sweeps_name_samplers_of_their_runs():
    """The sampler of each point goes with the model that the head of the file gives it, and no two points are one."""
    for name, which in (("owt", ("ssmd", "mdm", "block", "gpt", "ablations")), ("proteins", ("ancestral", "self_speculative"))):
        for preset in which:
            points = SWEEPS[name]["get_config"](preset).to_dict()["points"]
            assert len({str(point) for point in points}) == len(points)
            sampler = {point["sampler"] for point in points}
            assert len(sampler) == 1

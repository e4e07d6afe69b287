"""Adapters in the weights, and in PEFT's files: there and back, against PEFT itself, and everything that a folder can have wrong."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dllm.core.paths import map_named, named_leaves
from dllm.core.types import UserError
from dllm.models import hf, peft, qwen3, uno
from dllm.ops import masks

FROZEN = qwen3.Config(
    vocab=40, length=64, width=16, layers=2, heads=4, kv_heads=2, head_width=8, mlp=24, block=1, mask_id=-1, norm="eager", remat=False
)
CONFIG = uno.Config(**dataclasses.asdict(FROZEN) | dict(block=3), rank=3, alpha=12.0, noise_low=2, noise_high=30)
TOKENS = np.random.default_rng(0).integers(0, 40, (2, 12))


def network(config=CONFIG, seed=0):
    variables = uno.init(config, jax.random.key(seed))
    draw = lambda name, x: 0.3 * jax.random.normal(jax.random.key(len(name)), x.shape) if name.endswith("b") else x
    return {**variables["params"], "lora": map_named(draw, variables["params"]["lora"])}


def logits(model, config, params, gate=None):
    positions = jnp.broadcast_to(jnp.arange(12)[None], TOKENS.shape)
    extra = {} if gate is None else {"gate_BQ": jnp.full(TOKENS.shape, gate)}
    return jax.jit(lambda p: model.bind(config, {"params": p}).forward(None, jnp.asarray(TOKENS), positions, masks.causal, **extra)[0])(
        params
    )


@pytest.mark.parametrize("targets", [CONFIG.targets, "q,down"])
def test_merged_is_the_open_gate_everywhere(targets):
    config = dataclasses.replace(CONFIG, targets=targets)
    params = network(config)
    merged = peft.merge(config, params)
    opened, closed = logits(uno, config, params, True), logits(uno, config, params)
    np.testing.assert_allclose(logits(qwen3, peft.base(config), merged), opened, atol=2e-5)
    assert jnp.abs(opened - closed).max() > 0.1


def test_unmerge_undoes_merge():
    """Up to the rounding of one sum and one difference, in the kernels' type; what has no adapter keeps its bits."""
    for dtype, bound in (("float32", 2e-7), ("bfloat16", 2**-8)):
        params = network(dataclasses.replace(CONFIG, param_dtype=dtype))
        merged = peft.merge(CONFIG, params)
        back, there = named_leaves(peft.unmerge(CONFIG, merged, params["lora"])), named_leaves(params)
        assert back.keys() == there.keys()
        for name, array in there.items():
            assert back[name].dtype == array.dtype
            adapted = name.startswith("stack") and name.endswith("kernel")
            most = jnp.maximum(jnp.abs(array), jnp.abs(named_leaves(merged)[name])) if adapted else None
            if adapted:
                assert (jnp.abs(back[name] - array) <= 2 * bound * most).all(), name
                assert jnp.abs(named_leaves(merged)[name] - array).max() > 0.1
            else:
                np.testing.assert_array_equal(back[name], array)


@pytest.fixture
def folder(tmp_path):
    peft.save(tmp_path / "adapter", CONFIG, network(), "somebody/model")
    return tmp_path / "adapter"


def test_there_and_back(folder):
    config, arrays = peft.load(folder, FROZEN)
    assert config == CONFIG
    theirs = {name: leaf for name, leaf in named_leaves(network()).items() if name.startswith("lora")}
    assert arrays.keys() == theirs.keys()
    for name, leaf in theirs.items():
        np.testing.assert_array_equal(arrays[name], leaf)
        assert arrays[name].dtype == np.float32


def test_the_files(folder):
    """Names, shapes and keys are PEFT's (0.21.2 wrote such a folder to compare with); both texts say that no ungated use is Uno."""
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 7
    a, b = (tensors[f"base_model.model.model.layers.1.mlp.down_proj.lora_{side}.weight"] for side in "AB")
    assert (a.shape, b.shape) == ((3, 24), (16, 3))
    np.testing.assert_array_equal(a.T, network()["lora"]["stack"]["layers"]["down"]["a"][1])
    config = json.loads((folder / "adapter_config.json").read_text())
    expect = dict(r=3, lora_alpha=12, bias="none", task_type="CAUSAL_LM", peft_type="LORA", base_model_name_or_path="somebody/model")
    assert {key: config[key] for key in expect} == expect
    assert config["target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert "every row it is another model" in config["uno"]["note"]
    assert "every row it is another model" in (folder / "README.md").read_text()


def test_an_adapter_that_peft_wrote(folder):
    """Without our key the noise is the default, the block length is to be said; half-precision tensors and other orders are read."""
    config = json.loads((folder / "adapter_config.json").read_text())
    del config["uno"]
    config |= dict(target_modules=config["target_modules"][::-1], alpha_pattern={}, use_dora=False, lora_dropout=0.1, modules_to_save=None)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {name: array.astype(jnp.bfloat16) for name, array in load_file(folder / "adapter_model.safetensors").items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match="doesn't say how many noise rows were trained together; pass --block"):
        peft.load(folder, FROZEN)
    made, arrays = peft.load(folder, FROZEN, block=5)
    assert made == dataclasses.replace(CONFIG, block=5, noise_low=1, noise_high=0)
    np.testing.assert_allclose(arrays["lora/stack/layers/q/a"], network()["lora"]["stack"]["layers"]["q"]["a"], rtol=2**-8)


def edit(**keys):
    def change(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({key: value for key, value in (json.loads(path.read_text()) | keys).items() if value != "gone"}))

    return change


def tensors(change):
    def spoil(folder):
        found = load_file(folder / "adapter_model.safetensors")
        change(found)
        save_file(found, folder / "adapter_model.safetensors")

    return spoil


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


@pytest.mark.parametrize(
    "change, frozen, says",
    [
        (tensors(lambda t: t.pop(Q.format("B"))), {}, r"lacks the tensor base_model.*0.self_attn.q_proj.lora_B.weight, and adapter_config"),
        (tensors(lambda t: t.update(extra=t[Q.format("A")])), {}, "has the tensor extra, and adapter_config.json targets q,k,v"),
        (
            tensors(lambda t: t.update({Q.format("A"): t[Q.format("A")][:, :8]})),
            {},
            r"is \[3, 8\], and rank 3 on this base wants \[3, 16\]",
        ),
        (tensors(lambda t: t.update({Q.format("A"): t[Q.format("A")].astype(int)})), {}, "is of type I64; it can be F32, F16, BF16"),
        (edit(r=4), {}, r"is \[3, 24\], and rank 4 on this base wants \[4, 24\]"),
        (edit(r="three"), {}, "has r='three'; it wants a number"),
        (edit(r=0), {}, "model.rank is 0"),
        (edit(lora_alpha="gone"), {}, "has lora_alpha=None; it wants a number"),
        (edit(target_modules=["q_proj", "k_proj"]), {}, "has the tensor base_model.*down_proj.*targets q,k;"),
        (edit(target_modules=["q_proj", "lm_head"]), {}, "targets 'lm_head'; it can target q_proj, k_proj"),
        (edit(target_modules="all-linear"), {}, "has target_modules='all-linear'; it wants a list"),
        (edit(use_dora=True), {}, "has use_dora=True, which this adapter doesn't know; it wants none"),
        (edit(use_rslora=True), {}, "has use_rslora=True"),
        (edit(rank_pattern={"q_proj": 8}), {}, "has rank_pattern="),
        (edit(layers_to_transform=[0]), {}, "has layers_to_transform="),
        (edit(bias="all"), {}, "has bias='all', which this adapter doesn't know; it wants 'none'"),
        (edit(init_lora_weights="pissa"), {}, "has init_lora_weights='pissa'"),
        (edit(peft_type="IA3"), {}, "has peft_type='IA3'"),
        (edit(uno={"block": 3, "noise": "gaussian"}), {}, "noise must be 'uniform' or 'mask', not 'gaussian'"),
        (edit(uno={"block": 3, "gate": 1}), {}, "has 'gate' under `uno`"),
        (edit(uno={"block": 3, "noise_high": 41}), {}, "noise_low and noise_high are 1 and 41"),
        (lambda folder: None, dict(layers=3), "adapts 2 layers, and the base has 3; use the base that it was trained on"),
        (lambda folder: None, dict(layers=1), "adapts 2 layers, and the base has 1"),
        (lambda folder: None, dict(width=32), r"is \[16, 3\], and rank 3 on this base wants \[32, 3\]"),
        (lambda folder: None, dict(mask_id=3), "model.mask_id is 3; an adapter's frozen model is autoregressive"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), {}, "has no adapter_model.safetensors"),
        (lambda folder: (folder / "adapter_config.json").unlink(), {}, "cannot read"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), {}, "is no object of keys"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"12345678"), {}, "is damaged or unreadable"),
    ],
)
def test_bad_folders(change, frozen, says, folder):
    """One line that names the thing: https://github.com/vllm-project/vllm/pull/55947 needs row-gated adapters, and what doesn't fit must
    not load as if it did (Linen itself ignores it)."""
    change(folder)
    with pytest.raises(UserError, match=says) as e:
        peft.load(folder, dataclasses.replace(FROZEN, **frozen))
    assert "\n" not in str(e.value)


def test_block_said_twice(folder):
    assert peft.load(folder, FROZEN, block=3)[0] == CONFIG
    with pytest.raises(UserError, match="says that 3 noise rows were trained together, and --block 4; drop --block"):
        peft.load(folder, FROZEN, block=4)


def test_a_base_that_no_public_family_knows(tmp_path):
    config = dataclasses.replace(CONFIG, begins=True)
    with pytest.raises(UserError, match="begins its texts with an id of its own"):
        peft.save(tmp_path / "adapter", config, network(config), None)
    assert not (tmp_path / "adapter").exists()


THEIRS = """
import json, sys, warnings
import numpy as np, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
folder = sys.argv[1]
base = AutoModelForCausalLM.from_pretrained(f"{folder}/base", dtype=torch.float32, attn_implementation="eager")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model = PeftModel.from_pretrained(base, f"{folder}/adapter").eval()
tokens = torch.as_tensor(np.load(f"{folder}/tokens.npy"))
with torch.no_grad():
    np.save(f"{folder}/logits.npy", model(tokens).logits.numpy())
    with model.disable_adapter():
        np.save(f"{folder}/plain.npy", model(tokens).logits.numpy())
model.save_pretrained(f"{folder}/again")
print(json.dumps([str(w.message) for w in caught]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, dict(qk_norm=False, tied=True), dict(targets="v,up")], ids=["qwen3", "llama", "v,up"])
def test_peft_computes_the_same(changes, tmp_path):
    """PEFT loads what we write onto the base in transformers: its logits are ours with every gate open, and what it saves again is read
    as it was. No tensor is missing or left over, by its own account; of the key `uno` it warns."""
    python = os.environ.get("TRANSFORMERS_PYTHON")
    if not python:
        pytest.skip("set TRANSFORMERS_PYTHON to a python that has torch, transformers and peft (tests/models/make_golden.py)")
    if subprocess.run([python, "-c", "import peft"], capture_output=True, check=False).returncode:
        pytest.skip(f"{python} has no peft; pip install peft there")
    config = dataclasses.replace(CONFIG, **changes)
    params = network(config)
    peft.save(tmp_path / "adapter", config, params, str(tmp_path / "base"))
    hf.save(tmp_path / "base", peft.base(config), {name: x for name, x in named_leaves(params).items() if not name.startswith("lora")})
    np.save(tmp_path / "tokens.npy", TOKENS)
    done = subprocess.run([python, "-c", THEIRS, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (warned,) = json.loads(done.stdout.splitlines()[-1])
    assert "['uno']" in warned
    opened, plain = np.load(tmp_path / "logits.npy"), np.load(tmp_path / "plain.npy")
    np.testing.assert_allclose(logits(uno, config, params, True), opened, atol=1e-5, rtol=0)
    np.testing.assert_allclose(logits(uno, config, params), plain, atol=1e-5, rtol=0)
    assert np.abs(opened - plain).max() > 0.1
    made, arrays = peft.load(tmp_path / "again", peft.base(config), block=3)
    assert (made.rank, made.alpha, made.targets) == (config.rank, config.alpha, config.targets)
    assert all(np.array_equal(array, named_leaves(params)[name]) for name, array in arrays.items())

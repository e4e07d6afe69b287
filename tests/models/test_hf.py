"""Conversion: against what `transformers` computes (make_golden.py), there and back, and everything that a checkpoint can have wrong."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dllm.core.paths import map_named, named_leaves
from dllm.core.types import UserError
from dllm.data import tokenizers
from dllm.models import esm2, gpt2, hf, public, qwen3, sources
from dllm.ops import masks

HERE = Path(__file__).parent
BLOCK, VOCAB = 4, 40


def golden(name):
    with np.load(HERE / "golden" / f"{name}.npz") as file:
        return {key: file[key] for key in file.files}


@pytest.fixture
def checkpoint(tmp_path):
    """Writes a golden model as the folder of a checkpoint; `change(tensors, config)` may spoil it first."""

    def write(name="qwen3", change=lambda tensors, config: None, folder="hf"):
        arrays, folder = golden(name), tmp_path / folder
        folder.mkdir(exist_ok=True)
        tensors = {key.removeprefix("weight/"): value for key, value in arrays.items() if key.startswith("weight/")}
        config = json.loads(str(arrays["config"]))
        change(tensors, config)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


def tree(config, arrays):
    like = jax.eval_shape(lambda: hf.LAYOUTS[type(config)].model.init(config, jax.random.key(0))["params"])
    return {"params": map_named(lambda name, leaf: jnp.asarray(arrays[name]), like)}


def convert(folder, model, block=0):
    """Returns (config, arrays) of the model made of a checkpoint."""
    source = sources.open_source(folder)
    own, made = hf.target(model, source, block)
    hf.check_tokenizer(source, made)
    arrays = hf.empty(made)
    hf.load(source, own, made, arrays)
    return made, arrays


def assert_near(ours, theirs, tokens):
    """ESM-2's `text` says nothing of padding's own rows."""
    for kind, array in ours.items():
        array = np.where((tokens == 1)[:, :, None], theirs[kind], array) if kind == "text" else array
        np.testing.assert_allclose(array, theirs[kind], rtol=0, atol=1e-5, err_msg=kind)


def logits(config, variables, tokens, mask, chunk=0):
    """Returns logits of one pass, or of passes over `chunk` rows each, through the cache."""
    (B, L), module = tokens.shape, qwen3.build(config)
    forward = jax.jit(lambda cache, tokens, positions: module.apply(variables, cache, tokens, positions, mask))
    at = jnp.broadcast_to(jnp.arange(L, dtype=jnp.int32)[None], (B, L))
    if not chunk:
        return forward(None, tokens, at)[0]
    cache, parts = qwen3.bind(config, variables).empty_cache(B, L), []
    for n in range(0, L, chunk):
        part, cache = forward(cache, tokens[:, n : n + chunk], at[:, n : n + chunk])
        cache = cache.replace(lengths_B=cache.lengths_B + chunk)
        parts.append(part)
    return jnp.concatenate(parts, 1)


def all_logits(config, arrays, tokens):
    variables, block = tree(config, arrays), masks.BlockCausal(BLOCK)
    at = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    if isinstance(config, gpt2.Config):
        return {"causal": jax.jit(lambda x: gpt2.bind(config, variables).forward(None, x, at, masks.causal)[0])(tokens)}
    if isinstance(config, esm2.Config):  # in sequence order, all revealed: what each token's row predicts; nothing of padding's own rows
        full = dataclasses.replace(config, pad_id=31)  # an id that isn't there: then all tokens are read
        drafts = lambda config, x: esm2.bind(config, variables).both(x, at, jnp.full((len(x),), x.shape[1]))[0]
        drafts = jax.jit(drafts, static_argnums=0)
        return {"full": drafts(full, tokens), "text": drafts(config, tokens)}
    return {
        "causal": logits(config, variables, tokens, masks.causal),
        "block": logits(config, variables, tokens, block),
        "causal_cached": logits(config, variables, tokens, masks.causal, 3),
        "block_cached": logits(config, variables, tokens, block, BLOCK),
    }


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "llama"])
def test_logits_are_those_of_transformers(name, checkpoint):
    """Full and cached, causal and block-causal. Position i's logits score token i or i + 1 as the caller has it: there is no shift in the
    decoder (https://github.com/JetAstra/SDAR/issues/22), and weights that weren't loaded can't pass
    (https://github.com/kuleshov-group/bd3lms/issues/31)."""
    file = golden(name)
    assert_near(all_logits(*convert(checkpoint(name), name.partition("_")[0]), file["tokens"]), file, file["tokens"])
    assert np.abs(file["causal"] - file["block"]).max() > 1  # so that the masks are told apart


@pytest.mark.parametrize("name", ["gpt2", "esm2"])
def test_logits_of_gpt2_and_esm2_are_those_of_transformers(name, checkpoint):
    """ESM-2: two MASK tokens and padding that is read, or isn't."""
    file = golden(name)
    assert_near(all_logits(*convert(checkpoint(name), name), file["tokens"]), file, file["tokens"])
    assert name == "gpt2" or np.abs(file["full"] - file["text"])[1, :8].max() > 0.1


@pytest.mark.parametrize("name", ["gpt2", "esm2"])
def test_what_public_files_hold_besides(name, checkpoint):
    """GPT-2's were saved without a head, and so without a prefix; buffers are no weights; a tied head may be there, but not another one."""
    head, embedding = {"gpt2": ("lm_head", "transformer.wte"), "esm2": ("lm_head.decoder", "esm.embeddings.word_embeddings")}[name]

    def add(tensors, config, by=0):
        tensors[f"{head}.weight"] = tensors[f"{embedding}.weight"] + np.float32(by)
        if name == "gpt2":
            for key in [key for key in tensors if key.startswith("transformer.")]:
                tensors[key.removeprefix("transformer.")] = tensors.pop(key)
            tensors |= {"h.0.attn.bias": np.ones((1, 1, 4, 4), np.uint8), "h.0.attn.masked_bias": np.float32([-1e4])}
        else:
            inside = "esm.encoder.layer.0.attention.self.rotary_embeddings.inv_freq"
            tensors |= {inside: np.ones(2, np.float32), "esm.embeddings.position_ids": np.zeros((1, 66), np.int64)}
            tensors |= {"esm.contact_head.regression.weight": np.ones((1, 8), np.float32)}
        return tensors

    plain, more = convert(checkpoint(name), name), convert(checkpoint(name, add), name)
    assert plain[0] == more[0]
    assert all(more[1][key].tobytes() == array.tobytes() for key, array in plain[1].items())
    with pytest.raises(UserError, match=f"the tensor {head}.weight of .* isn't its embedding, and this model ties them"):
        convert(checkpoint(name, lambda t, c: add(t, c, 1)), name)


@pytest.mark.parametrize(
    "name, model, change, says",
    [
        ("gpt2", "gpt2", lambda t, c: c.update(activation_function="relu"), "has activation_function='relu', which this decoder doesn't"),
        ("gpt2", "gpt2", lambda t, c: t.pop("transformer.h.1.attn.c_attn.bias"), "lacks the tensor transformer.h.1.attn.c_attn.bias"),
        ("gpt2", "gpt2", lambda t, c: c.pop("n_embd"), "config lacks n_embd; restore"),
        ("gpt2", "gpt2", lambda t, c: c.update(n_positions=60), r"transformer.wpe.weight of \S+ is \[64, 16\], and its config wants \[60"),
        ("gpt2", "gpt2-medium", lambda t, c: None, "the checkpoint has vocab=40, and gpt2-medium vocab=50257"),
        ("gpt2", "esm2", lambda t, c: None, "is of model_type 'gpt2', from which no esm2 is made; pass --model=gpt2"),
        ("esm2", "esm2", lambda t, c: c.update(position_embedding_type="absolute"), "has position_embedding_type='absolute'"),
        ("esm2", "esm2", lambda t, c: c.update(emb_layer_norm_before=True), "has emb_layer_norm_before=True"),
        ("esm2", "dplm-150m", lambda t, c: None, "the checkpoint has width=16, and dplm-150m width=640"),
        ("esm2", "esm2", lambda t, c: t.update(extra=np.zeros(1, np.float32)), "holds the tensor extra, which this model has no use for"),
    ],
)
def test_a_gpt2_or_esm2_that_is_another(name, model, change, says, checkpoint):
    with pytest.raises(UserError, match=says):
        convert(checkpoint(name, change), model)


def test_blocks_and_tails_are_no_part_of_them(checkpoint):
    for name in ("gpt2", "esm2"):
        with pytest.raises(UserError, match=f"--block is for sdar, llama and stories; a {name} has no blocks"):
            convert(checkpoint(name), name, block=4)
    with pytest.raises(UserError, match="the format of ESM-2 has no causal layers; convert the workdir that the backbone was taken from"):
        hf.to_hf(esm2.Config(n_causal=1))
    with pytest.raises(UserError, match=r"model.theta is 500.0, and the format of ESM-2 has 10000 only"):
        hf.to_hf(esm2.Config(theta=500.0))


def test_gpt2s_tokenizer_learns_what_ends_a_text(checkpoint):
    folder = checkpoint("gpt2", lambda t, c: c.update(bos_token_id=2, eos_token_id=2))
    (folder / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "<|endoftext|>": 2, "ab": 3}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    files = hf.tokenizer(sources.open_source(folder))
    for name, data in files.items():
        (folder / name).write_bytes(data)
    tokenizer = tokenizers.read(folder)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.begins) == (2, 2, False)
    assert tokenizer.encode("ab<|endoftext|>a") == [3, 2, 0]
    assert hf.tokenizer(sources.open_source(checkpoint("gpt2", folder="without"))) == {}


@pytest.mark.parametrize("shard", [hf.SHARD, 4000])
@pytest.mark.parametrize(
    "name, dtype",
    [
        ("qwen3", "float32"),
        ("qwen3_moe", "float32"),
        ("llama", "float32"),
        ("qwen3", "bfloat16"),
        ("gpt2", "float32"),
        ("esm2", "float32"),
    ],
)
def test_there_and_back_bit_for_bit(name, dtype, shard, checkpoint, tmp_path):
    def cast(tensors, config):
        for key in tensors:
            tensors[key] = tensors[key].astype(dtype)

    folder = checkpoint(name, cast)
    config, arrays = convert(folder, name.partition("_")[0])
    assert getattr(config, "param_dtype", "float32") == dtype
    files = hf.save(tmp_path / "back", config, named_leaves(tree(config, arrays)["params"]), shard)
    assert len(files) == (2 if shard == hf.SHARD else len(list((tmp_path / "back").glob("*.safetensors"))) + 2)
    assert shard == hf.SHARD or len(files) > 5
    there, back = load_file(folder / "model.safetensors"), {}
    there.pop("esm.contact_head.regression.weight", None), there.pop("esm.contact_head.regression.bias", None)
    for file in files:
        back |= load_file(file) if file.suffix == ".safetensors" else {}
    assert there.keys() == back.keys()
    for key, array in there.items():
        if key.endswith("inv_freq"):  # no weight: reckoned anew
            np.testing.assert_allclose(back[key], array, rtol=1e-6)
            continue
        assert (back[key].dtype, back[key].shape, back[key].tobytes()) == (array.dtype, array.shape, array.tobytes())
    again, arrays_again = convert(tmp_path / "back", name.partition("_")[0])
    assert again == config
    assert all(arrays_again[key].tobytes() == array.tobytes() for key, array in arrays.items())


def test_qwen3_becomes_sdar(checkpoint):
    """The tied head is copied out, mask id and block are set; the network computes what it did."""
    masked = lambda tensors, config: config.update(mask_token_id=39)
    own, arrays = convert(checkpoint("qwen3_tied"), "qwen3")
    config, made = convert(checkpoint("qwen3_tied", masked), "sdar", block=8)
    assert own.tied
    assert (config.tied, config.block, config.mask_id, config.norm) == (False, 8, 39, "fused")
    np.testing.assert_array_equal(made["head/kernel"], arrays["embed/embedding"].T)
    assert {name: array.tobytes() for name, array in made.items() if name != "head/kernel"} == {n: a.tobytes() for n, a in arrays.items()}
    file = golden("qwen3_tied")
    np.testing.assert_allclose(logits(config, tree(config, made), file["tokens"], masks.causal), file["causal"], rtol=0, atol=1e-5)


def test_llama_grows_a_mask(checkpoint):
    config, arrays = convert(checkpoint("llama"), "llama", block=4)
    assert (config.vocab, config.mask_id, config.block, config.tied) == (VOCAB + 1, VOCAB, 4, False)
    embedding = arrays["embed/embedding"]
    np.testing.assert_allclose(embedding[VOCAB], embedding[:VOCAB].mean(0), rtol=1e-6)
    np.testing.assert_array_equal(arrays["head/kernel"], embedding.T)
    file = golden("llama")
    grown = logits(config, tree(config, arrays), file["tokens"], masks.causal)
    np.testing.assert_allclose(grown[..., :VOCAB], file["causal"], rtol=0, atol=1e-5)


def test_no_second_copy_in_memory(tmp_path):
    """Peak memory of reading into given arrays, and of writing, against the model's size. numpy and the library report to tracemalloc."""
    config = dataclasses.replace(public.MODELS["sdar-1.7b"], vocab=600, mask_id=7, width=64, mlp=128, layers=32, heads=2, kv_heads=1)
    config = dataclasses.replace(config, head_width=32, dtype="float32", param_dtype="float32")
    arrays = {name: np.full(like.shape, 0.5, like.dtype) for name, like in hf.abstract(config).items()}
    size, largest = sum(a.nbytes for a in arrays.values()), 600 * 64 * 4
    tracemalloc.start()
    hf.save(tmp_path, config, arrays, shard=300_000)
    written = tracemalloc.get_traced_memory()[1]
    source = sources.open_source(tmp_path)
    own, made = hf.target("sdar", source, 0)
    for array in arrays.values():
        array.fill(0)
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    hf.load(source, own, made, arrays)
    read = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert size > 4_000_000
    assert written < 300_000 + 2 * largest + 500_000
    assert read < 2 * largest + 500_000
    assert all((array == 0.5).all() for array in arrays.values())


def spoil(name):
    """Returns a change of tensors and config for `checkpoint`."""
    first, wide = "model.layers.1.self_attn.k_proj.weight", "model.layers.1.mlp.up_proj.weight"
    return {
        "missing": lambda t, c: t.pop(first),
        "unused": lambda t, c: t.update({"model.layers.1.self_attn.k_proj.bias": np.zeros(16, np.float32)}),
        "layer": lambda t, c: c.update(num_hidden_layers=1),
        "shape": lambda t, c: t.update({wide: t[wide].T.copy()}),
        "vocabulary": lambda t, c: c.update(vocab_size=39),
        "no head": lambda t, c: t.pop("lm_head.weight"),
        "integers": lambda t, c: t.update({first: t[first].astype(np.int32)}),
        "kind": lambda t, c: c.update(model_type="mamba"),
        "scaling": lambda t, c: c.update(rope_scaling={"type": "yarn", "factor": 4.0}),
        "rope": lambda t, c: c.update(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}),
        "bias": lambda t, c: c.update(attention_bias=True),
        "key": lambda t, c: c.pop("hidden_size"),
        "theta": lambda t, c: c.pop("rope_theta"),
    }[name]


@pytest.mark.parametrize(
    "what, says",
    [
        ("missing", "lacks the tensor model.layers.1.self_attn.k_proj.weight; download"),
        ("unused", r"holds the tensor model.layers.1.self_attn.k_proj.bias, which this model has no use for"),
        ("layer", r"holds the tensor model.layers.1.\S+, which this model has no use for"),
        ("shape", r"the tensor model.layers.1.mlp.up_proj.weight of \S+ is \[16, 24\], and its config wants \[24, 16\]"),
        ("vocabulary", r"the tensor model.embed_tokens.weight of \S+ is \[40, 16\], and its config wants \[39, 16\]; use the config.json"),
        ("no head", "lacks the tensor lm_head.weight; set tie_word_embeddings if its head is the embedding"),
        ("integers", "k_proj.weight is of type I32; it can be F32, F16, BF16"),
        ("kind", "is of model_type 'mamba'; this decoder is esm, gpt2, llama, qwen3, qwen3_moe, sdar, sdar_moe"),
        ("scaling", "has rope_scaling=.*, which this decoder doesn't know; it wants None"),
        ("rope", "has rope_type='yarn'"),
        ("bias", "has attention_bias=True, which this decoder doesn't know; it wants False"),
        ("key", "config lacks hidden_size; restore"),
        ("theta", "config lacks rope_theta; restore"),
    ],
)
def test_a_spoilt_checkpoint_is_named(what, says, checkpoint):
    """https://github.com/kuleshov-group/bd3lms/issues/31, /29, /37, /41: garbled samples were weights that had not been loaded."""
    with pytest.raises(UserError, match=says):
        convert(checkpoint("qwen3", spoil(what)), "qwen3")


def test_router_must_be_normalised(checkpoint):
    with pytest.raises(UserError, match="has norm_topk_prob=False"):
        convert(checkpoint("qwen3_moe", lambda t, c: c.update(norm_topk_prob=False)), "qwen3")


@pytest.mark.parametrize(
    "name, model, block, says",
    [
        ("llama", "qwen3", 0, "is of model_type 'llama', from which no qwen3 is made"),
        ("qwen3", "qwen3", 4, "a Qwen3 checkpoint is read by blocks as --model=sdar"),
        ("qwen3", "sdar", 0, "nothing says the block length; pass --block"),
        ("qwen3", "sdar-4b-b8", 4, "--block says 4 and --model=sdar-4b-b8 says 8; pass --block"),
        ("qwen3", "sdar", 4, "model.mask_id is 151669; make it an id below model.vocab = 40"),
        ("qwen3", "qwen3-4b", 0, "the checkpoint has vocab=40, and qwen3-4b vocab=151936"),
        ("llama", "llama", 65, "model.block is 65; make it 1 to model.length = 64"),
        ("llama", "llama", -1, "model.block is -1; make it 1 to model.length = 64"),
    ],
)
def test_a_model_that_the_checkpoint_is_not(name, model, block, says, checkpoint):
    with pytest.raises(UserError, match=says):
        convert(checkpoint(name), model, block)


MASKED = dict(mask_token_id=39, block_size=4)


@pytest.mark.parametrize(
    "file, content, says",
    [
        ("added_tokens.json", {"<MASK>": 38}, "added_tokens.json of .* has '<MASK>' as id 38, and the model's mask id is 39; use the tok"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"38": {"content": "<|MASK|>"}}},
            "'<|MASK|>' as id 38, and the model's mask id",
        ),
        ("added_tokens.json", {"</think>": 39}, "has '</think>' as id 39, which is the model's mask id"),
        ("vocab.json", {"a": 40}, "vocab.json of .* has 'a' as id 40, and the model's vocabulary is 40; use the tokenizer"),
        ("tokenizer.json", {"added_tokens": [{"content": "<MASK>", "id": 3}], "model": {"vocab": {}}}, "tokenizer.json of .* as id 3, and"),
        ("tokenizer.json", [], "tokenizer.json of .* is not a tokenizer's"),
    ],
)
def test_tokenizer_model_and_config_must_agree(file, content, says, checkpoint):
    """https://github.com/hxhcreate/DARE/issues/13: the mask id is read once, and tokenizer, model and config agree about it."""
    folder = checkpoint("qwen3", lambda t, c: c.update(MASKED))
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(UserError, match=says):
        convert(folder, "sdar")


def test_agreeing_ones_pass_and_disagreeing_configs_do_not(checkpoint):
    """https://github.com/hxhcreate/DARE/issues/13. MASK has two spellings, and a Qwen3 tokenizer doesn't know it."""
    folder = checkpoint("qwen3", lambda t, c: c.update(MASKED))
    (folder / "added_tokens.json").write_text(json.dumps({"<MASK>": 39, "</think>": 38}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"39": {"content": "<|MASK|>"}}}))
    assert convert(folder, "sdar")[0].mask_id == 39
    with pytest.raises(UserError, match=r"--block says 8 and config.json's block_size says 4"):
        convert(folder, "sdar", 8)
    config = hf.to_hf(public.MODELS["sdar-4b"])
    source = sources.Source("here", config | {"mask_token_id": 151668}, {}, lambda: iter(()), {})
    with pytest.raises(UserError, match="the checkpoint has mask_id=151668, and sdar-4b mask_id=151669"):
        hf.target("sdar", source, 0)


ROWS = ["sdar-4b", "sdar-30b-a3b-b32", "qwen3-1.7b", "qwen3-30b-a3b", "smollm2-135m", "stories260k", "gpt2-xl", "dplm-150m"]


@pytest.mark.parametrize("name", ROWS)
def test_config_json_there_and_back(name):
    row = public.MODELS[name]
    found, types = hf.from_hf(hf.to_hf(row), "here"), ("dtype", "param_dtype")
    assert dataclasses.replace(found, **{key: getattr(row, key) for key in types if hasattr(row, key)}) == row


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, model, block",
    [
        ("qwen3", "qwen3", 0),
        ("qwen3_tied", "sdar", 4),
        ("qwen3_moe", "qwen3", 0),
        ("llama", "llama", 4),
        ("gpt2", "gpt2", 0),
        ("esm2", "esm2", 0),
    ],
)
def test_a_saved_model_loads_in_transformers(name, model, block, checkpoint, tmp_path):
    """No key missing or unexpected, and the same logits, by another environment: see make_golden.py."""
    python = os.environ.get("TRANSFORMERS_PYTHON")
    if not python:
        pytest.skip("set TRANSFORMERS_PYTHON to a python that has torch and transformers (tests/models/make_golden.py)")
    config, arrays = convert(checkpoint(name, lambda t, c: c.update(MASKED) if model == "sdar" else None), model, block)
    hf.save(tmp_path / "ours", config, arrays, shard=8000)
    done = subprocess.run([python, HERE / "make_golden.py", f"--check={tmp_path / 'ours'}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["bad"] == {}
    with np.load(tmp_path / "ours" / "logits.npz") as theirs:
        assert_near(all_logits(config, arrays, theirs["tokens"]), theirs, theirs["tokens"])

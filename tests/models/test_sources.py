"""Readers of checkpoints: stories260K's known story, damaged folders and files, GGUF against safetensors."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dllm.core.types import UserError
from dllm.data import tokenizers
from dllm.models import hf, public, qwen3, sources
from dllm.ops import masks
from tests.models.test_hf import convert, tree

STORIES = Path(__file__).parents[3] / "shared" / "data" / "stories260K"
QWEN = Path(__file__).parents[3] / "shared" / "data" / "tokenizers" / "qwen3"
STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, r"

needs_stories = pytest.mark.skipif(not STORIES.is_dir(), reason="stories260K isn't here")


@needs_stories
@pytest.mark.parametrize("block", [0, 4])
def test_stories260k_tells_its_story(block):
    """The first 40 greedy tokens after BOS; the grown model, read causally and without MASK, tells the same."""
    config, arrays = convert(STORIES, "stories260k", block)
    assert (config.vocab, config.mask_id, config.tied) == ((513, 512, False) if block else (512, -1, True))
    variables = tree(config, arrays)

    @jax.jit
    def write(n, tokens_BL):
        positions_BL = jnp.arange(41, dtype=jnp.int32)[None]
        logits = qwen3.bind(config, variables).forward(None, tokens_BL, positions_BL, masks.causal)[0]
        return tokens_BL.at[0, n + 1].set(logits[0, n, :512].argmax())

    tokens_BL = jax.lax.fori_loop(0, 40, write, jnp.ones((1, 41), jnp.int32))
    assert tokenizers.read(STORIES).decode(tokens_BL[0].tolist()) == STORY


def write_llama2c(path, config, vocab_sign=1, cut=None):
    """Writes a random model in llama2.c's first format, rotary pairs interleaved; returns the arrays that it should be read as."""
    N, D, F, K, V, L = config.layers, config.width, config.mlp, config.head_width, config.vocab, config.length
    rng, kv = np.random.default_rng(0), config.kv_heads * config.head_width
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    arrays = [normal(V, D), normal(N, D), normal(N, D, D), normal(N, kv, D), normal(N, kv, D), normal(N, D, D), normal(N, D)]
    arrays += [normal(N, F, D), normal(N, D, F), normal(N, F, D), normal(D), normal(2, L, K // 2), normal(V, D)]
    arrays = arrays if vocab_sign < 0 else arrays[:-1]
    header = struct.pack("<7i", D, F, N, config.heads, config.kv_heads, vocab_sign * V, L)
    path.write_bytes((header + b"".join(a.tobytes() for a in arrays))[:cut])
    return arrays


TINY = dataclasses.replace(public.MODELS["stories260k"], vocab=11, length=6, width=16, layers=2, heads=4, kv_heads=2, head_width=4, mlp=5)


@pytest.mark.parametrize("sign", [1, -1])
def test_llama2c_order_and_rotary(sign, tmp_path):
    written = write_llama2c(tmp_path / "stories.bin", TINY, sign)
    config, arrays = convert(tmp_path, "stories")
    assert config == dataclasses.replace(TINY, tied=sign > 0)
    np.testing.assert_array_equal(arrays["stack/layers/down/kernel"][1], written[8][1].T)
    np.testing.assert_array_equal(arrays["stack/layers/up/kernel"][0], written[9][0].T)
    for head in range(2):
        np.testing.assert_array_equal(
            arrays["stack/layers/k/kernel"][1][:, 4 * head : 4 * head + 4].T, written[3][1][[0, 2, 1, 3] + np.array(4 * head)]
        )
    if sign < 0:
        np.testing.assert_array_equal(arrays["head/kernel"], written[-1].T)


def test_llama2c_damaged(tmp_path):
    write_llama2c(tmp_path / "stories.bin", TINY, cut=-4)
    with pytest.raises(UserError, match=r"stories.bin has \d+ bytes, and by its header should have \d+; download it again"):
        sources.open_source(tmp_path)
    (tmp_path / "stories.bin").write_bytes(b"GARBAGE!" * 99)
    with pytest.raises(UserError, match=r"is not a file of llama2.c's: its header is"):
        sources.open_source(tmp_path)
    (tmp_path / "stories.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"is not a file of llama2.c's"):
        sources.open_source(tmp_path / "stories.bin")


def test_llama2c_tokenizer_of_another_model(tmp_path):
    write_llama2c(tmp_path / "stories.bin", TINY)
    token = lambda text: struct.pack("<fi", 0.0, len(text)) + text
    (tmp_path / "tok.bin").write_bytes(struct.pack("<i", 3) + token(b"abc") * 12)
    with pytest.raises(UserError, match=r"tok.bin of .* has 'its last token' as id 11, and the model's vocabulary is 11; use the tok"):
        convert(tmp_path, "stories")
    (tmp_path / "tok.bin").write_bytes(struct.pack("<i", 3) + token(b"abc") * 10 + token(b"abc")[:-1])
    with pytest.raises(UserError, match=r"tok.bin of .* is not a tokenizer's .*cut off"):
        convert(tmp_path, "stories")


@pytest.fixture
def folder(tmp_path):
    """A sharded checkpoint."""
    rng = np.random.default_rng(0)
    config = dataclasses.replace(TINY, qk_norm=True, theta=1e6, eps=1e-6)
    arrays = {name: rng.normal(size=like.shape).astype(np.float32) for name, like in hf.abstract(config).items()}
    hf.save(tmp_path / "hf", config, arrays, shard=2000)
    return tmp_path / "hf"


def test_truncated_safetensors(folder):
    file = sorted(folder.glob("*.safetensors"))[1]
    for size in (-1, 40, 3, 0):
        data = file.read_bytes()
        file.write_bytes(data[:size])
        with pytest.raises(UserError, match=r"model-00002-of-\d+.safetensors is damaged or unreadable \(.*\); download it again"):
            convert(folder, "qwen3")
        file.write_bytes(data)
    convert(folder, "qwen3")


def test_index_and_files_must_agree(folder):
    index, file = json.loads((folder / sources.INDEX).read_text()), sorted(folder.glob("*.safetensors"))[1]
    tensors = load_file(file)
    first = next(iter(tensors))
    save_file({name: tensors[name] for name in tensors if name != first}, file)
    with pytest.raises(UserError, match=f"{file.name} lacks the tensor {first}, which model.safetensors.index.json says"):
        convert(folder, "qwen3")
    save_file(tensors | {"model.norm.weight": np.zeros(16, np.float32)}, file)
    with pytest.raises(UserError, match=r"both hold model.norm.weight; remove the file"):
        convert(folder, "qwen3")
    file.unlink()
    with pytest.raises(UserError, match=f"{file.name} is damaged or unreadable"):
        convert(folder, "qwen3")
    (folder / sources.INDEX).write_text("[]")
    with pytest.raises(UserError, match=r"index.json has no weight_map"):
        convert(folder, "qwen3")
    (folder / sources.INDEX).write_text(json.dumps(index)[:-9])
    with pytest.raises(UserError, match=r"index.json is not JSON"):
        convert(folder, "qwen3")


def test_files_without_an_index(folder):
    before = convert(folder, "qwen3")
    (folder / sources.INDEX).unlink()
    after = convert(folder, "qwen3")
    assert before[0] == after[0]
    assert all(array.tobytes() == after[1][name].tobytes() for name, array in before[1].items())


def test_nothing_to_read(folder, tmp_path):
    with pytest.raises(UserError, match=r"cannot read --src=.*nowhere: there is no such file or folder"):
        sources.open_source(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"has no config.json beside safetensors, nor one stories"):
        sources.open_source(tmp_path)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(UserError, match="hf holds no safetensors; pass the folder of a checkpoint"):
        sources.open_source(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(UserError, match=r"config.json is no object of keys; restore it"):
        sources.open_source(folder)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_gguf_holds_what_safetensors_hold(kind, tmp_path):
    import gguf

    config = dataclasses.replace(TINY, qk_norm=kind == "qwen3", tied=False)
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=like.shape).astype(np.float32) for name, like in hf.abstract(config).items()}
    hf.save(tmp_path / "hf", config, arrays)
    named = load_file(tmp_path / "hf" / "model.safetensors")
    theirs = {ours.format(n=n): name.format(n=n) for name, ours in sources.GGUF.items() for n in range(config.layers)}
    out = gguf.GGUFWriter(tmp_path / "model.gguf", kind)
    out.add_block_count(config.layers)
    out.add_context_length(config.length)
    out.add_embedding_length(config.width)
    out.add_feed_forward_length(config.mlp)
    out.add_head_count(config.heads)
    out.add_head_count_kv(config.kv_heads)
    out.add_layer_norm_rms_eps(config.eps)
    out.add_rope_freq_base(config.theta)
    out.add_tokenizer_model("gpt2")
    out.add_token_list(["a", "b", "ab", "<MASK>"])
    out.add_token_types([1, 1, 1, 3])
    out.add_token_merges(["a b"])
    for name, array in named.items():
        if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            array = array.reshape(-1, 2, 2, config.width).swapaxes(1, 2).reshape(array.shape)  # as llama.cpp's converter does
        out.add_tensor(theirs[name], array)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()

    source = sources.open_source(tmp_path / "model.gguf")
    own, made = hf.target(kind, source, 0)
    assert made == config
    read = hf.empty(made)
    hf.load(source, own, made, read)
    assert all(read[name].tobytes() == array.tobytes() for name, array in arrays.items())
    hf.check_tokenizer(source, made)
    assert json.loads(source.tokenizer["vocab.json"]) == {"a": 0, "b": 1, "ab": 2, "<MASK>": 3}
    with pytest.raises(UserError, match="'<MASK>' as id 3, and the model's mask id is 11"):
        hf.check_tokenizer(source, dataclasses.replace(made, vocab=12, mask_id=11))
    (tmp_path / "model.gguf").write_bytes((tmp_path / "model.gguf").read_bytes()[:200])
    with pytest.raises(UserError, match=r"model.gguf is damaged or no GGUF file"):
        sources.open_source(tmp_path / "model.gguf")


@pytest.mark.skipif(not QWEN.is_dir(), reason="SDAR's tokenizer isn't here")
def test_the_published_tokenizer_agrees_with_the_table():
    """https://github.com/hxhcreate/DARE/issues/13: id 151669 in every file that has it, however it is spelt."""
    files = {name: (QWEN / name).read_bytes() for name in ("added_tokens.json", "tokenizer_config.json")}
    source, config = sources.Source("here", {}, {}, lambda: iter(()), files), public.MODELS["sdar-4b"]
    hf.check_tokenizer(source, config)
    with pytest.raises(UserError, match="has '<MASK>' as id 151669, and the model's mask id is 151670"):
        hf.check_tokenizer(source, dataclasses.replace(config, mask_id=151670))
    found = {token for file in files for token, number in hf._tokens(source, file) if number == public.MASK_ID}
    assert found == set(public.MASK_SPELLINGS)

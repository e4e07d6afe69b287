"""Checkpoints as files: what they hold, under Hugging Face's names, and how it is read, tensor by tensor.

Safetensors folders, llama2.c's files, GGUF. All come out as if they were the first: rotary pairs of channels (j, j + K / 2), a config.json.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from dllm.core.config import read_json
from dllm.core.types import UserError

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16)}
INDEX = "model.safetensors.index.json"
TOKENIZER = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TOKENIZER += ("chat_template.jinja", "generation_config.json", "vocab.txt")

# By model_type: tensors that files hold beside the weights (masks, tables of angles, a head that predicts contacts), and what names lack
# in those that were saved without a head.
UNUSED = {
    "gpt2": r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",
    "esm": r".*(position_ids|position_embeddings\.weight|inv_freq)|esm\.contact_head\..*",
}
PREFIX = {"gpt2": "transformer."}


class Header(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint: its config.json, the headers of its tensors, and `read`, which yields (name, array), file by file."""

    where: str
    config: dict[str, Any]
    headers: dict[str, Header]
    read: Callable[[], Iterator[tuple[str, np.ndarray]]]
    tokenizer: dict[str, bytes]  # its tokenizer's files


def open_source(src: str | Path) -> Source:
    """Returns the checkpoint at `src`: a folder of safetensors and config.json; a GGUF file; llama2.c's stories*.bin, or its folder."""
    src = Path(src)
    if not src.exists():
        raise UserError(f"cannot read --src={src}: there is no such file or folder")
    if src.is_file():
        return gguf(src) if src.suffix == ".gguf" else llama2c(src)
    if (src / "config.json").is_file():
        return safetensors(src)
    if len(stories := sorted(src.glob("stories*.bin"))) == 1:
        return llama2c(stories[0])
    raise UserError(f"{src} has no config.json beside safetensors, nor one stories*.bin; pass the folder of a checkpoint")


def safetensors(folder: Path) -> Source:
    """Returns the checkpoint of a folder: the files that its index names, or without one all *.safetensors."""
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise UserError(f"{folder / 'config.json'} is no object of keys; restore it")
    index = None
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        index = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise UserError(f"{folder / INDEX} has no weight_map; download it again")
    files = sorted({folder / name for name in index.values()} if index else folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} holds no safetensors; pass the folder of a checkpoint")
    headers, at = {}, {}
    unused, prefix = re.compile(UNUSED.get(config.get("model_type"), "$.")), PREFIX.get(config.get("model_type"), "")
    whole = lambda name: name if name.startswith((prefix, "lm_head")) else prefix + name
    for file in files:
        with opened(file) as f:
            for name in f.keys():  # noqa: SIM118 (f is no dict)
                part = f.get_slice(name)
                if name in at:
                    raise UserError(f"{file} and {at[name]} both hold {name}; remove the file that doesn't belong to the checkpoint")
                at[name] = file
                if unused.fullmatch(name):
                    continue
                if part.get_dtype() not in DTYPES:
                    raise UserError(f"{file}: {name} is of type {part.get_dtype()}; it can be {', '.join(DTYPES)}")
                headers[whole(name)] = Header(tuple(part.get_shape()), DTYPES[part.get_dtype()])
    for name in index or ():
        if at.get(name) != folder / index[name]:
            raise UserError(f"{folder / index[name]} lacks the tensor {name}, which {INDEX} says it has; download the checkpoint again")

    def read() -> Iterator[tuple[str, np.ndarray]]:
        for file in files:
            with opened(file) as f:
                for name in f.keys():  # noqa: SIM118
                    if not unused.fullmatch(name):
                        yield whole(name), f.get_tensor(name)

    tokenizer = [folder / name for name in TOKENIZER if (folder / name).is_file()] + sorted(folder.glob("tok*.bin"))
    return Source(str(folder), config, headers, read, {path.name: path.read_bytes() for path in tokenizer})


def llama2c(path: Path) -> Source:
    """Returns the checkpoint of one of llama2.c's files in its first format: 7 int32 (width, mlp, layers, heads, kv heads, vocabulary, and
    length; a vocabulary below 0 has a head of its own), then float32 arrays, each over all layers, in the order of `parts`.

    Its rotary pairs are channels (2j, 2j + 1); they come out as (j, j + K / 2). The tokenizer is the tok*.bin beside it.
    Raises UserError if the file's size is not what its header says.
    """
    size, where = path.stat().st_size, str(path)
    with open(path, "rb") as file:
        header = struct.unpack("<7i", file.read(28)) if size > 28 else (0,) * 7
    width, mlp, layers, heads, kv_heads, vocab, length = header
    if min(width, mlp, layers, heads, kv_heads, length) < 1 or vocab == 0 or width % (2 * heads) or heads % kv_heads:
        raise UserError(f"{where} is not a file of llama2.c's: its header is {list(header)}; download it again")
    K, tied, vocab = width // heads, vocab > 0, abs(vocab)
    layer = lambda name: f"model.layers.{{n}}.{name}.weight"
    parts: list[tuple[str, tuple[int, ...]]] = [  # "": rotary tables, which are not used
        ("model.embed_tokens.weight", (vocab, width)),
        (layer("input_layernorm"), (layers, width)),
        (layer("self_attn.q_proj"), (layers, width, width)),
        (layer("self_attn.k_proj"), (layers, kv_heads * K, width)),
        (layer("self_attn.v_proj"), (layers, kv_heads * K, width)),
        (layer("self_attn.o_proj"), (layers, width, width)),
        (layer("post_attention_layernorm"), (layers, width)),
        (layer("mlp.gate_proj"), (layers, mlp, width)),
        (layer("mlp.down_proj"), (layers, width, mlp)),
        (layer("mlp.up_proj"), (layers, mlp, width)),
        ("model.norm.weight", (width,)),
        ("", (2, length, K // 2)),
        *[("lm_head.weight", (vocab, width))] * (not tied),
    ]
    wanted = 28 + 4 * sum(int(np.prod(shape)) for _, shape in parts)
    if size != wanted:
        raise UserError(f"{where} has {size} bytes, and by its header should have {wanted}; download it again")
    config = {"model_type": "llama", "vocab_size": vocab, "max_position_embeddings": length, "hidden_size": width, "head_dim": K}
    config |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": mlp}
    config |= {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": tied}
    names = lambda name: [name.format(n=n) for n in range(layers)] if "{n}" in name else [name] * bool(name)

    def read() -> Iterator[tuple[str, np.ndarray]]:
        flat, at = np.memmap(path, "<f4", "r", offset=28), 0
        for name, shape in parts:
            count = int(np.prod(shape))
            array = flat[at : at + count].reshape(shape)
            for n, tensor in enumerate(names(name)):
                part = array[n] if "{n}" in name else array
                yield tensor, _halves(tensor, part, K)
            at += count

    headers = {t: Header(shape[1:] if "{n}" in name else shape, DTYPES["F32"]) for name, shape in parts for t in names(name)}
    return Source(where, config, headers, read, {file.name: file.read_bytes() for file in path.parent.glob("tok*.bin")})


# A tensor of GGUF's, and what it is called here.
GGUF = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.{n}.attn_norm.weight": "model.layers.{n}.input_layernorm.weight",
    "blk.{n}.attn_q.weight": "model.layers.{n}.self_attn.q_proj.weight",
    "blk.{n}.attn_k.weight": "model.layers.{n}.self_attn.k_proj.weight",
    "blk.{n}.attn_v.weight": "model.layers.{n}.self_attn.v_proj.weight",
    "blk.{n}.attn_q_norm.weight": "model.layers.{n}.self_attn.q_norm.weight",
    "blk.{n}.attn_k_norm.weight": "model.layers.{n}.self_attn.k_norm.weight",
    "blk.{n}.attn_output.weight": "model.layers.{n}.self_attn.o_proj.weight",
    "blk.{n}.ffn_norm.weight": "model.layers.{n}.post_attention_layernorm.weight",
    "blk.{n}.ffn_gate.weight": "model.layers.{n}.mlp.gate_proj.weight",
    "blk.{n}.ffn_up.weight": "model.layers.{n}.mlp.up_proj.weight",
    "blk.{n}.ffn_down.weight": "model.layers.{n}.mlp.down_proj.weight",
}


def gguf(path: Path) -> Source:
    """Returns the dense checkpoint of a GGUF file, of architecture llama or qwen3, its quantised tensors as float32.

    The byte-level tokenizer inside comes out as vocab.json and merges.txt. Llama's rotary pairs are channels (2j, 2j + 1) there.
    Raises UserError if the file is damaged, or of another architecture.
    """
    reader, dequantize = library("gguf").GGUFReader, library("gguf.quants").dequantize
    try:
        file = reader(path)
    except (OSError, ValueError, IndexError, KeyError) as e:
        raise UserError(f"{path} is damaged or no GGUF file ({(str(e) or type(e).__name__).splitlines()[0][:120]})") from None

    def said(key: str, default: Any = None) -> Any:
        field = file.get_field(key)
        return default if field is None else field.contents()

    kind = said("general.architecture")
    if kind not in ("llama", "qwen3"):
        raise UserError(f"{path} is of architecture {kind!r}; this reader knows llama and qwen3")
    shapes = {tensor.name: tuple(int(n) for n in tensor.shape[::-1]) for tensor in file.tensors}
    names = {theirs.format(n=n): ours.format(n=n) for theirs, ours in GGUF.items() for n in range(said(f"{kind}.block_count", 0))}
    config = {
        "model_type": kind,
        "max_position_embeddings": said(f"{kind}.context_length"),
        "rope_theta": said(f"{kind}.rope.freq_base", 1e4),
    }
    config |= {"vocab_size": shapes.get("token_embd.weight", (0,))[0], "hidden_size": said(f"{kind}.embedding_length")}
    config |= {"intermediate_size": said(f"{kind}.feed_forward_length"), "num_hidden_layers": said(f"{kind}.block_count")}
    config |= {"num_attention_heads": said(f"{kind}.attention.head_count"), "num_key_value_heads": said(f"{kind}.attention.head_count_kv")}
    config |= {"head_dim": said(f"{kind}.attention.key_length"), "rms_norm_eps": said(f"{kind}.attention.layer_norm_rms_epsilon")}
    config |= {"tie_word_embeddings": "output.weight" not in shapes}
    config = {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in config.items()}  # 1e-5, not its float32
    K = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]

    def read() -> Iterator[tuple[str, np.ndarray]]:
        for tensor in file.tensors:
            name = names.get(tensor.name, tensor.name)
            array = dequantize(tensor.data, tensor.tensor_type).reshape(shapes[tensor.name])
            yield name, _halves(name, array, K) if kind == "llama" else array

    tokenizer = {}
    if said("tokenizer.ggml.model") == "gpt2":
        vocab = {token: number for number, token in enumerate(said("tokenizer.ggml.tokens"))}
        special = {number for number, kind in enumerate(said("tokenizer.ggml.token_type", [])) if kind == 3}
        added = {str(number): {"content": token} for token, number in vocab.items() if number in special}
        of = lambda key: next((token for token, number in vocab.items() if number == said(f"tokenizer.ggml.{key}_token_id")), None)
        settings = {"added_tokens_decoder": added, "bos_token": of("bos"), "eos_token": of("eos")}
        settings |= {
            "add_bos_token": said("tokenizer.ggml.add_bos_token", False),
            "tokenizer_class": "Qwen2Tokenizer"[: 14 * (kind == "qwen3")],
        }
        settings |= {"chat_template": said("tokenizer.chat_template")}
        tokenizer = {"vocab.json": json.dumps(vocab), "merges.txt": "\n".join(["#version: 0.2", *said("tokenizer.ggml.merges")]) + "\n"}
        tokenizer |= {"tokenizer_config.json": json.dumps(settings, indent=2) + "\n"}
    headers = {names.get(name, name): Header(shape, DTYPES["F32"]) for name, shape in shapes.items()}
    return Source(str(path), config, headers, read, {name: text.encode() for name, text in tokenizer.items()})


def _halves(name: str, tensor: np.ndarray, head_width: int) -> np.ndarray:
    """Returns a query or key projection [H K, D] with its rotary pairs as channels (j, j + K / 2), not (2j, 2j + 1); others as is."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return tensor
    return tensor.reshape(-1, head_width // 2, 2, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)


def library(name: str) -> Any:
    """Returns a module of the extra `hf`, imported now. Raises UserError if it isn't installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f"{name.partition('.')[0]} is not installed; pip install -e '.[hf]'") from None


def opened(file: Path) -> Any:
    """Returns the open file. Raises UserError if it is missing or damaged; the library sees a truncated one when it opens it."""
    try:
        return library("safetensors").safe_open(file, framework="numpy")
    except UserError:
        raise
    except Exception as e:  # the library's own
        raise UserError(f"{file} is damaged or unreadable ({str(e).splitlines()[0][:120]}); download it again") from None

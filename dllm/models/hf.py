"""Checkpoints of the public families as our models, and back: names, shapes, config.json, weights. (GPT-2 and ESM-2: models/layouts.py.)

`load` puts a `Source` (models/sources.py), tensor by tensor, into arrays stacked [N, ...] over layers that the caller gives: there is never
a second copy of a model in memory, and with arrays that are files not even one. Both ways are strict: what is missing, left over or of
another shape is named.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dllm.core.paths import named_leaves
from dllm.core.types import UserError
from dllm.models import esm2, gpt2, layouts, public, qwen3
from dllm.models.qwen3 import Config
from dllm.models.sources import INDEX, Source, library

# Our parameter, and the tensor (n: layer, e: expert) that holds it. Torch writes a product's weights [out, in]; ours are [in, out].
TENSORS = {
    "embed/embedding": "model.embed_tokens.weight",
    "stack/layers/attn_norm/scale": "model.layers.{n}.input_layernorm.weight",
    "stack/layers/q/kernel": "model.layers.{n}.self_attn.q_proj.weight",
    "stack/layers/k/kernel": "model.layers.{n}.self_attn.k_proj.weight",
    "stack/layers/v/kernel": "model.layers.{n}.self_attn.v_proj.weight",
    "stack/layers/q_norm/scale": "model.layers.{n}.self_attn.q_norm.weight",
    "stack/layers/k_norm/scale": "model.layers.{n}.self_attn.k_norm.weight",
    "stack/layers/o/kernel": "model.layers.{n}.self_attn.o_proj.weight",
    "stack/layers/mlp_norm/scale": "model.layers.{n}.post_attention_layernorm.weight",
    "stack/layers/gate/kernel": "model.layers.{n}.mlp.gate_proj.weight",
    "stack/layers/up/kernel": "model.layers.{n}.mlp.up_proj.weight",
    "stack/layers/down/kernel": "model.layers.{n}.mlp.down_proj.weight",
    "stack/layers/moe/router": "model.layers.{n}.mlp.gate.weight",
    "stack/layers/moe/gate": "model.layers.{n}.mlp.experts.{e}.gate_proj.weight",
    "stack/layers/moe/up": "model.layers.{n}.mlp.experts.{e}.up_proj.weight",
    "stack/layers/moe/down": "model.layers.{n}.mlp.experts.{e}.down_proj.weight",
    "norm/scale": "model.norm.weight",
    "head/kernel": "lm_head.weight",
}
EMBEDDING, HEAD = "embed/embedding", "head/kernel"
AnyConfig = Config | gpt2.Config | esm2.Config


class Layout(NamedTuple):
    """What a kind of checkpoint is as one of ours: the model, its tensors as TENSORS has them, whether products are stored [out, in], and
    the name of a tied head, which a checkpoint may hold beside its embedding."""

    model: ModuleType
    tensors: Mapping[str, str]
    turned: bool = True
    head: str | None = None


LAYOUTS: dict[type, Layout] = {
    Config: Layout(qwen3, TENSORS),
    gpt2.Config: Layout(gpt2, layouts.GPT2, turned=False, head="lm_head.weight"),
    esm2.Config: Layout(esm2, layouts.ESM2, head="lm_head.decoder.weight"),
}

# Keys of config.json that this decoder has no other value for; None stands for an absent one.
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "rope_scaling": (None,),
    "mlp_only_layers": ([], None),
    "decoder_sparse_step": (1, None),
}
SHARD = 2 * 10**9  # bytes a file


class Place(NamedTuple):
    """Where a tensor goes: `leaf[index]` is the tensor, or, `turned`, its transpose; of several leaves each is an equal part of columns."""

    leaves: tuple[str, ...]
    index: tuple[int, ...]
    turned: bool
    shape: tuple[int, ...]  # of the tensor, as it is stored


def abstract(config: AnyConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns {name: shape and dtype} of the model's parameters; nothing is computed."""
    model = LAYOUTS[type(config)].model
    return named_leaves(jax.eval_shape(functools.partial(model.init, config), jax.random.key(0))["params"])


def places(config: AnyConfig) -> dict[str, Place]:
    """Returns {tensor: its place} for a model of this shape."""
    layout, likes = LAYOUTS[type(config)], abstract(config)
    together: dict[str, list[str]] = {}
    for leaf in layout.tensors:
        if leaf in likes:
            together.setdefault(layout.tensors[leaf], []).append(leaf)
    found = {}
    for template, leaves in together.items():
        turned = layout.turned and not leaves[0].endswith(("embedding", "scale", "bias"))
        stacked = template.count("{")  # axes, over layers and experts
        lead, (*rows, columns) = likes[leaves[0]].shape[:stacked], likes[leaves[0]].shape[stacked:]
        shape = (*rows, columns * len(leaves))
        for index in np.ndindex(lead):
            name = template.format(**dict(zip("ne", index)))
            found[name] = Place(tuple(leaves), index, turned, shape[::-1] if turned else shape)
    return found


# -- config.json


def from_hf(config: Mapping[str, Any], where: str) -> AnyConfig:
    """Returns the model that a config.json describes. SDAR's lacks the mask id, and says the block length at most in training's copies.

    Raises UserError for what this decoder isn't, naming the key.
    """
    kind = config.get("model_type")
    kinds = sorted({k for kinds in public.FAMILIES.values() for k in kinds})
    if kind not in kinds:
        raise UserError(f"{where} is of model_type {kind!r}; this decoder is {', '.join(kinds)}")
    if kind in ("gpt2", "esm"):
        return (layouts.gpt2_from_hf if kind == "gpt2" else layouts.esm2_from_hf)(config, where)
    layouts.check_fixed(config, FIXED, where)
    rope = config.get("rope_parameters") or {}  # newer files keep theta there
    if rope.get("rope_type", "default") != "default":
        raise UserError(f"{where} has rope_type={rope['rope_type']!r}, which this decoder doesn't know; it wants 'default'")
    sparse, sdar = kind.endswith("_moe"), kind.startswith("sdar")
    if sparse and config.get("norm_topk_prob") is not True:
        raise UserError(f"{where} has norm_topk_prob={config.get('norm_topk_prob')!r}; this decoder's router is normalised: it wants true")
    keys = {"vocab": "vocab_size", "length": "max_position_embeddings", "width": "hidden_size", "layers": "num_hidden_layers"}
    keys |= {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "eps": "rms_norm_eps"}
    keys |= {"mlp": "moe_intermediate_size" if sparse else "intermediate_size"}
    keys |= {"experts": "num_experts", "experts_per_token": "num_experts_per_tok"} if sparse else {}
    theta = config.get("rope_theta", rope.get("rope_theta"))
    fields = layouts.fields({**config, "rope_theta": theta}, keys | {"theta": "rope_theta"}, where)
    return Config(
        **fields | {"theta": float(fields["theta"])},
        head_width=config.get("head_dim") or fields["width"] // fields["heads"],
        qk_norm=kind != "llama",
        tied=bool(config.get("tie_word_embeddings", False)),
        mask_id=config.get("mask_token_id", public.MASK_ID if sdar else -1),
        block=config.get("block_size", 1),
        norm="fused" if sdar else "eager",
    )


def to_hf(config: AnyConfig) -> dict[str, Any]:
    """Returns the model's config.json. Raises UserError for a model that has none.

    A block-diffusion one has `mask_token_id` and `block_size`, as SDAR's training copies do.
    """
    if not isinstance(config, Config):
        return layouts.gpt2_to_hf(config) if isinstance(config, gpt2.Config) else layouts.esm2_to_hf(config)
    family = "Llama" if not config.qk_norm else "Qwen3" if config.mask_id < 0 else "SDAR"
    if family == "Llama" and config.experts:
        raise UserError("a sparse model without norms on its heads has no name among the public families; set model.qk_norm")
    kind, sparse = family + "Moe" * bool(config.experts), config.experts > 0
    found = {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": family.lower() + "_moe" * sparse,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.length,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.mlp,
        "rms_norm_eps": config.eps,
        "rope_theta": config.theta,
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": config.param_dtype,
    }
    if sparse:
        found |= {"num_experts": config.experts, "num_experts_per_tok": config.experts_per_token, "moe_intermediate_size": config.mlp}
        found |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    if config.mask_id >= 0:
        found |= {"mask_token_id": config.mask_id, "block_size": config.block}
    return found


def target(model: str, source: Source, block: int) -> tuple[AnyConfig, AnyConfig]:
    """Returns (the source's own config, that of the model to be made of it, which is `model`: a row of the table, or a family).

    `block` > 0 makes a block-diffusion model: of SDAR with that block length; of a Llama one with a MASK id behind its vocabulary, and a
    head of its own. SDAR made of a Qwen3 checkpoint takes the public mask id. Raises UserError where the source isn't `model`, and where
    block lengths or mask ids disagree.
    """
    family, kind = public.family(model), source.config.get("model_type")
    own = from_hf(source.config, f"{source.where}'s config")
    if kind not in public.FAMILIES[family]:
        fit = " or ".join(name for name, kinds in public.FAMILIES.items() if kind in kinds)
        raise UserError(f"{source.where} is of model_type {kind!r}, from which no {family} is made; pass --model={fit}")
    half = source.headers and all(header.dtype == jnp.bfloat16 for header in source.headers.values())
    dtype = "bfloat16" if half else "float32"
    if hasattr(own, "param_dtype"):
        own = dataclasses.replace(own, dtype=dtype, param_dtype=dtype)
    if not isinstance(own, Config):
        if block:
            raise UserError(f"--block is for sdar, llama and stories; a {family} has no blocks: drop it")
        made = own
    elif family == "sdar":
        row = public.MODELS[model].block if model in public.MODELS else None
        said = {"--block": block or None, f"--model={model}": row, "config.json's block_size": source.config.get("block_size")}
        said = {key: value for key, value in said.items() if value is not None}
        if len(set(said.values())) != 1:
            disagree = " and ".join(f"{key} says {value}" for key, value in said.items()) or "nothing says the block length"
            raise UserError(f"{disagree}; pass --block as the checkpoint was trained with (its repository's name says it: -b8; 4 without)")
        mask_id = own.mask_id if own.mask_id >= 0 else public.MASK_ID
        made = dataclasses.replace(own, tied=False, mask_id=mask_id, block=next(iter(said.values())), norm="fused")
    elif block and family == "qwen3":
        raise UserError("a Qwen3 checkpoint is read by blocks as --model=sdar; drop --block for an autoregressive model")
    elif block and own.mask_id < 0:
        made = dataclasses.replace(own, vocab=own.vocab + 1, tied=False, mask_id=own.vocab, block=block)
    else:
        made = dataclasses.replace(own, block=block or own.block)
    public.check(model, made if family == "sdar" else own)
    LAYOUTS[type(made)].model.build(made)  # for its errors
    return own, made


# -- weights


def check_headers(source: Source, own: AnyConfig) -> None:
    """Returns None if the source holds the tensors of a model `own`, no more, no fewer. Raises UserError that names the first other one."""
    wanted = places(own)
    for name, place in wanted.items():
        if name not in source.headers:
            mend = "; set tie_word_embeddings if its head is the embedding" * (name == TENSORS[HEAD])
            raise UserError(f"{source.where} lacks the tensor {name}{mend or '; download the checkpoint again'}")
        if source.headers[name].shape != place.shape:
            shapes = f"{list(source.headers[name].shape)}, and its config wants {list(place.shape)}"
            raise UserError(f"the tensor {name} of {source.where} is {shapes}; use the config.json that belongs to it")
    for name in source.headers:
        if name not in wanted and name != LAYOUTS[type(own)].head:
            raise UserError(f"{source.where} holds the tensor {name}, which this model has no use for; it is another kind of model")


def load(source: Source, own: AnyConfig, config: AnyConfig, arrays: Mapping[str, np.ndarray]) -> None:
    """Fills `arrays`, {name: array} in the shapes of `abstract(config)`, from the source, which holds a model `own`.

    A head that `own` ties and `config` doesn't is the embedding, copied; the row of the vocabulary that `config` has more, MASK, is the
    mean of the embeddings. Raises UserError where the source isn't what it should be; see `check_headers`.
    """
    check_headers(source, own)
    wanted, head = places(own), LAYOUTS[type(own)].head
    for name, tensor in source.read():
        if name == head:
            continue
        place = wanted[name]
        for leaf, part in zip(place.leaves, np.split(tensor, len(place.leaves), -1)):
            into = arrays[leaf][place.index] if place.index else arrays[leaf]
            if leaf == EMBEDDING:
                into = into[: own.vocab]
            elif leaf == HEAD:
                into = into[:, : own.vocab]
            _put(into, part, place.turned)
        del tensor, part  # before the next is read
    if head in source.headers and not np.array_equal(next(t for name, t in source.read() if name == head), arrays[EMBEDDING]):
        raise UserError(f"the tensor {head} of {source.where} isn't its embedding, and this model ties them; it is another kind of model")
    if not isinstance(own, Config):
        return
    embedding_VD = arrays[EMBEDDING]
    if config.vocab > own.vocab:
        embedding_VD[own.vocab :] = embedding_VD[: own.vocab].mean(0, dtype=np.float32)
    if own.tied and not config.tied:
        _put(arrays[HEAD], embedding_VD, True)
    elif not config.tied:
        arrays[HEAD][:, own.vocab :] = embedding_VD[own.vocab :].T


def _put(into: np.ndarray, tensor: np.ndarray, turned: bool) -> None:
    """Copies the tensor, or its transpose; that in pieces that fit a cache, at less than half the time."""
    for n in range(0, len(tensor), 256) if turned else ():
        into[:, n : n + 256] = tensor[n : n + 256].T
    if not turned:
        into[...] = tensor


def empty(config: AnyConfig) -> dict[str, np.ndarray]:
    """Returns arrays for `load`, in memory."""
    return {name: np.empty(like.shape, like.dtype) for name, like in abstract(config).items()}


def save(folder: str | Path, config: AnyConfig, leaves: Mapping[str, Any], shard: int = SHARD) -> list[Path]:
    """Writes config.json and the weights {name: array} as safetensors files of at most `shard` bytes (or one tensor), and returns them.

    One file's tensors are in memory at a time, besides the model.
    """
    save_file = library("safetensors.numpy").save_file
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(to_hf(config), indent=2) + "\n")
    files: list[list[str]] = [[]]
    wanted, room, total = places(config), shard, 0
    for name, place in wanted.items():
        size = int(np.prod(place.shape)) * np.dtype(leaves[place.leaves[0]].dtype).itemsize
        if files[-1] and size > room:
            files.append([])
            room = shard
        files[-1].append(name)
        room, total = room - size, total + size
    paths = [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)] if files[1:] else ["model.safetensors"]
    whole: dict[str, np.ndarray] = {}  # the leaves at hand, on the host: stacked ones are read once, not once a layer

    def tensor(place: Place) -> np.ndarray:
        if place.leaves[0] not in whole:
            whole.clear()
            whole.update({leaf: np.asarray(leaves[leaf]) for leaf in place.leaves})
        into = np.empty(place.shape, whole[place.leaves[0]].dtype)
        for leaf, columns in zip(place.leaves, np.split(into, len(place.leaves), -1)):
            _put(columns, whole[leaf][place.index] if place.index else whole[leaf], place.turned)
        return into

    buffers = layouts.esm2_buffers(config) if isinstance(config, esm2.Config) else {}
    files[-1] += buffers
    total += sum(array.nbytes for array in buffers.values())
    for path, names in zip(paths, files):
        arrays = {name: buffers[name] if name in buffers else tensor(wanted[name]) for name in names}
        save_file(arrays, folder / path, metadata={"format": "pt"})
        del arrays
        (folder / path).chmod((folder / "config.json").stat().st_mode)  # the library makes files that only their owner can read
    if files[1:]:
        index = {"metadata": {"total_size": total}, "weight_map": {n: path for path, names in zip(paths, files) for n in names}}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return [folder / path for path in [*paths, *[INDEX] * bool(files[1:]), "config.json"]]


# -- the tokenizer


def tokenizer(source: Source) -> dict[str, bytes]:
    """Returns the source's tokenizer's files. GPT-2's own don't say what begins and ends a text; here tokenizer_config.json does."""
    if source.config.get("model_type") != "gpt2" or not source.tokenizer:
        return source.tokenizer
    file, ids = "tokenizer_config.json", {number: token for file in source.tokenizer for token, number in _tokens(source, file)}
    settings = json.loads(source.tokenizer.get(file, b"{}"))
    for key in ("bos", "eos"):
        if (number := source.config.get(f"{key}_token_id")) in ids:
            settings.setdefault(f"{key}_token", ids[number])
            settings.setdefault("added_tokens_decoder", {}).setdefault(str(number), {"content": ids[number]})
    return {**source.tokenizer, file: (json.dumps(settings, indent=2) + "\n").encode()}


def check_tokenizer(source: Source, config: AnyConfig) -> None:
    """Returns None if the source's tokenizer fits the model: ids below the vocabulary, and the mask id MASK's or nobody's.

    Its files spell MASK in two ways, so it is known by its id (https://github.com/hxhcreate/DARE/issues/13: ids that differ between
    tokenizer, model and config). Raises UserError that names the file and the token.
    """
    for file in source.tokenizer:
        for token, number in _tokens(source, file):
            has = f"{file} of {source.where} has {token!r} as id {number}"
            if token.upper() in public.MASK_SPELLINGS and config.mask_id >= 0 and number != config.mask_id:
                mend = "use the tokenizer and the config that belong together"
                raise UserError(f"{has}, and the model's mask id is {config.mask_id}; {mend}")
            if number == config.mask_id and token.upper() not in public.MASK_SPELLINGS:
                raise UserError(f"{has}, which is the model's mask id; use the tokenizer that belongs to the model")
            if not 0 <= number < config.vocab:
                raise UserError(f"{has}, and the model's vocabulary is {config.vocab}; use the tokenizer that belongs to the model")


def _tokens(source: Source, file: str) -> Iterator[tuple[str, int]]:
    """Yields (token, id) of all that one of the tokenizer's files tells."""
    data = source.tokenizer[file]
    try:
        if file.endswith(".bin"):  # llama2.c's: the longest token's length, then (score, length, bytes) a token
            at, number = 4, -1
            while at < len(data):
                at, number = at + 8 + struct.unpack_from("<i", data, at + 4)[0], number + 1
            if at != len(data):
                raise ValueError("its last token is cut off")
            yield "its last token", number
        if file == "vocab.txt":  # ESM-2's: a token a line
            yield from ((token, number) for number, token in enumerate(data.decode().split()))
        if not file.endswith(".json"):
            return
        content = json.loads(data)
        if file in ("vocab.json", "added_tokens.json"):
            yield from content.items()
        elif file == "tokenizer_config.json":
            yield from ((token["content"], int(number)) for number, token in content.get("added_tokens_decoder", {}).items())
        elif file == "tokenizer.json":
            yield from ((token["content"], token["id"]) for token in content.get("added_tokens", ()))
            yield from content["model"]["vocab"].items()
    except (AttributeError, KeyError, TypeError, ValueError, struct.error) as e:
        raise UserError(f"{file} of {source.where} is not a tokenizer's ({type(e).__name__}: {e}); restore it") from None

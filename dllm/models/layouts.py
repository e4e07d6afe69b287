"""How GPT-2's and ESM-2's checkpoints are laid out: the names of their tensors, and their config.json. models/hf.py reads and writes them.

GPT-2's products are stored [in, out] and its queries, keys and values lie in one tensor; ESM-2's are stored as Llama's are, [out, in].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dllm.core.types import UserError
from dllm.models import esm2, gpt2

# Our parameter, and the tensor (n: layer) that holds it. Parameters of one tensor are its parts along the last axis, in this order.
GPT2 = {
    "embed/embedding": "transformer.wte.weight",
    "position_embed/embedding": "transformer.wpe.weight",
    "stack/layers/attn_norm/scale": "transformer.h.{n}.ln_1.weight",
    "stack/layers/attn_norm/bias": "transformer.h.{n}.ln_1.bias",
    "stack/layers/q/kernel": "transformer.h.{n}.attn.c_attn.weight",
    "stack/layers/k/kernel": "transformer.h.{n}.attn.c_attn.weight",
    "stack/layers/v/kernel": "transformer.h.{n}.attn.c_attn.weight",
    "stack/layers/q/bias": "transformer.h.{n}.attn.c_attn.bias",
    "stack/layers/k/bias": "transformer.h.{n}.attn.c_attn.bias",
    "stack/layers/v/bias": "transformer.h.{n}.attn.c_attn.bias",
    "stack/layers/o/kernel": "transformer.h.{n}.attn.c_proj.weight",
    "stack/layers/o/bias": "transformer.h.{n}.attn.c_proj.bias",
    "stack/layers/mlp_norm/scale": "transformer.h.{n}.ln_2.weight",
    "stack/layers/mlp_norm/bias": "transformer.h.{n}.ln_2.bias",
    "stack/layers/up/kernel": "transformer.h.{n}.mlp.c_fc.weight",
    "stack/layers/up/bias": "transformer.h.{n}.mlp.c_fc.bias",
    "stack/layers/down/kernel": "transformer.h.{n}.mlp.c_proj.weight",
    "stack/layers/down/bias": "transformer.h.{n}.mlp.c_proj.bias",
    "norm/scale": "transformer.ln_f.weight",
    "norm/bias": "transformer.ln_f.bias",
}
_ESM2 = {  # a layer's: with .weight behind them a norm's scale or a product's kernel, with .bias the bias
    "attn_norm": "attention.LayerNorm",
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "o": "attention.output.dense",
    "mlp_norm": "LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
}
ESM2 = {
    "embed/embedding": "esm.embeddings.word_embeddings.weight",
    **{
        f"stack/layers/{ours}/{part}": f"esm.encoder.layer.{{n}}.{theirs}.{'bias' if part == 'bias' else 'weight'}"
        for ours, theirs in _ESM2.items()
        for part in ("scale" if ours.endswith("norm") else "kernel", "bias")
    },
    "norm/scale": "esm.encoder.emb_layer_norm_after.weight",
    "norm/bias": "esm.encoder.emb_layer_norm_after.bias",
    "head/dense/kernel": "lm_head.dense.weight",
    "head/dense/bias": "lm_head.dense.bias",
    "head/norm/scale": "lm_head.layer_norm.weight",
    "head/norm/bias": "lm_head.layer_norm.bias",
    "head/bias": "lm_head.bias",
}

# Keys of config.json that these models have no other value for; None stands for an absent one.
GPT2_FIXED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", None),
    "scale_attn_weights": (True, None),
    "scale_attn_by_inverse_layer_idx": (False, None),
    "add_cross_attention": (False, None),
    "tie_word_embeddings": (True, None),
}
ESM2_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("gelu", None),
    "position_embedding_type": ("rotary",),
    "emb_layer_norm_before": (False, None),
    "is_folding_model": (False, None),
    "add_cross_attention": (False, None),
    "tie_word_embeddings": (True, None),
}


def fields(config: Mapping[str, Any], keys: Mapping[str, str], where: str) -> dict[str, Any]:
    """Returns {field: value} of a config.json, by {field: its key there}. Raises UserError that names a key that isn't there."""
    for key in keys.values():
        if isinstance(config.get(key), bool) or not isinstance(config.get(key), (int, float)):
            raise UserError(f"{where} lacks {key}; restore the file as it was published")
    return {field: config[key] for field, key in keys.items()}


def check_fixed(config: Mapping[str, Any], fixed: Mapping[str, tuple[Any, ...]], where: str) -> None:
    """Returns None if the config.json has values that our models have. Raises UserError that names the first other one."""
    for key, values in fixed.items():
        if config.get(key) not in values:
            raise UserError(f"{where} has {key}={config.get(key)!r}, which this decoder doesn't know; it wants {values[0]!r}")


def gpt2_from_hf(config: Mapping[str, Any], where: str) -> gpt2.Config:
    """Returns the model that a config.json of model_type gpt2 describes. Raises UserError where it is another, naming the key."""
    check_fixed(config, GPT2_FIXED, where)
    keys = {"vocab": "vocab_size", "length": "n_positions", "width": "n_embd", "layers": "n_layer", "heads": "n_head"}
    found = fields(config, keys | {"eps": "layer_norm_epsilon"}, where)
    return gpt2.Config(**found, mlp=config.get("n_inner") or 4 * found["width"])


def gpt2_to_hf(config: gpt2.Config) -> dict[str, Any]:
    """Returns the model's config.json."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab,
        "n_positions": config.length,
        "n_ctx": config.length,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.mlp,
        "layer_norm_epsilon": config.eps,
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
        "torch_dtype": config.param_dtype,
    }


def esm2_from_hf(config: Mapping[str, Any], where: str) -> esm2.Config:
    """Returns the model that a config.json of model_type esm describes. Raises UserError where it is another, naming the key.

    `token_dropout` isn't read: it is off here.
    """
    check_fixed(config, ESM2_FIXED, where)
    keys = {"vocab": "vocab_size", "length": "max_position_embeddings", "width": "hidden_size", "n_noncausal": "num_hidden_layers"}
    keys |= {"heads": "num_attention_heads", "mlp": "intermediate_size", "eps": "layer_norm_eps"}
    found = fields(config, keys | {"mask_id": "mask_token_id", "pad_id": "pad_token_id"}, where)
    return esm2.Config(**found | {"length": found["length"] - 2})  # they count two positions that no sequence has


def esm2_buffers(config: esm2.Config) -> dict[str, np.ndarray]:
    """Returns the rotary frequencies that a checkpoint holds for each layer: without them transformers doesn't make its own."""
    width = config.width // config.heads
    frequency = (1.0 / 1e4 ** (np.arange(0, width, 2, dtype=np.float32) / width)).astype(np.float32)
    name = "esm.encoder.layer.{n}.attention.self.rotary_embeddings.inv_freq"
    return {name.format(n=n): frequency for n in range(config.n_noncausal)}


def esm2_to_hf(config: esm2.Config) -> dict[str, Any]:
    """Returns the model's config.json. Raises UserError for a model with a causal tail or a theta, which the format doesn't know."""
    if config.n_causal:
        raise UserError("the format of ESM-2 has no causal layers; convert the workdir that the backbone was taken from")
    if config.theta != 1e4:
        raise UserError(f"model.theta is {config.theta}, and the format of ESM-2 has 10000 only")
    return {
        "architectures": ["EsmForMaskedLM"],
        "model_type": "esm",
        "vocab_size": config.vocab,
        "max_position_embeddings": config.length + 2,
        "hidden_size": config.width,
        "num_hidden_layers": config.n_noncausal,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp,
        "layer_norm_eps": config.eps,
        "hidden_act": "gelu",
        "position_embedding_type": "rotary",
        "emb_layer_norm_before": False,
        "token_dropout": False,
        "mask_token_id": config.mask_id,
        "pad_token_id": config.pad_id,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }

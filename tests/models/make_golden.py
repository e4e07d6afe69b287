"""Makes tests/models/golden/*.npz, what `transformers` says of tiny random models; or asks it about a checkpoint.

    PYTHON tests/models/make_golden.py                   # writes the files anew
    PYTHON tests/models/make_golden.py --check=FOLDER    # loads FOLDER as tests do: strict, float32; writes FOLDER/logits.npz

PYTHON is an environment of its own: Python 3.11, `pip install torch "transformers>=4.52,<4.60" safetensors numpy`, CPU
only; with peft too, the adapters' test runs. The committed
files are from torch 2.13.0 and transformers 4.57.6. A file holds the weights under their names, config.json as text, the tokens [2, 12],
and float32 logits [2, 12, V] under the causal mask and the block-causal one of block 4, each in one pass and through the cache.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

BLOCK, LENGTH, VOCAB = 4, 12, 40
SHAPE = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
SHAPE |= dict(head_dim=8, max_position_embeddings=64, attn_implementation="eager", bos_token_id=None, eos_token_id=None, use_cache=True)
SPARSE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=True, decoder_sparse_step=1)
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=False)),
    "qwen3_tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=True)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **SPARSE, rope_theta=1e6, tie_word_embeddings=False)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_theta=1e5, rms_norm_eps=1e-5, tie_word_embeddings=True)),
}
CLASSES = {"qwen3": Qwen3ForCausalLM, "sdar": Qwen3ForCausalLM, "qwen3_moe": Qwen3MoeForCausalLM, "sdar_moe": Qwen3MoeForCausalLM}
CLASSES |= {"llama": LlamaForCausalLM}  # SDAR's own code lies in its repositories; its weights are Qwen3's


def additive(allowed):
    """Returns the 4-D mask [1, 1, Q, S] that is added to the scores."""
    return torch.where(torch.as_tensor(allowed), 0.0, torch.finfo(torch.float32).min)[None, None]


def blocks(length):
    at = np.arange(length) // BLOCK
    return at[None] <= at[:, None]


@torch.no_grad()
def logits(model, tokens):
    """Returns the four arrays of logits."""
    length = tokens.shape[1]

    def cached(edges, mask):
        cache, parts = DynamicCache(config=model.config), []
        for start, end in zip([0, *edges], [*edges, length]):
            allowed = None if mask is None else additive(mask[start:end, :end]).expand(len(tokens), -1, -1, -1)
            at = torch.arange(start, end)
            parts.append(
                model(tokens[:, start:end], attention_mask=allowed, past_key_values=cache, position_ids=at[None], cache_position=at).logits
            )
        return torch.cat(parts, 1)

    mask = blocks(length)
    found = {
        "causal": model(tokens).logits,
        "block": model(tokens, attention_mask=additive(mask).expand(len(tokens), -1, -1, -1)).logits,
        "causal_cached": cached([5, 6, 9], None),
        "block_cached": cached(range(BLOCK, length, BLOCK), mask),
    }
    return {name: array.numpy() for name, array in found.items()}


def make(folder):
    folder.mkdir(exist_ok=True)
    for seed, (name, build) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        model = build().float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                wide = parameter.ndim > 1
                parameter.copy_(torch.randn(parameter.shape) * (1.5 * parameter.shape[-1] ** -0.5 if wide else 0.3) + (not wide))
        tokens = torch.randint(0, VOCAB, (2, LENGTH))
        state = {key: value.numpy() for key, value in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            state.pop("lm_head.weight")
        config = json.dumps(model.config.to_diff_dict() | {"model_type": model.config.model_type, "hidden_act": "silu"} | SHAPE)
        arrays = {f"weight/{key}": value for key, value in state.items()} | logits(model, tokens)
        np.savez_compressed(folder / f"{name}.npz", config=config, tokens=tokens.numpy().astype(np.int32), **arrays)
        spread = {key: f"{value.std():.2f}" for key, value in arrays.items() if "/" not in key}
        print(name, f"{(folder / f'{name}.npz').stat().st_size:,} bytes, standard deviations of logits {spread}")


def check(folder):
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    model, said = CLASSES[kind].from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    bad = {key: sorted(map(str, value)) for key, value in said.items() if value}
    tokens = torch.arange(2 * LENGTH).reshape(2, LENGTH) * 7 % model.config.vocab_size
    np.savez(folder / "logits.npz", tokens=tokens.numpy().astype(np.int32), **logits(model.eval(), tokens))
    print(json.dumps({"transformers": transformers.__version__, "torch": torch.__version__, "bad": bad}))


if __name__ == "__main__":
    arguments = [argument.removeprefix("--check=") for argument in sys.argv[1:]]
    check(Path(arguments[0])) if arguments else make(Path(__file__).parent / "golden")

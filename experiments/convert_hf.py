"""Converts a checkpoint of the public families into a workdir, and back.

    python experiments/convert_hf.py --model=sdar-4b   --src=SDAR-4B-Chat --dst=runs/sdar_4b
    python experiments/convert_hf.py --model=sdar      --src=Qwen3-0.6B-Base --block=4 --dst=runs/sdar_of_qwen3    # to be trained
    python experiments/convert_hf.py --model=stories260k --src=stories260K.bin [--block=4] --dst=runs/stories      # llama2.c's file
    python experiments/convert_hf.py --model=smollm2-135m --src=FILE.gguf --dst=runs/smollm2
    python experiments/convert_hf.py --model=sdar      --src=runs/sdar_4b --dst=FOLDER --reverse
    python experiments/sample.py     --workdir=runs/sdar_4b --sampler=block_diffusion

--model is a row of dllm/models/public.py, or a family (sdar, qwen3, llama, stories): then the shape is read from config.json. --src is what
is read: a folder of safetensors with its config.json and tokenizer, a GGUF file or llama2.c's; with --reverse any workdir. Weights keep
their type (quantised ones become float32) and go from file to file: a model needs no memory to be converted, and on the way back once its
size on the device.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from absl import flags

from dllm.core.config import main, writable_folder
from dllm.core.paths import named_leaves
from dllm.core.types import UserError
from dllm.data.corpus import DataConfig
from dllm.models import hf, public, qwen3, sources
from dllm.train import converted
from dllm.train.checkpoint import load_run
from dllm.train.run import part

FLAGS = flags.FLAGS
flags.DEFINE_string("model", None, "a row of the table of public models, or a family: sdar, qwen3, llama, stories", required=True)
flags.DEFINE_string("src", None, "what is read", required=True)
flags.DEFINE_string("dst", None, "what is written, a folder of its own", required=True)
flags.DEFINE_bool("reverse", False, "from a workdir to a folder of safetensors")
flags.DEFINE_integer("block", 0, "block length; with llama and stories it makes a block-diffusion model of an autoregressive one")


def sections(config: qwen3.Config) -> dict[str, Any]:
    """Returns the converted model's config.json."""
    objective = part("diffusion", "Config", {"name": "block_diffusion" if config.mask_id >= 0 else "next_token"}, "objective")
    data = DataConfig("tokens", length=0)  # rows of any length
    model = {"name": "qwen3", **dataclasses.asdict(config)}
    return {"data": dataclasses.asdict(data), "model": model, "objective": objective.to_dict()}


def convert() -> None:
    source = sources.open_source(FLAGS.src)
    own, made = hf.target(FLAGS.model, source, FLAGS.block)
    hf.check_headers(source, own)
    hf.check_tokenizer(source, made)
    like = hf.abstract(made)
    with converted.writing(FLAGS.dst, sections(made), source.tokenizer, like) as arrays:
        hf.load(source, own, made, arrays)
    kind = f"block {made.block}, mask id {made.mask_id}" if made.mask_id >= 0 else "autoregressive"
    count, size = sum(leaf.size for leaf in like.values()), sum(leaf.size * leaf.dtype.itemsize for leaf in like.values())
    print(f"{count:,} parameters, {size / 1e9:.3f} GB of {made.param_dtype}, vocabulary {made.vocab}, {kind}")
    if not source.tokenizer:
        print(f"{FLAGS.src} has no tokenizer; put its files into {Path(FLAGS.dst) / converted.TOKENIZER}")
    print(f"wrote {FLAGS.dst}")


def convert_back() -> None:
    if FLAGS.block:
        raise UserError("--block belongs to the other direction; a workdir knows its block length")
    dst = Path(FLAGS.dst)
    if dst.exists() and any(dst.iterdir()):
        raise UserError(f"{dst} is not empty; give the checkpoint a folder of its own")
    loaded = load_run(FLAGS.src)
    config, name = loaded.model_config, loaded.config["model"]["name"]
    if name != "qwen3":
        raise UserError(f"{FLAGS.src} holds a model {name!r}, which no public family knows; only models of qwen3 can be converted")
    kind = hf.to_hf(config)["model_type"]
    if kind not in public.FAMILIES[public.family(FLAGS.model)]:
        fit = " or ".join(name for name, kinds in public.FAMILIES.items() if kind in kinds)
        raise UserError(f"{FLAGS.src} holds a model of type {kind}, not --model={FLAGS.model}; pass --model={fit}")
    if not (kind == "llama" and config.mask_id >= 0):  # grown by a MASK, it is no row of the table
        public.check(FLAGS.model, config)
    writable_folder(dst.parent)
    folder = dst.with_name(f".{dst.name}.part")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        files = hf.save(folder, config, named_leaves(loaded.variables["params"]))
        tokenizer = Path(FLAGS.src) / converted.TOKENIZER
        for file in sorted(tokenizer.iterdir()) if tokenizer.is_dir() else ():
            shutil.copy(file, folder / file.name)
        folder.rename(dst)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"wrote {dst}: {', '.join(file.name for file in files)}, of step {loaded.step}")


if __name__ == "__main__":
    main(lambda: convert_back() if FLAGS.reverse else convert())

"""Converts a checkpoint of the public families into a workdir, and back.

    python experiments/convert_hf.py --model=sdar-4b   --src=SDAR-4B-Chat --dst=runs/sdar_4b
    python experiments/convert_hf.py --model=sdar      --src=Qwen3-0.6B-Base --block=4 --dst=runs/sdar_of_qwen3    # to be trained
    python experiments/convert_hf.py --model=stories260k --src=stories260K.bin [--block=4] --dst=runs/stories      # llama2.c's file
    python experiments/convert_hf.py --model=smollm2-135m --src=FILE.gguf --dst=runs/smollm2
    python experiments/convert_hf.py --model=gpt2      --src=gpt2-large --dst=runs/gpt2_large                    # a judge
    python experiments/convert_hf.py --model=dplm-150m --src=dplm_150m --dst=runs/dplm                           # or esm2, of any size
    python experiments/convert_hf.py --model=sdar      --src=runs/sdar_4b --dst=FOLDER --reverse
    python experiments/convert_hf.py --model=uno       --src=runs/uno --dst=FOLDER --reverse [--base=Qwen/Qwen3-0.6B]  # an adapter alone
    python experiments/convert_hf.py --model=uno       --src=FOLDER --base=runs/qwen3 --dst=runs/uno [--block=7]
    python experiments/sample.py     --workdir=runs/sdar_4b --sampler=block_diffusion

--model is a row of dllm/models/public.py, or a family (sdar, qwen3, llama, stories, gpt2, esm2, dplm): then the shape is read from
config.json. --src is what is read: a folder of safetensors with its config.json and tokenizer, a GGUF file or llama2.c's; with --reverse
any workdir. Weights keep their type (quantised ones become float32, and so do ESM-2's) and go from file to file: a model needs no memory
to be converted, and on the way back once its size on the device.

ESM-2 and DPLM become models of the same kind, a masked language model that the samplers of hybrids write with. It doesn't scale embeddings
by the share of MASK tokens: where a checkpoint's config.json has token_dropout, that is said.

--model=uno is an adapter that drafts (dllm/models/uno.py), in PEFT's format. Its frozen model is a workdir of its own, --base, and part
of the workdir that is made. The format knows no gate: what loads such a folder elsewhere, for every row, has another model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from dllm.core.config import main, writable_folder
from dllm.core.paths import named_leaves
from dllm.core.types import UserError
from dllm.data.corpus import DataConfig
from dllm.models import hf, peft, public, qwen3, sources
from dllm.train import converted
from dllm.train.checkpoint import load_run
from dllm.train.run import part

FLAGS = flags.FLAGS
FAMILIES = ", ".join(public.FAMILIES)
flags.DEFINE_string("model", None, f"a row of the table of public models, or a family: {FAMILIES}; or uno", required=True)
flags.DEFINE_string("src", None, "what is read", required=True)
flags.DEFINE_string("dst", None, "what is written, a folder of its own", required=True)
flags.DEFINE_bool("reverse", False, "from a workdir to a folder of safetensors")
flags.DEFINE_integer("block", 0, "block length; with llama and stories it makes a block-diffusion model of an autoregressive one")
flags.DEFINE_string("base", "", "with uno: the workdir of the frozen model; with --reverse, what the adapter's file calls it")


def name_of(config: hf.AnyConfig) -> str:
    """Returns the name of the model that a config is of."""
    return hf.LAYOUTS[type(config)].model.__name__.rpartition(".")[2]


def sections(config: hf.AnyConfig) -> dict[str, Any]:
    """Returns the converted model's config.json."""
    name = name_of(config)
    objective = {"name": "ssmd" if name == "esm2" else "block_diffusion" if config.mask_id >= 0 else "next_token"}
    objective = part("diffusion", "Config", objective, "objective")
    data = DataConfig("tokens", length=0)  # rows of any length
    model = {"name": name, **dataclasses.asdict(config)}
    return {"data": dataclasses.asdict(data), "model": model, "objective": objective.to_dict()}


def convert() -> None:
    source = sources.open_source(FLAGS.src)
    own, made = hf.target(FLAGS.model, source, FLAGS.block)
    hf.check_headers(source, own)
    hf.check_tokenizer(source, made)
    like = hf.abstract(made)
    with converted.writing(FLAGS.dst, sections(made), hf.tokenizer(source), like) as arrays:
        hf.load(source, own, made, arrays)
    kind = f"block {made.block}, mask id {made.mask_id}" if isinstance(made, qwen3.Config) else f"mask id {made.mask_id}"
    kind = kind if made.mask_id >= 0 else "autoregressive"
    count, size = sum(leaf.size for leaf in like.values()), sum(leaf.size * leaf.dtype.itemsize for leaf in like.values())
    print(f"{count:,} parameters, {size / 1e9:.3f} GB of {next(iter(like.values())).dtype}, vocabulary {made.vocab}, {kind}")
    if source.config.get("token_dropout"):
        print(f"{FLAGS.src} has token_dropout, which is off here: where tokens are masked, logits differ from the checkpoint's own")
    if not source.tokenizer:
        print(f"{FLAGS.src} has no tokenizer; put its files into {Path(FLAGS.dst) / converted.TOKENIZER}")
    print(f"wrote {FLAGS.dst}")


def tokenizer_files(workdir: str | Path) -> list[Path]:
    """Returns the files of the tokenizer that lies in a workdir."""
    folder = Path(workdir) / converted.TOKENIZER
    return sorted(folder.iterdir()) if folder.is_dir() else []


@contextlib.contextmanager
def new_folder() -> Iterator[Path]:
    """Yields a folder that is renamed to --dst at the end; whatever goes wrong inside leaves nothing there."""
    dst = Path(FLAGS.dst)
    writable_folder(dst.parent)
    folder = dst.with_name(f".{dst.name}.part")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield folder
        folder.rename(dst)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_back() -> None:
    """Returns None if --dst can be written, and no flag of the other direction is given. Raises UserError otherwise."""
    if FLAGS.block:
        raise UserError("--block belongs to the other direction; a workdir knows its block length")
    dst = Path(FLAGS.dst)
    if dst.exists() and any(dst.iterdir()):
        raise UserError(f"{dst} is not empty; give the checkpoint a folder of its own")


def convert_back() -> None:
    check_back()
    loaded = load_run(FLAGS.src)
    config, name = loaded.model_config, loaded.config["model"]["name"]
    if type(config) not in hf.LAYOUTS:
        known = ", ".join(name_of(kind()) for kind in hf.LAYOUTS)
        raise UserError(f"{FLAGS.src} holds a model {name!r}, which no public family knows; only models of {known} can be converted")
    kind = hf.to_hf(config)["model_type"]
    if kind not in public.FAMILIES[public.family(FLAGS.model)]:
        fit = " or ".join(name for name, kinds in public.FAMILIES.items() if kind in kinds)
        raise UserError(f"{FLAGS.src} holds a model of type {kind}, not --model={FLAGS.model}; pass --model={fit}")
    if not (kind == "llama" and config.mask_id >= 0):  # grown by a MASK, it is no row of the table
        public.check(FLAGS.model, config)
    with new_folder() as folder:
        files = hf.save(folder, config, named_leaves(loaded.variables["params"]))
        for file in tokenizer_files(FLAGS.src):
            shutil.copy(file, folder / file.name)
    print(f"wrote {FLAGS.dst}: {', '.join(file.name for file in files)}, of step {loaded.step}")


def adapt() -> None:
    """Makes a workdir of an adapter and its base."""
    if not FLAGS.base:
        raise UserError("an adapter has no frozen model in it; pass --base, the workdir of the model that it was trained on")
    loaded = load_run(FLAGS.base)
    name, frozen = loaded.config["model"]["name"], loaded.model_config
    if name != "qwen3" or frozen.mask_id >= 0:
        raise UserError(f"{FLAGS.base} holds a model {name!r} that is no adapter's base; that is a qwen3 with mask_id=-1")
    config, adapter = peft.load(FLAGS.src, frozen, FLAGS.block)
    model = {"name": "uno", **dataclasses.asdict(config)}
    leaves = {**named_leaves(loaded.variables["params"]), **adapter}
    like = {leaf: jax.ShapeDtypeStruct(array.shape, array.dtype) for leaf, array in leaves.items()}
    tokenizer = {file.name: file.read_bytes() for file in tokenizer_files(FLAGS.base)}
    made = {**{section: loaded.config[section] for section in ("data", "objective")}, "model": model}
    with converted.writing(FLAGS.dst, made, tokenizer, like) as arrays:
        for leaf, array in leaves.items():
            arrays[leaf][...] = np.asarray(array)
    said = ", ".join(f"{key}={getattr(config, key)}" for key in ("rank", "alpha", "targets", *peft.OWN))
    print(f"an adapter of {said}")
    print(f"wrote {FLAGS.dst}")


def adapt_back() -> None:
    """Writes the adapter of a workdir."""
    check_back()
    loaded = load_run(FLAGS.src)
    name = loaded.config["model"]["name"]
    if name != "uno":
        raise UserError(f"{FLAGS.src} holds a model {name!r}, without an adapter; pass --model={name} for its weights")
    with new_folder() as folder:
        files = peft.save(folder, loaded.model_config, loaded.variables["params"], FLAGS.base or None)
    print(f"wrote {FLAGS.dst}: {', '.join(file.name for file in files)}, of step {loaded.step}")
    print(peft.NOTE)


def run() -> None:
    if FLAGS.base and FLAGS.model != "uno":
        raise UserError("--base belongs to --model=uno; other checkpoints are whole models")
    programs = {(False, False): convert, (False, True): convert_back, (True, False): adapt, (True, True): adapt_back}
    programs[FLAGS.model == "uno", FLAGS.reverse]()


if __name__ == "__main__":
    main(run)

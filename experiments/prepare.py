"""Prepares a corpus: documents are read, tokenized, laid into rows, and written to files that training reads in any order.

    python experiments/prepare.py --data=openwebtext --src=FOLDER --dst=FOLDER --tokenizer=GPT2 [--packing=wrapped]
    python experiments/prepare.py --data=openwebtext --src=FILE --src=FOLDER --dst=FOLDER --vocab=4096 --length=256 --held_out=drawn
    python experiments/prepare.py --data=uniref50 --src=uniref50.fasta.gz --dst=FOLDER [--long=drop]
    python experiments/prepare.py --data=text8 --src=text8.zip --dst=FOLDER --length=256

A source is a file, or a folder of files, of JSONL, text, FASTA or parquet (dllm/data/documents.py). A folder whose files are named train*,
valid* and test* is split so. Of any other the last --valid documents are for validation and the --test ones before them for tests, or, with
--held_out=drawn (the default for proteins, which often come sorted), so many drawn by --seed.

It may be interrupted: the same command goes on to the same rows, and loses at most one file of --shard rows. All sources are read through
once before the first row is made, so a damaged record is named at once; at the end all rows are read back, compared and counted. Training
reads them with --config.data.name=DATA --config.data.path=DST; with --format=tfds (extra `tfds`), DST/DATA/1.0.0.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from absl import flags

from dllm.core.config import main, read_json, write_atomic
from dllm.core.types import UserError
from dllm.data import documents, openwebtext, shards, text8, tfds_builders, tokenizers, uniref50
from dllm.train.workdir import locked
from dllm.train.writer import clock

FLAGS = flags.FLAGS
flags.DEFINE_enum("data", None, ["openwebtext", "uniref50", "text8"], "the module of dllm.data that reads it", required=True)
flags.DEFINE_multi_string("src", None, "a file or folder of documents; may be given several times", required=True)
flags.DEFINE_string("dst", None, "folder of the corpus", required=True)
flags.DEFINE_integer("length", 1024, "tokens a row; of proteins, at most so many", lower_bound=1)
flags.DEFINE_string("tokenizer", "", "openwebtext: folder of a byte-level BPE's files, such as GPT-2's encoder.json and vocab.bpe")
flags.DEFINE_integer("vocab", 0, "openwebtext: ids of a byte-level BPE trained on the training documents; 0: --tokenizer", lower_bound=0)
flags.DEFINE_enum("packing", "plain", openwebtext.PACKINGS, "openwebtext: rows of text, or of text between BOS and EOS")
flags.DEFINE_enum("long", "crop", ["crop", "drop"], "uniref50: what becomes of sequences of more than --length - 2 residues")
flags.DEFINE_integer("valid", 100_000, "documents of a source that are held out for validation", lower_bound=0)
flags.DEFINE_integer("test", 10_000, "documents of a source that are held out for tests", lower_bound=0)
flags.DEFINE_enum("held_out", None, ["last", "drawn"], "which those are; by default drawn for uniref50, and else the last")
flags.DEFINE_integer("seed", 0, "of what is drawn", lower_bound=0, upper_bound=2**32 - 1)
flags.DEFINE_string("key", "text", "the documents' name in JSONL and parquet")
flags.DEFINE_integer("shard", 16384, "rows a file: what an interrupted run loses at most", lower_bound=1)
flags.DEFINE_enum("format", "shards", ["shards", "tfds"], "files of our own, or a data set of TensorFlow Datasets, which can't be resumed")


def run() -> None:
    out = Path(FLAGS.dst)
    with locked(out, "preparing a corpus", "--dst"):
        recipe = text8_recipe() if FLAGS.data == "text8" else documents_recipe(out)
        check_same(out / "prepare.json", json.loads(json.dumps(recipe.about)))
        write_atomic(out / "prepare.json", json.dumps(recipe.about, indent=1) + "\n")
        where = out / FLAGS.data / tfds_builders.VERSION if FLAGS.format == "tfds" else out
        if shards.is_prepared(where):
            print(f"{where} is done already")
        elif FLAGS.format == "tfds":
            where = tfds_builders.write(out, recipe)
            for name, data in tokenizers.files(out / tokenizers.FOLDER).items():
                write_atomic(where / tokenizers.FOLDER / name, data)
            shards.write_manifest(where, recipe, tfds_builders.read_back(where), print)
        else:
            for split in documents.SPLITS:
                shards.write(out, recipe, split, FLAGS.shard, progress(split, recipe.documents[split]))
            shards.finish(out, recipe, print)
        print(f"train on it with --config.data.name={FLAGS.data} --config.data.path={where} --config.data.length={FLAGS.length}")


def text8_recipe() -> shards.Recipe:
    if len(FLAGS.src) != 1:
        raise UserError("--data=text8 reads one --src: a text8 file, or a folder of parts")
    return with_about(text8.recipe(FLAGS.src[0], FLAGS.length), shard=FLAGS.shard)


def documents_recipe(out: Path) -> shards.Recipe:
    """Returns the recipe that the flags ask for. The sources are counted first, and the tokenizer is put into the folder."""
    by = FLAGS.held_out or ("drawn" if FLAGS.data == "uniref50" else "last")
    texts = documents.plan(FLAGS.src, by, FLAGS.valid, FLAGS.test, FLAGS.seed, FLAGS.key, out / "counts.json", print)
    if FLAGS.data == "uniref50":
        write_atomic(out / tokenizers.FOLDER / tokenizers.RESIDUES, "".join(token + "\n" for token in uniref50.TOKENS))
        recipe = uniref50.recipe(texts, FLAGS.length, FLAGS.long, FLAGS.seed)
    else:
        recipe = openwebtext.recipe(texts, bpe(texts, out / tokenizers.FOLDER), FLAGS.length, FLAGS.packing)
    sources = [list(source) for source in zip((file.name for file in texts.files), texts.counts, texts.hashes)]
    digest = hashlib.sha256(repr(sorted(tokenizers.files(out / tokenizers.FOLDER).items())).encode()).hexdigest()
    asked = {"held_out": by, "valid": FLAGS.valid, "test": FLAGS.test, "seed": FLAGS.seed, "shard": FLAGS.shard, "trained": FLAGS.vocab}
    return with_about(recipe, **asked, sources=sources, tokenizer=digest)


def with_about(recipe: shards.Recipe, **more: object) -> shards.Recipe:
    return dataclasses.replace(recipe, about=recipe.about | more)


def bpe(texts: documents.Documents, folder: Path) -> Path:
    """Returns the folder, with the tokenizer's files in it: --tokenizer's, or those of one that is trained now, unless they are there."""
    if bool(FLAGS.tokenizer) == bool(FLAGS.vocab):
        raise UserError("give --tokenizer, a folder of GPT-2's files, or --vocab, the size of one that is to be trained")
    if FLAGS.tokenizer:
        files = openwebtext.gpt2_files(Path(FLAGS.tokenizer), FLAGS.packing)
    elif (folder / "tokenizer.json").is_file():
        return folder
    else:
        print(f"training a byte-level BPE of {FLAGS.vocab:,} ids", flush=True)
        files = openwebtext.trained_files((text for _, text in texts.read("train")), FLAGS.vocab, FLAGS.packing)
    for name, data in files.items():
        if (folder / name).is_file() and (folder / name).read_bytes() != data:
            raise UserError(
                f"{folder} has another {name} than this command makes; use the same --tokenizer and --packing, or another --dst"
            )
        write_atomic(folder / name, data)
    return folder


def check_same(path: Path, about: dict) -> None:
    """Returns None if the folder is new, or of this very corpus. Raises UserError that names what differs."""
    old = read_json(path) if path.exists() else about
    for key, value in about.items():
        was = old.get(key) if isinstance(old, dict) else old
        if was != value:
            raise UserError(f"{path.parent} holds a corpus with other {key}, {str(was)[:60]}, not {str(value)[:60]}; use another --dst")


def progress(split: str, documents: int) -> Callable[[int, int], None]:
    """Returns what prints how far a split is, every ten seconds."""
    begun, before, shown = time.monotonic(), None, time.monotonic()

    def report(done: int, rows: int) -> None:
        nonlocal before, shown
        before, now = done if before is None else before, time.monotonic()
        if now - shown >= 10:
            left = f", {clock((now - begun) * (documents - done) / (done - before))} left" if done > before else ""
            print(f"{split:5} {done:,} of {documents:,} documents, {rows:,} rows{left}", flush=True)
            shown = now

    return report


if __name__ == "__main__":
    main(run)

"""experiments/prepare.py: a run that was killed goes on to the same corpus; and what is asked wrongly, or damaged, is named."""

from __future__ import annotations

import json
import shutil
import signal

import numpy as np
import pytest

from dllm.data import openwebtext, text8, uniref50
from dllm.data.corpus import DataConfig
from tests.data.test_documents import jsonl, written
from tests.data.test_openwebtext import WORDS
from tests.data.test_tokenizers import shared
from tests.data.test_uniref50 import fasta
from tests.experiments.programs import complaint, files

# Killed when a file is whole but its JSON isn't written, at the next row, and when all rows are written but no manifest.
BEFORE_JSON = """
import os, signal
from dllm.data import shards
w = shards.write_atomic
def fail(path, data):
    if path.name == "train-00001.json": os.kill(os.getpid(), signal.SIGKILL)
    w(path, data)
shards.write_atomic = fail
"""
IN_A_FILE = """
import os, signal
from dllm.data import shards
w = shards.write
shards.write = lambda folder, recipe, split, size, report: w(
    folder, recipe, split, size, lambda done, rows: os.kill(os.getpid(), signal.SIGKILL) if rows == 37 else report(done, rows)
)
"""
BEFORE_THE_MANIFEST = """
import os, signal
from dllm.data import shards
shards.finish = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
"""
LENGTH = ("--length=8", "--shard=16")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Documents of words in two packings, and proteins. No test changes it."""
    place = tmp_path_factory.mktemp("prepare")
    (place / "web").mkdir()
    rng = np.random.default_rng(0)
    for part in range(2):
        texts = [" ".join(rng.choice(WORDS, rng.integers(1, 12))) for _ in range(40)]
        written(place / "web" / f"{part}.jsonl.gz", jsonl(*({"text": text} for text in texts)))
    written(place / "more.txt", "\n<|endoftext|>\n".join("the cat sat " * n for n in range(1, 9)))
    fasta(place / "proteins")
    return place


def web(place, out, *more):
    sources = (f"--src={place / 'web'}", f"--src={place / 'more.txt'}")
    return ("--data=openwebtext", *sources, f"--dst={out}", *LENGTH, "--valid=3", "--test=3", *(more or ("--vocab=280",)))


def contents(folder):
    """Returns what the folder holds by name, but for when files were changed."""
    return {path.relative_to(folder): data for path, data in files(folder).items()}


def test_a_killed_run_goes_on_to_the_same(place, programs, tmp_path):
    pytest.importorskip("tokenizers", reason="the extra `hf` isn't installed")
    done = programs.run("prepare", *web(place, tmp_path / "whole"))
    assert done.code == 0, done.err
    assert "          40 documents in" in done.out
    assert f"--config.data.path={tmp_path / 'whole'}" in done.out.splitlines()[-1]
    for first in (BEFORE_JSON, IN_A_FILE, BEFORE_THE_MANIFEST):
        assert programs.run("prepare", *web(place, tmp_path / "out"), first=first).code == -signal.SIGKILL
        assert not (tmp_path / "out" / "manifest.json").exists()
    assert sorted(path.name for path in (tmp_path / "out").glob("train-*")) != []
    done = programs.run("prepare", *web(place, tmp_path / "out"))
    assert done.code == 0, done.err
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    before = files(tmp_path / "out")
    assert "is done already" in programs.run("prepare", *web(place, tmp_path / "out")).out
    assert files(tmp_path / "out") == before
    corpus = openwebtext.load(DataConfig("openwebtext", str(tmp_path / "out"), 8))
    assert f"train {len(corpus.train):12,} rows, {8 * len(corpus.train):15,} tokens, of 76 documents" in done.out
    assert f"valid {len(corpus.valid):12,} rows, {8 * len(corpus.valid):15,} tokens, of 6 documents" in done.out


@pytest.mark.parametrize(
    "flags, says",
    [
        (("--vocab=281",), "holds a corpus with other trained, 280, not 281; use another --dst"),
        (("--vocab=280", "--packing=wrapped"), "holds a corpus with other packing, plain, not wrapped"),
        (("--vocab=280", "--length=9"), "holds a corpus with other length, 8, not 9"),
        (("--vocab=280", "--held_out=drawn"), "holds a corpus with other held_out, last, not drawn"),
        (("--vocab=280", "--valid=200"), "has 80 documents, and 200 + 3 are to be held out"),
        (("--vocab=280", "--tokenizer=x"), "give --tokenizer, a folder of GPT-2's files, or --vocab"),
        (("--length=8",), "give --tokenizer, a folder of GPT-2's files, or --vocab"),
        (("--vocab=280", "--key=body"), "0.jsonl.gz: document 0 (counted from 0), line 1 has no text under the key 'body'"),
        (("--vocab=280", "--src=/no/where"), "/no/where is no file and no folder"),
        (("--vocab=280", "--data=web"), "--data"),
    ],
)
def test_what_is_asked_wrongly(prepared, place, programs, flags, says):
    before = files(prepared)
    assert says in complaint(programs.run("prepare", *web(place, prepared, *flags)))
    after = files(prepared)
    assert {path for path in before if before[path] != after.get(path)} <= {prepared / "counts.json"}
    shutil.copy(prepared.parent / "counts.json", prepared / "counts.json")


@pytest.fixture(scope="module")
def prepared(place, programs, tmp_path_factory):
    pytest.importorskip("tokenizers", reason="the extra `hf` isn't installed")
    out = tmp_path_factory.mktemp("prepared") / "out"
    done = programs.run("prepare", *web(place, out))
    assert done.code == 0, done.err
    shutil.copy(out / "counts.json", out.parent)
    return out


def test_sources_that_changed(place, programs, tmp_path):
    src = shutil.copytree(place / "proteins", tmp_path / "src")
    flags = ("--data=uniref50", f"--src={src}", f"--dst={tmp_path / 'out'}", *LENGTH)
    assert programs.run("prepare", *flags).code == 0
    written(src / "train.fasta.gz", ">a\nMKV\n")
    line = complaint(programs.run("prepare", *flags))
    assert f"{tmp_path / 'out'} holds a corpus with other sources" in line
    data = (src / "train.fasta.gz").read_bytes()
    (src / "train.fasta.gz").write_bytes(data[:-6])
    line = complaint(programs.run("prepare", *flags, f"--dst={tmp_path / 'other'}"))
    assert f"{src / 'train.fasta.gz'}: document 0 (counted from 0), behind line 2: the file can't be read on" in line
    assert not list((tmp_path / "other").glob("*.array_record"))


def test_proteins_and_text8(place, programs, tmp_path):
    out = tmp_path / "proteins"
    done = programs.run("prepare", "--data=uniref50", f"--src={place / 'proteins'}", f"--dst={out}", "--length=12")
    assert done.code == 0, done.err
    corpus = uniref50.load(DataConfig("uniref50", str(out), 12))
    assert [len(getattr(corpus, split)) for split in ("train", "valid", "test")] == [4, 2, 2]
    assert (out / "tokenizer" / "vocab.txt").read_text().split() == list(uniref50.TOKENS)
    (tmp_path / "text8").write_text("the quick brown fox " * 20)
    out = tmp_path / "rows"
    done = programs.run("prepare", "--data=text8", f"--src={tmp_path / 'text8'}", f"--dst={out}", "--length=10")
    assert done.code == 0, done.err
    assert len(text8.load(DataConfig("text8", str(out), 10)).train) == 36
    line = complaint(programs.run("prepare", "--data=text8", *[f"--src={tmp_path / 'text8'}"] * 2, f"--dst={out}"))
    assert "--data=text8 reads one --src" in line


def test_a_data_set_of_tensorflow_datasets(place, programs, tmp_path):
    pytest.importorskip("tensorflow_datasets", reason="the extra `tfds` isn't installed")
    flags = ("--data=uniref50", f"--src={place / 'proteins'}", f"--dst={tmp_path / 'out'}", "--length=12", "--format=tfds")
    for said in ("read back", "is done already"):
        done = programs.run("prepare", *flags)
        assert done.code == 0, done.err
        assert said in done.out
    folder = tmp_path / "out" / "uniref50" / "1.0.0"
    assert f"--config.data.path={folder}" in done.out
    corpus = uniref50.load(DataConfig("uniref50", str(folder), 12))
    assert (len(corpus.train), corpus.tokenizer) == (4, folder / "tokenizer")


@pytest.mark.slow
def test_the_real_files(programs, tmp_path):
    """The small twins' recipes, and the counts that ../shared/data's README gives."""
    pytest.importorskip("tokenizers", reason="the extra `hf` isn't installed")
    done = programs.run("prepare", "--data=uniref50", f"--src={shared('proteins')}", f"--dst={tmp_path / 'p'}")
    assert done.code == 0, done.err
    rows = {split: about["rows"] for split, about in json.loads((tmp_path / "p" / "manifest.json").read_text())["splits"].items()}
    assert rows == {"train": 44829, "valid": 2500, "test": 2500}
    sources = (f"--src={shared('gov')}", f"--src={shared('cased')}")
    flags = ("--data=openwebtext", *sources, f"--tokenizer={shared('tokenizers', 'gpt2')}", "--held_out=drawn", "--valid=140", "--test=140")
    done = programs.run("prepare", *flags, f"--dst={tmp_path / 'w'}")
    assert done.code == 0, done.err
    about = json.loads((tmp_path / "w" / "manifest.json").read_text())
    assert 5.4e6 < sum(split["tokens"] for split in about["splits"].values()) < 5.6e6  # 2.88 M + 2.22 M + 0.44 M
    assert sum(split["documents"] for split in about["splits"].values()) == 2883 + 2646 + 214 + 298

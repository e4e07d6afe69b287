"""TensorFlow Datasets' builders, which prepare and read the same rows with no TensorFlow; in an environment that has the extra `tfds`."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.data import openwebtext, shards, text8, tfds_builders, uniref50
from dllm.data.corpus import DataConfig
from dllm.data.documents import SPLITS
from dllm.data.pipeline import train_batches
from tests.conftest import REPO
from tests.data import test_shards, test_uniref50

PREPARE = """
import sys
from pathlib import Path
from dllm.data import shards, text8, tfds_builders
from dllm.data.corpus import DataConfig
from dllm.data.pipeline import train_batches
made = text8.recipe(sys.argv[1], 8)
folder = tfds_builders.write(Path(sys.argv[2]), made)
shards.write_manifest(folder, made, tfds_builders.read_back(folder), print)
corpus = text8.load(DataConfig("text8", str(folder), 8))
print(next(train_batches(corpus.train, 8, 4, 0))["tokens"].shape, [name for name in sys.modules if name.split(".")[0] == "tensorflow"])
"""


@pytest.fixture
def tfds():
    return pytest.importorskip("tensorflow_datasets", reason="the extra `tfds` isn't installed")


def written(place, made):
    """Returns the folders of a recipe's rows, ours and that of TensorFlow Datasets."""
    (place / "ours").mkdir()
    for split in SPLITS:
        shards.write(place / "ours", made, split, 100, lambda *_: None)
    shards.finish(place / "ours", made, lambda line: None)
    theirs = tfds_builders.write(place / "theirs", made)
    shards.write_manifest(theirs, made, tfds_builders.read_back(theirs), lambda line: None)
    return place / "ours", theirs


def packed(place):
    return shards.Recipe(test_shards.recipe().about | {"data": "openwebtext"}, test_shards.COUNTS, test_shards.packed, np.dtype("<u2"))


def characters(place):
    (place / "text8").write_text("the quick brown fox jumps over the lazy dog " * 10)
    return text8.recipe(str(place / "text8"), 8)


def proteins(place):
    return test_uniref50.recipe(test_uniref50.fasta(place / "src"), place)


@pytest.mark.parametrize("module, make, length", [(openwebtext, packed, 6), (text8, characters, 8), (uniref50, proteins, 12)])
def test_the_same_rows(tfds, tmp_path, module, make, length):
    ours, theirs = written(tmp_path, make(tmp_path))
    name = module.__name__.rpartition(".")[2]
    assert theirs == tmp_path / "theirs" / name / "1.0.0"
    one, two = (module.load(DataConfig(name, str(folder), length)) for folder in (ours, theirs))
    assert (one.vocab, one.train.extras) == (two.vocab, two.train.extras)
    for split in SPLITS:
        a, b = getattr(one, split), getattr(two, split)
        assert len(a) == len(b) > 0
        assert a.unused == b.unused
        for field, x_BL in a.take(np.arange(len(a))).items():
            np.testing.assert_array_equal(x_BL, b.take(np.arange(len(b)))[field])
        source = tfds.data_source(name, data_dir=str(tmp_path / "theirs"), split=split)  # as anyone else reads it
        assert len(source) == len(a)
        assert source[0]["tokens"].tolist() == a.tokens[0][: len(source[0]["tokens"])].tolist()
    batches = [next(train_batches(corpus.train, length, 2, 0)) for corpus in (one, two)]
    for field in batches[0]:
        np.testing.assert_array_equal(batches[0][field], batches[1][field])


def test_no_tensorflow_is_loaded(tfds, tmp_path):
    """Preparing, reading and batching, in a process of their own."""
    (tmp_path / "text8").write_text("the quick brown fox jumps over the lazy dog " * 10)
    command = [sys.executable, "-c", PREPARE, str(tmp_path / "text8"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "(4, 8) []"


def test_damage_is_named(tfds, tmp_path):
    _, folder = written(tmp_path, packed(tmp_path))
    (file,) = folder.glob("*train*")
    data = file.read_bytes()
    file.write_bytes(bytes(len(data)))
    corpus = openwebtext.load(DataConfig("openwebtext", str(folder), 6))
    with pytest.raises(UserError, match=r"record 2 of the train split in .* is damaged"):
        corpus.train.take(np.array([2]))
    (folder / "dataset_info.json").unlink()
    with pytest.raises(UserError, match=f"{folder} can't be read as a data set"):
        openwebtext.load(DataConfig("openwebtext", str(folder), 6))


def test_without_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    tfds_builders.builders.cache_clear()
    with pytest.raises(UserError, match=r"TensorFlow Datasets needs packages: pip install -e '\.\[tfds\]'"):
        tfds_builders.write(tmp_path, packed(tmp_path))

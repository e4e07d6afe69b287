"""Prepared corpora as TensorFlow Datasets: the same rows, in folders that others' tools read too. Needs no TensorFlow (extra `tfds`).

    DST/NAME/1.0.0/      dataset_info.json, features.json and ArrayRecord files, by the package; a record is {"tokens": ids of a row}
                         manifest.json, SPLIT.lengths.npy and tokenizer/, as `dllm.data.shards` has them

`data.path` is DST/NAME/1.0.0. The package writes a data set in one go: one that was interrupted begins anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dllm.core.types import UserError
from dllm.data.documents import reason

VERSION = "1.0.0"


class _Tokens:
    """The rows of a data source, as `shards.Stored` reads them."""

    def __init__(self, source: Any):
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.source[index]["tokens"]


@functools.cache
def builders() -> dict[str, type]:
    """Returns {name of a data module: its builder class}. One is made of a `shards.Recipe`, and takes the package's own arguments."""
    tfds = _package()

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # names are found by folder, whatever else has them
        VERSION = tfds.core.Version(VERSION)

        def __init__(self, recipe: Any, **options: Any):
            self.recipe = recipe
            super().__init__(file_format="array_record", **options)

        def _info(self) -> Any:
            about = self.recipe.about
            shape = (None if self.recipe.ragged else about["length"],)
            tokens = tfds.features.Tensor(shape=shape, dtype=self.recipe.dtype.newbyteorder("=").type)
            return tfds.core.DatasetInfo(
                builder=self,
                description=f"Rows of {about['length']} tokens, {about['vocab']} ids.",
                features=tfds.features.FeaturesDict({"tokens": tokens}),
                disable_shuffling=True,
            )

        def _split_generators(self, downloads: Any) -> dict[str, Iterator]:
            return {split: self._generate_examples(split) for split in self.recipe.documents}

        def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
            for number, (row, _) in enumerate(self.recipe.rows(split, (0, 0))):
                yield number, {"tokens": row.astype(self.recipe.dtype)}

    class Text8(Builder, skip_registration=True):
        name = "text8"

    class OpenWebText(Builder, skip_registration=True):
        name = "openwebtext"

    class UniRef50(Builder, skip_registration=True):
        name = "uniref50"

    return {builder.name: builder for builder in (Text8, OpenWebText, UniRef50)}


def write(place: Path, recipe: Any) -> Path:
    """Returns the folder that a builder wrote the recipe's rows to, in `place`; nothing is done where it is there already."""
    builder = builders()[recipe.about["data"]](recipe, data_dir=str(place))
    builder.download_and_prepare()
    return Path(builder.data_dir)


def read_back(folder: Path) -> Callable[[str, np.ndarray], tuple[list[int], None]]:
    """Returns what `shards.write_manifest` reads the rows in `folder` by."""

    def rows(split: str, used: np.ndarray) -> tuple[list[int], None]:
        lengths, found = [], _Tokens(_open(folder, split))
        for number in range(len(found)):
            row = found[number]
            used[row] = True
            lengths.append(len(row))
        return lengths, None

    return rows


def open_split(folder: Path, split: str, rows: int) -> _Tokens:
    """Returns the rows of a split. Raises UserError where the package finds fewer or more than `rows`."""
    source = _open(folder, split)
    if len(source) != rows:
        raise UserError(f"{folder} has {len(source)} rows of {split}, and its manifest says {rows}; fetch it again, or prepare it anew")
    return _Tokens(source)


def _open(folder: Path, split: str) -> Any:
    """Returns the records of a split by index."""
    tfds = _package()
    try:
        return tfds.data_source(f"{folder.parent.name}:{folder.name}", data_dir=str(folder.parents[1]), split=split)
    except Exception as e:  # whatever the package raises
        raise UserError(f"{folder} can't be read as a data set ({reason(e)}); fetch it again, or prepare it anew") from None


def _package() -> Any:
    try:
        import tensorflow_datasets
    except ImportError:
        raise UserError("TensorFlow Datasets needs packages: pip install -e '.[tfds]'") from None
    return tensorflow_datasets

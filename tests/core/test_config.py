from __future__ import annotations

import dataclasses
import os
from typing import Any, Literal

import pytest

from dllm.core import config
from dllm.core.paths import map_named, named_leaves, select
from dllm.core.types import UserError


@dataclasses.dataclass(frozen=True)
class Inner:
    a: int = 1


@dataclasses.dataclass(frozen=True)
class Config:
    count: int
    rate: float
    flag: bool = False
    name: str = ""
    sizes: tuple[int, ...] = ()
    pair: tuple[int, str] = (0, "")
    mode: Literal["chain", "block"] = "chain"
    limit: int | None = None
    inner: Inner = Inner()
    anything: Any = None


def test_values_are_taken_as_their_fields_want_them():
    got = config.to_dataclass(Config, {"count": 1, "rate": 2, "sizes": [1, 2], "pair": [1, "x"], "limit": 3, "inner": {"a": 2}}, "c")
    assert got == Config(1, 2.0, sizes=(1, 2), pair=(1, "x"), limit=3, inner=Inner(2))
    assert type(got.rate) is float


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("count", 1.0, "c.count must be int, not 1.0"),
        ("count", True, "c.count must be int, not True"),
        ("count", "1", "c.count must be int, not '1'"),
        ("rate", "1", "c.rate must be float, not '1'"),
        ("rate", False, "c.rate must be float, not False"),
        ("flag", 1, "c.flag must be bool, not 1"),
        ("name", None, "c.name must be str, not None"),
        ("sizes", 3, "c.sizes must be tuple"),
        ("sizes", [1, "2"], r"c.sizes\[1\] must be int, not '2'"),
        ("pair", [1], "c.pair must be tuple"),
        ("mode", "tree", "c.mode must be 'chain' or 'block', not 'tree'"),
        ("limit", 1.5, "c.limit must be int | None"),
        ("inner", {"b": 1}, "unknown key c.inner.b; c.inner has: a"),
        ("cuont", 1, "unknown key c.cuont; c has: count, rate, flag"),
    ],
)
def test_anything_else_is_an_error_that_names_the_key(key, value, message):
    with pytest.raises(UserError, match=message):
        config.to_dataclass(Config, {"count": 1, "rate": 1.0, key: value}, "c")


def test_a_missing_key_without_a_default_is_an_error():
    with pytest.raises(UserError, match=r"missing key c.rate \(float\)"):
        config.to_dataclass(Config, {"count": 1}, "c")


def test_write_atomic_leaves_the_old_file_or_the_new(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "file"
    config.write_atomic(path, "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        config.write_atomic(path, b"new")
    assert path.read_text() == "old"


def test_places_that_cannot_be_written(tmp_path):
    """One line that names the place, and no half-written file."""
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"cannot make the folder .*file"):
        config.write_atomic(tmp_path / "file" / "x.json", "new")
    with pytest.raises(UserError, match=r"cannot write .*folder: Is a directory"):
        config.write_atomic(tmp_path / "folder", "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_read_json(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UserError, match=r"bad\.json is not JSON"):
        config.read_json(tmp_path / "bad.json")
    with pytest.raises(UserError, match=r"cannot read .*none\.json: No such file"):
        config.read_json(tmp_path / "none.json")


def test_names_of_leaves():
    tree = {"a": {"kernel": 1, "scale": 2}, "b": [3, 4]}
    assert named_leaves(tree) == {"a/kernel": 1, "a/scale": 2, "b/0": 3, "b/1": 4}
    assert select("^a/k|1$", tree) == {"a": {"kernel": True, "scale": False}, "b": [False, True]}
    assert map_named(lambda name, leaf: f"{name}={leaf}", tree)["b"] == ["b/0=3", "b/1=4"]

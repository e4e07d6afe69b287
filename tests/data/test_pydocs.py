"""The embedded corpus: what enters it, that nothing is run to get it, and how it is split."""

from __future__ import annotations

import hashlib
import sysconfig

import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.data import pydocs
from dllm.data.corpus import DataConfig, decode, words

CONFIG = DataConfig("pydocs", length=4)


def whole(corpus) -> str:
    return " ".join(decode(split) for split in (corpus.train, corpus.valid, corpus.test))


def test_this_python_has_enough_prose():
    corpus = pydocs.load(DataConfig("pydocs"))
    sizes = np.array([len(split) for split in (corpus.train, corpus.valid, corpus.test)])
    assert 600_000 < sizes.sum() < 4_000_000
    np.testing.assert_allclose(sizes / sizes.sum(), [0.90, 0.05, 0.05], atol=0.03)
    assert all(split.max() == 26 and split.dtype == np.uint8 for split in (corpus.train, corpus.valid, corpus.test))
    known = set(words(corpus.train))
    assert {"the", "return", "object", "zero"} <= known
    held_out = decode(corpus.test).split()
    assert np.mean([word in known for word in held_out]) > 0.9  # the ceiling that the spelling measure has here
    sentences = {tuple(held_out[i : i + 40]) for i in range(0, len(held_out) - 40, 40)}
    train = decode(corpus.train)
    assert np.mean([" ".join(sentence) in train for sentence in sentences]) < 0.02  # and no held-out text in the training text


@pytest.fixture
def library(monkeypatch, tmp_path):
    """An empty standard library without topics, from which any amount of text is enough."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(pydocs, "_topics", dict)
    monkeypatch.setattr(pydocs, "SMALLEST", 0)

    def add(name: str, source: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)

    for i in range(40):  # enough documents for three splits
        add(f"filler{i:02}.py", f'"""filler {" ".join("abcdefghij"[int(c)] for c in str(i))}"""')
    return add


SOURCE = '''
"""Head of 2 lines.

>>> a session
42

Tail."""
raise SystemExit("this module was imported")
if True:
    class A:
        """In a class."""
        async def f(self):
            """In a coroutine."""
            "not a docstring"
            "\\d"
'''


def test_docstrings_are_read_in_order_and_no_module_is_run(library):
    library("package/module.py", SOURCE)
    assert "head of two lines tail in a class in a coroutine" in whole(pydocs.load(CONFIG))
    assert "docstring" not in whole(pydocs.load(CONFIG))


@pytest.mark.parametrize("place", ["test/a.py", "json/tests/a.py", "site-packages/b/c.py", "idlelib/a.py", "data.txt"])
def test_what_is_not_the_librarys_own_stays_out(library, place):
    library(place, '"""stranger"""')
    assert "stranger" not in whole(pydocs.load(CONFIG))


def test_a_file_that_is_not_python_is_passed_over(library):
    before = whole(pydocs.load(CONFIG))
    library("template.py", '"""stranger"""\ndef {name}:')
    library("zero.py", '"""stranger"""\n\0')
    assert whole(pydocs.load(CONFIG)) == before


def test_a_repeated_paragraph_stays_once_and_documents_stay_whole(library):
    library("a.py", '"""Only in a.\n\nSaid twice."""')
    library("b.py", '"""Only in b.\n\nSaid  twice!"""\ndef f():\n    """Said twice."""')
    corpus = pydocs.load(CONFIG)
    text = whole(corpus)
    assert text.count("said twice") == text.count("only in a") == text.count("only in b") == 1
    assert text.count("filler") == 40
    first = min("ab", key=lambda name: hashlib.sha256(f"{name}.py".encode()).digest())
    assert f"only in {first} said twice" in text


def test_topics_and_sources_each_do_alone(library, monkeypatch, tmp_path):
    monkeypatch.setattr(pydocs, "_topics", lambda: {"if": "The if statement."})
    assert "the if statement" in whole(pydocs.load(CONFIG))
    monkeypatch.setattr(pydocs, "_topics", lambda: {f"t{i}": f"topic {'x' * (i + 1)}" for i in range(40)})
    for file in tmp_path.glob("*.py"):
        file.unlink()
    assert whole(pydocs.load(CONFIG)).count("topic") == 40


def test_a_stripped_python_and_a_path_are_refused(library, monkeypatch):
    monkeypatch.setattr(pydocs, "SMALLEST", 200_000)
    with pytest.raises(UserError, match=r"only .* characters .* use a Python"):
        pydocs.load(CONFIG)
    with pytest.raises(UserError, match=r"data.path is a/b"):
        pydocs.load(DataConfig("pydocs", "a/b", 4))

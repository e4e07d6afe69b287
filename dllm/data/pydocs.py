"""pydocs: prose that every Python brings along, for a first run without a network.

The documentation topics of `help()` (pydoc_data.topics) and the docstrings of the standard library's sources, about 1.6 million characters
of text8's alphabet. Sources are parsed, never imported. The text differs a little between Python versions; on one installation it is always
the same.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from dllm.core.types import UserError
from dllm.data.corpus import ALPHABET, Corpus, DataConfig, encode, make_corpus, normalize

VOCAB = len(ALPHABET)
SMALLEST = 200_000  # characters: far below any whole Python's, far above what a stripped one has

# Tests and demos are not documentation, site-packages is not Python's, and the codecs of encodings say one sentence a hundred times.
_SKIPPED = {"test", "tests", "idlelib", "turtledemo", "encodings", "site-packages", "dist-packages"}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def load(config: DataConfig) -> Corpus:
    """Returns the corpus of this Python's documentation, about 90/5/5 by whole documents (a topic, or a module's docstrings).

    Documents stand in the order of a hash of their names; a paragraph that occurred before is dropped, so none is in two splits.
    UserErrors: a `data.path`, which this corpus hasn't, or a Python that was stripped of its sources.
    """
    if config.path:
        raise UserError(f"data.name=pydocs reads no file, but data.path is {config.path}; use data.name=text8 for it, or drop the path")
    library = Path(sysconfig.get_path("stdlib"))
    documents = {f"topic {name}": text for name, text in _topics().items()} | dict(_modules(library))
    seen: set[str] = set()
    texts = []
    for name in sorted(documents, key=lambda name: hashlib.sha256(name.encode()).digest()):
        new = [paragraph for paragraph in dict.fromkeys(_paragraphs(documents[name])) if paragraph not in seen]
        seen.update(new)
        if new:
            texts.append(" ".join(new))
    total = sum(len(text) + 1 for text in texts)
    if total < SMALLEST:
        raise UserError(f"only {total} characters of documentation in {library}; use a Python with its whole library, or data.name=text8")
    splits: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    before = 0
    for text in texts:
        splits["train" if before < 0.90 * total else "valid" if before < 0.95 * total else "test"].append(text)
        before += len(text) + 1
    return make_corpus(config, **{split: encode(" ".join(members)) for split, members in splits.items()})


def _topics() -> dict[str, str]:
    """Returns the text of each topic of `help()`; nothing where the distribution left them out."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return {}
    return topics


def _modules(library: Path) -> Iterator[tuple[str, str]]:
    """Yields (path relative to `library`, its docstrings as paragraphs) of each source file that Python can parse."""
    for folder, subfolders, names in library.walk():
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED]  # walk goes on into what is left
        for file in (folder / name for name in names if name.endswith(".py")):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # invalid escapes in other people's strings
                    tree = ast.parse(file.read_bytes())
            except (OSError, SyntaxError, ValueError):
                continue  # templates and fixtures that aren't Python
            yield file.relative_to(library).as_posix(), "\n\n".join(_docstrings(tree))


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Yields the docstrings at and below `node`, in the order of the source."""
    if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
        yield text
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):  # no expression holds a documented statement
            yield from _docstrings(child)


def _paragraphs(text: str) -> list[str]:
    """Returns the paragraphs of `text` by text8's rules, without the empty ones and the interpreter sessions."""
    paragraphs = [normalize(paragraph) for paragraph in re.split(r"\n\s*\n", text) if ">>>" not in paragraph]
    return [paragraph for paragraph in paragraphs if paragraph]

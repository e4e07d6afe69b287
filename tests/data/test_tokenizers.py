"""Tokenizers: llama2.c's merges by score, Hugging Face's files, MASK by its id; and files that are damaged."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from dllm.core.types import UserError
from dllm.data import tokenizers
from dllm.data.tokenizers import CHARACTERS
from tests.data.files import scored

SHARED = Path(__file__).parents[3] / "shared" / "data"


def shared(*names: str) -> Path:
    path = SHARED.joinpath(*names)
    if not path.exists():
        pytest.skip(f"reads real files, and {'/'.join(names)} is not beside the project")
    return path


def test_without_a_folder_ids_are_characters(tmp_path):
    assert tokenizers.beside(tmp_path) == CHARACTERS
    assert CHARACTERS.encode("a b") == [1, 0, 2]
    assert CHARACTERS.decode([1, 0, 2, 31]) == "a b\ufffd"
    with pytest.raises(UserError, match="the prompt has 'A'"):
        CHARACTERS.encode("A", "the prompt")


def test_merges_go_by_score_and_ties_to_the_left(tmp_path):
    """Of " abab": "ab" (score -1) is merged at both places, left first, then " ab" (-2); "ba" has a worse score and nothing left."""
    tokenizer = tokenizers.read(scored(tmp_path, {"ab": -1.0, " ab": -2.0, "ba": -3.0}))
    ids = {piece: 259 + i for i, piece in enumerate([" ", "a", "b", "ab", " ab", "ba"])}
    assert tokenizer.encode("abab") == [ids[" ab"], ids["ab"]]
    assert tokenizer.encode("ba") == [ids[" "], ids["ba"]]
    assert tokenizer.encode("aé") == [ids[" "], ids["a"], 3 + 0xC3, 3 + 0xA9]  # bytes, where no piece is
    assert tokenizer.encode("") == []
    for text in ("abab", "ba é ab", " two spaces"):
        assert tokenizer.decode([tokenizer.bos, *tokenizer.encode(text)]) == text
    assert tokenizer.decode([1, *tokenizer.encode("ab"), 1, *tokenizer.encode("b")]) == "ab\n<s>\n b"


def test_settings_name_tokens(tmp_path):
    tokenizer = tokenizers.read(scored(tmp_path, {"ab": -1.0}))
    assert tokenizer.named("ab", "x") == [262]
    assert tokenizer.named("2, 13", "x") == [2, 13]
    assert tokenizer.named("", "x") == []
    with pytest.raises(UserError, match="setting stop is 'abc', which is not one token"):
        tokenizer.named("abc", "setting stop")


def test_the_stories_tokenizer():
    tokenizer = tokenizers.read(shared("stories260K"))
    text = "Once upon a time, there was a little girl named Lily."
    ids = tokenizer.encode(text)
    assert tokenizer.vocab == 512
    assert b"|".join(tokenizer.pieces[i] for i in ids) == b" Once| upon| a| time|,| there| was| a| little| g|ir|l| named| Lily|."
    assert tokenizer.decode([1, *ids]) == text
    story = shared("stories260K", "tinystories_sample.txt").read_text()[:400]
    assert tokenizer.decode(tokenizer.encode(story)) == story


@pytest.mark.parametrize("cut", [1, 2, 700, -1])
def test_a_cut_file_is_named(tmp_path, cut):
    file = scored(tmp_path, {"ab": -1.0}) / "tok.bin"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(UserError, match=r"tok.bin is no llama2.c tokenizer, or cut off"):
        tokenizers.read(tmp_path)


def test_a_folder_without_one(tmp_path):
    with pytest.raises(UserError, match="holds no tokenizer; put"):
        tokenizers.read(tmp_path)


def qwen3(folder: Path) -> Path:
    """Returns the folder with the public files unpacked into it."""
    for file in shared("tokenizers", "qwen3").iterdir():
        data = file.read_bytes()
        (folder / file.name.removesuffix(".xz")).write_bytes(lzma.decompress(data) if file.suffix == ".xz" else data)
    return folder


def test_qwen3_from_vocab_and_merges(tmp_path):
    """MASK is found by its id, whichever of its two spellings comes first: https://github.com/hxhcreate/DARE/issues/13"""
    pytest.importorskip("tokenizers")
    tokenizer = tokenizers.read(qwen3(tmp_path))
    assert tokenizer.encode("Hello world") == [9707, 1879]
    assert (tokenizer.vocab, tokenizer.mask, tokenizer.eos, tokenizer.bos, tokenizer.begins) == (151670, 151669, 151643, None, False)
    assert tokenizer.named("<|im_end|>", "setting stop") == [151645]
    assert tokenizer.encode("a<|im_end|>\n")[1] == 151645
    for text in ("It's 12.5 o'clock,\n\n  naïve 你好\t", "def f(x):\r\n    return x"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("2024")) == 4  # Qwen cuts numbers into digits; GPT-2 doesn't
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["added_tokens_decoder"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    other = tokenizers.read(tmp_path)
    assert (other.mask, other.named("<MASK>", "x")) == (151669, [151669])
    assert other != tokenizer


def test_tokenizer_json(tmp_path):
    """A file of the package's own; what it puts before a text is told by the file."""
    package = pytest.importorskip("tokenizers")
    inner = package.Tokenizer(package.models.WordLevel({"<s>": 0, "a": 1, "b": 2, "?": 3}, unk_token="?"))
    inner.pre_tokenizer = package.pre_tokenizers.Whitespace()
    inner.add_special_tokens(["<s>"])
    inner.post_processor = package.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    tokenizer = tokenizers.read(tmp_path)
    assert (tokenizer.bos, tokenizer.begins, tokenizer.mask, tokenizer.vocab) == (0, True, None, 4)
    assert tokenizer.encode("a b") == [1, 2]
    assert tokenizer.decode([0, 1, 2]) == "a b"
    assert tokenizers.files(tmp_path).keys() == {"tokenizer.json", "tokenizer_config.json"}
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(UserError, match=r"the tokenizer in .* is damaged"):
        tokenizers.read(tmp_path)


VOCABULARY = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGX-", "<mask>"]


def test_residues(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY))
    tokenizer = tokenizers.read(tmp_path)
    assert (tokenizer.vocab, tokenizer.bos, tokenizer.eos, tokenizer.mask, tokenizer.begins) == (10, 0, 2, 9, True)
    assert tokenizer.encode("GALX") == [6, 5, 4, 7]
    assert tokenizer.encode("G<mask>-") == [6, 9, 8]
    assert tokenizer.decode([0, 6, 5, 2, 1, 1]) == "GA"
    assert tokenizer.decode([0, 6, 1, 5, 2]) == "G<pad>A"
    assert tokenizer.decode([6, 0, 9, 11]) == "G<cls><mask>\ufffd"
    assert tokenizer.named("<eos>", "x") == [2]
    assert tokenizer.named("2, 7", "x") == [2, 7]
    assert tokenizer == tokenizers.read(tmp_path) != CHARACTERS
    assert tokenizers.files(tmp_path).keys() == {"vocab.txt"}
    for text, bad in (("GAl", "'l' at residue 3"), ("G<sep>", "'<sep>' at residue 2"), ("A<", "'<' at residue 2")):
        with pytest.raises(UserError, match=f"the prompt has {bad}, which is no residue"):
            tokenizer.encode(text, "the prompt")


def test_a_vocabulary_of_something_else(tmp_path):
    for tokens, says in (
        (VOCABULARY[:-1], "lacks <mask>"),
        ([*VOCABULARY, "L"], "it has 'L' twice"),
        ([*VOCABULARY, "##ing"], "it has '##ing' twice, or it is none"),
    ):
        (tmp_path / "vocab.txt").write_text("\n".join(tokens))
        with pytest.raises(UserError, match=says):
            tokenizers.read(tmp_path)

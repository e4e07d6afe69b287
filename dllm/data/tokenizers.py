"""Text to token ids and back: the 27 characters, llama2.c's vocabularies with scores, Hugging Face's files, and ESM-2's residues.

A run's tokenizer lies in WORKDIR/tokenizer/, that of a corpus of tokens in its folder's tokenizer/; without such a folder ids are
characters. The model's side of MASK is `model.mask_id`; a tokenizer knows it only where it has a token of its own for it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dllm.core.types import UserError
from dllm.data import corpus

FOLDER = "tokenizer"  # of a workdir, and of a corpus of tokens
HUGGING_FACE = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json")
RESIDUES = "vocab.txt"
STANDARD = "LAGVSERTIDPKQNFYMHWC"  # the residues that models of proteins write
SDAR_MASK = 151669  # spelt <|MASK|> in one of SDAR's files and <MASK> in another

# How Qwen's tokenizers cut a text before the merges; their vocab.json and merges.txt don't say it.
_QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_FIRST_BYTE = 3  # llama2.c: ids 0, 1, 2 are <unk>, BOS, EOS; then come the 256 bytes


@dataclasses.dataclass(frozen=True)
class Characters:
    """The 27 symbols of `data.corpus`. Prompts may leave positions open; see `evals.generate.parse_prompt`."""

    vocab: int = len(corpus.ALPHABET)
    bos: int | None = None
    eos: int | None = None
    mask: int | None = None
    begins: bool = False  # whether a text begins with BOS

    def encode(self, text: str, where: str = "the text") -> list[int]:
        """Returns the ids. A character outside a-z and space is a UserError that names `where`."""
        return corpus.encode(text, where).tolist()

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text; an id beyond the alphabet, which a model with a larger vocabulary may write, is a replacement character."""
        return "".join(corpus.ALPHABET[i] if i < len(corpus.ALPHABET) else "\ufffd" for i in ids)

    def named(self, text: str, where: str) -> list[int]:
        """Returns the ids that a setting names: each of its characters."""
        return self.encode(text, where)


@dataclasses.dataclass(frozen=True)
class Scored:
    """Pieces with scores, as sentencepiece trains them and llama2.c writes them: the best-scored neighbours are merged first.

    A text begins with BOS and has a space before its first word, which decoding takes away; what no piece covers is spelt in bytes.
    """

    pieces: tuple[bytes, ...]
    scores: tuple[float, ...]
    bos: int = 1
    eos: int = 2
    mask: int | None = None
    begins: bool = True

    @property
    def vocab(self) -> int:
        return len(self.pieces)

    def encode(self, text: str, where: str = "the text") -> list[int]:
        """Returns the ids, without BOS. Of equal scores the leftmost pair is merged first. Quadratic in the length: meant for prompts."""
        if not text:
            return []
        known = {piece: i for i, piece in reversed([*enumerate(self.pieces)])}
        ids: list[int] = []
        for character in " " + text:
            raw = character.encode()
            ids += [known[raw]] if raw in known else [_FIRST_BYTE + byte for byte in raw]
        while True:
            joined = [known.get(self.pieces[a] + self.pieces[b]) for a, b in itertools.pairwise(ids)]
            pairs = [at for at, piece in enumerate(joined) if piece is not None]
            if not pairs:
                return ids
            at = max(pairs, key=lambda at: (self.scores[joined[at]], -at))
            ids[at : at + 2] = [joined[at]]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text. A BOS at the start isn't shown; further ones, and EOS, are as the vocabulary spells them."""
        ids = [int(i) for i in ids]
        text = b"".join(self._bytes(i) for i in (ids[1:] if ids[:1] == [self.bos] else ids))
        return text.decode(errors="replace").removeprefix(" ")

    def _bytes(self, i: int) -> bytes:
        if _FIRST_BYTE <= i < _FIRST_BYTE + 256:
            return bytes([i - _FIRST_BYTE])
        return self.pieces[i] if i < self.vocab else "\ufffd".encode()

    def named(self, text: str, where: str) -> list[int]:
        """Returns the ids that a setting names: a list of ids, "13,42", or one token's text."""
        if (ids := _listed(text)) is not None:
            return ids
        for piece in (text, f" {text}"):
            if piece.encode() in self.pieces:
                return [self.pieces.index(piece.encode())]
        raise UserError(_no_token(text, where))


@dataclasses.dataclass(frozen=True)
class HuggingFace:
    """A tokenizer of the package `tokenizers`. Two are equal if their definitions are."""

    definition: str
    vocab: int
    bos: int | None
    eos: int | None
    mask: int | None
    begins: bool
    inner: Any = dataclasses.field(compare=False, repr=False)

    def encode(self, text: str, where: str = "the text") -> list[int]:
        """Returns the ids, special tokens that the text spells out included, none added."""
        return self.inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text, special tokens included, but for a BOS at the start. Ids without a token are left out."""
        ids = [int(i) for i in ids]
        return self.inner.decode(ids[1:] if self.begins and ids[:1] == [self.bos] else ids, skip_special_tokens=False)

    def named(self, text: str, where: str) -> list[int]:
        """Returns the ids that a setting names: a list of ids, "151643,151645", or one token's text."""
        if (ids := _listed(text)) is not None:
            return ids
        ids = self.encode(text)
        if len(ids) != 1:
            raise UserError(_no_token(text, where))
        return ids


@dataclasses.dataclass(frozen=True)
class Residues:
    """One token a residue, and specials spelt <so>: ESM-2's vocab.txt. A text begins with <cls>, and ends with <eos>."""

    tokens: tuple[str, ...]
    vocab: int
    bos: int | None
    eos: int | None
    mask: int | None
    begins: bool = True

    @property
    def forbidden(self) -> tuple[int, ...]:
        """The ids that no model writes: specials, and letters that stand for several residues or a rare one."""
        return tuple(i for i, token in enumerate(self.tokens) if token not in tuple(STANDARD))

    def encode(self, text: str, where: str = "the text") -> list[int]:
        """Returns the ids, specials that the text spells out included, none added. What is no token is a UserError that names `where`."""
        found = re.findall(r"<\w+>|.", text, re.DOTALL)
        for at, token in enumerate(found):
            if token not in self.tokens:
                raise UserError(f"{where} has {token!r} at residue {at + 1}, which is no residue; proteins are written in capital letters")
        return [self.tokens.index(token) for token in found]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the residues, without a <cls> at the start, and an <eos> and padding at the end; other specials are spelt out."""
        text = "".join(self.tokens[int(i)] if i < self.vocab else "\ufffd" for i in ids)
        return re.sub(r"^<cls>|(<eos>)?(<pad>)*$", "", text)

    def named(self, text: str, where: str) -> list[int]:
        """Returns the ids that a setting names: a list of ids, "2,24", or tokens, "<eos>"."""
        return self.encode(text, where) if (ids := _listed(text)) is None else ids


Tokenizer = Characters | Scored | HuggingFace | Residues
CHARACTERS = Characters()


def beside(place: str | Path) -> Tokenizer:
    """Returns the tokenizer in `place`/tokenizer, the characters if there is no such folder. Raises UserError as `read` does."""
    folder = Path(place) / FOLDER
    return read(folder) if folder.is_dir() else CHARACTERS


def read(folder: str | Path) -> Tokenizer:
    """Returns the tokenizer whose files are in `folder`: tokenizer.json, or vocab.json and merges.txt, or a llama2.c file, tok*.bin, or
    ESM-2's vocab.txt.

    Raises UserError where there is none, or it is damaged.
    """
    folder = Path(folder)
    if (folder / "tokenizer.json").is_file() or (folder / "vocab.json").is_file():
        return _hugging_face(folder)
    if len(scored := sorted(folder.glob("tok*.bin"))) == 1:
        return _scored(scored[0])
    if (folder / RESIDUES).is_file():
        return _residues(folder / RESIDUES)
    many = f"{scored[0].name} and {scored[1].name}, and one is wanted" if scored else "no tokenizer"
    raise UserError(f"{folder} holds {many}; put tokenizer.json, or vocab.json and merges.txt, one tok*.bin, or vocab.txt there")


def files(folder: str | Path) -> dict[str, bytes]:
    """Returns {name: contents} of the tokenizer's files in `folder`: what makes another folder the same tokenizer."""
    names = [name for name in (*HUGGING_FACE, RESIDUES) if (Path(folder) / name).is_file()]
    names += sorted(path.name for path in Path(folder).glob("tok*.bin"))
    try:
        return {name: (Path(folder) / name).read_bytes() for name in names}
    except OSError as e:
        raise UserError(f"cannot read {e.filename}: {e.strerror}") from None


def _listed(text: str) -> list[int] | None:
    """Returns the ids of a list of numbers; None if the text is none. "" is the empty list."""
    return [int(i) for i in text.split(",") if i.strip()] if re.fullmatch(r"[\d, ]*", text) and text != " " else None


def _no_token(text: str, where: str) -> str:
    return f"{where} is {text!r}, which is not one token of this tokenizer; give ids, as in 13,42"


def _scored(path: Path) -> Scored:
    """Returns the tokenizer of a llama2.c file: int32 longest piece; then of each piece float32 score, int32 length, bytes."""
    try:
        data = path.read_bytes()
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from None
    pieces, scores = [], []
    try:
        (longest,), at = struct.unpack_from("<i", data), 4
        while at < len(data):
            score, length = struct.unpack_from("<fi", data, at)
            piece, at = data[at + 8 : at + 8 + length], at + 8 + length
            if not 0 <= length <= longest or len(piece) < length:
                raise ValueError
            pieces.append(piece)
            scores.append(score)
        if pieces[_FIRST_BYTE : _FIRST_BYTE + 256] != [b"<0x%02X>" % byte for byte in range(256)]:
            raise ValueError
    except (struct.error, ValueError):
        raise UserError(f"{path} is no llama2.c tokenizer, or cut off; copy it again") from None
    return Scored(tuple(pieces), tuple(scores))


def _residues(path: Path) -> Residues:
    """Returns the tokenizer of a vocabulary with one token a line."""
    try:
        tokens = tuple(path.read_text().split())
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"cannot read {path} ({e}); copy it again") from None
    specials = ("<cls>", "<pad>", "<eos>", "<mask>")
    if missing := [token for token in specials if token not in tokens]:
        raise UserError(f"{path} is no vocabulary of ESM-2's, it lacks {missing[0]}; copy it again")
    if odd := [token for token in tokens if tokens.count(token) > 1 or not re.fullmatch(r"<\w+>|.", token)]:
        raise UserError(f"{path} is no vocabulary of residues, it has {odd[0]!r} twice, or it is none; copy it again")
    bos, _, eos, mask = map(tokens.index, specials)
    return Residues(tokens, len(tokens), bos, eos, mask)


def _hugging_face(folder: Path) -> HuggingFace:
    """Returns the tokenizer of tokenizer.json, or a byte-level BPE of vocab.json and merges.txt."""
    try:
        import tokenizers
    except ImportError:
        raise UserError(f"{folder} holds a Hugging Face tokenizer, which needs a package: pip install -e '.[hf]'") from None
    settings = _json(folder / "tokenizer_config.json")
    try:
        if (folder / "tokenizer.json").is_file():
            inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        else:
            inner = _byte_level(tokenizers, folder, settings)
    except UserError:
        raise
    except Exception as e:  # the package raises bare Exceptions
        raise UserError(f"the tokenizer in {folder} is damaged ({str(e).splitlines()[0][:100]}); copy its files again") from None
    named = lambda key: value.get("content") if isinstance(value := settings.get(key), dict) else value
    bos, eos = (inner.token_to_id(token) if (token := named(key)) else None for key in ("bos_token", "eos_token"))
    spelling = inner.id_to_token(SDAR_MASK)
    begins = bos is not None and (settings.get("add_bos_token") is True or inner.encode("").ids[:1] == [bos])
    vocab = max(inner.get_vocab(with_added_tokens=True).values()) + 1
    mask = SDAR_MASK if spelling and spelling.strip("<|>").upper() == "MASK" else None
    return HuggingFace(inner.to_str(), vocab, bos, eos, mask, begins, inner)


def _byte_level(tokenizers: Any, folder: Path, settings: dict[str, Any]) -> Any:
    """Returns a byte-level BPE tokenizer, cut as Qwen's are if tokenizer_config.json says so, else as GPT-2's."""
    if not (folder / "merges.txt").is_file():
        raise UserError(f"{folder} has vocab.json and no merges.txt; copy that too, or tokenizer.json")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    bytes_ = tokenizers.pre_tokenizers.ByteLevel
    qwen = str(settings.get("tokenizer_class", "")).startswith("Qwen")
    if qwen:
        inner.normalizer = tokenizers.normalizers.NFC()
        cut = tokenizers.pre_tokenizers.Split(tokenizers.Regex(_QWEN), "isolated")
        inner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([cut, bytes_(add_prefix_space=False, use_regex=False)])
    else:
        inner.pre_tokenizer = bytes_(add_prefix_space=settings.get("add_prefix_space") is True)
    inner.decoder = tokenizers.decoders.ByteLevel()
    added = {i: token for token, i in _json(folder / "added_tokens.json").items()}
    added |= {int(i): token["content"] for i, token in settings.get("added_tokens_decoder", {}).items()}
    for i, token in sorted(added.items()):  # each gets the next free id, or the one it has in vocab.json
        inner.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True)])
        if inner.token_to_id(token) != i:
            raise UserError(f"the token {token!r} of {folder} should have id {i}, and vocab.json leaves it {inner.token_to_id(token)}")
    return inner


def _json(path: Path) -> dict[str, Any]:
    """Returns what the file holds; nothing, if it isn't there."""
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as e:
        raise UserError(f"{path} is damaged or unreadable ({str(e).splitlines()[0][:100]}); copy it again") from None

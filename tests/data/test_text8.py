"""text8 in each of its packings, and its download, against a server that cuts off, damages, or isn't there."""

from __future__ import annotations

import contextlib
import http.server
import io
import lzma
import socket
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest

from dllm.core.types import UserError
from dllm.data import text8
from dllm.data.corpus import DataConfig, decode, encode

TEXT = decode(np.random.default_rng(0).integers(0, 27, 20_000))
WIKI8 = Path(__file__).parents[3] / "shared" / "data" / "wiki8"


def zipped(text: str, name: str = "text8") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, text)
    return buffer.getvalue()


PACKINGS = {
    "text8": TEXT.encode(),
    "text8.zip": zipped(TEXT),
    "text8.xz": lzma.compress(TEXT.encode()),
    "odd_name": zipped(TEXT, "my text"),
}


def config(path="", length=64) -> DataConfig:
    return DataConfig("text8", str(path), length)


@pytest.mark.parametrize("name", PACKINGS)
def test_one_file_is_split_in_order(tmp_path, name):
    (tmp_path / name).write_bytes(PACKINGS[name])
    loaded = text8.load(config(tmp_path / name))
    assert (len(loaded.train), len(loaded.valid), len(loaded.test)) == (18_000, 1_000, 1_000)
    assert decode(loaded.train) + decode(loaded.valid) + decode(loaded.test) == TEXT


def test_the_real_size_is_split_as_in_the_literature():
    assert [len(part) for part in text8._split(np.zeros(text8.SIZE, np.uint8))] == [90_000_000, 5_000_000, 5_000_000]


def folder_of_parts(folder: Path) -> Path:
    parts = {
        "train_00.xz": lzma.compress(b"one "),
        "train_01": b"two ",
        "train_10.zip": zipped("three"),
        "valid.txt": b"four",
        "test.xz": lzma.compress(b"five"),
    }
    for name, raw in parts.items():
        (folder / name).write_bytes(raw)
    (folder / "README.md").write_text("Not a part.")
    return folder


def test_a_folder_keeps_its_splits_and_the_order_of_its_parts(tmp_path):
    loaded = text8.load(config(folder_of_parts(tmp_path), length=4))
    assert [decode(loaded.train), decode(loaded.valid), decode(loaded.test)] == ["one two three", "four", "five"]


@pytest.mark.parametrize("missing", ["valid.txt", "test.xz"])
def test_a_folder_without_a_split_is_refused(tmp_path, missing):
    (folder_of_parts(tmp_path) / missing).unlink()
    with pytest.raises(UserError, match=f"no {missing.split('.')[0]} part"):
        text8.load(config(tmp_path, length=4))


def test_a_part_in_two_packings_is_refused(tmp_path):
    (folder_of_parts(tmp_path) / "train_00").write_bytes(b"one ")
    with pytest.raises(UserError, match=r"same part as train_00 and as train_00.xz"):
        text8.load(config(tmp_path, length=4))


@pytest.mark.parametrize("name", ["text8.zip", "text8.xz"])
@pytest.mark.parametrize("kept", [0.5, 0.999])
def test_a_cut_off_file_is_refused(tmp_path, name, kept):
    raw = PACKINGS[name]
    (tmp_path / name).write_bytes(raw[: int(kept * len(raw))])
    with pytest.raises(UserError, match=rf"{name} is damaged or cut off"):
        text8.load(config(tmp_path / name))


def test_a_changed_byte_is_refused(tmp_path):
    raw = bytearray(PACKINGS["text8.zip"])
    raw[len(raw) // 2] ^= 1
    (tmp_path / "text8.zip").write_bytes(raw)
    with pytest.raises(UserError, match=r"damaged"):
        text8.load(config(tmp_path / "text8.zip"))


def test_a_foreign_character_is_named_with_its_file(tmp_path):
    (tmp_path / "text8").write_bytes(TEXT.encode() + b"\n")
    with pytest.raises(UserError, match=r"text8 has b'\\n' at offset 20000"):
        text8.load(config(tmp_path / "text8"))


def test_missing_and_short_files_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"No such file"):
        text8.load(config(tmp_path / "text8"))
    (tmp_path / "text8").write_bytes(TEXT[:1000].encode())
    with pytest.raises(UserError, match=r"valid split .* has 50 characters"):
        text8.load(config(tmp_path / "text8"))


class Server:
    """Serves the given (declared length, body) answers one after another, the last one for ever; counts the requests."""

    def __init__(self, *answers: tuple[int | None, bytes]):
        self.requests = 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                length, body = answers[min(outer.requests, len(answers) - 1)]
                outer.requests += 1
                self.send_response(200)
                if length is not None:
                    self.send_header("Content-Length", str(length))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.http = http.server.HTTPServer(("127.0.0.1", 0), Handler)


@pytest.fixture
def serve(monkeypatch, tmp_path):
    monkeypatch.setenv("DLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(text8, "SIZE", len(TEXT))
    with contextlib.ExitStack() as stack:

        def start(*answers) -> Server:
            server = Server(*answers)
            stack.enter_context(server.http)
            thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.http.shutdown)
            monkeypatch.setattr(text8, "URL", f"http://127.0.0.1:{server.http.server_port}/text8.zip")
            return server

        yield start


def cached(tmp_path) -> list[str]:
    return sorted(file.name for file in (tmp_path / "cache").iterdir())


WHOLE = PACKINGS["text8.zip"]


def test_a_download_is_cached_and_shows_its_progress(serve, tmp_path, capsys):
    server = serve((len(WHOLE), WHOLE))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "text8.zip.part").write_bytes(WHOLE[:100])  # what a killed run left
    for _ in range(2):
        assert decode(text8.load(config()).train) == TEXT[:18_000]
    assert server.requests == 1
    assert cached(tmp_path) == ["text8.zip"]
    printed = capsys.readouterr()
    assert "#" * 40 in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    "bad",
    [
        (len(WHOLE), WHOLE[:-500]),
        (None, WHOLE[:-500]),
        (len(WHOLE), WHOLE[:2000] + b"x" + WHOLE[2001:]),
        (None, zipped(TEXT[:-1])),
        (None, b"<html>log in first</html>"),
    ],
    ids=["cut off", "cut off, length unsaid", "damaged", "another text", "a portal"],
)
def test_a_bad_download_is_never_used(serve, tmp_path, bad):
    server = serve(bad, (len(WHOLE), WHOLE))
    assert decode(text8.load(config()).train) == TEXT[:18_000]
    assert server.requests == 2

    server = serve(bad)
    (tmp_path / "cache" / "text8.zip").unlink()
    with pytest.raises(UserError, match=r"did not arrive whole in 3 tries.*data.path"):
        text8.load(config())
    assert server.requests == text8.TRIES
    assert cached(tmp_path) == []


def test_a_cut_off_is_called_by_its_name(serve, capsys):
    serve((len(WHOLE), WHOLE[:-500]), (len(WHOLE), WHOLE))
    text8.load(config())
    assert f"was cut off after {len(WHOLE) - 500} of {len(WHOLE)} bytes" in capsys.readouterr().err


@pytest.mark.parametrize("bad", [WHOLE[:-500], zipped(TEXT[:-1]), b""], ids=["cut off", "another text", "empty"])
def test_a_bad_cache_is_fetched_anew(serve, tmp_path, bad):
    server = serve((len(WHOLE), WHOLE))
    text8.load(config())
    (tmp_path / "cache" / "text8.zip").write_bytes(bad)
    assert decode(text8.load(config()).train) == TEXT[:18_000]
    assert server.requests == 2
    assert (tmp_path / "cache" / "text8.zip").read_bytes() == WHOLE


def test_without_a_network_one_line_says_what_to_do(monkeypatch, tmp_path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("DLLM_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(text8, "URL", f"http://127.0.0.1:{closed.getsockname()[1]}/text8.zip")
        with pytest.raises(UserError, match=r"cannot download.*data.path") as error:
            text8.load(config())
    assert "\n" not in str(error.value)
    assert cached(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DLLM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"DLLM_CACHE"):
        text8.load(config())


@pytest.mark.skipif(not WIKI8.is_dir(), reason="the text8 look-alike isn't here")
def test_the_look_alike_loads_whole():
    loaded = text8.load(config(WIKI8))
    assert [len(split) for split in (loaded.train, loaded.valid, loaded.test)] == [90_000_000, 5_000_000, 5_000_000]
    np.testing.assert_array_equal(loaded.train[:10], encode(decode(loaded.train[:10])))
    assert loaded.train.max() == 26

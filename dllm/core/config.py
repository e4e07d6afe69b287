"""The config border: what comes from a file, a flag or JSON becomes a frozen dataclass here, or a UserError."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import glob
import json
import os
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from absl import app, flags, logging

from dllm.core.types import UserError


def to_dataclass[T](cls: type[T], mapping: Mapping[str, Any], where: str) -> T:
    """Returns `cls(**mapping)`, every value checked against its field's type; lists become tuples and whole numbers floats where asked.

    Raises UserError, naming `where.key`, for an unknown key, a missing one that has no default, and a value of another type.
    """
    hints, fields = typing.get_type_hints(cls), dataclasses.fields(cls)
    names = [f.name for f in fields]
    for key in mapping:
        if key not in names:
            raise UserError(f"unknown key {where}.{key}; {where} has: {', '.join(names)}")
    for f in fields:
        if f.name not in mapping and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise UserError(f"missing key {where}.{f.name} ({_name(hints[f.name])})")
    return cls(**{key: _typed(value, hints[key], f"{where}.{key}") for key, value in mapping.items()})


def _typed(value: Any, hint: Any, where: str) -> Any:
    """Returns `value` as `hint` wants it. bool, int, float, str, None, Literal, dict, unions, tuples and nested dataclasses."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or (hint in (bool, int, str, type(None)) and type(value) is hint):
        return value
    if hint is float and type(value) in (int, float):
        return float(value)
    if origin is typing.Literal and any(value == a and type(value) is type(a) for a in args):
        return value
    if origin in (typing.Union, types.UnionType):
        for arg in args:
            try:
                return _typed(value, arg, where)
            except UserError:
                continue
    if origin is tuple and isinstance(value, (list, tuple)):
        each = [args[0]] * len(value) if args[1:] == (...,) else args
        if len(each) == len(value):
            return tuple(_typed(v, a, f"{where}[{i}]") for i, (v, a) in enumerate(zip(value, each)))
    if hint is dict and isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return to_dataclass(hint, value, where)
    raise UserError(f"{where} must be {_name(hint)}, not {value!r}")


def require(config: Any, where: str, keys: Iterable[str], range_: str, ok: Callable[[Any], bool]) -> None:
    """Returns None if `ok` holds for each of the keys. Raises UserError naming `where.key`, and the range in words, for the first other."""
    for key in keys:
        if not ok(getattr(config, key)):
            raise UserError(f"{where}.{key} is {getattr(config, key)}; it must be {range_}")


def _name(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(repr(a) for a in typing.get_args(hint))
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def read_json(path: str | os.PathLike) -> Any:
    """Returns the parsed file. Raises UserError if it is missing or is not JSON."""
    try:
        return json.loads(Path(path).read_text())
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from None
    except ValueError as e:
        raise UserError(f"{path} is not JSON ({e}); restore it, or remove it and what was made with it") from None


def write_atomic(path: str | os.PathLike, data: str | bytes) -> None:
    """Writes the whole file, or, on any interruption, leaves the old one: a temporary neighbour is renamed over it.

    Those that killed writers of the same file left are removed. Raises UserError where the place can't be written, or the disk is full.
    """
    path = Path(path)
    writable_folder(path.parent)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    for old in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        if not _alive(old.name.split(".")[-2]):
            old.unlink(missing_ok=True)
    try:
        with open(part, "wb") as f:
            f.write(data.encode() if isinstance(data, str) else data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
    except OSError as e:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {e.strerror}; make room, or choose another place") from None


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:  # another user's
        return True
    return True


def append_text(path: str | os.PathLike, line: str) -> None:
    """Appends the line by one write, and returns when it is on disk. Raises UserError if it can't be; half of it may then be there."""
    data = (line + "\n").encode()
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if os.write(file, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as e:
        raise UserError(f"cannot append to {path}: {e.strerror}; make room and run the same command again") from None


def writable_folder(folder: str | os.PathLike) -> Path:
    """Returns the folder, made if need be. Raises UserError if it can't be written: programs ask before the work, not after it."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"cannot make the folder {folder}: {e.strerror}; choose another place") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"cannot write in {folder}: permission denied; choose another place")
    return Path(folder)


def compile_cache() -> None:
    """Turns JAX's persistent compilation cache on: in $JAX_COMPILATION_CACHE_DIR, or else in .cache/jax of the checkout."""
    where = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(Path(__file__).parents[2] / ".cache" / "jax")
    jax.config.update("jax_compilation_cache_dir", where)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def keep_memory() -> None:
    """Makes glibc keep freed buffers. XLA:CPU allocates a program's temporaries anew at every call; returned to the system in between, they
    cost a small train step a third of its time in page faults (measured: 84 MB of temporaries, 125 ms a step against 79)."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another system's C library
        return
    m_trim_threshold, m_mmap_max, m_arena_max = -1, -4, -8  # malloc.h
    mallopt(m_arena_max, 1)
    mallopt(m_mmap_max, 0)
    mallopt(m_trim_threshold, 2**31 - 1)


def config_dict(config: Any, where: str = "--config") -> dict[str, Any]:
    """Returns a config flag's value as plain nested dicts. Raises UserError if it was not given or its file could not be read."""
    if config is None:
        raise UserError(f"pass {where}=configs/NAME.py")
    try:
        return config.to_dict()
    except OSError as e:  # ml_collections keeps a missing file to itself until the value is used
        raise UserError(f"cannot load {where}: {str(e.__cause__).splitlines()[-1].strip()}") from None


def _of_config_file(e: Exception, flag: str) -> str:
    """Returns in a line what ml_collections let through: an error of the file's own code, or an override of a key that it lacks."""
    file = os.path.abspath(flag.partition(":")[0])
    at = [frame.lineno for frame in traceback.extract_tb(e.__traceback__) if os.path.abspath(frame.filename) == file]
    text = str(e.args[0] if e.args else "")
    name = re.findall(r"\w+|$", re.split(r"\\n|\n", text)[0])[-2:][0]  # the last word of a sentence that differs from case to case
    if isinstance(e, (AttributeError, KeyError)) and not at and name != "get_config":
        return f"the config file has no key {name}: look at the --config.KEY=VALUE options"
    line = at[-1] if at else getattr(e, "lineno", None)
    where = f" in line {line}" * (line is not None) if name != "get_config" else ", which a config file must have"
    return f"cannot load {flag}: {type(e).__name__}: {text.strip().partition(chr(10))[0]}{where}; correct the file"


def main(program: Callable[[], None]) -> None:
    """Runs a command-line program: flags are parsed, then `program()`. A UserError ends it with one line on stderr and exit code 2."""

    def parse(argv: list[str]) -> list[str]:
        try:
            rest = flags.FLAGS(argv)
        except UserError as e:  # raised by a config file
            fail(e)
        except flags.Error as e:  # of a config file that fails it holds the traceback
            lines = [line.strip() for line in str(e).splitlines() if line.strip()]
            fail(" ".join(dict.fromkeys([lines[0], lines[-1]])).rstrip(".") + "; see --help")
        except Exception as e:
            fail(_of_config_file(e, next((arg.partition("=")[2] for arg in argv if arg.startswith("--config=")), "--config")))
        if len(rest) > 1:
            fail(f"unexpected argument {rest[1]!r}; options are written --name=value")
        return rest

    def run(_: list[str]) -> None:
        try:
            logging.set_verbosity(logging.FATAL)  # orbax logs, with a traceback, what it raises too
            compile_cache()
            keep_memory()
            program()
        except UserError as e:
            fail(e)
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            fail(f"cannot write {e.filename or 'a file'}: {e.strerror}; make room and run the same command again")
        except KeyboardInterrupt:
            fail("interrupted", 130)

    def fail(error: object, code: int = 2) -> typing.NoReturn:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(code)

    app.run(run, flags_parser=parse)

"""Files that are there whole or not at all: CSV tables, JSON lines, and what goes wrong with them in one line."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .config import RunError

Row = dict[str, Any]


def as_text(value: Any) -> str:
    """A value as text, None as nothing."""
    return "" if value is None else str(value)


def as_cell(value: Any) -> Any:
    """A value as a CSV cell: lists joined by commas, dictionaries as JSON, what does not apply empty."""
    if isinstance(value, dict):
        return json.dumps(value, default=str)
    if isinstance(value, (list, tuple, set, frozenset)):
        return ",".join(map(str, sorted(value) if isinstance(value, (set, frozenset)) else value))
    return value


def _typed(text: str) -> Any:
    """A CSV cell as number, bool, None or text; only where writing it again gives the same cell."""
    words: dict[str, Any] = {"": None, "True": True, "False": False}
    for value in (words.get(text, text), *_numbers(text)):
        if value != text and as_text(value) == text:
            return value
    return text


def _numbers(text: str) -> Iterator[int | float]:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            yield kind(text)


def read_csv(path: Path) -> list[Row]:
    """The rows of a table, cells as the numbers, booleans and None that were written."""
    with one_line_errors(f"cannot read {path}"), open(path, encoding="utf-8", newline="") as file:
        return [{name: _typed(text or "") for name, text in row.items()} for row in csv.DictReader(file)]


def write_csv(path: Path, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Write a table: `columns`, then what else the rows hold, in the order it appears."""
    names = list(dict.fromkeys([*columns, *(name for row in rows for name in row)]))
    with replacing(path) as file:
        writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_lines(path: str) -> list[Any]:
    """The JSON lines of a file, without a torn last one; [] if there is no such file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].split("\n")[:-1]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {reason(error)}") from None


def drop_torn_line(path: Path) -> None:
    """Cut off what follows the last line end, which a kill has left."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Any]:
    """A file that takes the place of `path` when it is complete, never before."""
    draft = f"{path}.{os.getpid()}.tmp"
    try:
        with open(draft, "w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(draft)


@contextlib.contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A new folder that takes the place of `folder` when the block ends well."""
    draft = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        yield draft
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    except OSError as error:
        raise RunError(f"cannot write {folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits no longer than a merge takes: ignored until the block ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def one_line_errors(what: str) -> Iterator[None]:
    """Raise `RunError` in the place of the system's own errors."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{what}: {reason(error)}") from None


def reason(error: Exception) -> str:
    """What went wrong, without errno and file name."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)

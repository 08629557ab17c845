"""Files that a user names: found, read, and refused with what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gradsieve.tasks.task import DataError


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What the system refuses is refused in the way of all data."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def existing(data: Path) -> Path:
    """The path itself, if there is something."""
    with reading(data):
        if data.exists():
            return data
    raise DataError(f"--data {data}: there is no such file or folder")


def needed(task: str, data: Path | None, wanted: str) -> Path:
    """The path that a task cannot do without."""
    if data is None:
        raise DataError(f"the task {task} needs --data: {wanted}")
    return existing(data)


def is_folder(path: Path) -> bool:
    with reading(path):
        return path.is_dir()


def files_in(folder: Path) -> list[str]:
    """The names of the files of a folder, in order."""
    with reading(folder):
        return sorted(path.name for path in folder.iterdir() if path.is_file())


def read_bytes(path: Path, limit: int | None = None) -> bytes:
    """The content of a file of at most `limit` bytes."""
    with reading(path):
        if not path.is_file():
            raise DataError(f"{path} is not a file")
        size = path.stat().st_size
        if limit is not None and size > limit:
            raise DataError(f"{path} is too large: {size:,} bytes, where at most {limit:,} are expected")
        return path.read_bytes()


def read_text(path: Path) -> str:
    """The content of a UTF-8 file with something in it; lines end in a line feed alone."""
    content = read_bytes(path)
    if b"\0" in content:
        raise DataError(f"{path} is a binary file (byte {content.index(0):,} is zero): a UTF-8 text is needed")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"{error.reason} at byte {error.start:,}"
        raise DataError(f"{path} is not UTF-8: {where}; convert it, for example with iconv") from error
    if not text.strip():
        raise DataError(f"{path} is empty: a UTF-8 text is needed")
    return text.replace("\r\n", "\n")


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names in a message, the first few of many."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")

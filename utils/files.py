"""Files and folders that appear whole or not at all, and a lock between processes."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from utils.config import UserError


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all. A file name that is not UTF-8 is written with escapes, as JSON and YAML do."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")  # names of files can be any bytes
    os.replace(temporary, path)


def write_json(path: Path, value) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A temporary folder that takes the place of `folder` when the block ends without an error."""
    folder = Path(folder)
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # it would stay for good, and on a full disk it is in the way
        raise
    mode = temporary.stat().st_mode & 0o666
    for file in temporary.rglob("*"):
        if file.is_file():
            file.chmod(mode)  # as the user's umask says; safetensors writes files that only the owner can read
    replace_folder(temporary, folder)


def replace_folder(new: Path, folder: Path) -> None:
    """Put a finished folder in the place of another, which lies in `.NAME.old` until the new one is in place."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    try:
        if folder.exists():
            os.replace(folder, old)
        os.replace(new, folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be replaced ({error.strerror}); what is finished lies in {new}") from None
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def locked(file: Path, refusal: str | None = None) -> Iterator[None]:
    """Inside, no other process holds the lock `file`. Where one does: wait for it, or raise UserError(refusal).

    A lock by fcntl.lockf belongs to one process: forked workers do not inherit it, and it ends with a killed one. The
    file may be deleted while it is held; a disk that knows no locks has none.
    """
    while True:
        with open(file, "w") as lock:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | (fcntl.LOCK_NB if refusal else 0))
            except (BlockingIOError, PermissionError):
                raise UserError(refusal or f"{file} cannot be locked") from None
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
            if file.exists() and os.path.samestat(os.fstat(lock.fileno()), os.stat(file)):
                yield
                return

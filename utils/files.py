"""Folders that take another's place at once, and files that lock out a second process."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from utils.config import UserError


def replace_folder(new: Path, folder: Path) -> None:
    """Put a finished folder in the place of another; at no moment is there a half-written one.

    A process that is killed in between leaves the old folder as `.NAME.old` beside it.
    """
    old = folder.with_name(f".{folder.name}.old")
    try:
        if folder.exists():
            os.rename(folder, old)
        os.rename(new, folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be replaced ({error.strerror}); what is finished lies in {new}") from None
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def locked(file: Path, refusal: str) -> Iterator[None]:
    """Hold a lock on `file`, which is created; UserError(refusal) if another process holds it.

    The lock is this process's own: forked children do not have it, and it ends with the process.
    """
    with open(file, "w") as opened:
        try:
            fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(refusal) from None
        yield

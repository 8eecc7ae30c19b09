"""Rows of JSON lines and of HDF5 groups: what stage 1 and the loader read alike."""

import json
from collections.abc import Iterator

from utils.config import UserError

CHUNK_ROWS = 1000
CHUNK_BYTES = 4_000_000
HDF5_TYPES = (".h5", ".hdf5")


class BadRow(Exception):
    """A row that cannot be used: (reason to count it under, detail)."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def bad_row(error: Exception) -> BadRow:
    """What went wrong while one row was read, whatever it is; what no row is to blame for is raised again."""
    if isinstance(error, (UserError, MemoryError)):
        raise error
    if isinstance(error, BadRow):
        return error
    return BadRow("broken_row", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


class TextRow(dict):
    """A row of a format without nesting (CSV, HDF5): numbers, lists and messages may stand in it as text."""


def unique_keys(pairs: list[tuple]) -> dict:
    """An object; of two equal keys one would be lost."""
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} stands twice")
    return row


def parse_line(file: str, number: int, line: bytes) -> Iterator[tuple[str, object]]:
    place = f"{file}:{number}"
    try:
        text = line.decode("utf-8").strip()
        if text:
            yield place, json.loads(text, object_pairs_hook=unique_keys)
    except UnicodeDecodeError as error:
        yield place, BadRow("broken_row", f"not UTF-8 at byte {error.start + 1}")
    except json.JSONDecodeError as error:
        yield f"{place}:{error.colno}", BadRow("broken_row", error.msg)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
        yield place, BadRow("broken_row", str(error).split(";")[0])


def import_h5py(file: str):
    try:
        import h5py
    except ImportError:
        raise UserError(f"{file}: HDF5 files need a package that is not installed: pip install h5py") from None
    return h5py


def hdf5_tables(file: str) -> list[tuple[str, int]]:
    """(group, rows) of each group of a HDF5 file that has columns; its columns must be equally long."""
    h5py = import_h5py(file)
    tables: list[tuple[str, int]] = []
    try:
        with h5py.File(file, "r") as opened:
            groups = [opened]
            opened.visititems(lambda _, item: groups.append(item) if isinstance(item, h5py.Group) else None)
            for group in groups:
                lengths = {
                    name: item.shape[0]
                    for name, item in group.items()
                    if isinstance(item, h5py.Dataset) and item.shape
                }
                if len(set(lengths.values())) > 1:
                    raise UserError(
                        f"{file}: columns of {group.name} differ in length ({lengths}); a row needs one value of each"
                    )
                if lengths:
                    tables.append((group.name, next(iter(lengths.values()))))
    except OSError as error:
        raise UserError(f"{file}: not a readable HDF5 file ({error})") from None
    if not tables:
        raise UserError(f"{file}: has no columns (datasets with at least one dimension)")
    return tables


def read_hdf5_rows(file: str, group: str, start: int, stop: int) -> list[TextRow | BadRow]:
    """Rows [start, stop) of one group. The file is opened here, so that every worker has its own handle."""
    h5py = import_h5py(file)
    columns: dict[str, list] = {}
    with h5py.File(file, "r") as opened:
        for name, item in opened[group].items():
            if isinstance(item, h5py.Dataset) and item.shape:
                if item.dtype.names:  # a compound type: a table of its own
                    columns |= {field: cells_of(item.fields(field), start, stop) for field in item.dtype.names}
                else:
                    columns[name] = cells_of(item, start, stop)
    rows: list[TextRow | BadRow] = []
    for cells in zip(*columns.values()):
        bad = next((name for name, cell in zip(columns, cells) if isinstance(cell, BadRow)), None)
        row = dict(zip(columns, cells))
        rows.append(TextRow(row) if bad is None else BadRow(row[bad].reason, f"{bad}: {row[bad].detail}"))
    return rows


def cells_of(item, start: int, stop: int) -> list:
    """Elements [start, stop) of a dataset; those of a damaged chunk come as BadRow, which halving finds."""
    try:
        return [plain(v) for v in item[start:stop]]
    except OSError as error:
        if stop - start == 1:
            return [bad_row(error)]
        middle = (start + stop) // 2
        return cells_of(item, start, middle) + cells_of(item, middle, stop)


def plain(value):
    """An element of an HDF5 dataset as Python's own type: bytes are text, NUL padding is no part of it."""
    if isinstance(value, bytes):
        try:
            return value.rstrip(b"\0").decode("utf-8")
        except UnicodeDecodeError as error:
            return BadRow("broken_row", f"not UTF-8 at byte {error.start + 1}")
    if not hasattr(value, "tolist"):
        return value
    listed = value.tolist()
    if isinstance(listed, list):
        listed = [plain(v) for v in listed]
        return next((v for v in listed if isinstance(v, BadRow)), listed)
    return plain(listed) if isinstance(listed, bytes) else listed

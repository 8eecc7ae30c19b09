"""The data folder: writing its splits, and the hidden folder beside it for what is not finished."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from dataprep.chunks import WorkerKilled, read_chunk, schema_of
from dataprep.rules import TEST, TRAIN, Decisions
from utils.config import UserError
from utils.data import COLUMNS
from utils.files import locked, write_text

ROWS_PER_SHARD = 100_000
ROWS_PER_GROUP = 1000
WINDOW = 20  # chunks that are shuffled together


# ------------------------------------------------------------------------------------------------------ splits


def write_splits(
    chunks: list[dict], d: Decisions, kind: str, seed: int, folder: Path, earlier: dict[str, list[Path]]
) -> tuple[dict[str, int], list[str]]:
    """Write the new rows of both splits after the files of the earlier output, if any. Train rows are shuffled.

    Returns the number of new rows by split, and the names of the new files.
    """
    rows_out, new_files = {}, []
    for split, side in (("train", TRAIN), ("test", TEST)):
        rows_out[split] = int(d.copies[d.new_rows() & (d.side == side)].sum())
        tables = kept_rows(chunks, d, kind, side, seed if side == TRAIN else None)
        new_files += write_split(tables, split, rows_out[split], kind, folder, earlier.get(split, []))
    return rows_out, new_files


def kept_rows(chunks: list[dict], d: Decisions, kind: str, side: int, seed: int | None) -> Iterator:
    """Arrow tables of the new rows of one side. With a seed the chunks come in a new order, and WINDOW of them are
    shuffled together."""
    import pyarrow as pa

    order = [i for i, chunk in enumerate(chunks) if chunk["kept"] and chunk["role"] != "old"]
    rng = np.random.default_rng([seed or 0, side])
    if seed is not None:
        rng.shuffle(order)
    for start in range(0, len(order), WINDOW):
        tables = []
        for i in order[start : start + WINDOW]:
            rows = d.rows(i)
            times = np.where((d.code[rows] == 0) & (d.side[rows] == side), d.copies[rows], 0)
            if times.any():
                taken = pa.array(np.repeat(np.arange(len(times)), times))
                tables.append(read_chunk(chunks[i]["file"], list(COLUMNS[kind])).take(taken))
        if tables:
            table = pa.concat_tables(tables)
            yield table.take(pa.array(rng.permutation(len(table)))) if seed is not None else table


def write_split(tables: Iterator, split: str, rows: int, kind: str, folder: Path, earlier: list[Path]) -> list[str]:
    """Write `split-00000-of-000NN.parquet` after the earlier output's files, which stay; returns the new names."""
    import pyarrow.parquet

    shards = max(1, len(earlier) + -(-rows // ROWS_PER_SHARD))
    files = [folder / f"{split}-{i:05d}-of-{shards:05d}.parquet" for i in range(shards)]
    for old, file in zip(earlier, files):
        link_or_copy(old, file)
    files = files[len(earlier) :]
    if files and not rows:  # a split without rows is a file without rows, so that readers find its columns
        tables = iter([schema_of(kind).empty_table()])
    waiting = next(tables, None)
    for file in files:
        with pyarrow.parquet.ParquetWriter(file, schema_of(kind), compression="zstd") as writer:
            room = ROWS_PER_SHARD
            while room and waiting is not None:
                writer.write_table(waiting.slice(0, room), row_group_size=ROWS_PER_GROUP)
                room, rest = max(0, room - len(waiting)), waiting.slice(room)
                waiting = rest if len(rest) else next(tables, None)
    return [file.name for file in files]


def link_or_copy(old: Path, new: Path) -> None:
    """A second name for a finished file, or a copy where the disk has no such names."""
    try:
        os.link(old, new)
    except OSError:
        shutil.copyfile(old, new)


def first_rows(folder: Path, files: list[str], n: int) -> list[dict]:
    """The first rows of the first file that has any."""
    import pyarrow.parquet

    for name in files:
        for batch in pyarrow.parquet.ParquetFile(folder / name).iter_batches(n):
            return batch.to_pylist()
    return []


# ------------------------------------------------------------------------------------------------ the workshop


@contextmanager
def workshop(output: Path, about: str | None) -> Iterator[Path]:
    """The hidden folder beside `output` for what is not finished; another process with the same one is refused.

    Its `chunks` are used again where a run with the same `about` left them. None: nobody can say what is the same.
    """
    folder = output.with_name(f".{output.name}.partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lock").touch()
    except OSError as error:
        raise UserError(f"output_dir {output} cannot be created ({error.strerror}); choose another one") from None
    busy = f"another run is preparing output_dir {output}; wait for it, or choose another one"
    with locked(folder / "lock", busy):
        note = folder / "about.json"
        same = about is not None and note.is_file() and note.read_text(encoding="utf-8") == about
        for leftover in folder.iterdir():
            if leftover.name != "lock" and not (same and leftover.name in ("chunks", "about.json")):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        (folder / "chunks").mkdir(exist_ok=True)
        if about is not None:
            write_text(note, about)
        try:
            yield folder
        except UserError as error:
            if isinstance(error, WorkerKilled) and about is not None:
                raise UserError(f"{error}; what is finished is kept") from None
            if not (folder / "new").exists():  # finished, and could not be put in place
                shutil.rmtree(folder, ignore_errors=True)
            raise
        except BrokenPipeError:  # nobody reads what is printed
            raise
        except OSError as error:  # such as a full disk
            kept = "; what is finished is kept for the next run" if about is not None else ""
            raise UserError(f"{error.filename or folder}: {error.strerror or error}{kept}") from None


def restore_folder(output: Path) -> None:
    """Bring back what a run that was killed in `replace_folder` had just moved away."""
    old = output.with_name(f".{output.name}.old")
    if old.exists():
        shutil.rmtree(old) if output.exists() and any(output.iterdir()) else os.rename(old, output)


def keep_files(old: Path, new: Path) -> None:
    """What else lies in the earlier output stays."""
    for file in old.iterdir():
        target = new / file.name
        if not target.exists() and not re.fullmatch(r"(train|test)-\d+-of-\d+\.parquet", file.name):
            shutil.copytree(file, target) if file.is_dir() else shutil.copy2(file, target)


def open_list(file: Path, earlier: Path | None):
    """A file of lines to write, after those of the earlier output."""
    if earlier is not None and (earlier / file.name).is_file():
        shutil.copyfile(earlier / file.name, file)
    return open(file, "a", encoding="utf-8")

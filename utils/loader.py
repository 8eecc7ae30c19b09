"""Training batches from data of any size: a thread reads, shuffles, encodes and collates ahead of the training loop.

The data is a list of blocks of about 1,000 rows: row groups of Parquet, byte ranges of JSON lines, slices of HDF5
tables. In each epoch the blocks are permuted, and windows of neighbouring blocks in that order are shuffled row by
row. The order depends on the seed and the epoch alone, so that any batch can be found again without reading what comes
before it, and every number of ranks sees the same batches. With no more rows than `buffer_rows` it is an exact uniform
permutation.
"""

import atexit
import contextlib
import json
import math
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch

from utils.config import UserError
from utils.data import COLUMNS, split_files
from utils.rows import CHUNK_BYTES, CHUNK_ROWS, HDF5_TYPES, BadRow, TextRow, hdf5_tables, parse_line, read_hdf5_rows

REQUIRED = {
    "preference": ("prompt", "chosen", "rejected"),
    "trajectories": ("prompt", "response", "reward"),
    "prompts": ("prompt",),
}
LARGE_GROUP = 10 * CHUNK_ROWS
DROPS = "run prepare_data.py on the file, which drops such rows"


@dataclass(frozen=True)
class Block:
    """Neighbouring rows of one file, read together."""

    file: str
    first: int
    """row of the file (line of a .jsonl), from 1"""
    rows: int
    part: tuple[int, int] | int | str
    """first byte and length in a .jsonl; row group of Parquet, or a large one and the batch in it; group of HDF5"""


class Batches:
    """Batches of rows, epoch after epoch.

    data: a folder that prepare_data.py wrote, of which `split` is read, or .jsonl, .parquet or HDF5 files with the
    columns of utils.data.COLUMNS (a prompt may be text, one user turn; only what the kind cannot do without must be
    there), or a list of these. batch_size: rows of all ranks together; the last batch of an epoch may be smaller. Rank
    r of W gets rows r::W of each. collate: list of rows, possibly empty -> batch; without it a batch is that list. It
    runs in a thread, so it must not share a tokenizer with others. Tensors of a batch, also in dicts and lists, are
    pinned where there is a GPU. shuffle: False = the order on disk. buffer_rows: rows of a window. prefetch:
    batches that wait, ready. limit: only the first so many rows on disk.

    `rows` and `per_epoch` are the rows and the batches of an epoch, the same on every rank. Raises UserError with file
    and row: here for data that is missing or of another kind, in `start`'s iterator for bad rows.
    """

    def __init__(
        self,
        data: str | list[str],
        split: str,
        kinds: tuple[str, ...],
        batch_size: int,
        collate: Callable[[list[dict]], object] = list,
        *,
        seed: int = 0,
        shuffle: bool = True,
        buffer_rows: int = 20_000,
        prefetch: int = 4,
        rank: int = 0,
        world: int = 1,
        limit: int | None = None,
    ):
        if batch_size < 1 or world < 1 or not 0 <= rank < world or limit is not None and limit < 1:
            raise UserError(
                f"batch_size {batch_size}, rank {rank} of {world}, limit {limit}: "
                "sizes must be at least 1, and rank below world"
            )
        paths = [data] if isinstance(data, str) else data
        files = [
            file for path in paths for file in ([path] if Path(path).is_file() else split_files(path, split, kinds))
        ]
        self.blocks, self.rows = [], 0
        for block in (block for file in files for block in find_blocks(str(file))):
            if self.rows == limit:
                break
            rows = block.rows if limit is None else min(block.rows, limit - self.rows)
            if rows:
                self.blocks.append(replace(block, rows=rows))
                self.rows += rows
        if not self.rows:
            raise UserError(f"data {data} has no rows")
        place, row = next(read_block(self.blocks[0], np.array([0])))
        names = set(row) if isinstance(row, dict) else set(own_row(row, kinds[0], place))  # which says what is wrong
        self.kind = next((kind for kind in kinds if set(REQUIRED[kind]) <= names), None)
        if self.kind is None:
            needed, has = (
                " or ".join(f"{kind} ({', '.join(REQUIRED[kind])})" for kind in kinds),
                ", ".join(sorted(names)),
            )
            raise UserError(f"{place}: this needs {needed}, the row has {has}; run prepare_data.py on the file first")
        self.batch_size, self.per_epoch, self.collate = batch_size, math.ceil(self.rows / batch_size), collate
        self.seed, self.shuffle, self.buffer_rows, self.prefetch = seed, shuffle, buffer_rows, prefetch
        self.rank, self.world = rank, world

    def start(self, step: int = 0) -> Iterator:
        """This rank's batches from the run's batch `step` (from 0) on, without end.

        Closing or dropping the iterator ends the thread.
        """
        # A thread of our own: a worker process of torch's DataLoader gave 31,000 tokens/s for our 74,000,
        # held 80 MB of its own, made 21 lines of a UserError, and cannot take a lambda where processes are spawned.
        # datasets' streaming lost 1,252 of 20,000 rows on resuming, torchdata wants a saved state and not a step.
        waiting: queue.Queue = queue.Queue(self.prefetch)
        stop = threading.Event()
        gpu = torch.cuda.current_device() if torch.cuda.is_available() else None

        def work():
            try:
                if gpu is not None:
                    torch.cuda.set_device(gpu)  # a new thread begins on GPU 0, and pinning would take memory there
                for batch in self.batches(step):
                    waiting.put((batch if gpu is None else pin(batch), None))
                    if stop.is_set():
                        return
            except BaseException as error:
                waiting.put((None, error))

        def close():
            stop.set()
            while thread.is_alive():
                with contextlib.suppress(queue.Empty):
                    waiting.get(timeout=0.05)  # the thread may wait for room

        thread = threading.Thread(target=work, name="loader", daemon=True)
        thread.start()
        atexit.register(close)  # Python must not end while the thread runs C++ code
        try:
            while True:
                batch, error = waiting.get()
                if error is not None:
                    raise error
                yield batch
        finally:
            atexit.unregister(close)
            close()

    def batches(self, step: int) -> Iterator:
        """What `start` gives, made in the caller's own thread."""
        epoch, first = divmod(step, self.per_epoch)
        while True:
            rows = self.order(epoch, first * self.batch_size)
            for batch in range(first, self.per_epoch):
                size = min(self.batch_size, self.rows - batch * self.batch_size)
                share = islice(rows, len(range(self.rank, size, self.world)))
                yield self.collate([own_row(row, self.kind, place) for place, row in share])
            epoch, first = epoch + 1, 0

    def order(self, epoch: int, start: int) -> Iterator[tuple[str, object]]:
        """(place, raw row) of this rank, from row `start` of the epoch on."""
        end = 0
        for number, window in enumerate(self.windows(epoch), 1):
            begin, end = end, end + sum(block.rows for block in window)
            if end > start:
                yield from self.read_window(window, [self.seed, epoch, number], begin, start)

    def windows(self, epoch: int) -> Iterator[list[Block]]:
        """The blocks in the order of the epoch, cut into windows of at most `buffer_rows` rows, or of one block."""
        draw, count = np.random.default_rng([self.seed, epoch]), len(self.blocks)
        order = draw.permutation(count) if self.shuffle else range(count)
        window, rows = [], 0
        for block in (self.blocks[i] for i in order):
            if window and (rows + block.rows > self.buffer_rows or not self.shuffle):
                yield window
                window, rows = [], 0
            window.append(block)
            rows += block.rows
        yield window

    def read_window(
        self, window: list[Block], seed: list[int], begin: int, start: int
    ) -> Iterator[tuple[str, object]]:
        """The rows of a window that begins at row `begin` of the epoch: this rank's, from row `start` on."""
        sizes = np.array([block.rows for block in window])
        ends = sizes.cumsum()
        order = np.random.default_rng(seed).permutation(ends[-1]) if self.shuffle else np.arange(ends[-1])
        position = begin + np.arange(ends[-1])
        order = order[(position >= start) & (position % self.batch_size % self.world == self.rank)]
        block = np.searchsorted(ends, order, side="right")
        row = order - (ends - sizes)[block]
        readers = {i: read_block(window[i], row[block == i]) for i in np.unique(block)}
        for i in block:
            yield next(readers[i])


# -------------------------------------------------------------------------------------------------------- files


def find_blocks(file: str) -> Iterator[Block]:
    """The blocks of one file, without reading its rows; a .jsonl is read once, for its line ends."""
    if not file.lower().endswith((".jsonl", ".ndjson", ".parquet", *HDF5_TYPES)):
        raise UserError(
            f"{file}: rows are read from .jsonl, .parquet, {' and '.join(HDF5_TYPES)}; run prepare_data.py on it first"
        )
    with readable(file):
        if file.lower().endswith(".parquet"):
            metadata, first = pyarrow.parquet.read_metadata(file), 1
            for group in range(metadata.num_row_groups):
                rows = metadata.row_group(group).num_rows
                if rows <= LARGE_GROUP:
                    yield Block(file, first, rows, group)
                else:
                    for i, start in enumerate(range(0, rows, CHUNK_ROWS)):
                        yield Block(file, first + start, min(CHUNK_ROWS, rows - start), (group, i))
                first += rows
        elif file.lower().endswith(HDF5_TYPES):
            for group, length in hdf5_tables(file):
                for start in range(0, length, CHUNK_ROWS):
                    yield Block(file, start + 1, min(CHUNK_ROWS, length - start), group)
        else:
            with open(file, "rb") as stream:
                begin = 3 if stream.read(3) == b"\xef\xbb\xbf" else 0
                stream.seek(begin)
                first, number, rows, size = 1, 1, 0, 0
                for line in stream:  # lines end at \n alone, so that U+2028 inside a text does not split a row
                    number, rows, size = number + 1, rows + bool(line.strip()), size + len(line)
                    if rows == CHUNK_ROWS or size >= CHUNK_BYTES:
                        yield Block(file, first, rows, (begin, size))
                        first, rows, begin, size = number, 0, begin + size, 0
                yield Block(file, first, rows, (begin, size))


def read_block(block: Block, wanted: np.ndarray) -> Iterator[tuple[str, object]]:
    """(place, raw row) of rows of a block, numbered from 0 in it, in the order wanted; broken ones as BadRow."""
    file, part = block.file, block.part
    with readable(file):
        if file.lower().endswith(".parquet"):
            if isinstance(part, tuple):
                table = in_slices(file, part[0]).get_batch(part[1]).take(pa.array(wanted))
            else:
                with pyarrow.parquet.ParquetFile(file) as parquet:
                    table = parquet.read_row_group(part, columns=own_columns(parquet)).take(wanted)
            for start in range(0, len(wanted), 100):  # an Arrow table is smaller than its objects
                for i, row in enumerate(table.slice(start, 100).to_pylist(), start):
                    yield f"{file}:{block.first + wanted[i]}", row
        elif file.lower().endswith(HDF5_TYPES):
            rows, start = read_hdf5_rows(file, part, block.first - 1, block.first - 1 + block.rows), block.first - 1
            for i in wanted:
                place = f"row {start + i + 1}" if part == "/" else f"{part.strip('/')}[{start + i}]"
                yield f"{file}:{place}", rows[i]
        else:
            with open(file, "rb") as stream:
                stream.seek(part[0])
                lines = stream.read(part[1]).split(b"\n")
            lines = [(number, line) for number, line in enumerate(lines, block.first) if line.strip()]
            for number, line in [lines[i] for i in wanted]:
                yield next(parse_line(file, number, line), (f"{file}:{number}", BadRow("broken_row", "no JSON")))


def own_columns(parquet) -> list[str] | None:
    known = {name for columns in COLUMNS.values() for name in columns}
    return [name for name in parquet.schema_arrow.names if name in known] or None


@lru_cache(64)
def in_slices(file: str, group: int):
    """A large row group as a temporary Arrow file with a batch for each CHUNK_ROWS rows: Parquet can be read only from
    a group's start. The file has no name, and is gone with the process."""
    with pyarrow.parquet.ParquetFile(file) as parquet, tempfile.NamedTemporaryFile(suffix=".arrow") as copy:
        batches = parquet.iter_batches(CHUNK_ROWS, row_groups=[group], columns=own_columns(parquet))
        first = next(batches)
        fields = [f.with_type(f.type.value_type) if pa.types.is_dictionary(f.type) else f for f in first.schema]
        with pa.ipc.new_file(copy, pa.schema(fields)) as writer:
            for batch in chain([first], batches):
                writer.write_batch(batch.cast(pa.schema(fields)))
        copy.flush()
        return pa.ipc.open_file(pa.memory_map(copy.name))


@contextlib.contextmanager
def readable(file: str):
    """Around reading: a file that cannot be read, or that became shorter, is one line."""
    try:
        yield
    except (OSError, IndexError, pa.ArrowException) as error:
        raise UserError(f"{file}: cannot be read ({' '.join(str(error).split())})") from None


def own_row(row, kind: str, place: str) -> dict:
    """A raw row -> all columns of its kind, as prepare_data.py writes them. Raises UserError."""
    if isinstance(row, BadRow):
        raise UserError(f"{place}: {row.reason} ({row.detail}); {DROPS}")
    if not isinstance(row, dict):
        raise UserError(f"{place}: expected an object with named columns, found {type(row).__name__}; {DROPS}")
    lists = {"prompt": "[{"} | ({"logprobs": "["} if isinstance(row, TextRow) else {})  # may stand there as JSON
    out = {}
    for name in COLUMNS[kind]:
        value = row.get(name)
        if isinstance(value, float) and math.isnan(value):  # HDF5 has no null
            value = None
        if name in lists and isinstance(value, str) and value.startswith(lists[name]):
            with contextlib.suppress(ValueError):
                value = json.loads(value)
        if name == "prompt" and isinstance(value, str):
            value = [{"role": "user", "content": value}]
        elif name == "metadata" and isinstance(value, dict):
            value = json.dumps(value, ensure_ascii=False)
        elif name == "id" and value is None:
            value = place
        check, expected = TYPES.get(name, (is_text, "text"))
        if name in REQUIRED[kind] if value is None else not check(value):
            found = "none" if value is None else type(value).__name__
            raise UserError(f"{place}: {name}: expected {expected}, found {found}; {DROPS}")
        out[name] = value
    return out


def is_text(value) -> bool:
    return isinstance(value, str)


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def is_numbers(value) -> bool:
    return isinstance(value, list) and all(map(is_number, value))


def is_dialogue(value) -> bool:
    turns = value if isinstance(value, list) else []
    return turns != [] and all(
        isinstance(turn, dict) and is_text(turn.get("role")) and is_text(turn.get("content")) for turn in turns
    )


TYPES = {
    "prompt": (is_dialogue, "text or {role, content} messages"),
    "logprobs": (is_numbers, "a list of numbers"),
    "margin": (is_number, "a number"),
    "reward": (is_number, "a number"),
}


def pin(batch):
    """The batch with its tensors in memory that a GPU can copy from while it computes."""
    if isinstance(batch, torch.Tensor):
        return batch.pin_memory()
    if isinstance(batch, dict):
        return {name: pin(value) for name, value in batch.items()}
    return [pin(value) for value in batch] if isinstance(batch, list) else batch

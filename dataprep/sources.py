"""Raw data files of any common type, read in chunks that a worker process can turn into rows.

JSON (array or lines), CSV, TSV, each plain, .gz or .zst; Parquet, Arrow, HDF5; folders and globs of these; folders
that `datasets` saved; hub names. One chunk is in memory at a time.
"""

import csv
import glob
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from utils.config import UserError, first_line
from utils.rows import (
    CHUNK_BYTES,
    CHUNK_ROWS,
    HDF5_TYPES,
    BadRow,
    TextRow,
    hdf5_tables,
    parse_line,
    read_hdf5_rows,
    unique_keys,
)
from utils.tracking import say

SIDECARS = (
    "report.json",
    "run.json",
    "state.json",
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "dropped.jsonl",
    "contradicted.jsonl",
    "coverage.jsonl",
    "coverage.json",
)  # about data
TEXT_TYPES = tuple(
    kind + packed for kind in (".jsonl", ".ndjson", ".json", ".csv", ".tsv") for packed in ("", ".gz", ".zst")
)
ARROW_TYPES = (".arrow", ".feather")
SUFFIXES = (*TEXT_TYPES, ".parquet", *ARROW_TYPES, *HDF5_TYPES)


@dataclass
class Chunk:
    """Some rows of one file, raw, so that parsing them can happen in another process.

    data: JSON lines as bytes, or an Arrow table, or a list of (place, row) with places inside the file.
    """

    file: str
    first: int
    data: object
    share: float = 0.0
    """of the file's bytes, for the progress bar"""

    def __post_init__(self):
        self.file = as_label(self.file)

    def rows(self) -> Iterator[tuple[str, object]]:
        """Yield (place, row); a row that cannot be parsed comes as its BadRow."""
        if isinstance(self.data, list) and self.data and isinstance(self.data[0], bytes):
            for number, line in enumerate(self.data, self.first):
                yield from parse_line(self.file, number, line)
        elif isinstance(self.data, list):
            for place, row in self.data:
                yield (f"{self.file}:{place}" if self.file else place), row
        else:
            try:
                rows = self.data.to_pylist()
            except Exception:  # Arrow does not look into its times before
                rows = [one_row(self.data.slice(i, 1)) for i in range(self.data.num_rows)]
            for number, row in enumerate(rows, self.first):
                yield f"{self.file}:{number}", row


def one_row(table) -> "dict | BadRow":
    try:
        with suppress(UnicodeError):
            check_arrow(table)
        return table.to_pylist()[0]
    except UnicodeDecodeError as error:
        return BadRow("broken_row", f"not UTF-8 at byte {error.start + 1} of a text")
    except Exception as error:
        return BadRow("broken_row", first_line(error))


def as_label(name: str) -> str:
    """A file's name as text that can be written, whatever bytes it has."""
    return name.encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True)
class Hub:
    """Where in a hub dataset to read."""

    name: str | None = None
    """configuration of the dataset, such as `main`"""
    data_dir: str | None = None
    """folder of the dataset, such as `harmless-base`"""
    split: str | None = None
    """default: train; also chooses the split of a folder that `datasets` saved, or whose files are named by split"""
    revision: str | None = None
    """commit or tag, for runs that can be repeated"""
    streaming: bool = False
    """read while downloading and keep nothing on disk, for sets larger than the disk"""


def hub_label(name: str, hub: Hub) -> str:
    """How rows of a hub set are named: set, place in it, split."""
    return ":".join(x for x in (name, hub.name, hub.data_dir, hub.revision) if x) + f"[{hub.split or 'train'}]"


def is_local(source: str) -> bool:
    return os.path.exists(source) or bool(glob.glob(source, recursive=True))


def is_saved(source: str) -> bool:
    """A folder that `datasets` wrote with save_to_disk."""
    return any(os.path.isfile(f"{source}/{name}") for name in ("dataset_dict.json", "state.json"))


SPLIT_WORD = r"(train|test|validation|valid|val|dev|eval)"
# test-00000.parquet, split=test/, or my_test.jsonl
SPLIT_NAME = re.compile(rf"(?:split=)?{SPLIT_WORD}(?=[-_.]|$)|.*[-_.]{SPLIT_WORD}(?=\.|$|[-_]\d)")


def source_files(source: str, split: str | None = None) -> tuple[list[str], list[str]]:
    """(files to read, files left out) of a file, folder or glob; none for a hub name or a set that `datasets` saved.

    In a folder whose files are named by split (train-00000.parquet, test.jsonl, split=train/a.jsonl) only those of
    `split` count (default: train); where none is named train, the files that name no split are. Raises UserError when
    there can be none.
    """
    path, left_out = Path(source), []
    if is_saved(source):
        return [], []
    if os.path.isfile(source):  # which, unlike pathlib, takes names that no file can have
        check_type(source)
        return [source], []
    is_folder = os.path.isdir(source)
    if is_folder:
        found = [
            str(f)
            for f in path.rglob("*")
            if f.is_file() and not any(part.startswith(".") for part in f.relative_to(path).parts)
        ]
    else:
        found = [f for f in glob.glob(source, recursive=True) if os.path.isfile(f)]
    found = sorted(found)
    if not is_folder and not found:
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) and not source.endswith(SUFFIXES):
            return [], []
        raise UserError(f"source {source[:200]} does not exist, and no file matches it")
    if not is_folder and len(found) == 1:
        check_type(found[0])
        return found, []
    found = [f for f in found if Path(f).name not in SIDECARS]
    files = [f for f in found if f.lower().endswith(SUFFIXES)]
    if is_folder:
        splits = {f: split_name(Path(f).relative_to(path)) for f in files}
        named, wanted = set(splits.values()), split or "train"
        if len(named) > 1 and named != {None, "train"}:
            wanted = None if wanted == "train" and "train" not in named else wanted
            files = [f for f in files if splits[f] == wanted]
            left_out = [f for f in splits if f not in files]
    if not files:
        raise UserError(
            f"source {source} has no {', '.join(SUFFIXES)} files"
            + (f" of the split {split or 'train'}" if left_out else "")
        )
    return files, left_out + [f for f in found if not f.lower().endswith((*SUFFIXES, ".html", ".yaml", ".md"))]


def split_name(file: Path) -> str | None:
    """The split in a file's name, or in the name of a folder that it lies in, the outermost first."""
    matches = (match for part in file.parts if (match := SPLIT_NAME.match(part.lower())))
    return next((match[1] or match[2] for match in matches), None)


def check_type(file: str) -> None:
    if not file.lower().endswith(SUFFIXES):
        raise UserError(f"{file}: unknown file type; known are {', '.join(SUFFIXES)}")


def read_source(source: str, hub: Hub = Hub()) -> Iterator[Chunk]:
    """Chunks of a file, a folder, a glob or a hub name, in a fixed order."""
    if is_saved(source):
        yield from read_saved(source, hub)
        return
    files, left_out = source_files(source, hub.split)
    if left_out:
        more = "; held-out ones can be given as eval_source" if left_out[0].lower().endswith(SUFFIXES) else ""
        say(f"{source}: {len(left_out)} files are not read, such as {left_out[0]}{more}")
    for file in files:
        yield from read_file(file)
    if not files:
        yield from read_hub(source, hub)


def read_file(file: str) -> Iterator[Chunk]:
    """Chunks of one local file."""
    check_type(file)
    if file.lower().endswith((".parquet", *ARROW_TYPES)):
        yield from read_arrow(file)
    elif file.lower().endswith(HDF5_TYPES):
        yield from read_hdf5(file)
    else:
        yield from read_text(file)


# ------------------------------------------------------------------------------------------------ text files


def read_text(file: str) -> Iterator[Chunk]:
    size = max(1, Path(file).stat().st_size)
    kind = file.lower().removesuffix(".gz").removesuffix(".zst").rsplit(".", 1)[1]
    done = 0
    try:
        with open(file, "rb") as raw:
            stream = unpacked(file, raw)
            if stream.peek(3)[:3] == b"\xef\xbb\xbf":
                stream.read(3)
            if kind in ("csv", "tsv"):
                chunks = csv_chunks(file, stream, "\t" if kind == "tsv" else ",")
            else:
                first = 1 + skip_blank(stream)
                is_array = stream.peek(64)[:64].lstrip()[:1] == b"["
                chunks = (
                    array_chunks(file, stream, first) if is_array else line_chunks(file, stream, first, kind == "json")
                )
            for chunk in chunks:
                position = raw.tell()
                chunk.share, done = (position - done) / size, position
                yield chunk
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error})") from None


def unpacked(file: str, raw) -> io.BufferedReader:
    """A stream of the file's text bytes; `raw` itself where nothing is packed."""
    codec = {".gz": "gzip", ".zst": "zstd"}.get(Path(file).suffix.lower())
    if codec is None:
        return raw
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw, "r"), codec), 1 << 20)


def skip_blank(stream) -> int:
    """Pass over blank lines, a buffer at a time: a small packed file can hold a thousand million. Returns how many."""
    lines = 0
    while block := stream.peek(1):
        blank = block[: len(block) - len(block.lstrip())]
        end = blank.rfind(b"\n") + 1
        if not end:
            break
        lines += stream.read(end).count(b"\n")
    return lines


def line_chunks(file: str, stream, number: int, whole_allowed: bool) -> Iterator[Chunk]:
    """Lines end at \\n alone, so that U+2028 inside a text does not split a row.

    whole_allowed: a .json file may also be one object over several lines, which holds the rows in a list.
    """
    start = True
    while True:
        lines, size = [], 0
        number += skip_blank(stream)
        while len(lines) < CHUNK_ROWS and size < CHUNK_BYTES and (line := stream.readline()):
            lines.append(line)
            size += len(line)
        if not lines:
            return
        if start:
            start = False
            first = next((line.strip() for line in lines if line.strip()), b"")
            alone = (
                whole_allowed
                and first.startswith(b"{")
                and not stream.peek(1)
                and sum(bool(line.strip()) for line in lines) == 1
            )
            if (
                alone
                or whole_allowed
                and first.startswith(b"{")
                and isinstance(next(parse_line("", 1, first))[1], BadRow)
            ):
                yield from object_chunks(file, b"".join(lines) + stream.read())
                return
        yield Chunk(file, number, lines)
        number += len(lines)


def object_chunks(file: str, data: bytes) -> Iterator[Chunk]:
    """A file that is one object: one row, or the rows in the only list of objects that it holds."""
    value = load_whole(file, data)
    lists = (
        [(k, v) for k, v in value.items() if isinstance(v, list) and v and all(isinstance(x, dict) for x in v)]
        if isinstance(value, dict)
        else []
    )
    conversations = (
        "prompt",
        "chosen",
        "rejected",
        "messages",
        "conversations",
        "completions",
        "responses",
        "summaries",
        "answers",
    )
    if len(lists) == 1 and lists[0][0] not in conversations:
        name, rows = lists[0]
        for start in range(0, len(rows), CHUNK_ROWS):
            yield Chunk(
                file,
                start + 1,
                [(f"{name}[{i}]", row) for i, row in enumerate(rows[start : start + CHUNK_ROWS], start)],
            )
    else:
        yield Chunk(file, 1, [("row 1", value)])


def load_whole(file: str, data: bytes):
    try:
        return json.loads(data.decode("utf-8-sig"), object_pairs_hook=unique_keys)
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 at byte {error.start}; convert the file") from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{file}:{error.lineno}:{error.colno}: {error.msg}; neither JSON lines nor one whole JSON value"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: {error}") from None


def array_chunks(file: str, stream, lines: int = 1) -> Iterator[Chunk]:
    """Elements of a JSON array, one chunk of text in memory at a time; after an error nothing can be trusted."""
    decoder = json.JSONDecoder(object_pairs_hook=unique_keys)
    text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
    buffer, end, number, rows, size = "", False, 1, [], 0
    position, inside, comma = 0, False, False

    def fail(message: str):
        line = lines + buffer.count("\n", 0, position)
        column = position - buffer.rfind("\n", 0, position)
        return UserError(
            f"{file}:{line}:{column}: {message}; a JSON array must be whole (JSON lines can have broken rows)"
        )

    while True:
        position = re.compile(r"[ \t\r\n]*").match(buffer, position).end()
        character = buffer[position : position + 1]
        if not character and not end:
            pass  # more text
        elif not inside:
            inside, position = True, position + 1
            continue
        elif character == "]":
            if buffer[position + 1 :].strip() or text.read().strip():
                position += 1
                raise fail("text after the array")
            break
        elif character == "," and comma:
            position, comma = position + 1, False
            continue
        elif not character or comma:
            raise fail("the array does not end" if not character else "expected , or ]")
        else:
            try:
                row, after = decoder.raw_decode(buffer, position)
                if after == len(buffer) and not end:  # a number may go on
                    raise json.JSONDecodeError("", buffer, after)
                size += after - position
                rows.append((f"row {number}", row))
                number, position, comma = number + 1, after, True
                if len(rows) >= CHUNK_ROWS or size >= CHUNK_BYTES:
                    yield Chunk(file, number, rows)
                    rows, size = [], 0
                continue
            except json.JSONDecodeError as error:
                if end:
                    position = error.pos
                    raise fail(error.msg) from None
            except (ValueError, RecursionError) as error:
                raise fail(str(error).split(";")[0]) from None
        lines += buffer.count("\n", 0, position)
        try:  # read as much again as is waiting, so that a long row is not parsed again for each block
            more = text.read(max(1 << 20, len(buffer) - position))
        except UnicodeDecodeError as error:
            raise UserError(f"{file}: not UTF-8 ({error.reason} near row {number}); convert the file") from None
        buffer, position, end = buffer[position:] + more, 0, not more
    if rows:
        yield Chunk(file, number, rows)


ESCAPED = re.compile(r'\\(["\\])')


def csv_chunks(file: str, stream, delimiter: str) -> Iterator[Chunk]:
    """Rows by the names in the first line; an empty cell is null. Cells may hold line breaks inside quotes.

    A quote inside a cell is written twice, or with a backslash before it: a file that has such is read both ways
    once, and the way with fewer broken rows counts.
    """
    csv.field_size_limit(sys.maxsize)
    escaped, broken = False, []
    with open(file, "rb") as raw:
        if any(b'\\"' in line for line in unpacked(file, raw)):
            for way in (False, True):
                with open(file, "rb") as again:
                    rows = csv_rows(file, unpacked(file, again), delimiter, way)
                    broken.append(sum(isinstance(row, BadRow) for _, row in rows))
            escaped = broken[1] < broken[0]
    part, size, first = [], 0, 1
    for place, row in csv_rows(file, stream, delimiter, escaped):
        part.append((place, row))
        size += sum(len(cell or "") for cell in row.values()) if isinstance(row, dict) else 0
        if len(part) == CHUNK_ROWS or size >= CHUNK_BYTES:
            yield Chunk(file, first, part)
            part, size, first = [], 0, first + len(part)
    if part:
        yield Chunk(file, first, part)


def csv_rows(file: str, stream, delimiter: str, escaped: bool) -> Iterator[tuple[str, TextRow | BadRow]]:
    """(line, row) of each record. Every line of a record whose quotes are wrong is a broken row, and so are the lines
    after it until three records without a quote in a cell follow each other: they may be the inside of a cell."""
    text = lines = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    if escaped:
        lines = (ESCAPED.sub(lambda match: match[1].replace('"', '""'), line) for line in text)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    names = column_names(file, next(reader, None) or [])
    wrong, doubtful = "", []
    while True:
        start, cells = reader.line_num + 1, None
        try:
            cells = next(reader, None)
        except csv.Error as error:
            wrong = f"{error} (lines {start} to {reader.line_num})"
        if cells is None or wrong and cells and (len(cells) != len(names) or '"' in "".join(cells)):
            lost = range(doubtful[0][0] if doubtful else start, reader.line_num + 1)
            yield from ((str(line), BadRow("broken_row", wrong)) for line in lost)
            doubtful = []
            if cells is None and reader.line_num < start:
                text.detach()  # else it closes the file, whose position is still asked for
                return
        elif len(cells) == len(names):
            doubtful.append((start, TextRow({n: cell if cell != "" else None for n, cell in zip(names, cells)})))
            if not wrong or len(doubtful) == 3:
                yield from ((str(line), row) for line, row in doubtful)
                wrong, doubtful = "", []
        elif cells:
            detail = f"expected {len(names)} cells, found {len(cells)} (lines {start} to {reader.line_num})"
            yield str(start), BadRow("broken_row", detail)


def column_names(file: str, header: list[str]) -> list[str]:
    index = "Unnamed: 0"  # what pandas calls the index that it wrote without a name
    while index in header:
        index += ".1"
    names = [index, *header[1:]] if len(header) > 1 and not header[0].strip() else header
    if not names or any(not name.strip() for name in names) or len(set(names)) < len(names):
        raise UserError(f"{file}:1: expected one different name for each column in the first line, found {header}")
    return names


# ---------------------------------------------------------------------------------------------- binary files


def read_arrow(file: str) -> Iterator[Chunk]:
    """Parquet, or Arrow IPC in its file or stream form."""
    import pyarrow as pa
    import pyarrow.parquet

    try:
        first = 1
        if file.endswith(".parquet"):
            parquet = pyarrow.parquet.ParquetFile(file)
            check_names(file, parquet.schema_arrow.names)
            total, groups = parquet.metadata.num_rows, map(parquet.metadata.row_group, range(parquet.num_row_groups))
            n = min((rows_at_once(group.total_byte_size, group.num_rows) for group in groups), default=CHUNK_ROWS)
            batches = parquet.iter_batches(n)
        else:
            with open(file, "rb") as stream:
                is_file = stream.read(6) == b"ARROW1"
            if is_file:
                reader = pa.ipc.open_file(pa.memory_map(file))
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
            else:
                reader = batches = pa.ipc.open_stream(pa.OSFile(file))
            check_names(file, reader.schema.names)
            total = 0
        for batch in batches:
            yield from arrow_chunks(file, first, batch, total)
            first += batch.num_rows
    except (OSError, pa.ArrowException) as error:
        kind = "Parquet" if file.endswith(".parquet") else "Arrow"
        raise UserError(f"{file}: not a readable {kind} file ({' '.join(str(error).split())})") from None


def rows_at_once(size: int, rows: int) -> int:
    """Rows of a chunk, by the bytes that so many rows have."""
    return max(1, min(CHUNK_ROWS, CHUNK_BYTES * rows // max(1, size)))


def check_arrow(table) -> None:
    """Raise an error for a damaged offset, which Arrow itself would follow anywhere, and UnicodeError for a text."""
    import pyarrow as pa

    try:
        table.validate(full=True)
    except pa.ArrowInvalid as error:
        raise UnicodeError(str(error)) if "UTF8" in str(error) else error from None


def arrow_chunks(name: str, first: int, table, total: int) -> Iterator[Chunk]:
    """Chunks of a table or a batch, whose first row is the `first` of `total`."""
    import pyarrow as pa

    n = rows_at_once(table.nbytes, table.num_rows)
    for start in range(0, table.num_rows, n):
        part = table.slice(start, n)
        place, share = first + start, part.num_rows / total if total else 0.0
        try:
            check_arrow(part)
            # of a batch's slice a worker would get the whole batch, of a table's only the slice
            yield Chunk(name, place, pa.table(part) if isinstance(part, pa.RecordBatch) else part, share)
        except (UnicodeError, pa.ArrowException):
            rows = [(str(place + i), one_row(part.slice(i, 1))) for i in range(part.num_rows)]
            yield Chunk(name, place, rows, share)


def check_names(file: str, names: list[str]) -> None:
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(f"{file}: two columns have the name {twice[0]!r}; rename one")


def read_hdf5(file: str) -> Iterator[Chunk]:
    for group, length in hdf5_tables(file):
        for start in range(0, length, CHUNK_ROWS):
            rows = read_hdf5_rows(file, group, start, min(start + CHUNK_ROWS, length))
            places = [
                (f"{group.strip('/')}[{i}]" if group != "/" else f"row {i + 1}", row)
                for i, row in enumerate(rows, start)
            ]
            yield Chunk(file, start + 1, places, len(rows) / length)


# ------------------------------------------------------------------------------------------------- datasets


def read_saved(source: str, hub: Hub) -> Iterator[Chunk]:
    import datasets

    try:
        saved = datasets.load_from_disk(source)
    except Exception as error:
        raise UserError(
            f"source {source}: not readable as a folder that datasets saved ({first_line(error)})"
        ) from None
    if isinstance(saved, datasets.DatasetDict):
        split = hub.split or "train"
        if split not in saved:
            raise UserError(f"source {source} has the splits {', '.join(saved)}; choose one with --hub.split")
        saved = saved[split]
    elif hub.split is not None:
        raise UserError(
            f"source {source} is one set without splits, so hub.split {hub.split} would have no effect; remove it"
        )
    yield from table_chunks(source, saved)


def read_hub(name: str, hub: Hub) -> Iterator[Chunk]:
    import datasets

    split = hub.split or "train"
    try:
        rows = datasets.load_dataset(
            name, hub.name, data_dir=hub.data_dir, split=split, revision=hub.revision, streaming=hub.streaming
        )
        yield from table_chunks(hub_label(name, hub), rows)
    except UserError:
        raise
    except Exception as error:  # the library raises many kinds, all of which mean the same to the user
        raise UserError(
            f"source {name}: neither a file here nor a readable hub dataset ({first_line(error)})"
        ) from None


def table_chunks(name: str, rows) -> Iterator[Chunk]:
    total = getattr(rows, "num_rows", 0)
    first = 1
    for table in rows.with_format("arrow").iter(CHUNK_ROWS):
        yield from arrow_chunks(name, first, table, total)
        first += table.num_rows

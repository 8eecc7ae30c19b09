"""Pass 1: chunks of raw rows become Arrow files of checked rows with their keys, in parallel."""

import hashlib
import json
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from dataprep.convert import convert
from dataprep.keys import row_keys
from dataprep.lengths import Limits, check_lengths, encode_rows
from dataprep.messages import beside_text
from dataprep.shapes import ANSWERS, GROUPED, Columns, Shape
from dataprep.sources import Chunk
from utils.config import UserError
from utils.data import COLUMNS
from utils.rows import BadRow, bad_row
from utils.tracking import progress_bar


@dataclass(frozen=True)
class RowRules:
    """What each row is checked by, the same for all sources."""

    tokenizer: object
    limits: Limits
    prompt_suffix: str
    pairs: Literal["best_worst", "all"]
    near_duplicates: float | None
    excluded: set[str]
    """ids, and prompts as JSON"""


class Work(NamedTuple):
    """What is to be known of the source that a chunk comes from."""

    shape: Shape
    columns: Columns
    source: str
    role: Literal["new", "test", "old"]
    """new rows, rows of eval_source, or rows of the earlier output"""
    weight: float = 1.0


class WorkerKilled(UserError):
    """Not the user's fault: the same run can go on."""


# ------------------------------------------------------------------------------------------------- in a worker

_worker: dict = {}


def start_worker(rules: RowRules, parent: int | None = None) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the cores are taken
    if parent is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent says the one line
        threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    _worker["rules"] = rules


def end_with(parent: int) -> None:
    """A worker does not outlive a run that was killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def process_chunk(chunk: Chunk, work: Work, file: Path) -> dict:
    """Raw rows -> one Arrow file of checked rows with their keys; returns and stores what happened to the others."""
    rules, kind = _worker["rules"], work.shape.kind
    stats = work._asdict() | {"rows": 0, "candidates": 0, "kept": 0, "unused": 0}
    stats |= {"dropped": [], "shortened": Counter(), "beside": Counter()}
    del stats["shape"], stats["columns"]
    rows = candidate_rows(chunk, work, rules, stats)
    if work.role == "old":
        kept = [row | {"_place": place} for place, row in rows]
        lengths = [[0] * (1 + len(ANSWERS[kind]))] * len(kept)
    else:
        kept, lengths = checked_rows(rows, work, rules, stats)
    stats |= {"kept": len(kept), "shortened": dict(stats["shortened"])}
    keys = row_keys(kept, kind, rules.near_duplicates, rules.prompt_suffix) if kept else {}
    write_chunk(file, kept, kind, keys | {"lengths": np.array(lengths, dtype=np.int32)}, stats)
    return stats


def candidate_rows(chunk: Chunk, work: Work, rules: RowRules, stats: dict) -> list[tuple[str, dict]]:
    """(place, row) of all rows that raw rows become; those that cannot be used go to `stats`."""
    rows: list[tuple[str, dict]] = []
    grouped = work.shape.kind == "preference" and work.shape.name in GROUPED
    for place, raw in chunk.rows():
        stats["rows"] += len(raw["scores"]) if grouped and isinstance(raw, dict) else 1
        try:
            if isinstance(raw, BadRow):
                raise raw
            old = work.role == "old"
            stats["beside"].update(beside_text(raw) if isinstance(raw, dict) and not old else ())
            made = [raw] if old else convert(raw, work.shape, work.columns, rules.prompt_suffix, rules.pairs)
        except Exception as error:
            made = [bad_row(error)]
        stats["candidates"] += len(made)
        if grouped and isinstance(raw, dict) and (rules.pairs == "best_worst" or isinstance(made[0], BadRow)):
            stats["unused"] += len(raw["scores"]) - (1 if isinstance(made[0], BadRow) else 2)
        for i, row in enumerate(made, 1):
            at = place if len(made) == 1 else f"{place} pair {i}"
            if isinstance(row, BadRow):
                stats["dropped"].append((at, row.reason, row.detail))
            else:
                rows.append((at, row))
    return rows


def checked_rows(
    rows: list[tuple[str, dict]], work: Work, rules: RowRules, stats: dict
) -> tuple[list[dict], list[list[int]]]:
    """Rows within the limits with id, source and place, and the lengths of their parts; the others go to `stats`."""
    kind, kept, lengths = work.shape.kind, [], []
    rows = [
        row
        for row in rows
        if not (bad := far_too_long(row[1], kind, rules)) or stats["dropped"].append((row[0], *bad))
    ]
    encoded = encode_rows([row for _, row in rows], kind, rules.tokenizer) if rows else []
    for (place, row), ids in zip(rows, encoded):
        try:
            if isinstance(ids, BadRow):
                raise ids
            stats["shortened"].update(check_lengths(row, ids, kind, rules.tokenizer, rules.limits))
            row["id"] = row_id(row)
            if rules.excluded and is_excluded(row, rules):
                raise BadRow("excluded", "listed in exclude")
        except BadRow as bad:
            stats["dropped"].append((place, bad.reason, bad.detail))
            continue
        kept.append(row | {"source": work.source, "_place": place})
        lengths.append([len(ids[name]) for name in ("prompt", *ANSWERS[kind])])
    return kept, lengths


def far_too_long(row: dict, kind: str, rules: RowRules) -> tuple[str, str] | None:
    """(reason, detail) of a row that would be dropped for its length whatever follows, by the beginning of its texts:
    no more of a text of 50 MB is tokenized. Assistant turns do not count, as templates cut their thoughts out."""
    limits, turns = rules.limits, row["prompt"][-1:]
    if limits.long_prompt == "filter":
        turns = [turn for turn in row["prompt"] if turn["role"] != "assistant"]
    parts = [("prompt_too_long", turn["content"].strip(), limits.prompt) for turn in turns]
    if limits.long_response == "filter":
        parts += [("response_too_long", row[name], limits.response) for name in ANSWERS[kind]]
    for reason, text, limit in parts:
        start = text[: 64 * limit]
        if len(start) < len(text):
            n = len(rules.tokenizer(start, add_special_tokens=False, split_special_tokens=True).input_ids)
            if n > 2 * limit:  # not limit, as the last tokens of a beginning are not those of the text
                return reason, f"more than {2 * limit} tokens, limit {limit}"
    return None


def row_id(row: dict) -> str:
    """16 hex digits of a hash of all but the metadata."""
    content = {key: value for key, value in row.items() if key != "metadata"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


def is_excluded(row: dict, rules: RowRules) -> bool:
    """Whether a row is listed, by its id or by its prompt with its suffix or without."""
    prompt = row["prompt"]
    plain_end = {**prompt[-1], "content": prompt[-1]["content"].removesuffix(rules.prompt_suffix)}
    return bool({row["id"], json.dumps(prompt), json.dumps([*prompt[:-1], plain_end])} & rules.excluded)


# ------------------------------------------------------------------------------------------------- chunk files


def schema_of(kind: str):
    import pyarrow as pa

    messages = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    types = {"prompt": messages, "margin": pa.float64(), "reward": pa.float64(), "logprobs": pa.list_(pa.float64())}
    return pa.schema([(name, types.get(name, pa.string())) for name in COLUMNS[kind]])


def write_chunk(file: Path, rows: list[dict], kind: str, keys: dict, stats: dict) -> None:
    """Rows with places, keys ((N, ...) or N arrays) and statistics in one Arrow file, which appears at once."""
    import pyarrow as pa

    schema = schema_of(kind).append(pa.field("_place", pa.string()))
    columns, names = pa.Table.from_pylist(rows, schema=schema).columns, [*schema.names]
    for name, values in keys.items():
        names.append(f"_{name}")
        if isinstance(values, list):
            columns.append(pa.array(values))
            continue
        values = values.reshape(len(values), -1) if values.ndim > 2 else values
        flat = pa.array(np.ascontiguousarray(values).ravel())
        columns.append(flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1]))
    table = pa.table(columns, names=names).replace_schema_metadata({"stats": json.dumps(stats)})
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with (
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer,
    ):
        writer.write_table(table)
    os.replace(temporary, file)


def chunk_stats(file: Path) -> dict | None:
    """What a chunk file says of itself, or None if there is none."""
    import pyarrow as pa

    if not file.exists():
        return None
    with pa.OSFile(str(file)) as source:
        return json.loads(pa.ipc.open_file(source).schema.metadata[b"stats"])


def read_chunk(file: Path, names: list[str]):
    """Some columns of a chunk file, as an Arrow table."""
    import pyarrow as pa

    with pa.OSFile(str(file)) as source:
        schema = pa.ipc.open_file(source).schema
        wanted = [schema.get_field_index(name) for name in names]
        return pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=wanted)).read_all().select(names)


def chunk_keys(file: Path, names: list[str]) -> dict:
    """Keys of a chunk's rows: (N,) or (N, ...) arrays; of arrays of any length all values, and their lengths (N,)."""
    import pyarrow as pa

    table, keys = read_chunk(file, [f"_{name}" for name in names]), {}
    for name in names:
        column = table[f"_{name}"].combine_chunks()
        if pa.types.is_list(column.type):
            keys[name] = (column.flatten().to_numpy(zero_copy_only=False), column.value_lengths().to_numpy())
        elif column.type.num_fields:
            keys[name] = column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), -1)
        else:
            keys[name] = column.to_numpy(zero_copy_only=False)
    return keys


# ------------------------------------------------------------------------------------------------- all chunks


def run_chunks(
    tasks: Iterator[tuple[Chunk, Work]], folder: Path, workers: int, rules: RowRules, files: int
) -> Iterator[dict]:
    """Process chunks in order, `workers` at a time; yields what is known of each, with its file.

    A file that is there already is not made again. files: of the sources, for the progress bar.
    """
    numbered = ((chunk, work, folder / f"{i:07d}.arrow") for i, (chunk, work) in enumerate(tasks))
    head = list(islice(numbered, 2))
    pool = None
    if workers > 1 and len(head) > 1:  # one chunk is not worth a pool
        pool = ProcessPoolExecutor(
            workers, mp_context=get_context("fork"), initializer=start_worker, initargs=(rules, os.getpid())
        )
    waiting: deque = deque()
    start_worker(rules)
    with progress_bar(label="preparing", unit="file", total=files) as bar, pool or nullcontext():

        def finished() -> dict:
            chunk, work, file, stats = waiting.popleft()
            try:
                stats = stats if isinstance(stats, dict) else stats.result()
            except RecursionError:  # its rows are nested too deep to be sent
                stats = process_chunk(chunk, work, file)
            bar.update(round(chunk.share, 4))
            return stats | {"file": file}

        try:
            for chunk, work, file in chain(head, numbered):
                stats = chunk_stats(file) or (
                    pool.submit(process_chunk, chunk, work, file) if pool else process_chunk(chunk, work, file)
                )
                waiting.append((chunk, work, file, stats))
                while len(waiting) > (2 * workers if pool else 0):
                    yield finished()
            while waiting:
                yield finished()
        except BrokenProcessPool:
            raise WorkerKilled(
                "a worker process was killed, perhaps for memory; run again with fewer --workers"
            ) from None
        except BaseException:
            if pool:
                pool.shutdown(cancel_futures=True)
            raise

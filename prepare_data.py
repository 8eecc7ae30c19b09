"""Stage 1: raw preferences, prompts or logged trajectories -> a Parquet folder and a data report.

    python prepare_data.py --source data/demo/preferences.jsonl --tokenizer MODEL --output_dir out/data
    python prepare_data.py --config configs/gsm8k_data.yaml

Reads what dataprep/sources.py reads. Each source's shape is recognised and printed. Rows that cannot be used are dropped,
counted by reason and listed in dropped.jsonl; lengths are measured in tokens after the chat template.

Two passes, neither of which holds the data in memory. Workers turn chunks of raw rows into checked rows with keys, one
file a chunk, so a killed run over local files goes on where it was. Then the keys alone decide what no row can know of itself
(duplicates, contradictions, the split), and the rows that are left are written.
"""

import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import yaml

from dataprep.shapes import (
    ANSWERS,
    GROUPED,
    PAIRED,
    USES,
    Columns,
    Shape,
    as_messages,
    convert,
    detect_shape,
    detect_source,
    group_rows,
    to_json,
)
from dataprep.similarity import (
    MINIMA,
    Groups,
    bands,
    combine,
    hash64,
    one_byte,
    plain,
    signatures,
    similarity,
    tfidf,
    word_rarity,
)
from dataprep.sources import Chunk, Hub, hub_label, is_local, is_saved, read_file, read_source, source_files
from utils.config import UserError
from utils.data import COLUMNS, encode_dialogues, encode_prompt, encode_response, encode_responses, folder_kind, show
from utils.files import write_json, write_text
from utils.rows import BadRow
from utils.run import check_output_dir, record_run, run_stage
from utils.tracking import progress_bar

ROWS_PER_SHARD = 100_000
ROWS_PER_GROUP = 1000
WINDOW = 20  # chunks that are shuffled together
EXAMPLES_PER_REASON = 3


@dataclass(frozen=True)
class Source:
    """A source with a weight or a place on the hub of its own."""

    path: str
    """file, folder, glob or hub name"""
    weight: float = 1.0
    """copies of each train row: 0.5 keeps a random half, 2 writes each row twice"""
    hub: Hub | None = None
    """where in this hub dataset to read; null = as the `hub` option says"""


@dataclass(frozen=True)
class Filter:
    """Leave out train pairs that a trained reward model contradicts; they are written to contradicted.jsonl."""

    reward_model: str
    """folder of a reward model that was trained on other pairs"""
    min_probability: float = 0.05
    """train pairs whose chosen answer is the better one with less probability than this, by the model's calibrated
    scores, are left out; the test split stays as it is"""
    micro_batch_size: int = 16
    """answers a forward pass"""


@dataclass(frozen=True)
class Coverage:
    """How well the train prompts cover the prompts of a deployment; written to coverage.jsonl."""

    prompts: str
    """file of real user prompts, in any format that stage 1 reads"""
    min_similarity: float = 0.5
    """cosine of word counts, weighted by rarity (TF-IDF), from which a train prompt counts as a close neighbour"""


@dataclass(frozen=True)
class DataConfig:
    source: str | Source | list[str | Source]
    """files, folders, globs or hub names, each as text or as {path, weight, hub}"""
    tokenizer: str
    """model whose tokenizer and chat template measure the lengths: a folder, a .gguf file or a hub name"""
    output_dir: str
    """folder to write"""
    kind: Literal["preference", "prompts", "trajectories"] | None = None
    """what to make of the rows; null = detected from the first hundred rows, and printed"""
    eval_source: str | Source | list[str | Source] | None = None
    """sources of the test split, in place of eval_fraction; train rows with one of their prompts are dropped"""
    max_prompt_length: int = 512
    """tokens after the chat template, inclusive"""
    max_response_length: int = 256
    """tokens with eos, inclusive"""
    long_prompt: Literal["filter", "keep_last_turns"] = "filter"
    """of a prompt over the limit: drop the row, or drop its oldest turns (not a system turn at its start, and not the last one)"""
    long_response: Literal["filter", "truncate"] = "filter"
    """of an answer over the limit: drop the row, or cut the answer's end off"""
    pairs: Literal["best_worst", "all"] | None = None
    """pairs of several rated answers: the best against the worst (default), or all that differ"""
    near_duplicates: float | None = 0.9
    """a row is dropped if prompt and answers each share this part of their three-word runs with those of an earlier row, and
    their numbers are the same; so is a train row whose prompt is that near to a test prompt. null = only equal ones"""
    eval_fraction: float | None = None
    """share of the prompts that becomes the test split (default 0.05); a prompt is never in both"""
    prompt_suffix: str = ""
    """appended to the last user turn, for example an instruction on the answer's form"""
    on_bad_row: Literal["skip", "error"] = "skip"
    """skip and count a row that cannot be used, or stop at the first"""
    exclude: str | list[str] | None = None
    """JSONL files of objects with an `id` or a `prompt`, such as a PPO run's suspicious.jsonl: those rows are left out"""
    filter: Filter | None = None
    """noise filter by a trained reward model; null = none"""
    coverage: Coverage | None = None
    """comparison with the prompts of a deployment; null = none"""
    workers: int | None = None
    """processes that parse and tokenize; null = one for each core. The output does not depend on it"""
    seed: int = 0
    """decides which prompts are held out, and the order of the train rows"""
    refresh: bool = False
    """add what is new to an earlier output: its rows, their ids and their split stay as they are"""
    overwrite: bool = False
    """replace the output of an earlier run"""
    columns: Columns = field(default_factory=Columns)
    hub: Hub = field(default_factory=Hub)


# ------------------------------------------------------------------------------------------- lengths in tokens


def encode_rows(rows: list[dict], kind: str, tokenizer) -> list[dict | BadRow]:
    """Ids of each row as training will see them: {prompt, chosen, ...}; a row that the template refuses comes as its BadRow."""
    names = ANSWERS[kind]
    try:
        prompts = encode_dialogues(tokenizer, [row["prompt"] for row in rows])
    except Exception:  # templates raise their own errors, for example on a role that they do not know
        prompts = []
        for row in rows:
            try:
                prompts.append(encode_prompt(tokenizer, row["prompt"]))
            except Exception as error:
                prompts.append(
                    BadRow("refused_by_template", (str(error).strip() or type(error).__name__).splitlines()[0])
                )
    answers = encode_responses(tokenizer, [row[name] for row in rows for name in names]) if names else []
    return [
        ids
        if isinstance(ids, BadRow)
        else {"prompt": ids} | dict(zip(names, answers[i * len(names) : (i + 1) * len(names)]))
        for i, ids in enumerate(prompts)
    ]


def shorten_prompt(row: dict, tokenizer, limit: int) -> list[int] | None:
    """Drop the oldest turns until the prompt fits; a system turn stays, and the rest begins with a user turn."""
    system = [m for m in row["prompt"][:1] if m["role"] == "system"]
    turns = row["prompt"][len(system) :]
    for start in range(1, len(turns)):
        if turns[start]["role"] == "user":
            ids = encode_prompt(tokenizer, [*system, *turns[start:]])
            if len(ids) <= limit:
                keep_raw(row, "prompt", row["prompt"])
                row["prompt"] = [*system, *turns[start:]]
                return ids
    return None


def shorten_answer(row: dict, name: str, tokenizer, limit: int) -> list[int]:
    """Cut the end off, so that the text and eos have at most `limit` tokens and no character is cut in two."""
    text = row[name]
    spans = tokenizer(text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)[
        "offset_mapping"
    ]
    for keep in range(limit - 1, 0, -1):
        cut = text[: spans[keep - 1][1]]
        cut = cut if name == "response" else cut.rstrip()
        ids = encode_response(tokenizer, cut)
        if len(ids) <= limit:
            keep_raw(row, name, text)
            row[name] = cut
            return ids
    raise BadRow("empty_response", f"{name} has no token left of {limit} with eos")


def keep_raw(row: dict, name: str, value) -> None:
    metadata = json.loads(row["metadata"]) if row["metadata"] else {}
    metadata.setdefault("_raw", {}).setdefault(name, value)
    row["metadata"] = to_json(metadata)


def check_lengths(row: dict, ids: dict, kind: str, tokenizer, cfg: DataConfig) -> list[str]:
    """Bring a row within the limits, or raise BadRow; returns what was shortened. `ids` are updated."""
    changed, whole = [], dict(ids)
    n = len(ids["prompt"])
    if n > cfg.max_prompt_length:
        shorter = (
            shorten_prompt(row, tokenizer, cfg.max_prompt_length) if cfg.long_prompt == "keep_last_turns" else None
        )
        if shorter is None:
            raise BadRow("prompt_too_long", f"{n} tokens, limit {cfg.max_prompt_length}")
        ids["prompt"] = shorter
        changed.append("prompt")
    for name in ANSWERS[kind]:
        n = len(ids[name])
        if n > cfg.max_response_length:
            if cfg.long_response == "filter":
                raise BadRow("response_too_long", f"{name} has {n} tokens, limit {cfg.max_response_length}")
            whole[name], ids[name] = ids[name], shorten_answer(row, name, tokenizer, cfg.max_response_length)
            changed.append(name)
    if kind == "preference" and ids["chosen"] == ids["rejected"]:
        cut = set(changed) & {"chosen", "rejected"}
        raise BadRow("equal_after_truncation" if cut else "equal_answers", "chosen and rejected are the same tokens")
    if kind == "trajectories" and row["logprobs"] is not None:
        n, cut = len(whole["response"]), len(ids["response"])
        if len(row["logprobs"]) not in (n, n - 1):
            raise BadRow("logprobs_length", f"{len(row['logprobs'])} logprobs for {n} response tokens with eos")
        if cut < n:
            if ids["response"][:-1] != whole["response"][: cut - 1]:
                raise BadRow("logprobs_length", "the shortened response has other tokens than the logged one")
            row["logprobs"] = row["logprobs"][: cut - 1]
    return changed


# -------------------------------------------------------------------------------------- keys and near duplicates


def prompt_key(prompt: list[dict]) -> int:
    """Equal for prompts that differ only in case, white space and the encoding of accents."""
    return hash64(" ".join(plain("\0".join(f"{m['role']} {m['content']}" for m in prompt)).split()))


def row_keys(rows: list[dict], kind: str, threshold: float | None) -> dict[str, np.ndarray]:
    """What is compared between rows: prompts, subjects with their labels, near-duplicate bands and signatures.

    A subject is what a label is given to: a prompt with two answers (the label: which is better), or a prompt (the label:
    its right answer). Near rows must share their numbers too, for another number makes another sum.
    """
    fields = {"preference": ("chosen", "rejected"), "trajectories": ("response",), "prompts": ("reference",)}[kind]
    prompts = [prompt_key(row["prompt"]) for row in rows]
    subject, label = [], []
    for row, prompt in zip(rows, prompts):
        if kind == "preference":
            subject.append(hash64(str(prompt), *sorted((row["chosen"], row["rejected"]))))
            label.append(int(row["chosen"] < row["rejected"]))
        elif kind == "prompts" and row["ground_truth"] is not None:
            subject.append(prompt)
            label.append(hash64(re.sub(r"[\s,]", "", plain(row["ground_truth"]))))
        else:  # a logged answer may well have had several rewards
            subject.append(int(row["id"], 16))
            label.append(0)
    keys = {"prompt": prompts, "subject": subject, "label": label, "id": [int(row["id"], 16) for row in rows]}
    keys = {name: np.array(values, dtype=np.uint64) for name, values in keys.items()}
    if threshold is None:
        return keys
    texts = [["\n".join(m["content"] for m in row["prompt"]), *(row[name] or "" for name in fields)] for row in rows]
    sketch = signatures([text for row in texts for text in row]).reshape(len(rows), 1 + len(fields), MINIMA)
    numbers = [[" ".join(re.findall(r"\d+", text)) for text in row] for row in texts]
    prompt_numbers = np.array([hash64(n[0]) for n in numbers], dtype=np.uint64)
    more = {"trajectories": "reward", "prompts": "ground_truth"}.get(kind)
    all_numbers = np.array(
        [hash64(*n, str(row[more]) if more else "") for n, row in zip(numbers, rows)], dtype=np.uint64
    )
    keys["near_row"] = np.stack(
        [
            combine(sketch[:, :, band].reshape(len(rows), -1), all_numbers + np.uint64(i))
            for i, band in enumerate(bands(threshold, 1 + len(fields)))
        ],
        1,
    )
    keys["near_prompt"] = np.stack(
        [combine(sketch[:, 0, band], prompt_numbers + np.uint64(i)) for i, band in enumerate(bands(threshold, 1))], 1
    )
    keys["sketch"] = one_byte(sketch)
    return keys


# ----------------------------------------------------------------------------------- pass 1: a chunk of raw rows


class Work(NamedTuple):
    """What a worker needs to know of a source."""

    cfg: DataConfig
    shape: Shape
    columns: Columns
    source: str
    role: Literal["new", "test", "old"]
    """new rows, rows of eval_source, or rows of the earlier output"""
    weight: float = 1.0


_worker: dict = {}


def end_with(parent: int) -> None:
    """A worker does not outlive a run that was killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def start_worker(tokenizer, excluded: set[str], parent: int | None = None) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the cores are taken
    if parent is not None:
        for lock in _locks:
            lock.close()  # it is the run's own
        threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    _worker.update(tokenizer=tokenizer, excluded=excluded)


def excluded_prompt(prompt: list[dict], suffix: str) -> bool:
    """Whether a prompt is listed, with its suffix or without."""
    plain_end = {**prompt[-1], "content": prompt[-1]["content"].removesuffix(suffix)}
    return bool({json.dumps(prompt), json.dumps([*prompt[:-1], plain_end])} & _worker["excluded"])


def process_chunk(chunk: Chunk, work: Work, file: Path) -> dict:
    """Raw rows -> one Arrow file of checked rows with their keys; returns and stores what happened to the others."""
    cfg, kind, tokenizer = work.cfg, work.shape.kind, _worker["tokenizer"]
    dropped: list[tuple[str, str, str]] = []
    shortened: Counter[str] = Counter()
    rows, places, n, candidates = [], [], 0, 0
    grouped = kind == "preference" and work.shape.name in GROUPED
    for place, raw in chunk.rows():
        n += len(raw["scores"]) if grouped and isinstance(raw, dict) else 1
        try:
            if isinstance(raw, BadRow):
                raise raw
            if work.role == "old":
                made = [raw]
            else:
                made = convert(raw, work.shape, work.columns, cfg.prompt_suffix, cfg.pairs or "best_worst")
        except BadRow as bad:
            candidates += 1
            dropped.append((place, bad.reason, bad.detail))
            continue
        candidates += len(made)
        for i, row in enumerate(made, 1):
            at = place if len(made) == 1 else f"{place} pair {i}"
            if isinstance(row, BadRow):
                dropped.append((at, row.reason, row.detail))
            else:
                rows.append(row)
                places.append(at)

    kept, lengths = [], []
    encoded = encode_rows(rows, kind, tokenizer) if rows and work.role != "old" else [None] * len(rows)
    for place, row, ids in zip(places, rows, encoded):
        if work.role == "old":
            kept.append(row | {"_place": place})
            lengths.append([0] * (1 + len(ANSWERS[kind])))
            continue
        try:
            if isinstance(ids, BadRow):
                raise ids
            shortened.update(check_lengths(row, ids, kind, tokenizer, cfg))
            content = {k: v for k, v in row.items() if k != "metadata"}
            row["id"] = hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[
                :16
            ]
            if _worker["excluded"] and (
                row["id"] in _worker["excluded"] or excluded_prompt(row["prompt"], cfg.prompt_suffix)
            ):
                raise BadRow("excluded", "listed in exclude")
        except BadRow as bad:
            dropped.append((place, bad.reason, bad.detail))
            continue
        kept.append(row | {"source": work.source, "_place": place})
        lengths.append([len(ids[name]) for name in ("prompt", *ANSWERS[kind])])

    stats = {
        "source": work.source,
        "role": work.role,
        "weight": work.weight,
        "rows": n,
        "candidates": candidates,
        "kept": len(kept),
        "dropped": dropped,
        "shortened": dict(shortened),
    }
    keys = row_keys(kept, kind, cfg.near_duplicates) if kept else {}
    write_chunk(file, kept, kind, keys | {"lengths": np.array(lengths, dtype=np.int32)}, stats)
    return stats


def write_chunk(file: Path, rows: list[dict], kind: str, keys: dict[str, np.ndarray], stats: dict) -> None:
    """Rows with their places, keys (N, ...) and statistics in one Arrow file, which appears when it is whole."""
    import pyarrow as pa

    schema = schema_of(kind).append(pa.field("_place", pa.string()))
    columns, names = pa.Table.from_pylist(rows, schema=schema).columns, [*schema.names]
    for name, values in keys.items():
        values = values.reshape(len(values), -1) if values.ndim > 2 else values
        flat = pa.array(np.ascontiguousarray(values).ravel())
        columns.append(flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1]))
        names.append(f"_{name}")
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


def chunk_keys(file: Path, names: list[str]) -> dict[str, np.ndarray]:
    """Keys of a chunk's rows: (N,) or (N, ...) arrays."""
    table = read_chunk(file, [f"_{name}" for name in names])
    out = {}
    for name in names:
        column = table[f"_{name}"].combine_chunks()
        nested = hasattr(column, "flatten") and column.type.num_fields
        out[name] = (
            column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), -1)
            if nested
            else column.to_numpy(zero_copy_only=False)
        )
    return out


# ------------------------------------------------------------------------------ pass 2: what rows mean together


REASONS = (
    "",
    "duplicate",
    "already_there",
    "contradicting_labels",
    "near_duplicate",
    "prompt_in_test",
    "prompt_in_train",
    "near_test_prompt",
    "left_out_by_weight",
    "contradicted_by_reward_model",
)
CODE = {reason: code for code, reason in enumerate(REASONS)}
ASKED_FOR = ("excluded", "already_there", "left_out_by_weight", "contradicted_by_reward_model")  # no bad rows
TRAIN, TEST = 0, 1
OLD, OFFICIAL, NEW = (
    0,
    1,
    2,
)  # rows of the earlier output, of eval_source, and of source; in doubt the first of these stay


class Decisions:
    """What becomes of each row that passed the first pass, all (N,): `code` into REASONS (0 = kept), `side` TRAIN or TEST, `copies`.

    Rows are numbered in the order of the chunks (the earlier output, eval_source, source).
    """

    def __init__(self, chunks: list[dict]):
        self.first = np.cumsum([0, *(chunk["kept"] for chunk in chunks)])  # row of each chunk's first one
        n = int(self.first[-1])
        self.code = np.zeros(n, dtype=np.uint8)
        self.side = np.zeros(n, dtype=np.uint8)
        self.copies = np.ones(n, dtype=np.uint16)
        self.role = np.full(n, NEW, dtype=np.uint8)
        self.twin = np.full(n, -1)  # the row because of which it goes

    def rows(self, chunk: int) -> slice:
        return slice(self.first[chunk], self.first[chunk + 1])

    def drop(self, row: int, reason: str, twin: int = -1) -> None:
        if not self.code[row]:
            self.code[row], self.twin[row] = CODE[reason], twin


def decide(chunks: list[dict], cfg: DataConfig, folder: Path) -> Decisions:
    """The rules that need all rows; of two that cannot both stay, the earlier one does."""
    d = Decisions(chunks)
    role = d.role
    groups = {name: Groups(folder, name) for name in ("id", "prompt", "subject", "near_row", "near_prompt")}
    near = cfg.near_duplicates is not None
    sketch_width = 0
    fraction = 0.0 if cfg.eval_source is not None else cfg.eval_fraction if cfg.eval_fraction is not None else 0.05
    with open(folder / "sketches.bin", "wb") as sketches:
        for i, chunk in enumerate(chunks):
            if not chunk["kept"]:
                continue
            mine = d.rows(i)
            role[mine] = {"new": NEW, "test": OFFICIAL, "old": OLD}[chunk["role"]]
            keys = chunk_keys(
                chunk["file"],
                ["id", "prompt", "subject", "label", *(["near_row", "near_prompt", "sketch"] if near else [])],
            )
            if chunk["role"] == "new":
                d.side[mine] = in_test_split(keys["prompt"], cfg.seed, fraction)
                chance = keys["id"].astype(np.float64) / 2**64
                d.copies[mine] = int(chunk["weight"]) + (chance < chunk["weight"] % 1)
            else:  # an earlier row's source is its split
                d.side[mine] = TEST if chunk["role"] == "test" or chunk["source"] == "test" else TRAIN
            if near:
                sketch_width = keys["sketch"].shape[1]
                sketches.write(keys.pop("sketch").tobytes())
            left_out = (d.side[mine] == TRAIN) & (d.copies[mine] == 0)
            d.code[mine][left_out] = CODE[
                "left_out_by_weight"
            ]  # before the rules, so that no other row goes because of it
            rows = np.arange(mine.start, mine.stop, dtype=np.uint64)[~left_out]
            keys = {name: values[~left_out] for name, values in keys.items()}
            groups["id"].add(keys["id"], rows)
            groups["prompt"].add(keys["prompt"], rows)
            groups["subject"].add(keys["subject"], rows, keys["label"])
            for name in ("near_row", "near_prompt") if near else ():
                for band in keys[name].T:
                    groups[name].add(band, rows)

    for entries, starts in groups["id"].shared():
        rows = entries[:, 1].astype(np.int64)
        leaders = np.repeat(rows[starts], np.diff([*starts, len(rows)]))
        for row, leader in np.stack([rows, leaders], 1)[rows != leaders].tolist():
            d.drop(
                row,
                "already_there"
                if role[leader] == OLD
                else "prompt_in_test"
                if role[row] != role[leader]
                else "duplicate",
                leader,
            )

    for entries, starts in groups["subject"].shared(3):
        rows, labels = entries[:, 1].astype(np.int64), entries[:, 2]
        differ = np.minimum.reduceat(labels, starts) != np.maximum.reduceat(labels, starts)
        for a, b in zip(starts[differ].tolist(), np.r_[starts[1:], len(rows)][differ].tolist()):
            for row, label in zip(rows[a:b].tolist(), labels[a:b].tolist()):
                twin = next(
                    (
                        r
                        for r, other in zip(rows[a:b].tolist(), labels[a:b].tolist())
                        if other != label and role[r] <= role[row]
                    ),
                    None,
                )
                if role[row] != OLD and twin is not None:
                    d.drop(row, "contradicting_labels", twin)

    # the split: a prompt is on one side, which it never leaves
    for entries, starts in groups["prompt"].shared():
        rows = entries[:, 1].astype(np.int64)
        special = np.minimum.reduceat(role[rows], starts) < NEW
        for a, b in zip(starts[special].tolist(), np.r_[starts[1:], len(rows)][special].tolist()):
            mine = rows[a:b]
            old, official, new = (mine[role[mine] == r] for r in (OLD, OFFICIAL, NEW))
            if len(old):
                d.side[new] = d.side[old[0]]
                for row in official.tolist() if d.side[old[0]] == TRAIN else ():
                    d.drop(row, "prompt_in_train", int(old[0]))
            official = official[d.code[official] == 0]
            for row in new.tolist() if len(official) else ():
                d.drop(row, "prompt_in_test", int(official[0]))

    if near:
        with open(folder / "sketches.bin", "rb") as sketches:
            drop_near(groups["near_row"], d, sketches, sketch_width, cfg.near_duplicates, prompts=False)
            drop_near(groups["near_prompt"], d, sketches, sketch_width, cfg.near_duplicates, prompts=True)
    d.copies[(d.side == TEST) | (d.copies == 0)] = (
        1  # weights are for training; a row that changed its side was not left out
    )
    return d


def drop_near(groups: Groups, d: Decisions, sketches, width: int, threshold: float, prompts: bool) -> None:
    """Rows that are near to an earlier row (prompts: train rows whose prompt is near to a test prompt) are dropped.

    Rows that share a band are candidates, and their signatures decide.
    """
    fields, role = width // MINIMA, d.role
    near: list[np.ndarray] = []
    for entries, starts in groups.shared():
        rows = entries[:, 1].astype(np.int64)
        pairs = near_candidates(rows, starts, d, prompts)
        if len(pairs):
            pairs = np.unique(pairs, axis=0)
            for block in np.array_split(pairs, -(-len(pairs) // 20_000)):
                a, b = (
                    read_sketches(sketches, block[:, c], width).reshape(-1, fields, MINIMA)[
                        :, : 1 if prompts else fields
                    ]
                    for c in (0, 1)
                )
                near.append(block[(similarity(a, b) >= threshold).all(1)])
    for row, other in np.unique(np.concatenate(near), axis=0).tolist() if near else []:
        if d.code[row] or d.code[other]:
            continue
        if not prompts:
            d.drop(row, "near_test_prompt" if role[row] > role[other] == OFFICIAL else "near_duplicate", other)
        elif role[row] != OLD:
            d.drop(row, "near_test_prompt", other)
        elif role[other] != OLD:  # an earlier train row stays, so the new test row goes
            d.drop(other, "prompt_in_train", row)


def near_candidates(rows: np.ndarray, starts: np.ndarray, d: Decisions, prompts: bool) -> np.ndarray:
    """Pairs (row, earlier row), or (train row, test row), among rows that share a key: with at most 16 others each, so that
    a thousand rows of one template are not a million pairs. rows: all groups, one after the other, (M,) -> (P, 2)."""
    pairs = [np.empty((0, 2), dtype=np.int64)]
    live, test = d.code[rows] == 0, d.side[rows] == TEST
    group = np.repeat(np.arange(len(starts)), np.diff([*starts, len(rows)]))
    if prompts:
        first, second = np.flatnonzero(live & ~test), np.flatnonzero(live & test)
        begin, end = (
            np.searchsorted(group[second], group[first], "left"),
            np.searchsorted(group[second], group[first], "right"),
        )
        for k in range(16):
            have = begin + k < end
            pairs.append(np.stack([rows[first[have]], rows[second[(begin + k)[have]]]], 1))
    else:
        at = np.flatnonzero(live)
        for k in range(1, 17):
            same = group[at[k:]] == group[at[:-k]]
            pairs.append(np.stack([rows[at[k:][same]], rows[at[:-k][same]]], 1))
    pairs = np.concatenate(pairs)
    return pairs if prompts else pairs[d.role[pairs[:, 0]] != OLD]


def read_sketches(file, rows: np.ndarray, width: int) -> np.ndarray:
    data = b"".join(os.pread(file.fileno(), width, int(row) * width) for row in rows)
    return np.frombuffer(data, dtype=np.uint8).reshape(len(rows), width)


def in_test_split(prompt_keys: np.ndarray, seed: int, fraction: float) -> np.ndarray:
    """Decided by the prompt's own hash and the seed: a prompt is always on the same side, whatever else is read. (N,) -> (N,) 0 or 1."""
    mixed = combine(np.stack([prompt_keys] * 2, 1), np.full(len(prompt_keys), hash64(str(seed)), dtype=np.uint64))
    return (mixed < np.uint64(min(int(fraction * 2**64), 2**64 - 1))).astype(np.uint8)


# ---------------------------------------------------------------------------------------------------- writing


def schema_of(kind: str):
    import pyarrow as pa

    messages = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    types = {"prompt": messages, "margin": pa.float64(), "reward": pa.float64(), "logprobs": pa.list_(pa.float64())}
    return pa.schema([(name, types.get(name, pa.string())) for name in COLUMNS[kind]])


def kept_rows(chunks: list[dict], d: Decisions, kind: str, side: int, seed: int | None) -> Iterator:
    """Arrow tables of the new rows of one side. With a seed the chunks come in a new order, WINDOW of them shuffled together."""
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
                tables.append(
                    read_chunk(chunks[i]["file"], list(COLUMNS[kind])).take(
                        pa.array(np.repeat(np.arange(len(times)), times))
                    )
                )
        if tables:
            table = pa.concat_tables(tables)
            yield table.take(pa.array(rng.permutation(len(table)))) if seed is not None else table


def write_split(tables: Iterator, split: str, rows: int, kind: str, folder: Path, earlier: list[Path]) -> list[str]:
    """Write `split-00000-of-000NN.parquet` after the earlier output's files, which keep their rows; returns the new names."""
    import pyarrow.parquet

    shards = max(1, len(earlier) + -(-rows // ROWS_PER_SHARD))
    files = [folder / f"{split}-{i:05d}-of-{shards:05d}.parquet" for i in range(shards)]
    for old, file in zip(earlier, files):
        try:
            os.link(old, file)
        except OSError:
            shutil.copyfile(old, file)
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


@contextmanager
def workshop(
    cfg: DataConfig, output: Path, files: list[str], all_local: bool, tokenizer, excluded: set[str]
) -> Iterator[Path]:
    """The folder beside output_dir for what is not finished; what an equal run left there is used again. files: all local ones.

    Equal means: the same settings, tokenizer, template, exclusions, code, and local files that have not changed; of the hub
    nobody can say.
    """
    from utils.models import template_fingerprint

    folder = output.with_name(f".{output.name}.partial")
    code = [
        Path(__file__),
        *sorted((Path(__file__).parent / "dataprep").glob("*.py")),
        *(Path(__file__).parent / "utils" / f"{name}.py" for name in ("data", "rows")),
    ]
    files = files + sorted(map(str, output.glob("*.parquet")))
    settings = {
        k: v
        for k, v in dataclasses.asdict(cfg).items()
        if k not in ("workers", "overwrite", "coverage", "filter", "on_bad_row")
    }
    stamp = [(file, os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files]
    about = json.dumps(
        [
            settings,
            stamp,
            template_fingerprint(tokenizer),
            sorted(excluded),
            [hash64(file.read_text(encoding="utf-8")) for file in code],
        ]
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "w")
    except OSError as error:
        raise UserError(f"output_dir {output} cannot be created ({error.strerror}); choose another one") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(f"another run is preparing output_dir {output}; wait for it, or choose another one") from None
    _locks.append(lock)
    note = folder / "about.json"
    same = note.is_file() and note.read_text(encoding="utf-8") == about and all_local
    for leftover in folder.iterdir():
        if leftover.name != "lock" and not (same and leftover.name in ("chunks", "about.json")):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    (folder / "chunks").mkdir(exist_ok=True)
    write_text(note, about)
    try:
        yield folder
    except UserError as error:
        if isinstance(error, WorkerKilled) and all_local:
            raise UserError(f"{error}; what is finished is kept") from None
        if not (folder / "new").exists():  # finished, and could not be put in place
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        _locks.pop().close()


_locks: list = []  # open for as long as the run is


class WorkerKilled(UserError):
    """Not the user's fault: the same run can go on."""


def local_files(source: Source) -> list[str]:
    """Files that a source is read from; none for the hub."""
    if is_saved(source.path):
        return sorted(str(f) for f in Path(source.path).rglob("*") if f.is_file())
    return source_files(source.path, source.hub.split)[0]


def replace_folder(new: Path, output: Path) -> None:
    """Put a finished folder in the place of another; at no moment is there a half-written one."""
    old = output.with_name(f".{output.name}.old")
    try:
        if output.exists():
            os.rename(output, old)
        os.rename(new, output)
    except OSError as error:
        raise UserError(
            f"output_dir {output} cannot be replaced ({error.strerror}); the finished data is in {new}"
        ) from None
    shutil.rmtree(old, ignore_errors=True)


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


def restore_folder(output: Path) -> None:
    """Bring back what a run that was killed in `replace_folder` had just moved away."""
    old = output.with_name(f".{output.name}.old")
    if old.exists():
        shutil.rmtree(old) if output.exists() and any(output.iterdir()) else os.rename(old, output)


def print_example(row: dict, kind: str, tokenizer) -> None:
    """One row as training will see it; ‹...› marks the tokens that are learned from."""
    prompt = tokenizer.decode(encode_prompt(tokenizer, row["prompt"]))
    print("--- one row, decoded; ‹...› marks the response tokens" if show("‹") == "‹" else "--- one row, decoded")
    print(show(prompt))
    for name in ANSWERS[kind]:
        print(show(f"{name}: ‹{tokenizer.decode(encode_response(tokenizer, row[name]))}›"))
    for name in ("margin", "reward", "ground_truth"):
        if row.get(name) is not None:
            print(show(f"{name}: {row[name]}"))
    print("---", flush=True)


def read_excluded(files: list[str]) -> set[str]:
    """Ids and prompts (as JSON) of the objects in JSONL files."""
    excluded = set()
    for file in files:
        if not Path(file).is_file():
            raise UserError(f"exclude {file} is not a file")
    for place, raw in (row for file in files for part in read_file(file) for row in part.rows()):
        if isinstance(raw, BadRow):  # such as a last line that a killed run left half-written
            print(f"{place}: {raw.reason}, left out of exclude", flush=True)
            continue
        if not isinstance(raw, dict) or not ("id" in raw or "prompt" in raw):
            raise UserError(f"{place}: exclude needs objects with an id or a prompt (a list of messages)")
        excluded |= {str(raw["id"])} if "id" in raw else set()
        try:
            excluded |= {json.dumps(as_messages(raw["prompt"], "prompt"))} if "prompt" in raw else set()
        except BadRow as bad:
            raise UserError(f"{place}: {bad.detail}") from None
    return excluded


# ------------------------------------------------------------------------------- noise filter, coverage, report


def drop_contradicted(cfg: DataConfig, chunks: list[dict], d: Decisions, aside) -> None:
    """Score the new train pairs with a trained reward model; those that it contradicts strongly are written aside."""
    import torch

    from utils.models import read_stats
    from utils.rewards import reward_model_scorer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scorer = reward_model_scorer(cfg.filter.reward_model, cfg.filter.micro_batch_size, device)
    temperature = (read_stats(cfg.filter.reward_model) or {}).get("temperature", 1.0)
    wanted = (d.code == 0) & (d.side == TRAIN) & (d.role != OLD)
    with progress_bar(label="filtering", unit="pairs", total=int(wanted.sum())) as bar:
        for i, chunk in enumerate(chunks):
            mine = np.flatnonzero(wanted[d.rows(i)])
            if not len(mine):
                continue
            rows = read_chunk(chunk["file"], list(COLUMNS["preference"])).take(mine).to_pylist()
            scores = scorer(
                [row["prompt"] for row in rows] * 2,
                [row["chosen"] for row in rows] + [row["rejected"] for row in rows],
                {},
            )
            for place, row, chosen, rejected in zip(mine.tolist(), rows, scores, scores[len(rows) :]):
                probability = 0.5 + 0.5 * np.tanh((chosen - rejected) / temperature / 2)  # sigmoid
                if probability < cfg.filter.min_probability:
                    d.drop(int(d.first[i]) + place, "contradicted_by_reward_model")
                    scored = {
                        "probability": float(f"{probability:.4g}"),
                        "score_chosen": chosen,
                        "score_rejected": rejected,
                    }
                    aside.write(json.dumps(row | scored, ensure_ascii=False) + "\n")
            bar.update(len(rows))


def measure_coverage(cfg: DataConfig, folder: Path) -> dict:
    """For each real prompt the nearest train prompt, by the last user turn; written to coverage.jsonl, the loneliest first."""
    import pyarrow.parquet

    real: list[tuple[str, str]] = []
    for chunk in read_source(cfg.coverage.prompts):
        for place, row in chunk.rows():
            try:
                if isinstance(row, BadRow):
                    raise row
                shape = detect_shape(row, Columns(), "prompts")
                real.append((place, convert(row, shape, Columns())[0]["prompt"][-1]["content"]))
            except (BadRow, UserError) as error:
                raise UserError(
                    f"{place}: {getattr(error, 'detail', error)}; coverage.prompts needs rows with a prompt"
                ) from None
    if not real:
        raise UserError(f"coverage.prompts {cfg.coverage.prompts} has no rows")

    def train_prompts(label: str) -> Iterator[list[str]]:
        for file in progress_bar(sorted(folder.glob("train-*.parquet")), label, unit="files"):
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches(ROWS_PER_GROUP, columns=["prompt"]):
                yield [prompt[-1]["content"].removesuffix(cfg.prompt_suffix) for prompt in batch["prompt"].to_pylist()]

    rarity = word_rarity(train_prompts("counting words"))
    vectors = tfidf([text for _, text in real], rarity)
    best, nearest = np.full(len(real), -1.0), [""] * len(real)
    for texts in train_prompts("coverage"):
        likeness = vectors @ tfidf(texts, rarity).T  # (real, train)
        for i in np.flatnonzero(likeness.max(1) > best):
            best[i], nearest[i] = likeness[i].max(), texts[likeness[i].argmax()]
    order = np.argsort(best, kind="stable")
    lines = [
        {
            "place": real[i][0],
            "similarity": round(float(best[i]), 4),
            "covered": bool(best[i] >= cfg.coverage.min_similarity),
            "prompt": real[i][1],
            "nearest": nearest[i],
        }
        for i in order
    ]
    write_text(folder / "coverage.jsonl", "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    covered = sum(line["covered"] for line in lines)
    return {
        "prompts": len(real),
        "covered": covered,
        "share": round(covered / len(real), 4),
        "min_similarity": cfg.coverage.min_similarity,
        "median_similarity": round(float(np.median(best)), 4),
        "loneliest": lines[:5],
    }


class Tally:
    """What became of the rows, counted and with examples; each drop is also a line of a file."""

    def __init__(self, strict: bool, file):
        self.strict, self.file = strict, file
        self.rows_in = self.candidates = self.longer_chosen = 0
        self.dropped: Counter[str] = Counter()
        self.shortened: Counter[str] = Counter()
        self.examples: dict[str, list[dict]] = defaultdict(list)
        self.sources: dict[str, dict] = {}
        self.histograms: dict[str, np.ndarray] = {}

    def drop(self, place: str, reason: str, detail: str) -> None:
        if self.strict and reason not in ASKED_FOR:
            raise UserError(f"{place}: {reason}: {detail}; --on_bad_row skip drops such rows")
        self.dropped[reason] += 1
        self.file.write(json.dumps({"place": place, "reason": reason, "detail": detail}, ensure_ascii=False) + "\n")
        if len(self.examples[reason]) < EXAMPLES_PER_REASON:
            self.examples[reason].append({"place": place, "detail": detail})

    def add_chunk(self, chunk: dict) -> None:
        """After the first pass of a chunk. Its lists are taken out of it, so that memory does not grow with the drops."""
        for drop in chunk.pop("dropped"):
            self.drop(*drop)
        self.shortened.update(chunk.pop("shortened"))
        if chunk["role"] != "old":
            self.rows_in += chunk["rows"]
            self.candidates += chunk["candidates"]
            self.sources[chunk["source"]]["rows"] += chunk["rows"]

    def add_decisions(self, chunks: list[dict], d: Decisions, kind: str) -> None:
        """After the second pass."""
        for i, chunk in enumerate(chunks):
            if chunk["role"] == "old" or not chunk["kept"]:
                continue
            codes = d.code[d.rows(i)]
            self.sources[chunk["source"]]["kept"] += int((codes == 0).sum())
            places = read_chunk(chunk["file"], ["_place"])["_place"] if codes.any() else None
            for k in np.flatnonzero(codes).tolist():
                reason, twin, detail = REASONS[codes[k]], int(d.twin[d.first[i] + k]), ""
                if twin >= 0 and self.dropped[reason] < 100:  # for each to be looked up there may be too many
                    j = int(np.searchsorted(d.first, twin, side="right")) - 1
                    detail = f"with {read_chunk(chunks[j]['file'], ['_place'])['_place'][twin - int(d.first[j])]}"
                self.drop(places[k].as_py(), reason, detail)
            lengths = chunk_keys(chunk["file"], ["lengths"])["lengths"][codes == 0]  # (kept, parts)
            for name, column in zip(("prompt", *ANSWERS[kind]), lengths.T):
                before = self.histograms.get(name, np.zeros(0, dtype=np.int64))
                counts = np.bincount(column, minlength=len(before))
                counts[: len(before)] += before
                self.histograms[name] = counts
            self.longer_chosen += (
                float((lengths[:, 1] > lengths[:, 2]).sum() + (lengths[:, 1] == lengths[:, 2]).sum() / 2)
                if kind == "preference"
                else 0
            )
        self.file.close()

    def report(self, kind: str, rows_out: dict[str, int]) -> dict:
        report = {
            "kind": kind,
            "rows_in": self.rows_in,
            "candidates": self.candidates,
            "rows_out": rows_out,
            "dropped": dict(self.dropped.most_common()),
            "dropped_examples": self.examples,
            "shortened": dict(self.shortened),
            "sources": self.sources,
            "tokens": {name: percentiles(h) for name, h in self.histograms.items() if h.sum()},
        }
        kept = sum(source["kept"] for source in self.sources.values())
        if kind == "preference" and kept:
            report["longer_answer_chosen"] = round(self.longer_chosen / kept, 4)
        return report


def percentiles(histogram: np.ndarray) -> dict[str, int]:
    """Of lengths whose counts are `histogram`."""
    total, below = histogram.sum(), np.cumsum(histogram)
    return {
        f"p{p}": int(np.searchsorted(below, min(total - 1, total * p // 100), side="right"))
        for p in (0, 50, 90, 99, 100)
    }


def report_page(report: dict, histograms: dict[str, np.ndarray], examples: list[dict], kind: str, tokenizer) -> str:
    """report.html: what came in, what went out and why, lengths, and examples with the learned tokens marked."""
    import html

    from utils.report import figure_svg, new_figure, page, table

    out = report["rows_out"]
    body = f"<p>{report['kind']} from {len(report['sources'])} source(s): {report['rows_in']:,} rows read, {report['candidates']:,} candidates, "
    body += f"{out['train']:,} train and {out['test']:,} test rows written, {sum(report['dropped'].values()):,} dropped.</p>"
    body += "<h2>Sources</h2>" + table(
        ["source", "shape", "rows", "kept", "share of the kept"],
        [
            [
                name,
                s["shape"],
                f"{s['rows']:,}",
                f"{s['kept']:,}",
                f"{s['kept'] / max(1, sum(x['kept'] for x in report['sources'].values())):.1%}",
            ]
            for name, s in report["sources"].items()
        ],
    )
    if report["dropped"]:
        rows = [
            [
                reason,
                f"{n:,}",
                f"{n / report['candidates']:.1%}",
                "\n".join(f"{e['place']}: {e['detail']}" for e in report["dropped_examples"][reason]),
            ]
            for reason, n in report["dropped"].items()
        ]
        body += "<h2>Dropped</h2>" + table(["reason", "rows", "share", "examples"], rows)
    if report["shortened"]:
        body += "<h2>Shortened</h2>" + table(["part", "rows"], [[k, f"{v:,}"] for k, v in report["shortened"].items()])
    body += "<h2>Lengths in tokens</h2>"
    if any(h.sum() for h in histograms.values()):
        figure = new_figure(4 * len(histograms), 3)
        for axis, (name, histogram) in zip(figure.subplots(1, len(histograms), squeeze=False)[0], histograms.items()):
            axis.hist(np.arange(len(histogram)), bins=min(40, len(histogram)), weights=histogram)
            axis.set_title(name)
        body += figure_svg(figure)
        body += table(
            ["", *next(iter(report["tokens"].values()))],
            [[name, *map(str, p.values())] for name, p in report["tokens"].items()],
        )
    if "longer_answer_chosen" in report:
        body += f"<p>The longer answer is the chosen one in {report['longer_answer_chosen']:.1%} of the pairs, equally long ones counted as half (50% would be no preference for length).</p>"
    if "coverage" in report:
        c = report["coverage"]
        body += f"<h2>Coverage</h2><p>{c['covered']:,} of {c['prompts']:,} real prompts ({c['share']:.1%}) have a train prompt with a similarity of at least {c['min_similarity']}. The farthest:</p>"
        body += table(
            ["similarity", "real prompt", "nearest train prompt"],
            [[str(x["similarity"]), x["prompt"], x["nearest"]] for x in c["loneliest"]],
        )
    body += "<h2>Examples</h2><p>As training sees them; marked is what is learned from.</p>"
    for row in examples:
        body += "<p style='white-space:pre-wrap'>" + html.escape(
            tokenizer.decode(encode_prompt(tokenizer, row["prompt"]))
        )
        for name in ANSWERS[kind]:
            body += f"\n<small>{name}</small> <mark>{html.escape(tokenizer.decode(encode_response(tokenizer, row[name])))}</mark>"
        for name in ("margin", "reward", "ground_truth"):
            body += f"\n<small>{name}</small> {html.escape(str(row[name]))}" if row.get(name) is not None else ""
        body += "</p><hr>"
    return page("Data report", body)


# ---------------------------------------------------------------------------------------------------- prepare


def check_config(cfg: DataConfig) -> list[list[Source]]:
    """Refuse what cannot work; returns the sources and the test sources, each with its place on the hub."""

    def listed(value) -> list[Source]:
        values = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        return [v if isinstance(v, Source) else Source(v) for v in values]

    sources, test_sources = listed(cfg.source), listed(cfg.eval_source)
    if not sources:
        raise UserError("source is empty; give a file, a folder, a glob or a hub name")
    for source in [*sources, *test_sources]:
        if source.path[:1] in "[{":
            raise UserError(f"source {source.path} is not valid; write texts, or objects with path, weight and hub")
        if not 0 <= source.weight <= 1000:
            raise UserError(f"source {source.path}: weight {source.weight} must be between 0 and 1000")
        if Path(source.path).is_dir() and Path(cfg.output_dir).resolve().is_relative_to(Path(source.path).resolve()):
            raise UserError(
                f"output_dir {cfg.output_dir} lies inside the source {source.path}, which would then read what it wrote; choose another folder"
            )
        if source.hub is not None and is_local(source.path) and source.hub != Hub(split=source.hub.split):
            raise UserError(
                f"source {source.path} is a local file, so its hub options would have no effect; remove them"
            )
    if any(source.weight != 1 for source in test_sources):
        raise UserError("weight would have no effect on eval_source; remove it")
    if cfg.hub != Hub() and all(
        s.hub is not None or is_local(s.path) and not Path(s.path).is_dir() for s in [*sources, *test_sources]
    ):
        raise UserError("hub.* is set but every source is a local file, so it would have no effect; remove it")
    if cfg.eval_fraction is not None and not 0 <= cfg.eval_fraction < 1:
        raise UserError(f"eval_fraction {cfg.eval_fraction} must be at least 0 and below 1")
    if cfg.eval_source is not None and cfg.eval_fraction is not None:
        raise UserError("eval_fraction would have no effect beside eval_source; give one of them")
    if cfg.near_duplicates is not None and not 0.7 <= cfg.near_duplicates <= 1:
        raise UserError(f"near_duplicates {cfg.near_duplicates} must be between 0.7 and 1, or null")
    if cfg.max_prompt_length < 1 or cfg.max_response_length < 2:
        raise UserError("max_prompt_length must be at least 1, max_response_length at least 2 (a token and eos)")
    if cfg.workers is not None and cfg.workers < 1:
        raise UserError(f"workers {cfg.workers} must be at least 1")
    if cfg.filter is not None and not 0 < cfg.filter.min_probability < 0.5:
        raise UserError(f"filter.min_probability {cfg.filter.min_probability} must be above 0 and below 0.5")
    if cfg.columns.choice_a is not None and cfg.columns.choice is None:
        raise UserError(
            "columns.choice_a would have no effect without columns.choice, answer_a and answer_b; name them too"
        )
    if cfg.coverage is not None and not (0 < cfg.coverage.min_similarity <= 1):
        raise UserError(f"coverage.min_similarity {cfg.coverage.min_similarity} must be above 0 and at most 1")
    if cfg.coverage is not None and not is_local(cfg.coverage.prompts):
        raise UserError(f"coverage.prompts {cfg.coverage.prompts} does not exist; give a file of real prompts")
    if cfg.coverage is not None:
        source_files(cfg.coverage.prompts)  # which refuses types that it does not know
    if cfg.filter is not None and not Path(cfg.filter.reward_model).is_dir():
        raise UserError(
            f"filter.reward_model {cfg.filter.reward_model} is not a folder; train_reward.py writes one under final/"
        )
    if cfg.refresh and cfg.overwrite:
        raise UserError("refresh keeps the earlier output and overwrite replaces it; give one of them")
    return [[replace(s, hub=s.hub or cfg.hub) for s in part] for part in (sources, test_sources)]


def check_kind(cfg: DataConfig, kind: str) -> None:
    """Refuse options that would do nothing for rows of this kind."""
    for option, is_set, kinds in (
        ("filter", cfg.filter is not None, ("preference",)),
        ("pairs", cfg.pairs is not None, ("preference",)),
        ("long_response", cfg.long_response != "filter", ("preference", "trajectories")),
    ):
        if is_set and kind not in kinds:
            raise UserError(f"{option} would have no effect on {kind}; remove it")


def check_refresh(output: Path, cfg: DataConfig) -> None:
    """What would put a prompt on both sides of the split, or leave rows in that should go, is refused."""
    if cfg.exclude is not None:
        raise UserError("exclude cannot take rows out of an earlier output; prepare it anew with --overwrite true")
    file = output / "config.yaml"
    before = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if before.get("prompt_suffix", cfg.prompt_suffix) != cfg.prompt_suffix:
        raise UserError(
            f"{file}: the earlier output has prompt_suffix {before['prompt_suffix']!r}, so its prompts would come again; refresh with the same"
        )
    if before.get("eval_source") is not None and cfg.eval_source is None:
        raise UserError(
            f"{file}: the earlier output has an eval_source, to which no other rows should come; refresh with the same"
        )


def all_sources(output: Path, cfg: DataConfig) -> DataConfig:
    """The configuration with the earlier output's sources too, for a folder that was refreshed."""
    file = output / "config.yaml"
    before = yaml.safe_load(file.read_text(encoding="utf-8"))["source"] if file.is_file() else []
    before, now = (
        value if isinstance(value, list) else [value] for value in (before, dataclasses.asdict(cfg)["source"])
    )
    return replace(cfg, source=[*before, *(source for source in now if source not in before)])


def chunks_of(
    source: Source, role: str, cfg: DataConfig, kind: str | None, folder: Path
) -> tuple[Work, Iterator[Chunk]]:
    """A source's chunks, and the shape that its first rows have."""
    chunks = read_source(source.path, source.hub)
    seen: list[Chunk] = []
    some: list[tuple[str, dict]] = []
    while len(some) < 100 and len(seen) < 10 and (chunk := next(chunks, None)) is not None:
        seen.append(chunk)
        some += islice(((place, row) for place, row in chunk.rows() if isinstance(row, dict)), 100)
    chunks = chain(seen, chunks)
    if some:
        place, shape = detect_source(some, cfg.columns, kind)
        check_kind(cfg, shape.kind)
        unused = [
            key
            for key, value in dataclasses.asdict(cfg.columns).items()
            if value is not None and key not in USES[shape.name]
        ]
        unused += ["pairs"] if cfg.pairs and shape not in PAIRED else []
        if unused:
            option = unused[0] if unused[0] == "pairs" else f"columns.{unused[0]}"
            raise UserError(
                f"{place}: {option} would have no effect on {shape.kind}, {shape.name}; remove it, or set --kind"
            )
        print(show(f"{source.path}: {shape.kind}, {shape.name} (from {place})"), flush=True)
    else:
        shape = Shape(kind or "prompts", "no rows")  # every row is broken and says why
    columns = cfg.columns
    if shape.kind == "preference" and shape.name in GROUPED:
        chunks, columns = group_rows(chunks, shape, columns, folder), Columns()
    split = f"[{source.hub.split}]" if source.hub.split else ""
    name = source.path + split if is_local(source.path) else hub_label(source.path, source.hub)
    return Work(cfg, shape, columns, name, role, source.weight), chunks


def run_chunks(
    tasks: Iterator[tuple[Chunk, Work]], folder: Path, workers: int, start: tuple, files: int
) -> Iterator[dict]:
    """Process chunks in order, `workers` at a time; yields what is known of each, with its file. One that is there already is not
    made again."""
    numbered = ((chunk, work, folder / f"{i:07d}.arrow") for i, (chunk, work) in enumerate(tasks))
    head = list(islice(numbered, 2))
    pool = None
    if workers > 1 and len(head) > 1:  # one chunk is not worth a pool
        pool = ProcessPoolExecutor(
            workers, mp_context=get_context("fork"), initializer=start_worker, initargs=(*start, os.getpid())
        )
    else:
        start_worker(*start)
    waiting: deque = deque()
    with progress_bar(label="preparing", unit="file", total=files) as bar, pool or nullcontext():

        def finished() -> dict:
            share, file, stats = waiting.popleft()
            stats = stats if isinstance(stats, dict) else stats.result()
            bar.update(round(share, 4))
            return stats | {"file": file}

        try:
            for chunk, work, file in chain(head, numbered):
                stats = chunk_stats(file) or (
                    pool.submit(process_chunk, chunk, work, file) if pool else process_chunk(chunk, work, file)
                )
                waiting.append((chunk.share, file, stats))
                while len(waiting) > (2 * workers if pool else 0):
                    yield finished()
            while waiting:
                yield finished()
        except BrokenProcessPool:
            raise WorkerKilled(
                "a worker process was killed, perhaps for memory; run again with fewer --workers"
            ) from None


def prepare(cfg: DataConfig) -> dict:
    """Run stage 1; returns the report that is also written to report.json."""
    import pyarrow.parquet

    from utils.models import load_tokenizer

    started = time.time()
    sources, test_sources = check_config(cfg)
    output = Path(cfg.output_dir).resolve()
    if Path.cwd().is_relative_to(output):
        raise UserError(
            f"output_dir {cfg.output_dir} holds the current folder, and is replaced as a whole; choose a folder inside it"
        )
    restore_folder(output)
    earlier = cfg.refresh and output.exists() and any(output.iterdir())
    if not earlier:
        check_output_dir(cfg.output_dir, cfg.overwrite)
    kind = folder_kind(cfg.output_dir) if earlier else cfg.kind
    if earlier and cfg.kind not in (None, kind):
        raise UserError(f"output_dir {output} holds {kind}, so {cfg.kind} cannot be added; choose another folder")
    if kind is not None:
        check_kind(cfg, kind)
    if earlier:
        check_refresh(output, cfg)
    tokenizer = load_tokenizer(cfg.tokenizer)
    excluded = read_excluded([cfg.exclude] if isinstance(cfg.exclude, str) else cfg.exclude or [])
    local = {id(source): local_files(source) for source in [*sources, *test_sources]}
    files = [file for part in local.values() for file in part]
    inside = [file for file in files if cfg.overwrite and Path(file).resolve().is_relative_to(output)]
    if inside:
        raise UserError(
            f"source {inside[0]} lies in output_dir {cfg.output_dir}, which overwrite would replace; choose another output_dir"
        )
    with workshop(cfg, output, files, all(local.values()), tokenizer, excluded) as folder:
        old_files = {
            split: sorted(output.glob(f"{split}-*.parquet")) if earlier else [] for split in ("train", "test")
        }
        tally = Tally(cfg.on_bad_row == "error", open_list(folder / "dropped.jsonl", output if earlier else None))

        # 1. rows -> chunk files, in parallel
        def tasks() -> Iterator[tuple[Chunk, Work]]:
            nonlocal kind
            for split, file in [(name, file) for name, files in old_files.items() for file in files]:
                for chunk in read_file(str(file)):
                    yield chunk, Work(cfg, Shape(kind, "earlier output"), Columns(), split, "old")
            opened: dict[int, tuple[Work, Iterator[Chunk]]] = {}
            for source in sources:  # the first one with rows decides the kind
                opened[id(source)] = chunks_of(source, "new", cfg, kind, folder)
                if opened[id(source)][0].shape.name != "no rows":
                    kind = opened[id(source)][0].shape.kind
                    break
            kind = kind or "prompts"
            for role, source in [*(("test", s) for s in test_sources), *(("new", s) for s in sources)]:
                work, its_chunks = opened.pop(id(source), None) or chunks_of(source, role, cfg, kind, folder)
                tally.sources.setdefault(work.source, {"shape": work.shape.name, "rows": 0, "kept": 0})
                for chunk in its_chunks:
                    yield chunk, work

        workers = cfg.workers or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
        parts = sum(1 if is_saved(s.path) else max(1, len(local[id(s)])) for s in [*sources, *test_sources])
        chunks = []
        for chunk in run_chunks(tasks(), folder / "chunks", workers, (tokenizer, excluded), parts):
            tally.add_chunk(chunk)
            chunks.append(chunk)
        if not tally.rows_in:
            raise UserError(f"source {', '.join(s.path for s in sources)} has no rows")

        # 2. what no row can know of itself
        new = folder / "new"
        new.mkdir()
        d = decide(chunks, cfg, folder)
        if cfg.filter is not None:
            with open_list(new / "contradicted.jsonl", output if earlier else None) as aside:
                drop_contradicted(cfg, chunks, d, aside)
        tally.add_decisions(chunks, d, kind)
        is_new = (d.role != OLD) & (d.code == 0)
        if not is_new.any() and not earlier:
            worst, n = tally.dropped.most_common(1)[0]
            example = tally.examples[worst][0]
            raise UserError(
                f"all {tally.rows_in} rows were dropped, {n} of them as {worst}: {example['place']}: {example['detail']}"
            )

        # 3. write; nothing is replaced before everything is there
        rows_out, new_files = {}, []
        for split, side in (("train", TRAIN), ("test", TEST)):
            rows_out[split] = int(d.copies[is_new & (d.side == side)].sum())
            tables = kept_rows(chunks, d, kind, side, cfg.seed if side == TRAIN else None)
            new_files += write_split(tables, split, rows_out[split], kind, new, old_files[split])
        os.replace(folder / "dropped.jsonl", new / "dropped.jsonl")
        report = tally.report(kind, rows_out)
        if earlier:
            before = (
                json.loads((output / "report.json").read_text(encoding="utf-8"))
                if (output / "report.json").is_file()
                else {}
            )
            report["added"] = {"rows": rows_out, "files": new_files, "already_there": tally.dropped["already_there"]}
            report["rows_out"] = {
                split: sum(pyarrow.parquet.read_metadata(f).num_rows for f in new.glob(f"{split}-*.parquet"))
                for split in rows_out
            }
            report["earlier"] = [*before.pop("earlier", []), before]
        if cfg.coverage is not None:
            report["coverage"] = measure_coverage(cfg, new)
        shown = first_rows(new, new_files, 5)
        write_text(new / "report.html", report_page(report, tally.histograms, shown, kind, tokenizer))
        write_json(new / "report.json", report)
        record_run(new, all_sources(output, cfg) if earlier else cfg, started)
        if earlier:
            keep_files(output, new)
        replace_folder(new, output)
        shutil.rmtree(folder)

    # 4. say what happened
    if shown:
        print_example(shown[0], kind, tokenizer)
    made = f" into {tally.candidates} candidates" if tally.candidates != tally.rows_in else ""
    print(
        f"{tally.rows_in} rows read{made}: {rows_out['train']} train, {rows_out['test']} test, {sum(tally.dropped.values())} dropped"
    )
    for reason, n in tally.dropped.most_common():
        print(
            show(
                f"  dropped {n} {reason}, e.g. {tally.examples[reason][0]['place']}: {tally.examples[reason][0]['detail']}"
            )
        )
    for part, n in tally.shortened.items():
        print(f"  shortened {n} {part}; the whole text is kept in the metadata")
    for split in [name for name in rows_out if not report["rows_out"][name]]:
        print(
            f"  the {split} split is empty"
            + ("; a higher eval_fraction or an eval_source fills it" if split == "test" else "")
        )
    if "coverage" in report:
        print(
            f"  {report['coverage']['share']:.1%} of {report['coverage']['prompts']} real prompts have a close train prompt; see coverage.jsonl"
        )
    print(f"wrote {output}", flush=True)
    return report


def first_rows(folder: Path, files: list[str], n: int) -> list[dict]:
    """The first rows of the first new file that has any."""
    import pyarrow.parquet

    for name in files:
        for batch in pyarrow.parquet.ParquetFile(folder / name).iter_batches(n):
            return batch.to_pylist()
    return []


if __name__ == "__main__":
    run_stage(prepare, DataConfig)

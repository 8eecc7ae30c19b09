"""Pass 2: the rules that need all rows (duplicates, contradictions, the split), decided by the keys of pass 1 alone.

Of two rows that cannot both stay, the earlier one does. 13 bytes a row are held in memory.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dataprep.chunks import chunk_keys
from dataprep.similarity import MINIMA, combine, hash64, similarity

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
)
CODE = {reason: code for code, reason in enumerate(REASONS)}
TRAIN, TEST = 0, 1
# rows of the earlier output, of eval_source, and of source; in doubt the first of these stay
OLD, OFFICIAL, NEW = 0, 1, 2


class Decisions:
    """What becomes of each row of pass 1, all (N,): `code` into REASONS (0 = kept), `side` TRAIN or TEST, `copies`.

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

    def new_rows(self) -> np.ndarray:
        """Which rows are written: (N,) bool"""
        return (self.role != OLD) & (self.code == 0)

    def drop(self, row: int, reason: str, twin: int = -1) -> None:
        if not self.code[row]:
            self.code[row], self.twin[row] = CODE[reason], twin


@dataclass(frozen=True)
class SplitRule:
    """Which new prompts are held out: a share of them, by the prompt's hash and the seed."""

    fraction: float
    seed: int


def decide(chunks: list[dict], folder: Path, threshold: float | None, split: SplitRule) -> Decisions:
    """Apply all rules. chunks: as `run_chunks` yields them; threshold: of near duplicates, or None."""
    d = Decisions(chunks)
    near = ["near_row", "near_prompt"] if threshold is not None else []
    groups = {name: Groups(folder, name) for name in ("id", "prompt", "subject", *near)}
    with open(folder / "sketches.bin", "wb") as file:
        width = collect_keys(chunks, d, split, groups, file if near else None)
    drop_duplicates(groups["id"], d)
    drop_contradictions(groups["subject"], d)
    keep_sides(groups["prompt"], d)
    if near:
        with open(folder / "sketches.bin", "rb") as file:
            sketches = Sketches(file, width, threshold)
            drop_near_rows(groups["near_row"], d, sketches)
            drop_near_prompts(groups["near_prompt"], d, sketches)
    # weights are for training; a row that changed its side was not left out
    d.copies[(d.side == TEST) | (d.copies == 0)] = 1
    return d


def collect_keys(chunks: list[dict], d: Decisions, split: SplitRule, groups: dict[str, "Groups"], sketches) -> int:
    """Read all keys once, into `groups` and the file `sketches` (None without near duplicates); set roles, sides and
    copies. Returns the bytes of one row's signatures."""
    width = 0
    names = ["id", "prompt", "subject", "label", *(["near_row", "near_prompt", "sketch"] if sketches else [])]
    for i, chunk in enumerate(chunks):
        if not chunk["kept"]:
            continue
        mine = d.rows(i)
        d.role[mine] = {"new": NEW, "test": OFFICIAL, "old": OLD}[chunk["role"]]
        keys = chunk_keys(chunk["file"], names)
        if chunk["role"] == "new":
            d.side[mine] = in_test_split(keys["prompt"], split.seed, split.fraction)
            chance = keys["id"].astype(np.float64) / 2**64
            d.copies[mine] = int(chunk["weight"]) + (chance < chunk["weight"] % 1)
        else:  # an earlier row's source is its split
            d.side[mine] = TEST if chunk["role"] == "test" or chunk["source"] == "test" else TRAIN
        if sketches:
            width = keys["sketch"].shape[1]
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
        for name in ("near_row", "near_prompt") if sketches else ():
            for band in keys[name].T:
                groups[name].add(band, rows)
    return width


def in_test_split(prompt_keys: np.ndarray, seed: int, fraction: float) -> np.ndarray:
    """Whether each prompt is held out, by its own hash and the seed, whatever else is read. (N,) -> (N,) 0 or 1."""
    mixed = combine(np.stack([prompt_keys] * 2, 1), np.full(len(prompt_keys), hash64(str(seed)), dtype=np.uint64))
    return (mixed < np.uint64(min(int(fraction * 2**64), 2**64 - 1))).astype(np.uint8)


# ------------------------------------------------------------------------------------------------- equal keys


class Groups:
    """(key, row) entries on disk, by the key's first bits, to find rows that share a key; one part at a time is read.

    DuckDB finds the same rows: for 1,000,000 keys in 2.6 s with 233 MB, where this takes 0.9 s and 65 MB.
    """

    PARTS = 32

    def __init__(self, folder: Path, name: str):
        self.files = [open(folder / f"{name}-{i:02d}.bin", "wb+") for i in range(self.PARTS)]

    def add(self, keys: np.ndarray, rows: np.ndarray, *more: np.ndarray) -> None:
        """All (N,); `more` is carried along."""
        entries = np.stack([keys, *(x.astype(np.uint64) for x in (rows, *more))], 1)
        part = (keys >> np.uint64(59)).astype(np.int64)
        order = np.argsort(part, kind="stable")
        bounds = np.searchsorted(part[order], np.arange(self.PARTS + 1))
        for i, file in enumerate(self.files):
            if bounds[i] < bounds[i + 1]:
                file.write(entries[order[bounds[i] : bounds[i + 1]]].tobytes())

    def shared(self, columns: int = 2) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (entries (M, columns), starts): the entries of all keys that more than one has, in order of key and
        row, and where each key's entries start."""
        for file in self.files:
            file.seek(0)
            entries = np.fromfile(file, dtype=np.uint64).reshape(-1, columns)
            file.close()
            os.unlink(file.name)
            if not len(entries):
                continue
            entries = entries[np.lexsort((entries[:, 1], entries[:, 0]))]
            starts = np.flatnonzero(np.r_[True, entries[1:, 0] != entries[:-1, 0]])
            sizes = np.diff([*starts, len(entries)])
            entries = entries[np.repeat(sizes > 1, sizes)]
            sizes = sizes[sizes > 1]
            if len(sizes):
                yield entries, np.cumsum([0, *sizes[:-1]])


def drop_duplicates(ids: Groups, d: Decisions) -> None:
    """Rows of one id: the first of them stays."""
    for entries, starts in ids.shared():
        rows = entries[:, 1].astype(np.int64)
        leaders = np.repeat(rows[starts], np.diff([*starts, len(rows)]))
        for row, leader in np.stack([rows, leaders], 1)[rows != leaders].tolist():
            if d.role[leader] == OLD:
                d.drop(row, "already_there", leader)
            else:
                d.drop(row, "prompt_in_test" if d.role[row] != d.role[leader] else "duplicate", leader)


def drop_contradictions(subjects: Groups, d: Decisions) -> None:
    """Rows whose subject has another label too, in a row of the same role or of one that stays before it."""
    for entries, starts in subjects.shared(3):
        rows, labels = entries[:, 1].astype(np.int64), entries[:, 2]
        differ = np.minimum.reduceat(labels, starts) != np.maximum.reduceat(labels, starts)
        for a, b in zip(starts[differ].tolist(), np.r_[starts[1:], len(rows)][differ].tolist()):
            labelled = list(zip(rows[a:b].tolist(), labels[a:b].tolist()))
            for row, label in labelled:
                others = (r for r, other in labelled if other != label and d.role[r] <= d.role[row])
                twin = next(others, None)
                if d.role[row] != OLD and twin is not None:
                    d.drop(row, "contradicting_labels", twin)


def keep_sides(prompts: Groups, d: Decisions) -> None:
    """A prompt is on one side, which it never leaves: new rows go to the side of the earlier output's, or out."""
    for entries, starts in prompts.shared():
        rows = entries[:, 1].astype(np.int64)
        special = np.minimum.reduceat(d.role[rows], starts) < NEW
        for a, b in zip(starts[special].tolist(), np.r_[starts[1:], len(rows)][special].tolist()):
            mine = rows[a:b]
            old, official, new = (mine[d.role[mine] == role] for role in (OLD, OFFICIAL, NEW))
            if len(old):
                d.side[new] = d.side[old[0]]
                for row in official.tolist() if d.side[old[0]] == TRAIN else ():
                    d.drop(row, "prompt_in_train", int(old[0]))
            official = official[d.code[official] == 0]
            for row in new.tolist() if len(official) else ():
                d.drop(row, "prompt_in_test", int(official[0]))


# ------------------------------------------------------------------------------------------------- near rows


@dataclass(frozen=True)
class Sketches:
    """All rows' signatures in a file, `width` bytes each, and how alike two must be."""

    file: object
    width: int
    threshold: float

    def read(self, rows: np.ndarray) -> np.ndarray:
        """(N,) -> (N, fields, MINIMA) uint8"""
        data = b"".join(os.pread(self.file.fileno(), self.width, int(row) * self.width) for row in rows)
        return np.frombuffer(data, dtype=np.uint8).reshape(len(rows), -1, MINIMA)

    def alike(self, pairs: np.ndarray, fields: slice) -> np.ndarray:
        """Those of the pairs of rows, (P, 2), that are near in all of these fields."""
        near = [np.empty((0, 2), dtype=np.int64)]
        for block in np.array_split(pairs, -(-len(pairs) // 20_000)) if len(pairs) else []:
            a, b = (self.read(block[:, side])[:, fields] for side in (0, 1))
            near.append(block[(similarity(a, b) >= self.threshold).all(1)])
        return np.concatenate(near)


def drop_near_rows(groups: Groups, d: Decisions, sketches: Sketches) -> None:
    """Rows that are near to an earlier row go. Rows that share a band are candidates, and their signatures decide."""
    for row, other in near_pairs(groups, d, sketches, near_candidates, slice(None)):
        if not d.code[row] and not d.code[other]:
            official = d.role[row] > d.role[other] == OFFICIAL
            d.drop(row, "near_test_prompt" if official else "near_duplicate", other)


def drop_near_prompts(groups: Groups, d: Decisions, sketches: Sketches) -> None:
    """Train rows whose prompt is near to a test prompt go."""
    for row, other in near_pairs(groups, d, sketches, prompt_candidates, slice(1)):
        if d.code[row] or d.code[other]:
            continue
        if d.role[row] != OLD:
            d.drop(row, "near_test_prompt", other)
        elif d.role[other] != OLD:  # an earlier train row stays, so the new test row goes
            d.drop(other, "prompt_in_train", row)


def near_pairs(groups: Groups, d: Decisions, sketches: Sketches, candidates, fields: slice) -> list[list[int]]:
    """Sorted pairs of rows that share a band and are near in these fields."""
    near = [np.empty((0, 2), dtype=np.int64)]
    for entries, starts in groups.shared():
        pairs = candidates(entries[:, 1].astype(np.int64), starts, d)
        near.append(sketches.alike(np.unique(pairs, axis=0), fields))
    return np.unique(np.concatenate(near), axis=0).tolist()


def near_candidates(rows: np.ndarray, starts: np.ndarray, d: Decisions) -> np.ndarray:
    """Pairs (row, earlier row) among rows that share a key: with at most 16 others each, so that a thousand rows of
    one template are not a million pairs. rows: all groups, one after the other: (M,) -> (P, 2)."""
    group = np.repeat(np.arange(len(starts)), np.diff([*starts, len(rows)]))
    live = np.flatnonzero(d.code[rows] == 0)
    pairs = [np.empty((0, 2), dtype=np.int64)]
    for k in range(1, 17):
        later, earlier = live[k:], live[:-k]
        same = group[later] == group[earlier]
        pairs.append(np.stack([rows[later[same]], rows[earlier[same]]], 1))
    pairs = np.concatenate(pairs)
    return pairs[d.role[pairs[:, 0]] != OLD]


def prompt_candidates(rows: np.ndarray, starts: np.ndarray, d: Decisions) -> np.ndarray:
    """As `near_candidates`, but pairs (train row, test row)."""
    group = np.repeat(np.arange(len(starts)), np.diff([*starts, len(rows)]))
    live, test = d.code[rows] == 0, d.side[rows] == TEST
    first, second = np.flatnonzero(live & ~test), np.flatnonzero(live & test)
    begin = np.searchsorted(group[second], group[first], "left")
    end = np.searchsorted(group[second], group[first], "right")
    pairs = [np.empty((0, 2), dtype=np.int64)]
    for k in range(16):
        have = begin + k < end
        pairs.append(np.stack([rows[first[have]], rows[second[(begin + k)[have]]]], 1))
    return np.concatenate(pairs)

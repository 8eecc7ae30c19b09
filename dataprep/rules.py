"""Pass 2: the rules that need all rows (duplicates, contradictions, the split), decided by the keys of pass 1 alone.

Of two rows that cannot both stay, the earlier one does. 31 bytes a row are held in memory.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dataprep.chunks import chunk_keys
from dataprep.keys import PROMPT_FIELDS, own_keys
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
COMMON = 20  # rows that make a run of words a template's, not their own
RUN_BITS = 22  # of a run's hash, by which it is counted
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
    """Which new dialogues are held out: a share of them, by the hash of their first prompt and the seed."""

    fraction: float
    seed: int


def decide(chunks: list[dict], folder: Path, kind: str, threshold: float | None, split: SplitRule) -> Decisions:
    """Apply all rules. chunks: as `run_chunks` yields them; threshold: of near duplicates, or None."""
    d = Decisions(chunks)
    near = ["near_row", "near_prompt"] if threshold is not None else []
    groups = {name: Groups(folder, name) for name in ("turns", "id", "subject", "dialogue", *near)}
    dialogues, times = first_look(chunks, d, groups["turns"], bool(near))
    with open(folder / "sketches.bin", "wb") as file:
        collect_keys(chunks, d, split, groups, dialogues)
        width = collect_near(chunks, d, groups, (kind, threshold, times), file) if near else 0
    drop_duplicates(groups["id"], d)
    drop_contradictions(groups["subject"], d)
    keep_sides(groups["dialogue"], d)
    if near and os.path.getsize(folder / "sketches.bin"):
        sketches = Sketches(
            np.memmap(folder / "sketches.bin", np.uint8, "r").reshape(-1, width // MINIMA, MINIMA), threshold
        )
        drop_near_rows(groups["near_row"], d, sketches)
        drop_near_prompts(groups["near_prompt"], d, sketches)
    # weights are for training; a row that changed its side was not left out
    d.copies[(d.side == TEST) | (d.copies == 0)] = 1
    return d


def first_look(chunks: list[dict], d: Decisions, turns: "Groups", near: bool) -> tuple[np.ndarray, np.ndarray]:
    """Set roles. Returns the dialogue of each row, (N,) uint64, and how many rows hold a three-word run of the last
    turn, by the run's first bits, (2^RUN_BITS,)."""
    prompts = np.zeros(len(d.code), dtype=np.uint64)
    times = np.zeros(1 << RUN_BITS if near else 0, dtype=np.uint32)
    for i, chunk in enumerate(chunks):
        if not chunk["kept"]:
            continue
        mine = d.rows(i)
        d.role[mine] = {"new": NEW, "test": OFFICIAL, "old": OLD}[chunk["role"]]
        keys = chunk_keys(chunk["file"], ["prompt", "turns", *(["runs"] if near else [])])
        prompts[mine] = keys["prompt"]
        key, lengths = keys["turns"]
        number = np.arange(len(key)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        whole = number + 1 == np.repeat(lengths, lengths)
        turns.add(key, np.repeat(np.arange(mine.start, mine.stop, dtype=np.uint64), lengths), number * 2 + whole)
        if near:
            bits, n = np.unique(keys["runs"][0] >> np.uint32(32 - RUN_BITS), return_counts=True)
            times[bits] += n.astype(np.uint32)
    return dialogue_keys(turns, prompts), times


def dialogue_keys(turns: "Groups", prompts: np.ndarray) -> np.ndarray:
    """The dialogue of each row: the key of the shortest prompt among all rows that its own goes on from. prompts: the
    rows' own keys; a row whose dialogue stands nowhere else has this one. (N,) uint64."""
    dialogues, shortest = prompts.copy(), np.full(len(prompts), 1 << 15, dtype=np.uint16)
    for entries, starts in turns.shared(3):
        rows, number, whole = (
            entries[:, 1].astype(np.int64),
            entries[:, 2] >> np.uint64(1),
            entries[:, 2] & np.uint64(1),
        )
        sizes = np.diff([*starts, len(rows)])
        owner = np.repeat(np.minimum.reduceat(np.where(whole, rows, len(prompts)), starts), sizes)
        order = np.argsort(number, kind="stable")[::-1]  # of several turns of a row the first one is set last
        order = order[(owner[order] < len(prompts)) & (number[order] < shortest[rows[order]])]
        dialogues[rows[order]] = prompts[owner[order]]
        shortest[rows[order]] = number[order]
    return dialogues


def collect_keys(
    chunks: list[dict], d: Decisions, split: SplitRule, groups: dict[str, "Groups"], dialogues: np.ndarray
) -> None:
    """Set sides and copies, and read the keys by which rows are equal into `groups`."""
    for i, chunk in enumerate(chunks):
        if not chunk["kept"]:
            continue
        mine = d.rows(i)
        keys = chunk_keys(chunk["file"], ["id", "subject", "label"])
        if chunk["role"] == "new":
            d.side[mine] = in_test_split(dialogues[mine], split.seed, split.fraction)
            chance = keys["id"].astype(np.float64) / 2**64
            d.copies[mine] = int(chunk["weight"]) + (chance < chunk["weight"] % 1)
        else:  # an earlier row's source is its split
            d.side[mine] = TEST if chunk["role"] == "test" or chunk["source"] == "test" else TRAIN
        left_out = (d.side[mine] == TRAIN) & (d.copies[mine] == 0)
        d.code[mine][left_out] = CODE[
            "left_out_by_weight"
        ]  # before the rules, so that no other row goes because of it
        rows = np.arange(mine.start, mine.stop, dtype=np.uint64)[~left_out]
        groups["dialogue"].add(dialogues[mine][~left_out], rows)
        groups["id"].add(keys["id"][~left_out], rows)
        groups["subject"].add(keys["subject"][~left_out], rows, keys["label"][~left_out])


def collect_near(chunks: list[dict], d: Decisions, groups: dict[str, "Groups"], how: tuple, sketches) -> int:
    """Read the keys by which rows are near into `groups` and the file `sketches`; returns the bytes of one row there.

    how: (kind, threshold, times). A run that one row in a thousand and at least COMMON rows hold is not compared.
    """
    kind, threshold, times = how
    least, width = max(COMMON, len(d.code) // 1000), 0
    for i, chunk in enumerate(chunks):
        if not chunk["kept"]:
            continue
        keys = chunk_keys(chunk["file"], ["near_row", "near_prompt", "sketch", "runs"])
        keys = own_keys(keys, times[keys["runs"][0] >> np.uint32(32 - RUN_BITS)] >= least, kind, threshold)
        width = keys["sketch"].shape[1]
        sketches.write(keys["sketch"].tobytes())
        rows = np.arange(d.first[i], d.first[i + 1], dtype=np.uint64)
        compared = d.code[d.rows(i)] == 0
        for name in ("near_row", "near_prompt"):
            for band in keys[name][compared].T:
                groups[name].add(band, rows[compared])
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
        sizes = np.diff([*starts, len(rows)])
        first, n = np.repeat(starts, sizes), len(rows)
        # the first row of the other label, for those of the first one; rows are in the order of their roles
        other = np.minimum.reduceat(np.where(labels != labels[first], np.arange(n), n), starts)
        twin = np.where(labels != labels[first], first, np.repeat(other, sizes))
        found = np.flatnonzero(twin < n)
        found = found[(d.role[rows[found]] != OLD) & (d.role[rows[twin[found]]] <= d.role[rows[found]])]
        for row, why in zip(rows[found].tolist(), rows[twin[found]].tolist()):
            d.drop(row, "contradicting_labels", why)


def keep_sides(dialogues: Groups, d: Decisions) -> None:
    """A dialogue is on one side, which it never leaves: new rows go to the side of the earlier output's, or out."""
    for entries, starts in dialogues.shared():
        rows = entries[:, 1].astype(np.int64)
        special = np.minimum.reduceat(d.role[rows], starts) < NEW
        for a, b in zip(starts[special].tolist(), np.r_[starts[1:], len(rows)][special].tolist()):
            mine = rows[a:b]
            old, official, new = (mine[d.role[mine] == role] for role in (OLD, OFFICIAL, NEW))
            if len(old):
                d.side[new] = d.side[old[0]]
                trained = old[d.side[old] == TRAIN]
                for row in official.tolist() if len(trained) else ():
                    d.drop(row, "prompt_in_train", int(trained[0]))
            if len(np.unique(d.side[old])) > 1:  # an output that was split by prompts
                for row in new.tolist():
                    d.drop(row, "prompt_in_test", int(old[d.side[old] == TEST][0]))
            official = official[d.code[official] == 0]
            for row in new.tolist() if len(official) else ():
                d.drop(row, "prompt_in_test", int(official[0]))


# ------------------------------------------------------------------------------------------------- near rows


@dataclass(frozen=True)
class Sketches:
    """All rows' signatures, (N, fields, MINIMA) uint8 in a file, and how alike two must be."""

    rows: np.ndarray
    threshold: float

    def alike(self, pairs: np.ndarray, fields: slice) -> np.ndarray:
        """Which pairs of rows, (P, 2), are near in all of these fields: (P,) bool"""
        near = [np.empty(0, dtype=bool)]
        for block in np.array_split(pairs, -(-len(pairs) // 20_000)) if len(pairs) else []:
            a, b = (self.rows[block[:, side], fields] for side in (0, 1))
            near.append((similarity(a, b) >= self.threshold).all(1))
        return np.concatenate(near)


def drop_near_rows(groups: Groups, d: Decisions, sketches: Sketches) -> None:
    """Rows that are near to an earlier row go. Rows that share a band are candidates, and their signatures decide."""
    near = [np.empty((0, 2), dtype=np.int64)]
    for entries, starts in groups.shared():
        near.append(near_in_groups(entries[:, 1].astype(np.int64), starts, d, sketches))
    for row, other in np.unique(np.concatenate(near), axis=0).tolist():
        if not d.code[row] and not d.code[other]:
            official = d.role[row] > d.role[other] == OFFICIAL
            d.drop(row, "near_test_prompt" if official else "near_duplicate", other)


def near_in_groups(rows: np.ndarray, starts: np.ndarray, d: Decisions, sketches: Sketches) -> np.ndarray:
    """Near pairs (row, earlier row) among rows that share a key, (P, 2). rows: all groups, one after the other: (M,).

    All are compared with the first of their group, those that are not near with the first that is left, and so on 16
    times: many rows that are alike cost one comparison each, and many that are not no million pairs.
    """
    group = np.repeat(np.arange(len(starts)), np.diff([*starts, len(rows)]))
    live = d.code[rows] == 0
    rows, group, found = rows[live], group[live], [np.empty((0, 2), dtype=np.int64)]
    for _ in range(16):
        first = np.diff(group, prepend=-1) > 0
        pairs = np.stack([rows, rows[first][np.cumsum(first) - 1]], 1)[~first] if len(rows) else found[0]
        near = sketches.alike(pairs, slice(None))
        new = d.role[pairs[:, 0]] != OLD
        found.append(pairs[near & new])
        rows, group = pairs[~(near & new), 0], group[~first][~(near & new)]
    return np.unique(np.concatenate(found), axis=0)


def drop_near_prompts(groups: Groups, d: Decisions, sketches: Sketches) -> None:
    """Train rows whose prompt is near to a test prompt go."""
    near = [np.empty((0, 2), dtype=np.int64)]
    for entries, starts in groups.shared():
        pairs = np.unique(prompt_candidates(entries[:, 1].astype(np.int64), starts, d), axis=0)
        near.append(pairs[sketches.alike(pairs, slice(PROMPT_FIELDS))])
    for row, other in np.unique(np.concatenate(near), axis=0).tolist():
        if d.code[row] or d.code[other]:
            continue
        if d.role[row] != OLD:
            d.drop(row, "near_test_prompt", other)
        elif d.role[other] != OLD:  # an earlier train row stays, so the new test row goes
            d.drop(other, "prompt_in_train", row)


def prompt_candidates(rows: np.ndarray, starts: np.ndarray, d: Decisions) -> np.ndarray:
    """Pairs (train row, test row) among rows that share a key, with at most 16 test rows each. rows: (M,) -> (P, 2)"""
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

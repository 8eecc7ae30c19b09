"""Which texts are alike: MinHash signatures for near duplicates, grouping by keys on disk, and TF-IDF vectors for coverage."""

import hashlib
import os
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

WORD = re.compile(
    "[\u2e80-\u9fff\uac00-\ud7af]|[^\\W\u2e80-\u9fff\uac00-\ud7af]+"
)  # one CJK character, or a run of letters and digits
MINIMA = 128
A, B = np.random.default_rng(7).integers(1, 2**32, (2, MINIMA), dtype=np.uint32) | np.uint32(1)
MIX = np.random.default_rng(8).integers(1, 2**63, MINIMA + 1, dtype=np.uint64) | np.uint64(1)


def plain(text: str) -> str:
    """Case, and the several ways to write an accented letter, aside."""
    return (text if text.isascii() else unicodedata.normalize("NFC", text)).casefold()


def hash64(*texts: str) -> int:
    return int.from_bytes(hashlib.blake2b("\0".join(texts).encode(), digest_size=8).digest(), "big")


@lru_cache(1 << 16)
def word_hash(word: str) -> int:
    return zlib.crc32(word.encode())


def signatures(texts: list[str]) -> np.ndarray:
    """MinHash (Broder 1997) of each text's three-word runs, case and punctuation aside: (N, MINIMA) uint32.

    The share of equal places in two signatures estimates the Jaccard similarity of the two sets of runs.
    """
    words: list[int] = []
    starts, n = [], 0
    for text in texts:
        mine = [word_hash(w) for w in WORD.findall(plain(text))] or [word_hash(text.strip())]
        mine += [0] * (3 - len(mine))  # at least one run
        starts.append(n)
        words += mine
        n += len(mine) - 2
    lengths = np.diff([*starts, n])
    w = np.array(words, dtype=np.uint32)
    runs = w[:-2] * np.uint32(0x9E3779B1) + w[1:-1] * np.uint32(0x85EBCA6B) + w[2:] * np.uint32(0xC2B2AE35)
    first = np.cumsum([0, *(lengths[:-1] + 2)])  # runs that cross into the next text are left out
    runs = runs[np.repeat(first - starts, lengths) + np.arange(n)]
    runs ^= runs >> np.uint32(15)
    minima = np.empty((len(texts), MINIMA), dtype=np.uint32)
    for k in range(MINIMA):
        value = (runs ^ B[k]) * A[k]
        value ^= value >> np.uint32(16)
        minima[:, k] = np.minimum.reduceat(value * A[k], starts)
    return minima


def bands(threshold: float, fields: int) -> list[np.ndarray]:
    """Places of the signature that are compared at once, so many that two texts at the threshold in each of `fields` fields
    agree in all places of at least one band with a probability of 0.98 or more (Leskovec et al., Mining of Massive Datasets, 3.4)."""
    for width in range(16, 0, -1):
        count = MINIMA // width
        if 1 - (1 - threshold ** (width * fields)) ** count >= 0.98:
            break
    return [np.arange(b * width, (b + 1) * width) for b in range(count)]


def one_byte(minima: np.ndarray) -> np.ndarray:
    """Signatures for storing: a byte of each minimum is enough to compare by."""
    return (minima * A[0] >> np.uint32(24)).astype(np.uint8)


def combine(values: np.ndarray, seed: np.ndarray) -> np.ndarray:
    """(N, n) numbers -> (N,) uint64 keys, mixed with (N,) seeds."""
    key = seed.astype(np.uint64)
    for k in range(values.shape[1]):
        key = (key ^ values[:, k].astype(np.uint64)) * MIX[k % len(MIX)]
        key ^= key >> np.uint64(29)
    return key


def similarity(sketch: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Estimated Jaccard similarity by field: (..., F, MINIMA) uint8 twice -> (..., F). One byte in 256 is equal by chance."""
    return ((sketch == other).mean(-1) - 1 / 256) / (1 - 1 / 256)


class Groups:
    """(key, row) entries, kept on disk by the key's first bits, to find rows that share a key; one part is in memory at a time."""

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
        """Yield (entries (M, columns), starts) with the entries of all keys that more than one entry has, in order of (key,
        row), and where each key's entries start."""
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


HASHED_WORDS = 1 << 18
HASHED_SIZE = 4096


def word_counts(texts: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(text, word hash, count) of each different word of each text."""
    rows, words, counts = [], [], []
    for i, text in enumerate(texts):
        for word, count in Counter(WORD.findall(plain(text))).items():
            rows.append(i)
            words.append(word_hash(word))
            counts.append(count)
    return np.array(rows, dtype=np.int64), np.array(words, dtype=np.int64), np.array(counts, dtype=np.float32)


def word_rarity(batches: Iterator[list[str]]) -> np.ndarray:
    """Smoothed inverse document frequency by word hash, of all texts of all batches: (HASHED_WORDS,)."""
    n, seen = 0, np.zeros(HASHED_WORDS)
    for texts in batches:
        seen += np.bincount(word_counts(texts)[1] % HASHED_WORDS, minlength=HASHED_WORDS)
        n += len(texts)
    return (np.log((n + 1) / (seen + 1)) + 1).astype(np.float32)


def tfidf(texts: list[str], rarity: np.ndarray) -> np.ndarray:
    """Unit vectors of log-damped word counts weighted by rarity, in signed hashed coordinates (Weinberger et al. 2009): (N, 4096)."""
    rows, words, counts = word_counts(texts)
    vectors = np.zeros((len(texts), HASHED_SIZE), dtype=np.float32)
    sign = np.where(words >> 31 & 1, -1.0, 1.0).astype(np.float32)
    np.add.at(
        vectors, (rows, words >> 4 & HASHED_SIZE - 1), sign * (1 + np.log(counts)) * rarity[words % HASHED_WORDS]
    )
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)

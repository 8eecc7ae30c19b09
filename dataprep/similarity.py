"""How alike two texts are, by MinHash signatures, and the hashes that this needs."""

import hashlib
import re
import unicodedata
import zlib
from functools import lru_cache

import numpy as np

# vowels and accents that are characters of their own
MARKS = re.escape("".join(c for c in map(chr, range(0x10000)) if unicodedata.category(c)[0] == "M"))
NO_SPACES = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
CJK = "\u2e80-\u2fff\u3005-\u3007\u3031-\u9fff\uac00-\ud7af"  # without its punctuation
# one character where words are written without spaces, or a run of letters and digits; marks belong to their letters
WORD = re.compile(rf"[{CJK}]|[{NO_SPACES}][{MARKS}]*|(?:[^\W{CJK}{NO_SPACES}]|[{MARKS}])+")
ASCII_WORD = re.compile(r"\w+")  # the same, and faster
# what makes another sum, formula or name though the words are the same, with punctuation
EXACT = re.compile(r"\d+|!=|[^\w\s]|[\u00b2\u00b3\u00b9\u00bc-\u00be\u2070-\u209f\u2150-\u218f\u2460-\u24ff]")
ONE_MINUS = str.maketrans("\u2013\u2212", "--")
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


@lru_cache(1 << 12)
def is_exact(part: str) -> bool:
    """Whether a match of EXACT is more than what ends, joins or quotes sentences, and no vowel."""
    kind = unicodedata.category(part[0])[0]
    return kind == "N" or kind == "S" and part != "`" or part in ("!=", "\u2013", *"#%&*/@\\-(){}[]")


def exact_parts(text: str) -> str:
    """Numbers, signs and symbols of a text, in their order."""
    return " ".join(part for part in EXACT.findall(plain(text)) if is_exact(part)).translate(ONE_MINUS)


def word_runs(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of each text's three-word runs, case and punctuation aside: uint32, those of N texts one after the other,
    and how many each text has, (N,), at least one."""
    words: list[int] = []
    starts, n = [], 0
    for text in texts:
        text = plain(text)
        found = (WORD if not text.isascii() else ASCII_WORD).findall(text)
        mine = [word_hash(w) for w in found] or [word_hash(text.strip())]
        mine += [0] * (3 - len(mine))  # at least one run
        starts.append(n)
        words += mine
        n += len(mine) - 2
    lengths = np.diff([*starts, n])
    w = np.array(words, dtype=np.uint32)
    runs = w[:-2] * np.uint32(0x9E3779B1) + w[1:-1] * np.uint32(0x85EBCA6B) + w[2:] * np.uint32(0xC2B2AE35)
    first = np.cumsum([0, *(lengths[:-1] + 2)])  # runs that cross into the next text are left out
    runs = runs[np.repeat(first - starts, lengths) + np.arange(n)]
    return runs ^ (runs >> np.uint32(15)), lengths


def minima_of(runs: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """MinHash (Broder 1997) of N sets of runs, given as `word_runs` does: (N, MINIMA) uint32.

    The share of equal places in two signatures estimates the Jaccard similarity of the two sets.
    """
    starts = np.cumsum([0, *lengths[:-1]])
    minima = np.empty((len(lengths), MINIMA), dtype=np.uint32)
    for k in range(MINIMA):
        value = (runs ^ B[k]) * A[k]
        value ^= value >> np.uint32(16)
        minima[:, k] = np.minimum.reduceat(value * A[k], starts)
    return minima


def signatures(texts: list[str]) -> np.ndarray:
    """MinHash of each text's three-word runs: (N, MINIMA) uint32."""
    return minima_of(*word_runs(texts))


def bands(threshold: float, fields: int) -> list[np.ndarray]:
    """Places of the signature that are compared at once, so many that two texts at the threshold in each of `fields`
    fields agree in all places of at least one band with a probability of 0.98 or more (Leskovec et al., Mining of
    Massive Datasets, 3.4)."""
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
    """Estimated Jaccard similarity by field: (..., F, MINIMA) uint8 twice -> (..., F).

    One byte in 256 is equal by chance.
    """
    return ((sketch == other).mean(-1) - 1 / 256) / (1 - 1 / 256)

"""How well the train prompts of a finished data folder cover the prompts of a deployment.

    python -m dataprep.coverage --data out/data --prompts real.jsonl [--min_similarity 0.5]

Writes coverage.jsonl (for each real prompt the nearest train prompt, the loneliest first) and coverage.json into the
data folder, whose Parquet files stay as they are. Prompts are compared by their last user turn; likeness is that of
weighted word counts, so a paraphrase without common words counts as far.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from dataprep.convert import convert
from dataprep.folder import ROWS_PER_GROUP
from dataprep.shapes import Columns, detect_shape
from dataprep.similarity import WORD, plain, word_hash
from dataprep.sources import is_local, read_source, source_files
from utils.config import UserError
from utils.data import COLUMNS, split_files
from utils.files import write_json, write_text
from utils.rows import BadRow, bad_row
from utils.run import run_stage
from utils.tracking import progress_bar, say


@dataclass(frozen=True)
class CoverageConfig:
    data: str
    """a folder that prepare_data.py wrote"""
    prompts: str
    """file of real user prompts, in any format that stage 1 reads"""
    min_similarity: float = 0.5
    """cosine of word counts, weighted by rarity (TF-IDF), from which a train prompt counts as a close neighbour"""


# ---------------------------------------------------------------------------------------------------- likeness

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
    """Unit vectors of log-damped word counts weighted by rarity, in signed hashed coordinates (Weinberger et al.
    2009): (N, HASHED_SIZE)."""
    rows, words, counts = word_counts(texts)
    vectors = np.zeros((len(texts), HASHED_SIZE), dtype=np.float32)
    sign = np.where(words >> 31 & 1, -1.0, 1.0).astype(np.float32)
    np.add.at(
        vectors, (rows, words >> 4 & HASHED_SIZE - 1), sign * (1 + np.log(counts)) * rarity[words % HASHED_WORDS]
    )
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)


# ---------------------------------------------------------------------------------------------------- the work


def measure(cfg: CoverageConfig) -> dict:
    """Compare, write and print; returns what coverage.json holds."""
    if not 0 < cfg.min_similarity <= 1:
        raise UserError(f"min_similarity {cfg.min_similarity} must be above 0 and at most 1")
    files = split_files(cfg.data, "train", tuple(COLUMNS))
    real = real_prompts(cfg.prompts)
    best, nearest = nearest_prompts([text for _, text in real], files, prompt_suffix(Path(cfg.data)))
    lines = [
        {
            "place": real[i][0],
            "similarity": round(float(best[i]), 4),
            "covered": bool(best[i] >= cfg.min_similarity),
            "prompt": real[i][1],
            "nearest": nearest[i],
        }
        for i in np.argsort(best, kind="stable")
    ]
    covered = sum(line["covered"] for line in lines)
    result = {
        "prompts": len(real),
        "covered": covered,
        "share": round(covered / len(real), 4),
        "min_similarity": cfg.min_similarity,
        "median_similarity": round(float(np.median(best)), 4),
        "loneliest": lines[:5],
    }
    listing = Path(cfg.data, "coverage.jsonl")
    try:
        write_text(listing, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
        write_json(listing.with_suffix(".json"), result)
    except OSError as error:
        raise UserError(f"{listing} cannot be written ({error.strerror})") from None
    say(f"{result['share']:.1%} of {len(real)} real prompts have a close train prompt; the loneliest:")
    for line in result["loneliest"]:
        say(f"  {line['similarity']:.3f} {line['prompt'][:100]!r}, nearest {line['nearest'][:100]!r}")
    say(f"wrote {listing}")
    return result


def real_prompts(source: str) -> list[tuple[str, str]]:
    """(place, last turn) of each prompt of a file."""
    if not is_local(source):
        raise UserError(f"prompts {source} does not exist; give a file of real prompts")
    source_files(source)  # which refuses types that it does not know
    real: list[tuple[str, str]] = []
    bad: list[str] = []
    for place, row in (row for chunk in read_source(source) for row in chunk.rows()):
        try:
            if isinstance(row, BadRow):
                raise row
            shape = detect_shape(row, Columns(), "prompts")
            real.append((place, convert(row, shape, Columns())[0]["prompt"][-1]["content"]))
        except Exception as error:
            bad.append(f"{place}: {error if isinstance(error, UserError) else bad_row(error).detail}")
    if bad and not real:
        raise UserError(f"{bad[0]}; prompts needs rows with a prompt")
    if bad:
        say(f"{len(bad)} rows of {source} are left out, such as {bad[0]}")
    if not real:
        raise UserError(f"prompts {source} has no rows")
    return real


def prompt_suffix(folder: Path) -> str:
    """What stage 1 appended to each prompt of the folder."""
    file = folder / "config.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8")).get("prompt_suffix", "") if file.is_file() else ""


def nearest_prompts(texts: list[str], files: list[str], suffix: str) -> tuple[np.ndarray, list[str]]:
    """Similarity and text of the train prompt that is nearest to each text. files: Parquet."""
    rarity = word_rarity(train_prompts(files, suffix, "counting words"))
    vectors = tfidf(texts, rarity)
    best, nearest = np.full(len(texts), -1.0), [""] * len(texts)
    for train in train_prompts(files, suffix, "coverage"):
        likeness = vectors @ tfidf(train, rarity).T  # (texts, train)
        for i in np.flatnonzero(likeness.max(1) > best):
            best[i], nearest[i] = likeness[i].max(), train[likeness[i].argmax()]
    return best, nearest


def train_prompts(files: list[str], suffix: str, label: str) -> Iterator[list[str]]:
    """The last turns of all prompts, without what stage 1 appended, in batches."""
    import pyarrow.parquet

    for file in progress_bar(files, label, unit="files"):
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(ROWS_PER_GROUP, columns=["prompt"]):
            yield [prompt[-1]["content"].removesuffix(suffix) for prompt in batch["prompt"].to_pylist()]


if __name__ == "__main__":
    run_stage(measure, CoverageConfig)

"""What rows are compared by: hashes of prompts and of what a label is given to, and near-duplicate signatures."""

import re

import numpy as np

from dataprep.similarity import (
    MINIMA,
    bands,
    combine,
    exact_parts,
    hash64,
    minima_of,
    one_byte,
    plain,
    signatures,
    word_runs,
)

COMPARED = {"preference": ("chosen", "rejected"), "trajectories": ("response",), "prompts": ("reference",)}
PROMPT_FIELDS = 3  # of a sketch: the last turn's own part, the last turn, what stands before it


def prompt_key(prompt: list[dict]) -> int:
    """Equal for prompts that differ only in case, white space and the encoding of accents."""
    return hash64(" ".join(plain("\0".join(f"{m['role']} {m['content']}" for m in prompt)).split()))


def turn_keys(prompt: list[dict]) -> list[int]:
    """Keys of the prompts that a dialogue had up to here, the shortest first: what stands before each answer in it."""
    ends = [i for i in range(1, len(prompt)) if prompt[i]["role"] == "assistant" != prompt[i - 1]["role"]]
    return [prompt_key(prompt[:end]) for end in [*ends, len(prompt)]]


def without_suffix(prompt: list[dict], suffix: str) -> list[dict]:
    return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"].removesuffix(suffix)}]


def row_keys(rows: list[dict], kind: str, threshold: float | None, suffix: str = "") -> dict:
    """Keys of N rows: `id`, `prompt`, `subject` and `label` (N,) uint64, `turns` N arrays; unless threshold is None
    also what `near_keys` gives. suffix: of all prompts, which says nothing about them.

    A subject is what a label is given to: a prompt with two answers (the label: which is better), or a prompt (the
    label: its right answer).
    """
    prompts = [prompt_key(row["prompt"]) for row in rows]
    subjects, labels = [], []
    for row, prompt in zip(rows, prompts):
        if kind == "preference":
            subjects.append(hash64(str(prompt), *sorted((row["chosen"], row["rejected"]))))
            labels.append(int(row["chosen"] < row["rejected"]))
        elif kind == "prompts" and row["ground_truth"] is not None:
            subjects.append(prompt)
            labels.append(hash64(re.sub(r"[\s,]", "", plain(row["ground_truth"]))))
        else:  # a logged answer may well have had several rewards
            subjects.append(int(row["id"], 16))
            labels.append(0)
    keys = {"prompt": prompts, "subject": subjects, "label": labels, "id": [int(row["id"], 16) for row in rows]}
    keys = {name: np.array(values, dtype=np.uint64) for name, values in keys.items()}
    bare = [without_suffix(row["prompt"], suffix) for row in rows]
    keys["turns"] = [np.array(turn_keys(prompt), dtype=np.uint64) for prompt in bare]
    return keys if threshold is None else keys | near_keys(rows, bare, kind, threshold)


def near_bands(kind: str, threshold: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Bands by which rows, and by which prompts, are near. The first of a row is the whole signature: equal ones meet
    whatever else there is."""
    return [np.arange(MINIMA), *bands(threshold, 2 + len(COMPARED[kind]))], bands(threshold, 2)


def near_keys(rows: list[dict], prompts: list[list[dict]], kind: str, threshold: float) -> dict:
    """What near duplicates are found by, as far as a row knows it by itself: `near_row` and `near_prompt` (N, bands)
    uint64 of all but the last turn, `runs` N arrays, those of the last turn, and `sketch` (N, fields, MINIMA) uint8 of
    the last turn, what stands before it, and the answers. `own_keys` makes the rest of it.

    Near rows must share their numbers and signs too, for another one makes another sum.
    """
    names = COMPARED[kind]
    texts = [
        [prompt[-1]["content"], "\n".join(m["content"] for m in prompt[:-1]), *(row[name] or "" for name in names)]
        for row, prompt in zip(rows, prompts)
    ]
    sketch = signatures([text for row in texts for text in row]).reshape(len(rows), -1, MINIMA)
    exact = [[exact_parts(text) for text in row] for row in texts]
    more = {"trajectories": "reward", "prompts": "ground_truth"}.get(kind)
    of_prompt = np.array([hash64(*e[:2]) for e in exact], dtype=np.uint64)
    of_row = np.array([hash64(*e, str(row[more]) if more else "") for e, row in zip(exact, rows)], dtype=np.uint64)
    row_bands, prompt_bands = near_bands(kind, threshold)
    near_row = [
        combine(sketch[:, 1:, band].reshape(len(rows), -1), of_row + np.uint64(i)) for i, band in enumerate(row_bands)
    ]
    near_prompt = [combine(sketch[:, 1, band], of_prompt + np.uint64(i)) for i, band in enumerate(prompt_bands)]
    runs, lengths = word_runs([row[0] for row in texts])
    return {
        "near_row": np.stack(near_row, 1),
        "near_prompt": np.stack(near_prompt, 1),
        "sketch": one_byte(sketch),
        "runs": [np.unique(part) for part in np.split(runs, np.cumsum(lengths)[:-1])],
    }


def own_keys(keys: dict, common: np.ndarray, kind: str, threshold: float) -> dict[str, np.ndarray]:
    """`near_row`, `near_prompt` and `sketch` (N, bytes) with what is the row's own in its last turn: the runs that are
    not `common`, (runs,) bool of all rows' runs, or all of them where none is left. The sketch begins with it."""
    runs, lengths = keys["runs"]
    row = np.repeat(np.arange(len(lengths)), lengths)
    own = ~common | (np.bincount(row, ~common) == 0)[row]
    minima = minima_of(runs[own], np.bincount(row[own]))
    both = zip(("near_row", "near_prompt"), near_bands(kind, threshold))
    near = {
        name: np.stack([combine(minima[:, b], keys[name][:, i]) for i, b in enumerate(bs)], 1) for name, bs in both
    }
    return near | {"sketch": np.concatenate([one_byte(minima), keys["sketch"]], 1)}

"""What rows are compared by: hashes of prompts and of what a label is given to, and near-duplicate signatures."""

import re

import numpy as np

from dataprep.similarity import MINIMA, bands, combine, hash64, one_byte, plain, signatures

COMPARED = {"preference": ("chosen", "rejected"), "trajectories": ("response",), "prompts": ("reference",)}


def prompt_key(prompt: list[dict]) -> int:
    """Equal for prompts that differ only in case, white space and the encoding of accents."""
    return hash64(" ".join(plain("\0".join(f"{m['role']} {m['content']}" for m in prompt)).split()))


def row_keys(rows: list[dict], kind: str, threshold: float | None) -> dict[str, np.ndarray]:
    """Keys of N rows: `id`, `prompt`, `subject` and `label` (N,) uint64; unless threshold is None also `near_row` and
    `near_prompt` (N, bands) uint64 and `sketch` (N, fields, MINIMA) uint8.

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
    return keys if threshold is None else keys | near_keys(rows, kind, threshold)


def near_keys(rows: list[dict], kind: str, threshold: float) -> dict[str, np.ndarray]:
    """Bands and signatures of N rows. Near rows must share their numbers too, for another number makes another sum."""
    names = COMPARED[kind]
    texts = [["\n".join(m["content"] for m in row["prompt"]), *(row[name] or "" for name in names)] for row in rows]
    sketch = signatures([text for row in texts for text in row]).reshape(len(rows), 1 + len(names), MINIMA)
    numbers = [[" ".join(re.findall(r"\d+", text)) for text in row] for row in texts]
    more = {"trajectories": "reward", "prompts": "ground_truth"}.get(kind)
    of_prompt = np.array([hash64(n[0]) for n in numbers], dtype=np.uint64)
    of_row = np.array([hash64(*n, str(row[more]) if more else "") for n, row in zip(numbers, rows)], dtype=np.uint64)
    near_row = [
        combine(sketch[:, :, band].reshape(len(rows), -1), of_row + np.uint64(i))
        for i, band in enumerate(bands(threshold, 1 + len(names)))
    ]
    near_prompt = [combine(sketch[:, 0, band], of_prompt + np.uint64(i)) for i, band in enumerate(bands(threshold, 1))]
    return {"near_row": np.stack(near_row, 1), "near_prompt": np.stack(near_prompt, 1), "sketch": one_byte(sketch)}

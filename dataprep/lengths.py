"""Lengths in tokens, as training will see them: rows are encoded, shortened or refused."""

import json
from dataclasses import dataclass
from typing import Literal

from dataprep.messages import to_json
from dataprep.shapes import ANSWERS
from utils.config import first_line
from utils.data import encode_dialogues, encode_prompt, encode_response, encode_responses
from utils.rows import BadRow


@dataclass(frozen=True)
class Limits:
    """Tokens, inclusive, and what happens beyond them."""

    prompt: int
    response: int
    long_prompt: Literal["filter", "keep_last_turns"]
    long_response: Literal["filter", "truncate"]


def encode_rows(rows: list[dict], kind: str, tokenizer) -> list[dict | BadRow]:
    """Ids of each row, {prompt, chosen, ...}; a row that the template refuses comes as its BadRow."""
    names = ANSWERS[kind]
    try:
        prompts = encode_dialogues(tokenizer, [row["prompt"] for row in rows])
    except Exception:  # templates raise their own errors, for example on a role that they do not know
        prompts = []
        for row in rows:
            try:
                prompts.append(encode_prompt(tokenizer, row["prompt"]))
            except Exception as error:
                prompts.append(BadRow("refused_by_template", first_line(error)))
    answers = encode_responses(tokenizer, [row[name] for row in rows for name in names]) if names else []
    return [
        ids
        if isinstance(ids, BadRow)
        else {"prompt": ids} | dict(zip(names, answers[i * len(names) : (i + 1) * len(names)]))
        for i, ids in enumerate(prompts)
    ]


def check_lengths(row: dict, ids: dict, kind: str, tokenizer, limits: Limits) -> list[str]:
    """Bring a row within the limits, or raise BadRow; returns what was shortened. `row` and `ids` are updated."""
    changed, whole = [], dict(ids)
    n = len(ids["prompt"])
    if n > limits.prompt:
        keep_turns = limits.long_prompt == "keep_last_turns"
        shorter = shorten_prompt(row, tokenizer, limits.prompt) if keep_turns else None
        if shorter is None:
            raise BadRow("prompt_too_long", f"{n} tokens, limit {limits.prompt}")
        ids["prompt"] = shorter
        changed.append("prompt")
    for name in ANSWERS[kind]:
        n = len(ids[name])
        if n > limits.response:
            if limits.long_response == "filter":
                raise BadRow("response_too_long", f"{name} has {n} tokens, limit {limits.response}")
            ids[name] = shorten_answer(row, name, tokenizer, limits.response)
            changed.append(name)
    if kind == "preference" and ids["chosen"] == ids["rejected"]:
        cut = set(changed) & {"chosen", "rejected"}
        raise BadRow("equal_after_truncation" if cut else "equal_answers", "chosen and rejected are the same tokens")
    if kind == "trajectories" and row["logprobs"] is not None:
        row["logprobs"] = fitting_logprobs(row["logprobs"], whole["response"], ids["response"])
    return changed


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
    encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)
    for keep in range(limit - 1, 0, -1):
        cut = text[: encoded["offset_mapping"][keep - 1][1]]
        cut = cut if name == "response" else cut.rstrip()
        ids = encode_response(tokenizer, cut)
        if len(ids) <= limit:
            keep_raw(row, name, text)
            row[name] = cut
            return ids
    raise BadRow("empty_response", f"{name} has no token left of {limit} with eos")


def keep_raw(row: dict, name: str, value) -> None:
    """Note what was shortened under `_raw` in the metadata."""
    metadata = json.loads(row["metadata"]) if row["metadata"] else {}
    metadata.setdefault("_raw", {}).setdefault(name, value)
    row["metadata"] = to_json(metadata)


def fitting_logprobs(logprobs: list[float], whole: list[int], ids: list[int]) -> list[float]:
    """Log-probabilities of the tokens that are left of a response. whole: its ids before it was cut, with eos."""
    n, cut = len(whole), len(ids)
    if len(logprobs) not in (n, n - 1):
        raise BadRow("logprobs_length", f"{len(logprobs)} logprobs for {n} response tokens with eos")
    if cut == n:
        return logprobs
    if ids[:-1] != whole[: cut - 1]:
        raise BadRow("logprobs_length", "the shortened response has other tokens than the logged one")
    return logprobs[: cut - 1]

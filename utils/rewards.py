"""Where scores come from: a reward model, a rule, or a Python function. Scores are one number a response."""

import importlib
import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal, SupportsFloat

import torch

from utils.config import ModelConfig, UserError
from utils.data import encode_prompt, encode_response
from utils.models import (
    arithmetic,
    last_hidden,
    load_reward_model,
    load_tokenizer,
    max_positions,
    score_at_end,
    trunk_of,
)
from utils.tensors import pad_rows
from utils.tracking import progress_bar


@dataclass(frozen=True)
class RewardConfig:
    """What responses are scored by."""

    style: Literal["model", "rule", "function"] = "model"
    """a reward model (`path`), a built-in rule (`rule`) or your own Python function (`function`)"""
    path: str | None = None
    """folder of a reward model, as train_reward.py writes it; or a hub name"""
    rule: Literal["gsm8k", "gsm8k_strict"] | None = None
    """gsm8k: 1 if the final number equals ground_truth, else 0; gsm8k_strict: only a number after #### counts"""
    function: str | None = None
    """module:name of f(prompts, responses, **columns) -> one number a response"""


def check_reward_config(cfg: RewardConfig) -> None:
    """Exactly the key that the style needs is set."""
    needs = {"model": "path", "rule": "rule", "function": "function"}
    if getattr(cfg, needs[cfg.style]) is None:
        raise UserError(f"reward_model.style {cfg.style} needs reward_model.{needs[cfg.style]}")
    for style, key in needs.items():
        if style != cfg.style and getattr(cfg, key) is not None:
            raise UserError(
                f"reward_model.{key} has no effect with reward_model.style {cfg.style}; remove it or set style {style}"
            )


# ------------------------------------------------------------------------------------------------ final numbers

_NUMBER = re.compile(r"(\d+/\d+|(?:\d{1,3}(?:,\d{3})+(?![\d])|\d+)(?:\.\d+)?|\.\d+)")
_SPACED = re.compile(r"[$\s]*(-?)\s?\$?\s?(\d{1,3}(?: \d{3})+)(\.\d+)?[.%\s]*")


def numbers(text: str) -> list[Fraction]:
    """All numbers of a text, in order, exactly.

    A comma belongs to a number only between groups of three digits, a minus only where nothing it could
    be subtracted from stands before it; `$` is skipped, `%` is ignored (15% is 15), and 1/4 is a quarter.

    >>> [float(x) for x in numbers("from -3 to 1,234.50, 12,34 and 5-3")]
    [-3.0, 1234.5, 12.0, 34.0, 5.0, 3.0]
    """
    text = text.replace("\u2212", "-")
    spaced = _SPACED.fullmatch(text)
    if spaced:  # 48 000 is one number where nothing else stands beside it
        text = spaced[1] + spaced[2].replace(" ", "") + (spaced[3] or "")
    found = []
    for match in _NUMBER.finditer(text):
        digits = match[0].replace(",", "")
        if "/" in digits and int(digits.split("/")[1]) == 0:
            continue
        before = re.sub(r"[\s$]{0,2}$", "", text[: match.start()])
        negative = before.endswith("-") and not re.search(r"[\d)]\s?$|[A-Za-z]$", before[:-1])
        found.append(-Fraction(digits) if negative else Fraction(digits))
    return found


def _boxed(text: str) -> str | None:
    """Content of the last complete \\boxed{...} or \\fbox{...}, braces nested, or None."""
    for match in reversed(list(re.finditer(r"\\f?box(?:ed)?\s*\{", text))):
        depth = 1
        for i in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[match.end() : i]
    return None


def final_number(text: str, strict: bool = False) -> Fraction | None:
    """The answer that a response gives: after the last ####; else (not strict) in the last box; else the last number.

    None if there is none. #### marks win over boxes, because GSM8K's own solutions use them.
    """
    text = re.sub(r"\\d?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", text.replace("**", "").replace("\\$", "$"))
    for marked in reversed(text.split("####")[1:]):
        found = numbers(marked.strip().splitlines()[0] if marked.strip() else "")
        if found:
            return found[0]
    if strict:
        return None
    box = _boxed(text)
    found = numbers(box) if box is not None else []
    found = found or numbers(text)
    return found[-1] if found else None


def gsm8k_score(response: str, ground_truth: str, strict: bool = False) -> float:
    """1.0 if the response's final number equals the right one, else 0.0."""
    gold = final_number(ground_truth)
    answer = final_number(response, strict)
    return float(gold is not None and answer is not None and gold == answer)


# ----------------------------------------------------------------------------------------------------- scorers

# prompts (dialogues), responses (texts), columns (name -> one value a response) -> one score a response
Scorer = Callable[[list[list[dict]], list[str], dict[str, list]], list[float]]


def rule_scorer(rule: str) -> Scorer:
    strict = rule.endswith("_strict")
    return lambda prompts, responses, columns: [
        gsm8k_score(response, truth, strict) for response, truth in zip(responses, columns["ground_truth"])
    ]


def check_ground_truth(rows: list[dict]) -> None:
    """A rule can only score rows whose right answer is a number."""
    for row in rows:
        if row.get("ground_truth") is None or final_number(row["ground_truth"]) is None:
            raise UserError(
                f"row {row['id']}: ground_truth {row.get('ground_truth')!r} is not a number, which reward_model.rule needs; "
                "remove the row or prepare data with a ground_truth column"
            )


def function_scorer(name: str) -> Scorer:
    """`module:name`, imported from the current folder or the Python path."""
    module_name, _, attribute = name.partition(":")
    for folder in (str(Path.cwd()), str(Path(__file__).parent.parent)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"reward function {name}: {error}; write it as module:name, importable from here") from None

    def scorer(prompts, responses, columns):
        scores = function(prompts, responses, **columns)
        if not isinstance(scores, Iterable):
            raise UserError(f"reward function {name} returned a {type(scores).__name__}, not one number a response")
        scores = list(scores)
        if len(scores) != len(responses):
            raise UserError(f"reward function {name} returned {len(scores)} scores for {len(responses)} responses")
        for i, score in enumerate(scores):
            if not isinstance(score, SupportsFloat) or not math.isfinite(score):
                raise UserError(f"reward function {name} returned {score} for the response {responses[i][:80]!r}")
        return [float(score) for score in scores]

    return scorer


@torch.no_grad()
def model_scores(
    forward, tokenizer, prompts, responses, micro_batch_size: int, device, positions: int | None = None, progress=None
) -> list[float]:
    """Scores of a reward model, by text: each response is encoded as in reward training, with eos at its end.

    forward: (input_ids (B, S), attention_mask (B, S) bool) -> scores (B,). A row longer than the model's
    `positions` loses the end of its response. Raises UserError on a score that is not finite.
    """
    rows = [encode_prompt(tokenizer, p) + encode_response(tokenizer, r) for p, r in zip(prompts, responses)]
    rows = [row if positions is None or len(row) <= positions else [*row[: positions - 1], row[-1]] for row in rows]
    scores = [0.0] * len(rows)
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    for start in range(0, len(order), micro_batch_size):
        part = order[start : start + micro_batch_size]
        ids, mask = pad_rows([rows[i] for i in part], tokenizer.pad_token_id, torch.long)
        for i, score in zip(part, forward(ids.to(device), mask.to(device)).tolist()):
            scores[i] = score
        if progress is not None:
            progress.update(len(part))
    for response, score in zip(responses, scores):
        if not math.isfinite(score):
            raise UserError(
                f"the reward model gives {score} to the response {response[:80]!r}; try model.dtype float32"
            )
    return scores


def reward_model_scorer(path: str, micro_batch_size: int, device: torch.device, dtype: str = "auto") -> Scorer:
    """A reward model on its own, with its own tokenizer."""
    model = load_reward_model(ModelConfig(path, dtype), device)
    tokenizer = load_tokenizer(path)

    def forward(ids, mask):
        with arithmetic([model], next(trunk_of(model).parameters()).dtype):
            hidden = last_hidden(model, ids, mask)
        return score_at_end(model.score, hidden, mask)

    def scorer(prompts, responses, columns):
        with progress_bar(label="scoring", unit="responses", total=len(prompts)) as bar:
            return model_scores(
                forward, tokenizer, prompts, responses, micro_batch_size, device, max_positions(model), bar
            )

    return scorer

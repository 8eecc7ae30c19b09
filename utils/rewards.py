"""Where scores come from: a reward model, a rule, or a Python function. Scores are one number a response."""

import importlib
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal, SupportsFloat

import torch
from torch import Tensor

from utils.config import ModelConfig, UserError
from utils.data import encode_prompt, encode_response
from utils.models import (
    STATS_FILE,
    arithmetic,
    last_hidden,
    load_reward_model,
    load_tokenizer,
    max_positions,
    read_stats,
    score_at_end,
    trunk_of,
)
from utils.tensors import pad_rows
from utils.tracking import progress_bar, say_once


class BadScore(UserError):
    """A score that is not finite, among the `scores` of all responses."""

    def __init__(self, message: str, scores: list[float]):
        super().__init__(message)
        self.scores = scores


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

# math-verify 0.9 was tried in place of what follows. It reads more LaTeX, but 12 of the 35 answers in
# tests/test_rewards.py wrong (a minus sign, \fbox, "#### 72" before more text) and 6 of 2,000 solutions of GSM8K.
# It takes 2 ms an answer for our 0.03. Outside the main thread it needs its timeouts off, and then
# \boxed{9^{9^{9^{9}}}} holds the whole process for good.

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


def boxed(text: str) -> str | None:
    r"""Content of the last complete \boxed{...} or \fbox{...}, its braces matched, without outer spaces, or None.

    One rule for what a model answers and for a right answer that stage 1 reads from a written solution. A box
    that is never closed does not count, and the one before it does.
    """
    start, last, opened = -1, None, []
    for match in re.finditer(r"\\f?box(?:ed)?\s*\{|[{}]", text):
        if match[0] != "}":
            opened.append(match.end() if match[0] != "{" else -1)
        elif opened:
            begin = opened.pop()
            if begin > start:
                start, last = begin, text[begin : match.start()].strip()
    return last


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
    box = boxed(text)
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
                f"row {row['id']}: ground_truth {row.get('ground_truth')!r} is not a number, "
                "which reward_model.rule needs; remove the row or prepare data with a ground_truth column"
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
            if not isinstance(score, SupportsFloat):
                raise UserError(f"reward function {name} returned {score} for the response {responses[i][:80]!r}")
        scores = [float(score) for score in scores]
        for response, score in zip(responses, scores):
            if not math.isfinite(score):
                raise BadScore(f"reward function {name} returned {score} for the response {response[:80]!r}", scores)
        return scores

    return scorer


WIDTH_STEP = 64  # tokens


@dataclass(frozen=True)
class RewardModel:
    """A reward model that is ready to score texts, and what its scores mean."""

    forward: Callable[[Tensor, Tensor], Tensor]
    """input_ids (B, S), attention_mask (B, S) bool -> raw scores (B,)"""
    tokenizer: object
    device: torch.device
    positions: int | None = None
    """longest row in tokens; a longer one loses the end of its response"""
    mean: float = 0.0
    """of the raw scores on held-out data; 0 with std 1 where nobody measured them"""
    std: float = 1.0
    temperature: float = 1.0
    """probability that a is better than b = sigmoid((a - b) / temperature), in raw scores"""
    synced: bool = False
    """other ranks run the same forwards beside this one (ZeRO-3)"""

    @torch.no_grad()
    def scores(self, prompts: list[list[dict]], responses: list[str], micro_batch_size: int, bar=None) -> list[float]:
        """Raw scores: each response is encoded by its text as in reward training, with eos at its end.

        Equal texts are scored once, so they have one score. Raises UserError on a score that is not finite.
        """
        own, most = self.tokenizer, self.positions
        rows = [encode_prompt(own, p) + encode_response(own, r) for p, r in zip(prompts, responses)]
        rows = [tuple(row if most is None or len(row) <= most else [*row[: most - 1], row[-1]]) for row in rows]
        found: dict[tuple[int, ...], float] = {}
        if bar is not None:
            bar.update(len(rows) - len(set(rows)))
        for part, width in self.batches(rows, micro_batch_size):
            ids, mask = pad_rows(part, own.pad_token_id, torch.long, width)
            found |= zip(part, self.forward(ids.to(self.device), mask.to(self.device)).tolist())
            if bar is not None:
                bar.update(len(set(part)))
        scores = [found[row] for row in rows]
        for response, score in zip(responses, scores):
            if not math.isfinite(score):
                raise BadScore(
                    f"the reward model gives {score} to the response {response[:80]!r}; try model.dtype float32",
                    scores,
                )
        return scores

    def batches(self, rows: list[tuple[int, ...]], size: int) -> list[tuple[list[tuple[int, ...]], int]]:
        """The different rows in batches, the longest first, and the width to pad each to.

        Low precision rounds by a batch's shape, which therefore a row's own length alone decides: on a CPU rows go one
        by one, on a GPU in full batches (the last one with copies) of widths in steps. Under ZeRO-3, where all ranks
        need as many forwards, in batches as they come, as many as without equal rows.
        """
        order = sorted(dict.fromkeys(rows), key=len, reverse=True)
        if self.synced:
            parts = [order[i : i + size] for i in range(0, len(order), size)]
            parts += parts[:1] * (-(-len(rows) // size) - len(parts))
            return [(part, len(part[0])) for part in parts]
        size, step = (1, 1) if self.device.type == "cpu" else (size, WIDTH_STEP)
        batches, most = [], self.positions or math.inf
        for steps, group in itertools.groupby(order, lambda row: -(-len(row) // step)):
            alike = list(group)
            parts = [alike[i : i + size] for i in range(0, len(alike), size)]
            batches += [(part + part[:1] * (size - len(part)), min(steps * step, most)) for part in parts]
        return batches

    def scorer(self, micro_batch_size: int, scaled: bool = False, bar: bool = False) -> Scorer:
        """scaled: shift and scale to mean 0 and deviation 1 on held-out data. bar: show progress."""
        mean, std = (self.mean, self.std) if scaled else (0.0, 1.0)

        def scorer(prompts, responses, columns):
            shown = progress_bar(label="scoring", unit="responses", total=len(prompts)) if bar else nullcontext()
            with shown as progress:
                raw = self.scores(prompts, responses, micro_batch_size, progress)
            return [(score - mean) / std for score in raw] if scaled else raw

        return scorer


def open_reward_model(
    path: str,
    device: torch.device,
    dtype: str = "auto",
    forward: Callable[[Tensor, Tensor], Tensor] | None = None,
    positions: int | None = None,
    tokenizer=None,
) -> RewardModel:
    """The reward model of a folder or hub name, with what `reward_stats.json` beside it says of its scores.

    forward and positions: of a model that the caller holds; without them it is loaded here. tokenizer: the policy's,
    where the reward sits on the policy's backbone; without it the folder's own. Raises UserError where the model was
    trained with another chat template or tokenizer.
    """
    if forward is None:
        model = load_reward_model(ModelConfig(path, dtype), device)
        positions = max_positions(model)

        def forward(ids, mask):
            with arithmetic([model], next(trunk_of(model).parameters()).dtype):
                hidden = last_hidden(model, ids, mask)
            return score_at_end(model.score, hidden, mask)

    own = load_tokenizer(path) if tokenizer is None else tokenizer
    stats = read_stats(path, own, "its folder holds" if tokenizer is None else "the policy has")
    if stats is None:
        say_once(f"{path} has no {STATS_FILE}: its scores are used as they are, and its chat template is not checked")
        return RewardModel(forward, own, device, positions)
    scale = stats["score_mean"], stats["score_std"], stats["temperature"]
    return RewardModel(forward, own, device, positions, *scale)


def open_scorer(
    cfg: RewardConfig,
    micro_batch_size: int,
    device: torch.device,
    dtype: str = "auto",
    reward: RewardModel | None = None,
    scaled: bool = False,
) -> Scorer:
    """What a configuration scores by: the one place that knows the styles.

    reward: the opened model of style `model`; without it the model is opened here, and shows its progress.
    scaled: for style `model`, scores of mean 0 and deviation 1 on held-out data.
    """
    if cfg.style == "rule":
        return rule_scorer(cfg.rule)
    if cfg.style == "function":
        return function_scorer(cfg.function)
    opened = reward or open_reward_model(cfg.path, device, dtype)
    return opened.scorer(micro_batch_size, scaled, bar=reward is None)

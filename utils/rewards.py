"""Where scores come from: a reward model, a rule, or a Python function. Scores are one number a response."""

import copy
import importlib
import inspect
import itertools
import math
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, SupportsFloat

import torch
from torch import Tensor

from utils.answers import boxed, final_number, numbers, right_number  # noqa: F401  (importable from here)
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


GIVEN: dict[str, Callable] = {}  # reward functions that a notebook gave as they are, by the name that stands for them


@dataclass(frozen=True)
class RewardPart:
    """One source of scores."""

    style: Literal["model", "rule", "function"] = "model"
    """a reward model (`path`), a built-in rule (`rule`) or your own Python function (`function`)"""
    path: str | None = None
    """folder of a reward model, as train_reward.py writes it; or a hub name"""
    rule: Literal["gsm8k", "gsm8k_strict"] | None = None
    """gsm8k: 1 if the final number equals ground_truth, else 0; gsm8k_strict: only a number after #### counts"""
    function: str | None = None
    """module:name of f(prompts, responses, **columns) -> one number a response; in Python also the function itself"""
    ended_only: bool = False
    """rule: a response that was cut off gets 0, whatever number it breaks off at"""
    weight: float = 1.0
    """the score is multiplied by this"""

    def __post_init__(self):
        if callable(self.function):  # its name stands for it, in config.yaml too
            home, name = (getattr(self.function, key, "") for key in ("__module__", "__qualname__"))
            name = base = f"{home}:{name or type(self.function).__qualname__ + '<>'}"
            count = itertools.count(2)
            while "<" in base and GIVEN.get(name, self.function) is not self.function:  # lambdas have one name
                name = f"{base}{next(count)}"
            GIVEN[name] = self.function
            object.__setattr__(self, "function", name)

    @property
    def name(self) -> str:
        """What metrics call it: the rule, the function, or the reward model's folder."""
        folders = [part for part in Path(self.path or "").parts if part != "final"]
        name = self.rule or re.split("[:.]", self.function or "")[-1] or (folders or ["model"])[-1]
        return re.sub(r"\W+", "_", name).strip("_")


@dataclass(frozen=True)
class RewardConfig(RewardPart):
    """What responses are scored by."""

    also: list[RewardPart] = field(default_factory=list)
    """more sources, each with the keys above (their own style, weight, ...): the score is the weighted sum of all"""

    @property
    def parts(self) -> list[RewardPart]:
        return [self, *self.also]


def check_reward_config(cfg: RewardConfig) -> None:
    """In every part exactly the key that the style needs is set."""
    needs = {"model": "path", "rule": "rule", "function": "function"}
    for i, part in enumerate(cfg.parts):
        place = f"reward_model.also[{i - 1}]" if i else "reward_model"
        if getattr(part, needs[part.style]) is None:
            raise UserError(f"{place}.style {part.style} needs {place}.{needs[part.style]}")
        for style, key in needs.items():
            if style != part.style and getattr(part, key) is not None:
                raise UserError(
                    f"{place}.{key} has no effect with {place}.style {part.style}; remove it or set style {style}"
                )
        if part.style != "rule" and part.ended_only:
            raise UserError(f"{place}.ended_only has no effect with style {part.style}; remove it")
        if not math.isfinite(part.weight):
            raise UserError(f"{place}.weight {part.weight} must be a finite number")


# ---------------------------------------------------------------------------------------------------------- rules


def gsm8k_score(response: str, ground_truth: str, strict: bool = False) -> float:
    """1.0 if the response's final number equals the right one, else 0.0."""
    gold = right_number(ground_truth)
    answer = final_number(response, strict)
    return float(gold is not None and answer is not None and gold == answer)


def check_ground_truth(rows: list[dict]) -> None:
    """A rule can only score rows whose right answer is a number."""
    for row in rows:
        if row.get("ground_truth") is None or right_number(row["ground_truth"]) is None:
            raise UserError(
                f"row {row['id']}: ground_truth {row.get('ground_truth')!r} is not a number, "
                "which reward_model.rule needs; remove the row or prepare data with a ground_truth column"
            )


def unpayable(cfg: RewardConfig, responses: list[str], ended: list[bool]) -> str | None:
    """What is wrong where a rule can read an answer in none of the responses, or None."""
    for part in cfg.parts:
        if part.style == "rule" and part.ended_only and not any(ended):
            return (
                f"all {len(responses)} responses were cut off, so rule {part.rule} gives each of them 0; "
                "raise max_response_length, or set reward_model.ended_only to false"
            )
        strict = part.rule == "gsm8k_strict"
        if part.style == "rule" and all(final_number(response, strict) is None for response in responses):
            wanted = "number after ####, as in '#### 42'" if strict else "number, as in 'The answer is 42.'"
            return (
                f"rule {part.rule} finds no answer in any of the {len(responses)} responses, so each gets 0; "
                f"it looks for a {wanted}: ask for that in the prompts (prompt_suffix of stage 1)"
            )
    return None


# ----------------------------------------------------------------------------------------------------- scorers

SCORED_BY = ("id", "ground_truth", "reference", "metadata")  # of a row, what a scorer gets beside prompt and response

# prompts (dialogues), responses (texts), columns (name -> one value a response) -> one score a response
Scorer = Callable[[list[list[dict]], list[str], dict[str, list]], list[float]]


def rule_scorer(rule: str, ended_only: bool = False) -> Scorer:
    """Columns: ground_truth, and with ended_only `ended`, whether the response ended by itself."""
    strict = rule.endswith("_strict")

    def scorer(prompts, responses, columns):
        ended = columns["ended"] if ended_only else [True] * len(responses)
        return [
            gsm8k_score(response, truth, strict) if end else 0.0
            for response, truth, end in zip(responses, columns["ground_truth"], ended)
        ]

    return scorer


def function_scorer(name: str) -> Scorer:
    """`module:name`, imported from the current folder or the Python path, or a function that a notebook gave."""
    function = GIVEN[name] if name in GIVEN else import_function(name)

    def call(*batch) -> list:  # with copies: what the function does to them stays its own
        prompts, responses, columns = copy.deepcopy(batch)
        scores = function(prompts, responses, **wanted_columns(function, columns))
        scores = scores.tolist() if hasattr(scores, "tolist") else scores  # of arrays and tensors
        if not isinstance(scores, Iterable) or isinstance(scores, Mapping | Set | str | bytes):
            raise UserError(f"reward function {name} returned a {type(scores).__name__}, not one number a response")
        return list(itertools.islice(scores, len(batch[1]) + 1))

    def scorer(prompts, responses, columns):
        def one(i: int) -> tuple:
            return prompts[i : i + 1], responses[i : i + 1], {n: values[i : i + 1] for n, values in columns.items()}

        try:
            scores = call(prompts, responses, columns)
        except UserError:
            raise
        except Exception as error:
            rows = columns.get("id", range(len(responses)))
            place = next((f"row {row}" for i, row in enumerate(rows) if fails(call, one(i), type(error))), "a batch")
            raise UserError(f"reward function {name} failed at {place}: {described(error)}") from None
        if len(scores) != len(responses):
            more = "more" if len(scores) > len(responses) else len(scores)
            raise UserError(f"reward function {name} returned {more} scores for {len(responses)} responses")
        values = [as_number(score) for score in scores]
        for i, score in enumerate(scores):
            if not abs(values[i]) <= torch.finfo(torch.float32).max:
                row = f"row {columns['id'][i]}, " if "id" in columns else ""
                shown = "too large a number" if isinstance(score, int) else " ".join(str(score).split())[:80]
                message = f"reward function {name} returned {shown} for {row}the response {responses[i][:80]!r}"
                raise BadScore(message, values) if isinstance(score, SupportsFloat) else UserError(message)
        return values

    return scorer


def import_function(name: str) -> Callable:
    module_name, _, attribute = name.partition(":")
    for folder in (str(Path.cwd()), str(Path(__file__).parent.parent)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"reward function {name}: {error}; write it as module:name, importable from here") from None
    except Exception as error:
        raise UserError(f"reward function {name} cannot be imported: {described(error)}") from None
    if not callable(function):
        raise UserError(f"reward function {name} is a {type(function).__name__}; give the name of a function")
    return function


def wanted_columns(function: Callable, columns: dict[str, list]) -> dict[str, list]:
    """Those that the function has parameters for: all, where it takes **columns."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return columns
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return columns
    return {name: values for name, values in columns.items() if name in parameters}


def as_number(score) -> float:
    """NaN where it is none."""
    try:
        return math.nan if isinstance(score, str | bytes) else float(score)
    except Exception:
        return math.nan


def fails(call: Callable, batch: tuple, kind: type) -> bool:
    try:
        call(*batch)
    except Exception as error:
        return isinstance(error, kind)
    return False


def described(error: Exception) -> str:
    """`ValueError: its text (reward.py:12)`, of the last line of the user's own code that it passed; one line."""
    library = (__file__, "<frozen", sysconfig.get_path("stdlib"))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(library)]
    frames = [f for f in frames if "site-packages" not in f.filename]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300] + place


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
            try:
                with shown as progress:
                    raw = self.scores(prompts, responses, micro_batch_size, progress)
            except BadScore as error:  # it names the response
                rows = [row for row, score in zip(columns.get("id", []), error.scores) if not math.isfinite(score)]
                raise BadScore(f"row {rows[0]}: {error}" if rows else str(error), error.scores) from None
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


def open_scorers(
    cfg: RewardConfig,
    micro_batch_size: int,
    device: torch.device,
    dtype: str = "auto",
    reward: RewardModel | None = None,
    scaled: bool = False,
) -> dict[str, tuple[float, Scorer]]:
    """What a configuration scores by, the one place that knows the styles: weight and scorer of each part, by name.

    reward: the opened model of the first part, where that is one; without it the model is opened here, and shows its
    progress. scaled: scores of models have mean 0 and deviation 1 on held-out data.
    """
    scorers: dict[str, tuple[float, Scorer]] = {}
    for part in cfg.parts:
        if part.style == "rule":
            scorer = rule_scorer(part.rule, part.ended_only)
        elif part.style == "function":
            scorer = function_scorer(part.function)
        else:
            given = reward if part is cfg else None
            opened = given or open_reward_model(part.path, device, dtype)
            scorer = opened.scorer(micro_batch_size, scaled, bar=part is cfg and given is None)
        name = part.name if part.name not in scorers else f"{part.name}_{len(scorers) + 1}"
        scorers[name] = (part.weight, scorer)
    return scorers


def weighted_scores(
    scorers: dict[str, tuple[float, Scorer]], prompts: list[list[dict]], responses: list[str], columns: dict[str, list]
) -> tuple[list[float], dict[str, list[float]]]:
    """One score a response, the weighted sum, and the scores of each part."""
    parts = {name: scorer(prompts, responses, columns) for name, (_, scorer) in scorers.items()}
    weights = [weight for weight, _ in scorers.values()]
    return [sum(w * s for w, s in zip(weights, scores)) for scores in zip(*parts.values())], parts


def open_scorer(cfg: RewardConfig, *args, **kwargs) -> Scorer:
    """The weighted sum of `open_scorers`, which takes the same arguments."""
    scorers = open_scorers(cfg, *args, **kwargs)
    return lambda prompts, responses, columns: weighted_scores(scorers, prompts, responses, columns)[0]

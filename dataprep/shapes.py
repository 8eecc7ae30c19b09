"""The shapes in which people keep preferences, prompts and logged answers, and how they are known by their columns."""

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from dataprep.messages import found
from utils.config import UserError
from utils.rows import BadRow


@dataclass(frozen=True)
class Columns:
    """Names of your columns, where they are not the usual ones."""

    prompt: str | None = None
    """text, or a list of {role, content} messages; also found: question, instruction, problem, history, ..."""
    system: str | None = None
    """text of a system turn, put before the prompt"""
    chosen: str | None = None
    """the preferred answer"""
    rejected: str | None = None
    """the other answer"""
    margin: str | None = None
    """by how much chosen is better, in reward units"""
    answer_a: str | None = None
    """one of two answers, where `choice` says which is better"""
    answer_b: str | None = None
    """the other one"""
    choice: str | None = None
    """which of the two answers is better"""
    choice_a: str | int | None = None
    """the value of `choice` that means answer_a, where it is not a, A, model_a or the like"""
    choice_b: str | int | None = None
    """the value that means answer_b; rows with any other are ties"""
    answers: str | None = None
    """a list of answers, as texts or as objects with a score; without scores the best stands first"""
    scores: str | None = None
    """their scores, as a list"""
    response: str | None = None
    """the logged answer; also found: completion, output, answer"""
    reward: str | None = None
    """the logged answer's reward; also found: score, rating"""
    label: str | None = None
    """thumbs up or down for the logged answer: true or false; also found: thumbs_up"""
    logprobs: str | None = None
    """one log-probability (nats) a response token, from the policy that wrote it"""
    ground_truth: str | None = None
    """the right final answer, for rule rewards"""
    reference: str | None = None
    """a written reference answer; also found: solution"""


class Shape(NamedTuple):
    kind: str
    """of the rows that come out"""
    name: str


USUAL = {
    "prompt": (
        "prompt",
        "question",
        "instruction",
        "problem",
        "history",
        "query",
        "messages",
        "conversations",
        "turns",
        "context",
        "input",
    ),
    "system": ("system", "system_prompt"),
    "chosen": ("chosen", "response_j"),  # stack-exchange-paired
    "rejected": ("rejected", "response_k"),
    "answers": ("responses", "completions", "answers", "summaries"),
    "scores": ("scores", "ratings"),
    "response": ("response", "completion", "output", "answer"),
    "reward": ("reward", "score", "rating"),
    "label": ("label", "thumbs_up"),
    "reference": ("reference", "solution"),
}
# Two answers, the column that says which is better, and how: index 0/1, flag 1 for the first, sign below 0 for the
# first, name, 1 or 2, scores of both, or a column of 0 and 1 for each.
CHOICES = (
    ("response_0", "response_1", "better_response_id", "index"),  # PKU-SafeRLHF
    ("human_ref_A", "human_ref_B", "labels", "flag"),  # SHP
    ("response_1", "response_2", "preference_strength", "sign"),  # HelpSteer2
    ("response1", "response2", "overall_preference", "sign"),  # HelpSteer3
    ("conversation_a", "conversation_b", "winner", "name"),  # Chatbot Arena
    ("response_a", "response_b", "winner", "name"),
    ("response_a", "response_b", "winner_model_a", "one-hot"),  # Arena 55k
    ("answer_0", "answer_1", "score_0", "scores"),  # WebGPT
    ("output_1", "output_2", "preference", "one or two"),  # AlpacaFarm
)
BESIDE = defaultdict(tuple, {"one-hot": ("winner_model_b",), "scores": ("score_1",)})  # columns that are needed too
USES = {  # columns that a shape looks at
    "chosen and rejected": ("prompt", "system", "chosen", "rejected", "margin"),
    "two answers and a choice": ("prompt", "system", "answer_a", "answer_b", "choice", "choice_a", "choice_b"),
    "two summaries and a choice": ("answers",),
    "rated answers": ("prompt", "system", "answers", "scores"),
    "ranked answers": ("prompt", "system", "answers"),
    "rated rows": ("prompt", "system", "response", "reward"),
    "thumbs": ("prompt", "system", "response", "label", "logprobs"),
    "logged answers": ("prompt", "system", "response", "reward", "logprobs"),
    "prompts": ("prompt", "system", "response", "ground_truth", "reference"),
}
GROUPED = ("rated rows", "thumbs")  # one answer a row; for pairs the rows of a prompt are brought together
PAIRED = [
    Shape("preference", name) for name in ("rated answers", "ranked answers", "rated rows", "thumbs")
]  # where several pairs can be made of a prompt
ANSWERS = {"preference": ("chosen", "rejected"), "trajectories": ("response",), "prompts": ()}
ANSWER_COLUMN = re.compile(
    r"chosen|rejected|responses|completions|winner\w*|label|preference|preferred|"
    r"(best|better|worse|worst|good|bad|positive|negative)_?(response|answer|output|completion)|"
    r"(response|answer|output|completion|generation|reply|summary)s?_?([0-9]|[a-d]|[jkwl])",
    re.IGNORECASE,
)
SCORE_KEYS = ("score", "overall_score", "rating", "reward")


def find(row: dict, columns: Columns, name: str) -> str | None:
    """The column of `row` that holds `name`, or None if it has none."""
    mapped = getattr(columns, name)
    if mapped is not None:
        if mapped not in row:
            raise BadRow(
                "missing_column", f"no column {mapped!r} (columns.{name}); the row has {sorted(map(str, row))}"
            )
        return mapped
    return next((c for c in USUAL.get(name, (name,)) if c in row), None)


FIELDS = [name for name in Columns.__dataclass_fields__ if name not in ("choice_a", "choice_b")]


@lru_cache(1024)
def _find_all(row_columns: tuple[str, ...], columns: Columns) -> dict[str, str | None]:
    row = dict.fromkeys(row_columns)
    return {name: find(row, columns, name) for name in FIELDS}


def find_all(row: dict, columns: Columns) -> dict[str, str | None]:
    """The column of each field; most rows have the columns of the row before. Raises BadRow."""
    return _find_all(tuple(row), columns)


def find_choice(row: dict, columns: Columns) -> tuple[str, str, str, str] | None:
    """Columns of two answers and of the choice between them, and how the choice is written."""
    if columns.choice or columns.answer_a or columns.answer_b:
        mapped = [find(row, columns, name) for name in ("answer_a", "answer_b", "choice")]
        if None in mapped:
            raise UserError("columns.answer_a, columns.answer_b and columns.choice belong together; name all three")
        if (columns.choice_a is None) != (columns.choice_b is None):
            raise UserError("columns.choice_a and columns.choice_b belong together; name both")
        if mapped[2] == "winner_model_a" and "winner_model_b" in row:
            return (*mapped, "one-hot")  # 0 may be a tie
        return (*mapped, "mapped" if columns.choice_a is not None else "name")
    return next((layout for layout in CHOICES if all(c in row for c in (*layout[:3], *BESIDE[layout[3]]))), None)


RANK = ["preference", "trajectories", "prompts"]


def detect_source(rows: list[tuple[str, dict]], columns: Columns, kind: str | None = None) -> tuple[str, Shape]:
    """(place, shape) of a source by some of its rows, as the first can lack what others have. Raises UserError."""
    best, first_error = None, None
    for place, row in rows:
        try:
            shape = detect_shape(row, columns, kind)
            if best is None or RANK.index(shape.kind) < RANK.index(best[1].kind):
                best = place, shape
        except UserError as error:
            first_error = first_error or UserError(f"{place}: {error}")
    if first_error is not None and (best is None or best[1].kind == "prompts" and kind is None):
        raise first_error
    return best


def detect_shape(row, columns: Columns, kind: str | None = None) -> Shape:
    """What a row holds, by its columns. Raises UserError when they say nothing, or do not fit `kind`."""
    if not isinstance(row, dict):
        raise UserError(f"expected objects with named columns, found {found(row)}")
    try:
        has = find_all(row, columns)
    except BadRow as bad:
        raise UserError(bad.detail) from None
    shapes = []
    if has["chosen"] and has["rejected"]:
        shapes.append(Shape("preference", "chosen and rejected"))
    elif find_choice(row, columns):
        shapes.append(Shape("preference", "two answers and a choice"))
    elif has["answers"] and isinstance(row[has["answers"]], list) and "choice" in row and "info" in row:
        shapes.append(Shape("preference", "two summaries and a choice"))
    elif has["answers"] and (has["scores"] or rated_objects(row[has["answers"]])):
        shapes.append(Shape("preference", "rated answers"))
    elif columns.answers and isinstance(row[columns.answers], list):
        shapes.append(Shape("preference", "ranked answers"))
    elif has["prompt"] and has["response"]:
        logged = [Shape("trajectories", "logged answers"), Shape("preference", "rated rows")] if has["reward"] else []
        thumbs = (
            [Shape("preference", "thumbs"), Shape("trajectories", "thumbs")]
            if has["label"] and thumb(row[has["label"]]) is not None
            else []
        )
        shapes += logged + thumbs if "reward" in row or columns.reward else thumbs + logged
    if has["prompt"]:
        shapes.append(Shape("prompts", "prompts"))
    several = [c for c in USUAL["response"] + USUAL["answers"] if isinstance(row.get(c), list) and len(row[c]) > 1]
    if kind is None and shapes and shapes[0].kind == "prompts" and several and not is_dialogue(row[several[0]]):
        raise UserError(
            f"{several[0]} is a list of answers without scores; if the best stands first, say "
            f"--columns.answers {several[0]}, else name their scores with --columns.scores, "
            "or say --kind prompts to use the prompt alone"
        )
    answers = sorted(str(c) for c in row if ANSWER_COLUMN.fullmatch(str(c)))
    if kind is None and shapes and shapes[0].kind == "prompts" and answers:
        raise UserError(
            f"the columns {', '.join(answers)} look like answers, but the row makes neither a pair nor a trajectory; "
            "name its columns with --columns.*, or say --kind prompts to use the prompt alone"
        )
    fitting = [shape for shape in shapes if kind in (None, shape.kind)]
    if not fitting:
        what = f"make no {kind}" if shapes else "are none that stage 1 knows"
        raise UserError(
            f"the columns {sorted(map(str, row))} {what}; "
            "name yours with --columns.prompt, --columns.chosen, --columns.rejected, ... (see --help)"
        )
    return fitting[0]


def is_dialogue(value: list) -> bool:
    return all(isinstance(v, dict) and ("role" in v or "from" in v) for v in value)


def rated_objects(value) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(v, dict) and any(k in v for k in (*SCORE_KEYS, "rank")) for v in value)
    )


def thumb(value) -> bool | None:
    """True for thumbs up, False for down, None for anything else."""
    text = str(value).strip().lower()
    return (
        True
        if text in ("true", "1", "1.0", "up", "thumbs_up", "+1")
        else False
        if text in ("false", "0", "0.0", "down", "thumbs_down", "-1")
        else None
    )

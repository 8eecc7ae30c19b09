"""The shapes in which people keep preferences, prompts and logged answers, and how each becomes rows of one kind."""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from dataprep.sources import Chunk
from utils.config import UserError
from utils.rows import CHUNK_ROWS, BadRow, TextRow


@dataclass(frozen=True)
class Columns:
    """Names of your columns, where they are not the usual ones."""

    prompt: str | None = None
    """text, or a list of {role, content} messages; also found: question, instruction, problem, history, messages, ..."""
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
    """a list of answers, as texts or as objects with a score"""
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
    "answers": ("responses", "completions", "answers", "summaries"),
    "scores": ("scores", "ratings"),
    "response": ("response", "completion", "output", "answer"),
    "reward": ("reward", "score", "rating"),
    "label": ("label", "thumbs_up"),
    "reference": ("reference", "solution"),
}
# Two answers, the column that says which is better, and how: index 0/1, flag 1 for the first, sign below 0 for the first, name.
CHOICES = (
    ("response_0", "response_1", "better_response_id", "index"),  # PKU-SafeRLHF
    ("human_ref_A", "human_ref_B", "labels", "flag"),  # SHP
    ("response_1", "response_2", "preference_strength", "sign"),  # HelpSteer2
    ("response1", "response2", "overall_preference", "sign"),  # HelpSteer3
    ("conversation_a", "conversation_b", "winner", "name"),  # Chatbot Arena
    ("response_a", "response_b", "winner", "name"),
)
USES = {  # columns that a shape looks at
    "chosen and rejected": ("prompt", "system", "chosen", "rejected", "margin"),
    "two answers and a choice": ("prompt", "system", "answer_a", "answer_b", "choice", "choice_a", "choice_b"),
    "two summaries and a choice": ("answers",),
    "rated answers": ("prompt", "system", "answers", "scores"),
    "rated rows": ("prompt", "system", "response", "reward"),
    "thumbs": ("prompt", "system", "response", "label", "logprobs"),
    "logged answers": ("prompt", "system", "response", "reward", "logprobs"),
    "prompts": ("prompt", "system", "response", "ground_truth", "reference"),
}
GROUPED = ("rated rows", "thumbs")  # one answer a row; for pairs the rows of a prompt are brought together
ANSWER_COLUMNS = {
    "chosen",
    "rejected",
    "responses",
    "completions",
    "response_a",
    "response_b",
    "response_0",
    "response_1",
    "response_2",
    "winner",
    "label",
}
SCORE_KEYS = ("score", "overall_score", "rating", "reward")
TEXT_KEYS = ("response", "text", "content", "answer", "completion")
ROLES = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}
HH_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")
HELPSTEER_TURN = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")


def found(value) -> str:
    """What a value is, in words of the data."""
    names = {
        bool: "true/false",
        int: "number",
        float: "number",
        str: "text",
        list: "list",
        dict: "object",
        type(None): "null",
    }
    name = names.get(type(value), type(value).__name__)
    return f"{name} {str(value)[:40]!r}" if name in ("text", "number", "true/false") else name


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
        return (*mapped, "mapped" if columns.choice_a is not None else "name")
    return next((layout for layout in CHOICES if all(c in row for c in layout[:3])), None)


RANK = ["preference", "trajectories", "prompts"]


def detect_source(rows: list[tuple[str, dict]], columns: Columns, kind: str | None = None) -> tuple[str, Shape]:
    """(place, shape) of a source by some of its rows: the first row can lack what the others have. Raises UserError."""
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
    if kind is None and shapes and shapes[0].kind == "prompts" and (answers := sorted(ANSWER_COLUMNS & set(row))):
        raise UserError(
            f"the columns {', '.join(answers)} look like answers, but the row makes neither a pair nor a trajectory; "
            "name its columns with --columns.*, or say --kind prompts to use the prompt alone"
        )
    fitting = [shape for shape in shapes if kind in (None, shape.kind)]
    if not fitting:
        what = f"make no {kind}" if shapes else "are none that stage 1 knows"
        raise UserError(
            f"the columns {sorted(map(str, row))} {what}; name yours with --columns.prompt, --columns.chosen, --columns.rejected, ... (see --help)"
        )
    return fitting[0]


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


def as_text(value, name: str) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadRow(
                "wrong_type", f"{name}: expected text, found bytes that are not UTF-8 at byte {error.start + 1}"
            ) from None
    if not isinstance(value, str):
        raise BadRow("wrong_type", f"{name}: expected text, found {found(value)}")
    return value


def as_number(value, name: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        raise BadRow("wrong_type", f"{name}: expected a number, found {found(value)}")
    if not abs(value) < 1e300:
        raise BadRow("wrong_type", f"{name}: expected a finite number, found {found(value)}")
    return float(value)


def parse_hh(text: str) -> list[dict] | None:
    """An HH dialogue as messages, or None if the text is not one. A marker counts only after a blank line.

    >>> parse_hh("\\n\\nHuman: Hi\\n\\nAssistant: Hello")
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]
    """
    parts = HH_TURN.split(text.removeprefix("\n\n"))
    if len(parts) < 3 or parts[0].strip():
        return None
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[r], "content": c} for r, c in zip(parts[1::2], parts[2::2])]


def hh_text(messages: list[dict]) -> str:
    """The HH text of messages, which `parse_hh` reads."""
    return "".join(f"\n\n{'Human' if m['role'] == 'user' else 'Assistant'}: {m['content']}" for m in messages)


def is_dialogue(text: str) -> bool:
    """Whether a prompt's text holds turns that `as_messages` reads."""
    return "\n\nAssistant:" in text and parse_hh(text) is not None or "<extra_id_1>" in text


def as_messages(value, name: str) -> list[dict]:
    """Text, one message or a list of messages (role and content, or ShareGPT's from and value) -> [{role, content}], checked."""
    if value is None:
        raise BadRow("empty_prompt", f"{name} is null or missing")
    if isinstance(value, (str, bytes)):
        text = as_text(value, name)
        if "\n\nAssistant:" in text and (dialogue := parse_hh(text)):
            return (
                dialogue[:-1]
                if dialogue[-1]["role"] == "assistant" and not dialogue[-1]["content"].strip()
                else dialogue
            )
        if "<extra_id_1>" in text:  # HelpSteer's turns; the first one is the user's
            parts = HELPSTEER_TURN.split("\n<extra_id_1>User\n" + text.removeprefix("<extra_id_1>User\n"))
            turns = [{"role": r.lower(), "content": c} for r, c in zip(parts[1::2], parts[2::2])]
            return turns[:-1] if turns[-1]["role"] == "assistant" and not turns[-1]["content"].strip() else turns
        return [{"role": "user", "content": text}]
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise BadRow("wrong_type", f"{name}: expected text or a list of messages, found {found(value)}")
    messages = []
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise BadRow("wrong_type", f"{name}[{i}]: expected {{role, content}}, found {found(message)}")
        keys = ("role", "content") if "role" in message else ("from", "value")
        if not set(keys) <= set(message):
            raise BadRow(
                "wrong_type",
                f"{name}[{i}]: expected {{role, content}}, found an object with {sorted(map(str, message))}",
            )
        role, content = as_text(message[keys[0]], f"{name}[{i}].{keys[0]}"), message[keys[1]]
        if (
            isinstance(content, list)
            and content
            and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content)
        ):
            content = "".join(part["text"] for part in content)
        if any(message.get(key) for key in ("tool_calls", "function_call", "images")):
            raise BadRow("wrong_type", f"{name}[{i}]: expected a message of text, found tool calls or images")
        messages.append({"role": ROLES.get(role.lower(), role), "content": as_text(content, f"{name}[{i}].{keys[1]}")})
    return messages


def as_answer(value, name: str, prompt: list[dict]) -> str:
    """Text, one assistant message, or a conversation that repeats the prompt -> the answer's text."""
    if value is None:
        raise BadRow("empty_response", f"{name} is null or missing")
    if isinstance(value, (list, dict)):
        messages = as_messages(value, name)
        if messages[: len(prompt)] == prompt:
            messages = messages[len(prompt) :]
        if len(messages) != 1 or messages[0]["role"] != "assistant":
            raise BadRow(
                "no_final_answer",
                f"{name}: expected one assistant message after the prompt, found {[m['role'] for m in messages]}",
            )
        return messages[0]["content"]
    return as_text(value, name)


def is_conversation(value) -> bool:
    return isinstance(value, list) and len(value) > 1 or isinstance(value, str) and parse_hh(value) is not None


def conversation_pair(chosen, rejected, names=("chosen", "rejected")) -> tuple[list[dict], str, str]:
    """Two whole conversations (HH text or message lists) -> (shared prompt, chosen answer, rejected answer)."""
    sides = []
    for name, value in zip(names, (chosen, rejected)):
        if value is None:
            raise BadRow("empty_response", f"{name} is null or missing")
        messages = parse_hh(value) if isinstance(value, str) else as_messages(value, name)
        if messages is None:
            raise BadRow("no_prompt", f"{name} is text without a dialogue, and there is no prompt column")
        if not messages or messages[-1]["role"] != "assistant":
            raise BadRow("no_final_answer", f"{name} does not end with an assistant turn")
        sides.append(messages)
    if sides[0][:-1] != sides[1][:-1]:
        raise BadRow("different_prompts", f"{names[0]} and {names[1]} differ before the last answer")
    return sides[0][:-1], sides[0][-1]["content"], sides[1][-1]["content"]


def read_prompt(row: dict, name: dict) -> list[dict]:
    """The prompt column, with what belongs to it: a system turn, and the input of an instruction."""
    column = name["prompt"]
    value = row[column] if column else None
    if column == "turns" and isinstance(value, list) and value and isinstance(value[0], (str, bytes)):
        value = value[0]  # MT-Bench: the later turns need the model's answers; they stay in the metadata
    prompt = as_messages(value, column or "prompt")
    for more in ("input", "context") if column == "instruction" else ():
        if row.get(more):
            prompt[-1]["content"] += "\n\n" + as_text(row[more], more)
    if column in ("instruction", "question", "prompt") and isinstance(row.get("history"), list):
        earlier = [turn for pair in row["history"] if isinstance(pair, list) and len(pair) == 2 for turn in pair]
        if len(earlier) != 2 * len(row["history"]):
            raise BadRow("wrong_type", "history: expected a list of [question, answer] pairs")
        prompt = [
            {"role": ("user", "assistant")[i % 2], "content": as_text(turn, "history")}
            for i, turn in enumerate(earlier)
        ] + prompt
    system = row[name["system"]] if name["system"] else None
    if system and prompt[:1] != [{"role": "system", "content": system}]:
        prompt.insert(0, {"role": "system", "content": as_text(system, name["system"])})
    return prompt


def read_pair(row: dict, name: dict, chosen: str, rejected: str) -> dict:
    """Two answers in the columns `chosen` and `rejected`, which may be whole conversations or repeat the prompt."""
    good, bad, column = row[chosen], row[rejected], name["prompt"]
    if column is None or is_conversation(good) and is_conversation(bad):
        prompt, good, bad = conversation_pair(good, bad, (chosen, rejected))
        if column not in (
            None,
            "messages",
            "conversations",
            "turns",
        ):  # the prompt stands in a column too, perhaps without its first turns
            stated = read_prompt(row, name)
            if not stated or not prompt or stated[-1]["content"].strip() != prompt[-1]["content"].strip():
                raise BadRow("different_prompts", f"{column} is not what {chosen} and {rejected} answer")
        raw = {}
        for key, value, answer in (("chosen", row[chosen], good), ("rejected", row[rejected], bad)):
            if (
                isinstance(value, str)
                and value != hh_text([*prompt, {"role": "assistant", "content": answer}])
                or more_than_messages(value)
            ):
                raw[key] = value
        if (
            column is not None
            and row[column] != prompt
            and not (len(prompt) == 1 and row[column] == prompt[0]["content"])
        ):
            raw["prompt"] = row[column]
        return {"prompt": prompt, "chosen": good, "rejected": bad, "raw": raw}
    prompt, raw = read_prompt(row, name), {}
    if prompt[-1:] and prompt[-1]["role"] == "assistant" and column in ("messages", "conversations"):
        prompt = prompt[:-1]  # the chosen answer once more
    good, bad = as_answer(good, chosen, prompt), as_answer(bad, rejected, prompt)
    text = row[column]
    # Some sets repeat the prompt in front of both answers. One or two words can start an answer by chance.
    if (
        isinstance(text, str)
        and len(text.split()) > 2
        and all(a.startswith(text) and re.match(r"\s", a[len(text) :]) for a in (good, bad))
    ):
        raw = {"chosen": good, "rejected": bad}
        good, bad = good[len(text) :], bad[len(text) :]
    for key, value in (("chosen", row[chosen]), ("rejected", row[rejected])):
        raw |= {key: value} if more_than_messages(value) else {}
    return {"prompt": prompt, "chosen": good, "rejected": bad, "raw": raw}


def more_than_messages(value) -> bool:
    """Whether messages say more than role and text: a name, a weight, content in parts."""
    messages = value if isinstance(value, list) else [value] if isinstance(value, dict) else []
    return any(
        isinstance(m, dict) and (len(m) > 2 or not isinstance(m.get("content", m.get("value")), str)) for m in messages
    )


def choice_of(value, how: str, column: str, columns: Columns) -> bool:
    """Whether the first answer is the better one. Raises BadRow for ties."""
    text = str(value).strip().lower()
    if value is None or text in ("", "tie", "both", "neither", "same", "equal") or text.startswith("tie"):
        raise BadRow("tie", f"{column}: {found(value)}")
    if how == "mapped":
        if same_value(value, columns.choice_a) == same_value(value, columns.choice_b):
            raise BadRow("tie", f"{column}: {found(value)} is neither choice_a nor choice_b")
        return same_value(value, columns.choice_a)
    if how == "name":
        last = re.split(r"[\s_-]", text)[-1]
        if last not in ("a", "b"):
            raise BadRow(
                "wrong_type",
                f"{column}: expected a, b or tie, found {found(value)}; --columns.choice_a and choice_b name the values",
            )
        return last == "a"
    number = as_number(value, column)
    if how == "sign":
        if number == 0:
            raise BadRow("tie", f"{column}: 0")
        return number < 0
    if number not in (0, 1):
        raise BadRow("wrong_type", f"{column}: expected 0 or 1, found {found(value)}")
    return number == (0 if how == "index" else 1)


def same_value(a, b) -> bool:
    """Equal as numbers where both are some (1 and 1.0, which tables write for 1), else as text."""
    a, b = (str(x).strip().lower() for x in (a, b))
    try:
        return float(a) == float(b)
    except ValueError:
        return a == b


def rated_answers(row: dict, name: dict, prompt: list[dict]) -> tuple[list[tuple[str, float, dict]], list[BadRow]]:
    """(answer, score, what else its object says) of each rated answer, and those that cannot be used; a rank counts downwards."""
    column = name["answers"]
    values = row[column]
    if not isinstance(values, list):
        raise BadRow("wrong_type", f"{column}: expected a list of answers, found {found(values)}")
    scores = row[name["scores"]] if name["scores"] else None
    if scores is not None and (not isinstance(scores, list) or len(scores) != len(values)):
        n = len(scores) if isinstance(scores, list) else found(scores)
        raise BadRow("wrong_type", f"{name['scores']}: expected {len(values)} scores, one for each answer, found {n}")
    rated, unusable = [], []
    for i, value in enumerate(values):
        score, place, rest = scores[i] if scores is not None else None, f"{column}[{i}]", {}
        try:
            if isinstance(value, dict) and scores is None:
                key = next((k for k in SCORE_KEYS if k in value), None)
                score = value[key] if key else None
                if key is None and value.get("rank") is not None:
                    score = -as_number(value["rank"], f"{place}.rank")
                text_key = next((k for k in TEXT_KEYS if k in value), None)
                if text_key is None:
                    raise BadRow(
                        "wrong_type",
                        f"{place}: expected an answer under {', '.join(TEXT_KEYS)}, found {sorted(map(str, value))}",
                    )
                rest = {k: v for k, v in value.items() if k != text_key}
                value = value[text_key]
            number = as_number(score, f"score of {place}")
            if number is None:
                raise BadRow("wrong_type", f"{place}: expected a score, found null")
            answer = as_answer(value, place, prompt)
            if is_blank(answer):
                raise BadRow("empty_response", f"{place} is empty")
            rated.append((answer, number, rest))
        except BadRow as bad:
            unusable.append(bad)
    return rated, unusable


def pairs_from_scores(rated: list[tuple[str, float, dict]], mode: str) -> list[dict]:
    """Pairs of n rated answers, with the difference of their scores as margin. Raises BadRow when no two differ."""
    ordered = sorted(rated, key=lambda item: -item[1])
    pairs = [(a, b) for i, a in enumerate(ordered) for b in ordered[i + 1 :] if a[1] > b[1]]
    if not pairs:
        raise BadRow(
            "tie" if len(rated) > 1 else "no_counterpart", f"{len(rated)} answers, no two with different scores"
        )
    if mode == "best_worst":  # texts can be equal though their scores are not
        pairs = [
            max(
                (p for p in pairs if p[0][0].strip() != p[1][0].strip()),
                key=lambda p: p[0][1] - p[1][1],
                default=pairs[0],
            )
        ]
    more = [{"metadata": {"chosen": a[2], "rejected": b[2]}} if a[2] or b[2] else {} for a, b in pairs]
    return [
        {"chosen": a[0], "rejected": b[0], "margin": float(f"{a[1] - b[1]:.9g}"), **m}
        for (a, b), m in zip(pairs, more)
    ]


def boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...}, with its braces matched."""
    start = text.rfind("\\boxed{")
    depth = 0
    for i in range(start + 6, len(text) if start >= 0 else 0):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start + 7 : i].strip()
    return None


def read_prompts_row(row: dict, name: dict, columns: Columns, pairs: str) -> tuple[list[dict], set]:
    """A prompt with its right answer and its written answer, as far as they are known."""
    prompt, used = merge_turns(read_prompt(row, name)), set()
    written = None
    while prompt and prompt[-1]["role"] == "assistant":  # a finished dialogue: its last answer is no prompt
        written = prompt.pop()["content"]
    out = {
        "prompt": prompt,
        "reference": written,
        "ground_truth": None,
        "raw": {} if written is None else {name["prompt"]: row[name["prompt"]]},
    }
    verl = row.get("reward_model")
    for key in ("reference", "ground_truth"):
        if name[key]:
            out[key] = row[name[key]]
            used.add(name[key])
    if isinstance(verl, dict) and out["ground_truth"] is None:
        out["ground_truth"] = verl.get("ground_truth")  # verl's rows; the object also stays in the metadata
    answer = name["response"]
    if (
        answer
        and name["prompt"] == "problem"
        and out["ground_truth"] is None
        and isinstance(row[answer], (str, int, float))
    ):
        out["ground_truth"] = row[answer]  # MATH-like sets: the solution is the reference, the answer is the result
        used.add(answer)
    elif answer and isinstance(row[answer], str) and out["reference"] is None:
        out["reference"] = row[answer]
        used.add(answer)
    if out["ground_truth"] is None and isinstance(out["reference"], str) and written is None:
        if last := re.search(r"^#### ?([^\n]*)\Z", out["reference"].rstrip(), re.MULTILINE):  # GSM8K
            out["ground_truth"] = last[1].strip()
            if not out["ground_truth"]:
                raise BadRow("empty_ground_truth", "nothing stands after ####")
        elif name["prompt"] == "problem":
            out["ground_truth"] = boxed(out["reference"])
    for key in ("reference", "ground_truth"):
        if isinstance(out[key], bytes):
            out[key] = as_text(out[key], key)
        elif out[key] is not None and not isinstance(out[key], str):
            out[key] = to_json(out[key])
    return [out], used


def untext(row: TextRow, name: dict) -> dict:
    """A row of a format without nesting: what should be a number, a list or messages is read from its text."""
    out = dict(row)
    for key, column in name.items():
        cell = row.get(column)
        if not isinstance(cell, str):
            continue
        if key in ("margin", "reward", "label", "logprobs", "scores", "answers", "choice") or cell.lstrip()[:2] in (
            "[{",
            '{"',
            "[ ",
        ):
            try:
                value = json.loads(cell)
            except ValueError:
                continue
            messages = (
                isinstance(value, list)
                and value
                and all(isinstance(v, dict) and ("role" in v or "from" in v) for v in value)
            )
            if key in ("margin", "reward", "label", "logprobs", "scores", "answers", "choice") or messages:
                out[column] = value
    return out


def to_json(value) -> str:
    """JSON text; bytes become text, and a number that JSON has no name for becomes null."""

    def default(x):
        if isinstance(x, bytes):
            return x.decode("utf-8", "backslashreplace")
        return x.isoformat() if hasattr(x, "isoformat") else str(x)

    def clean(x):
        if isinstance(x, dict):
            return {str(k): clean(v) for k, v in x.items()}
        if isinstance(x, list):
            return [clean(v) for v in x]
        return None if isinstance(x, float) and not abs(x) < float("inf") else x

    try:
        return json.dumps(value, ensure_ascii=False, default=default, allow_nan=False)
    except (ValueError, TypeError):
        return json.dumps(clean(value), ensure_ascii=False, default=default)


def read_labelled(row: dict, name: dict, columns: Columns, pairs: str) -> tuple[list[dict], set]:
    """chosen and rejected."""
    for key in ("chosen", "rejected"):
        if name[key] is None:
            raise BadRow("missing_column", f"no column {key!r}; the row has {sorted(map(str, row))}")
    margin = row[name["margin"]] if name["margin"] else None
    margin = None if margin != margin else as_number(margin, name["margin"])  # tables write NaN for null
    if margin is not None and margin < 0:
        raise BadRow("negative_margin", f"{name['margin']} {margin}: the rejected answer would be the better one")
    return [read_pair(row, name, name["chosen"], name["rejected"]) | {"margin": margin}], {
        name["chosen"],
        name["rejected"],
        name["margin"],
    }


def read_choice(row: dict, name: dict, columns: Columns, pairs: str) -> tuple[list[dict], set]:
    """Two answers and a choice between them; the choice stays in the metadata."""
    layout = find_choice(row, columns)
    if layout is None:
        raise BadRow("missing_column", f"the row has {sorted(map(str, row))}, not two answers and a choice")
    first, second, choice, how = layout
    chosen, rejected = (first, second) if choice_of(row[choice], how, choice, columns) else (second, first)
    margin = abs(as_number(row[choice], choice)) if how == "sign" else None
    return [read_pair(row, name, chosen, rejected) | {"margin": margin}], {first, second}


def read_summaries(row: dict, name: dict, columns: Columns, pairs: str) -> tuple[list[dict], set]:
    """A post and two summaries (Stiennon et al. 2020); all of it stays in the metadata."""
    info, summaries = row.get("info"), row.get(name["answers"])
    if not isinstance(info, dict) or not isinstance(summaries, list) or len(summaries) != 2:
        raise BadRow("wrong_type", "expected info and two summaries")
    texts = [
        as_text(s.get("text") if isinstance(s, dict) else s, f"{name['answers']}[{i}].text")
        for i, s in enumerate(summaries)
    ]
    better = 0 if choice_of(row.get("choice"), "index", "choice", columns) else 1
    return [
        {
            "prompt": [{"role": "user", "content": summary_prompt(info)}],
            "chosen": texts[better],
            "rejected": texts[1 - better],
            "margin": None,
        }
    ], set()


def read_rated(row: dict, name: dict, columns: Columns, pairs: str) -> tuple[list[dict], set]:
    """One prompt with several rated answers; their scores stay in the metadata."""
    if name["answers"] is None:
        raise BadRow("missing_column", f"no list of answers; the row has {sorted(map(str, row))}")
    prompt = read_prompt(row, name)
    rated, unusable = rated_answers(row, name, prompt)
    if len(rated) < 2 and unusable:
        raise unusable[0]
    made = [{"prompt": [dict(m) for m in prompt], **pair} for pair in pairs_from_scores(rated, pairs)]
    return [*made, *unusable], {
        name["answers"]
    } if pairs == "all" else set()  # answers between the best and the worst stay in the metadata


def read_thumbs(row: dict, name: dict, columns: Columns, pairs: str) -> tuple[list[dict], set]:
    """As rated answers, but up and down have no distance."""
    rows, used = read_rated(row, name, columns, pairs)
    return [pair if isinstance(pair, BadRow) else pair | {"margin": None} for pair in rows], used


def logged_answer(row: dict, name: dict, score: str) -> tuple[list[dict], str, float]:
    """(prompt, answer, score) of a row with one answer. score: `reward`, or `label` for thumbs, which are 1 and 0."""
    prompt = read_prompt(row, name)
    answer = as_answer(row[name["response"]] if name["response"] else None, name["response"] or "response", prompt)
    column = name[score] or score
    value = row.get(column)
    if value is None or score == "label" and value != value:  # tables write a missing label as NaN
        raise BadRow("no_reward", f"{column} is null or missing")
    if score == "reward":
        return prompt, answer, as_number(value, column)
    if thumb(value) is None:
        raise BadRow("wrong_type", f"{column}: expected thumbs, true or false, found {found(value)}")
    return prompt, answer, float(thumb(value))


def read_logged(row: dict, name: dict, columns: Columns, pairs: str, score: str = "reward") -> tuple[list[dict], set]:
    """A logged answer with its reward."""
    prompt, response, reward = logged_answer(row, name, score)
    logprobs = row[name["logprobs"]] if name["logprobs"] else None
    if logprobs is not None:
        if not isinstance(logprobs, list):
            raise BadRow("wrong_type", f"{name['logprobs']}: expected a list of numbers, found {found(logprobs)}")
        logprobs = [as_number(x, f"{name['logprobs']}[{i}]") for i, x in enumerate(logprobs)]
        if None in logprobs:
            raise BadRow("wrong_type", f"{name['logprobs']}: expected numbers, found null")
    return [{"prompt": prompt, "response": response, "reward": reward, "logprobs": logprobs}], {
        name["response"],
        name[score],
        name["logprobs"],
    }


def read_logged_thumb(row: dict, name: dict, columns: Columns, pairs: str) -> tuple[list[dict], set]:
    return read_logged(row, name, columns, pairs, "label")


PAIRED = [
    Shape("preference", name) for name in ("rated answers", "rated rows", "thumbs")
]  # where several pairs can be made of a prompt
READERS = {
    Shape("preference", "chosen and rejected"): read_labelled,
    Shape("preference", "two answers and a choice"): read_choice,
    Shape("preference", "two summaries and a choice"): read_summaries,
    Shape("preference", "rated answers"): read_rated,
    Shape("preference", "rated rows"): read_rated,  # after group_rows
    Shape("preference", "thumbs"): read_thumbs,  # after group_rows
    Shape("trajectories", "logged answers"): read_logged,
    Shape("trajectories", "thumbs"): read_logged_thumb,
    Shape("prompts", "prompts"): read_prompts_row,
}


def convert(row, shape: Shape, columns: Columns, suffix: str = "", pairs: str = "best_worst") -> list["dict | BadRow"]:
    """One raw row -> rows with the columns of the kind, without id and source. Raises BadRow, or has it in the place of one of several.

    Texts stay as they are, besides white space around an answer. Whatever cannot be put together again from the new row
    (that white space, a repeated prompt, turns that were joined) is kept under `_raw` in the metadata.
    """
    if not isinstance(row, dict):
        raise BadRow("wrong_type", f"expected an object with named columns, found {found(row)}")
    name = find_all(row, columns)
    if isinstance(row, TextRow):
        choice = find_choice(row, columns)
        row = untext(
            row, name | ({"answer_a": choice[0], "answer_b": choice[1], "choice": choice[2]} if choice else {})
        )
    rows, used = READERS[shape](row, name, columns, pairs)
    used = used | {name["prompt"], name["system"]} if name["prompt"] not in (None, "turns") else used
    rest = {str(k): v for k, v in row.items() if k not in used}
    raw_prompt = row[name["prompt"]] if name["prompt"] else None
    return [
        out
        if isinstance(out, BadRow)
        else try_finish(out, shape.kind, dict(rest), raw_prompt, suffix, alone=len(rows) == 1)
        for out in rows
    ]


def try_finish(out: dict, kind: str, rest: dict, raw_prompt, suffix: str, alone: bool) -> "dict | BadRow":
    try:
        return finish(out, kind, rest | out.pop("metadata", {}), raw_prompt, suffix)
    except BadRow as bad:
        if alone:
            raise
        return bad


def summary_prompt(info: dict) -> str:
    """Stiennon et al. 2020, table 4: a Reddit post with its title, or a news article."""
    if info.get("article"):
        return as_text(info["article"], "info.article") + "\n\nTL;DR:"
    parts = [as_text(info.get(key), f"info.{key}") for key in ("subreddit", "title", "post")]
    return "SUBREDDIT: r/{}\n\nTITLE: {}\n\nPOST: {}\n\nTL;DR:".format(*parts)


CONTROL = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ufffe\uffff]"
)  # not tab, line ends, or what joins letters and emoji
ANSWERS = {"preference": ("chosen", "rejected"), "trajectories": ("response",), "prompts": ()}


def is_blank(text: str) -> bool:
    """Nothing to see: white space, or characters without a form of their own such as U+200B."""
    return not any(c.isprintable() and not c.isspace() for c in text)


def merge_turns(messages: list[dict]) -> list[dict]:
    """Join neighbouring turns of one role by a blank line: many chat templates refuse them."""
    merged: list[dict] = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"]:
            merged[-1]["content"] = f"{merged[-1]['content']}\n\n{message['content']}"
        else:
            merged.append(dict(message))
    return merged


def finish(out: dict, kind: str, rest: dict, raw_prompt, suffix: str) -> dict:
    """The checks that all shapes share, and the metadata."""
    raw = out.pop("raw", None) or {}
    prompt = merge_turns(out["prompt"])
    if (len(prompt) != len(out["prompt"]) or more_than_messages(raw_prompt)) and "prompt" not in raw:
        raw["prompt"] = raw_prompt if isinstance(raw_prompt, list) else out["prompt"]
    if (
        isinstance(raw_prompt, str)
        and "prompt" not in raw
        and prompt[-1:]
        and raw_prompt != prompt[-1]["content"]
        and is_dialogue(raw_prompt)
    ):
        canonical = raw_prompt == hh_text(out["prompt"]) + "\n\nAssistant:"
        raw |= {"prompt_format": "hh"} if canonical else {"prompt": raw_prompt}
    if not prompt or is_blank(prompt[-1]["content"]) or prompt[-1]["role"] == "system":
        raise BadRow("empty_prompt", "the prompt's last turn is empty, or there is only a system turn")
    if prompt[-1]["role"] == "assistant" and kind != "prompts":
        raise BadRow("no_final_answer", "the prompt ends with an assistant turn, so the answer has no question")
    out["prompt"] = prompt
    for name in ANSWERS[kind]:
        text = out[name]
        if is_blank(text):
            raise BadRow("empty_response", f"{name} is empty")
        if kind == "trajectories":  # its tokens were counted with their white space
            continue
        out[name] = text.strip()
        if out[name] != text and name not in raw:
            raw[name] = text
    if kind == "preference" and out["chosen"] == out["rejected"]:
        raise BadRow("equal_answers", "chosen and rejected are the same text")
    texts = [m["content"] for m in prompt] + [m["role"] for m in prompt] + [out[name] for name in ANSWERS[kind]]
    texts += [out[name] for name in ("reference", "ground_truth") if out.get(name)]
    for text in texts:
        if control := CONTROL.search(text):
            raise BadRow(
                "control_characters",
                f"U+{ord(control.group()):04X} near {text[max(0, control.start() - 20) : control.start()]!r}",
            )
    if suffix:
        prompt[-1]["content"] += suffix
    if raw and "_raw" in rest:
        rest["_raw_column"] = rest.pop("_raw")
    rest |= {"_raw": raw} if raw else {}
    out["metadata"] = to_json(rest) if rest else None
    try:
        for text in [*texts, out["metadata"] or ""]:
            text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRow(
            "broken_text", "half of a character (a lone surrogate), or bytes that are not UTF-8, stand in the text"
        ) from None
    return out


def group_rows(chunks: Iterator[Chunk], shape: Shape, columns: Columns, folder: Path) -> Iterator[Chunk]:
    """Rows of one answer each -> chunks of rows with all answers to one prompt; sorted on disk, by the prompt's hash."""
    parts = 64
    files = [open(folder / f"group-{i:02d}.jsonl", "w+", encoding="utf-8") for i in range(parts)]
    bad: list[tuple[str, BadRow]] = []
    for chunk in chunks:
        for place, row in chunk.rows():
            try:
                if isinstance(row, BadRow):
                    raise row
                if not isinstance(row, dict):
                    raise BadRow("wrong_type", f"expected an object with named columns, found {found(row)}")
                name = find_all(row, columns)
                row = untext(row, name) if isinstance(row, TextRow) else row
                prompt, answer, score = logged_answer(row, name, "label" if shape.name == "thumbs" else "reward")
                if not answer.strip():
                    raise BadRow("empty_response", f"{name['response']} is empty")
                key = to_json(merge_turns(prompt))
                key.encode("utf-8"), answer.encode("utf-8")
                rest = to_json({str(k): v for k, v in row.items() if k not in (name["prompt"], name["response"])})
                part = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % parts
                files[part].write(json.dumps([place, key, answer, score, rest]) + "\n")
            except BadRow as error:
                bad.append((place, error))
            except UnicodeEncodeError:
                bad.append((place, BadRow("broken_text", "a lone surrogate, half of a character, stands in the text")))
            if len(bad) == CHUNK_ROWS:
                yield Chunk("", 1, bad)
                bad = []
        yield Chunk("", 1, [], chunk.share)  # moves the progress bar
    if bad:
        yield Chunk("", 1, bad)
    for file in files:
        groups: dict[str, list] = {}
        file.seek(0)
        for line in file:
            place, key, answer, score, rest = json.loads(line)
            groups.setdefault(key, []).append((place, answer, score, json.loads(rest)))
        rows = [
            (
                "+".join(place for place, *_ in group),
                {
                    "prompt": json.loads(key),
                    "answers": [a for _, a, _, _ in group],
                    "scores": [s for _, _, s, _ in group],
                    "rows": [r for *_, r in group],
                },
            )
            for key, group in groups.items()
        ]
        for start in range(0, len(rows), CHUNK_ROWS):
            yield Chunk("", 1, rows[start : start + CHUNK_ROWS])
        file.close()
        os.unlink(file.name)

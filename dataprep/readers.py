"""What a row of each shape says: its prompt, its answers, and which of them is the better one."""

import json
import re
from collections import Counter
from contextlib import suppress

from dataprep.messages import (
    as_answer,
    as_messages,
    as_number,
    as_text,
    found,
    hh_text,
    is_blank,
    is_conversation,
    merge_turns,
    more_than_messages,
    parse_hh,
    to_json,
)
from dataprep.shapes import SCORE_KEYS, Columns, Shape, find_choice, thumb
from utils.rewards import boxed
from utils.rows import BadRow

MOST_PAIRS = 100_000  # of one prompt
TEXT_KEYS = ("response", "text", "content", "answer", "completion")


def read_prompt(row: dict, name: dict) -> list[dict]:
    """The prompt column, with what belongs to it: a system turn, and the input of an instruction."""
    column = name["prompt"]
    value = row[column] if column else None
    if isinstance(value, dict) and "full_text" in value:
        value = value["full_text"]  # WebGPT: a question with its source
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
                f"{column}: expected a, b or tie, found {found(value)}; "
                "--columns.choice_a and choice_b name the values",
            )
        return last == "a"
    number = as_number(value, column)
    if how == "one or two":
        if number not in (1, 2):
            raise BadRow("tie", f"{column}: {found(value)} is neither 1 nor 2")
        return number == 1
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
    """(answer, score, what else its object says) of each rated answer, and those that cannot be used.

    A rank counts downwards.
    """
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
    ordered, n = sorted(rated, key=lambda item: -item[1]), len(rated)
    if not n or ordered[0][1] == ordered[-1][1]:
        raise BadRow("tie" if n > 1 else "no_counterpart", f"{n} answers, no two with different scores")
    if mode == "best_worst":
        pairs = [best_and_worst(ordered)]
    else:
        count = (n * n - sum(k * k for k in Counter(item[1] for item in rated).values())) // 2
        if count > MOST_PAIRS:
            raise BadRow(
                "too_many_pairs", f"{n} answers to one prompt make {count} pairs; --pairs best_worst makes one"
            )
        pairs = [(a, b) for i, a in enumerate(ordered) for b in ordered[i + 1 :] if a[1] > b[1]]
    more = [{"metadata": {"chosen": a[2], "rejected": b[2]}} if a[2] or b[2] else {} for a, b in pairs]
    return [
        {"chosen": a[0], "rejected": b[0], "margin": float(f"{a[1] - b[1]:.9g}"), **m}
        for (a, b), m in zip(pairs, more)
    ]


def best_and_worst(ordered: list[tuple[str, float, dict]]) -> tuple[tuple, tuple]:
    """The pair with the largest difference among answers that fall by score; texts can be equal though their scores
    are not. Only the best place of the first two texts and the worst place of the last two can be in it."""
    best, worst = {}, {}
    for item in ordered:
        best.setdefault(item[0].strip(), item)
    for item in sorted(ordered, key=lambda item: item[1]):
        worst.setdefault(item[0].strip(), item)
    pairs = [(a, b) for s, a in list(best.items())[:2] for t, b in list(worst.items())[:2] if s != t and a[1] > b[1]]
    return max(pairs, key=lambda pair: pair[0][1] - pair[1][1], default=(ordered[0], ordered[-1]))


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


def summary_prompt(info: dict) -> str:
    """Stiennon et al. 2020, table 4: a Reddit post with its title, or a news article."""
    if info.get("article"):
        return as_text(info["article"], "info.article") + "\n\nTL;DR:"
    parts = [as_text(info.get(key), f"info.{key}") for key in ("subreddit", "title", "post")]
    return "SUBREDDIT: r/{}\n\nTITLE: {}\n\nPOST: {}\n\nTL;DR:".format(*parts)


# ------------------------------------------------------------------------------------------------ each shape


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
    value, margin = row[choice], None
    if how in ("scores", "one-hot"):  # two columns, in which the better answer has more
        other = {"score_0": "score_1", "winner_model_a": "winner_model_b"}[choice]
        margin = as_number(value or 0, choice) - as_number(row[other] or 0, other)
        if margin == 0:
            raise BadRow("tie", f"{choice} and {other} are equal")
        chosen, rejected = (first, second) if margin > 0 else (second, first)
        margin = abs(margin) if how == "scores" else None
    else:
        chosen, rejected = (first, second) if choice_of(value, how, choice, columns) else (second, first)
        margin = abs(as_number(value, choice)) if how == "sign" else None
    if how == "one-hot":
        row = row | {key: only_turn(row[key], key) for key in (name["prompt"], first, second) if key}
    return [read_pair(row, name, chosen, rejected) | {"margin": margin}], {first, second}


def only_turn(value, name: str):
    """The Arena's files hold the turns of a conversation as a JSON list of texts."""
    if isinstance(value, str) and value.startswith("["):
        with suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, list) and value and not isinstance(value[0], dict):
        if len(value) > 1:
            raise BadRow("different_prompts", f"{name} has {len(value)} turns, whose earlier answers differ")
        value = value[0]
    return value


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
    # answers between the best and the worst stay in the metadata; of all pairs each has only what is its own
    return [*made, *unusable], {name["answers"], name["scores"]} if pairs == "all" else set()


def read_ranked(row: dict, name: dict, columns: Columns, pairs: str) -> tuple[list[dict], set]:
    """A list of answers without scores, the best first, which says nothing of their distance."""
    column = name["answers"]
    if column is None or not isinstance(row[column], list):
        raise BadRow("wrong_type", f"{column or 'answers'}: expected a list of answers, the best first")
    scores = [-i for i in range(len(row[column]))]
    rows, used = read_rated(row | {"_scores": scores}, name | {"scores": "_scores"}, columns, pairs)
    return [pair if isinstance(pair, BadRow) else pair | {"margin": None} for pair in rows], used


def read_grouped(row: dict, name: dict, columns: Columns, pairs: str) -> tuple[list[dict], set]:
    """Rows of one answer each, brought together by `group_rows`: a pair keeps what its own two rows say."""
    rated = list(zip(row["answers"], row["scores"], row["rows"]))
    made = pairs_from_scores(rated, pairs)
    for pair in made:
        pair["prompt"] = [dict(m) for m in row["prompt"]]
        pair["metadata"] = {"rows": list(pair["metadata"].values())}
    return made, {"answers", "scores", "rows"}


def read_thumbs(row: dict, name: dict, columns: Columns, pairs: str) -> tuple[list[dict], set]:
    """As grouped rows, but up and down have no distance."""
    rows, used = read_grouped(row, name, columns, pairs)
    return [pair | {"margin": None} for pair in rows], used


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
        if isinstance(out[key], float) and out[key].is_integer():
            out[key] = int(out[key])  # tables write 42.0 for 42 where a cell of the column is null
        if isinstance(out[key], bytes):
            out[key] = as_text(out[key], key)
        elif out[key] is not None and not isinstance(out[key], str):
            out[key] = to_json(out[key])
    return [out], used


READERS = {
    Shape("preference", "chosen and rejected"): read_labelled,
    Shape("preference", "two answers and a choice"): read_choice,
    Shape("preference", "two summaries and a choice"): read_summaries,
    Shape("preference", "rated answers"): read_rated,
    Shape("preference", "ranked answers"): read_ranked,
    Shape("preference", "rated rows"): read_grouped,
    Shape("preference", "thumbs"): read_thumbs,
    Shape("trajectories", "logged answers"): read_logged,
    Shape("trajectories", "thumbs"): read_logged_thumb,
    Shape("prompts", "prompts"): read_prompts_row,
}

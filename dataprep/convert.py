"""Raw rows of one shape -> rows of one kind: the checks that all shapes share, and the metadata."""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from dataprep.messages import (
    CONTROL,
    found,
    hh_text,
    is_blank,
    is_dialogue,
    merge_turns,
    more_than_messages,
    refuse_tools_and_media,
    to_json,
)
from dataprep.readers import READERS, logged_answer
from dataprep.shapes import ANSWERS, Columns, Shape, find_all, find_choice
from dataprep.sources import Chunk
from utils.rows import CHUNK_ROWS, BadRow, TextRow, bad_row


def convert(row, shape: Shape, columns: Columns, suffix: str = "", pairs: str = "best_worst") -> list["dict | BadRow"]:
    """One raw row -> rows with the columns of the kind, without id and source. A row that cannot be used is raised as
    BadRow where it is the only one, and stands as BadRow among several.

    Texts stay as they are, besides white space around an answer. Whatever cannot be put together again from the new
    row (that white space, a repeated prompt, turns that were joined) is kept under `_raw` in the metadata.
    """
    if not isinstance(row, dict):
        raise BadRow("wrong_type", f"expected an object with named columns, found {found(row)}")
    name = find_all(row, columns)
    refuse_tools_and_media({key: value for key, value in row.items() if key not in name.values()})
    choice = find_choice(row, columns)
    row = untext(row, name | ({"answer_a": choice[0], "answer_b": choice[1], "choice": choice[2]} if choice else {}))
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


NOT_TEXT = ("margin", "reward", "label", "logprobs", "scores", "answers", "choice")
MESSAGES = re.compile(r'\s*(\[\s*)?\{\s*"')


def untext(row: dict, name: dict) -> dict:
    """Messages that stand as JSON text, in any format; in one without nesting also numbers and lists, and what such a
    format has for null: nothing, or NaN."""
    out = {k: None if v == "" or v != v else v for k, v in row.items()} if isinstance(row, TextRow) else dict(row)
    for key, column in name.items():
        cell = row.get(column)
        number = isinstance(row, TextRow) and key in NOT_TEXT
        if not isinstance(cell, str) or not (number or MESSAGES.match(cell)):
            continue
        try:
            value = json.loads(cell)
        except ValueError:
            continue
        if number or is_messages(value):
            out[column] = value
    return out


def is_messages(value) -> bool:
    if isinstance(value, dict):
        return {"role", "content"} <= set(value) or {"from", "value"} <= set(value)
    return (
        isinstance(value, list)
        and value != []
        and all(isinstance(v, dict) and ("role" in v or "from" in v) for v in value)
    )


def try_finish(out: dict, kind: str, rest: dict, raw_prompt, suffix: str, alone: bool) -> "dict | BadRow":
    try:
        return finish(out, kind, rest | out.pop("metadata", {}), raw_prompt, suffix)
    except BadRow as bad:
        if alone:
            raise
        return bad


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
        sides = raw.get("chosen"), raw.get("rejected")
        if sides[0] != sides[1] and any(map(more_than_messages, sides)):
            raise BadRow("equal_text", "chosen and rejected differ only in what stands beside their text")
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
    """Rows of one answer each -> chunks of rows with all answers to one prompt, sorted by its hash in `folder`."""
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
                refuse_tools_and_media({key: value for key, value in row.items() if key not in name.values()})
                row = untext(row, name)
                prompt, answer, score = logged_answer(row, name, "label" if shape.name == "thumbs" else "reward")
                if not answer.strip():
                    raise BadRow("empty_response", f"{name['response']} is empty")
                key = to_json(merge_turns(prompt))
                key.encode("utf-8"), answer.encode("utf-8")
                rest = to_json({str(k): v for k, v in row.items() if k not in (name["prompt"], name["response"])})
                part = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % parts
                files[part].write(json.dumps([place, key, answer, score, rest]) + "\n")
            except UnicodeEncodeError:
                bad.append((place, BadRow("broken_text", "a lone surrogate, half of a character, stands in the text")))
            except Exception as error:
                bad.append((place, bad_row(error)))
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
                "+".join([place for place, *_ in group[:4]] + [f"{len(group) - 4} more"] * (len(group) > 4)),
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

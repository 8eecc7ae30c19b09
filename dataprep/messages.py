"""Texts and messages as people write them: HH dialogues, ShareGPT turns, one message, a list of them."""

import json
import re
from decimal import Decimal

from utils.rows import BadRow

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
TOOLS = ("tools", "functions", "tool_calls", "function_call")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
REASONING = ("reasoning_content", "reasoning", "thinking")
HH_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")
HELPSTEER_TURN = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")
CONTROL = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ufffe\uffff]"
)  # not tab, line ends, or what joins letters and emoji


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


def refuse_tools_and_media(columns: dict) -> None:
    """Raise BadRow where a row's columns hold tools, pictures or sound: its text alone would say something else."""
    for key, value in columns.items():
        text = value.strip() if isinstance(value, str) else ""
        held = bool(value) and isinstance(value, (list, dict, bytes)) or text not in ("", "[]", "{}")
        if held and (key in MEDIA or key in TOOLS and (not text or text[0] in "[{")):
            raise BadRow(
                "tools_or_media", f"{key}: the text alone would say something else; drop the column if it does not"
            )


def beside_text(row: dict) -> set[str]:
    """What messages of a row say besides role and text, such as a name: it is kept in the metadata alone."""
    known = {"role", "content", "from", "value", *REASONING}
    columns = [value if isinstance(value, list) else [value] for value in row.values()]
    turns = [m for column in columns for m in column if isinstance(m, dict) and ("role" in m or "from" in m)]
    return {
        str(key) for m in turns for key, value in m.items() if key not in known and value not in (None, "", [], {})
    }


def as_messages(value, name: str) -> list[dict]:
    """Text, one message or a list of messages (role and content, or from and value) -> [{role, content}]."""
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
        place = f"{name}[{i}]"
        if any(message.get(key) for key in (*TOOLS, *MEDIA)):
            raise BadRow("wrong_type", f"{place}: expected a message of text, found tool calls or images")
        if isinstance(content, list) and content and all(isinstance(p, dict) for p in content):
            if all(isinstance(p.get("text"), str) for p in content):
                content = "".join(part["text"] for part in content)
            elif found_parts := [str(p["type"]) for p in content if p.get("type") not in (None, "text")]:
                raise BadRow("tools_or_media", f"{place}: expected text alone, found {', '.join(found_parts)[:80]}")
        content = as_text(content, f"{place}.{keys[1]}")
        role = ROLES.get(role.lower(), role)
        thoughts = next((message[key] for key in REASONING if isinstance(message.get(key), str)), "")
        if role == "assistant" and thoughts.strip() and "<think>" not in content:
            content = f"<think>\n{thoughts.strip()}\n</think>\n\n{content.lstrip()}"  # as most templates write it
        messages.append({"role": role, "content": content})
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


def more_than_messages(value) -> bool:
    """Whether messages say more than role and text: a name, a weight, content in parts."""
    messages = value if isinstance(value, list) else [value] if isinstance(value, dict) else []
    return any(
        isinstance(m, dict) and (len(m) > 2 or not isinstance(m.get("content", m.get("value")), str)) for m in messages
    )


def merge_turns(messages: list[dict]) -> list[dict]:
    """Join neighbouring turns of one role by a blank line: many chat templates refuse them."""
    merged: list[dict] = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"]:
            merged[-1]["content"] = f"{merged[-1]['content']}\n\n{message['content']}"
        else:
            merged.append(dict(message))
    return merged


def is_blank(text: str) -> bool:
    """Nothing to see: white space, or characters without a form of their own such as U+200B."""
    return not any(c.isprintable() and not c.isspace() for c in text)


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

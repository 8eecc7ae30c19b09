"""Reading what prepare_data.py wrote, and the functions that turn a dialogue into token ids: all stages use these."""

import datetime
import json
import os
import re
import secrets
import sys
from functools import lru_cache
from pathlib import Path

from utils.config import UserError

TEMPLATE_DATE = datetime.datetime(2024, 7, 26)  # else one text would have other ids, and another score, every day
COLUMNS = {
    "preference": ("id", "source", "prompt", "chosen", "rejected", "margin", "metadata"),
    "prompts": ("id", "source", "prompt", "ground_truth", "reference", "metadata"),
    "trajectories": ("id", "source", "prompt", "response", "reward", "logprobs", "metadata"),
}


# --------------------------------------------------------------------------------------- dialogues -> token ids


def encode_dialogues(tokenizer, dialogues: list[list[dict]]) -> list[list[int]]:
    """Ids of each dialogue: chat template with the assistant's header, and exactly one bos for models that have one.

    Neighbouring texts never meet inside a token: a response is encoded apart from its prompt, everywhere. Control
    tokens come from the template alone: a message that holds the text of one keeps it as text. A template
    that prints the date always gets one and the same.
    """
    answer_opening(tokenizer, str(tokenizer.chat_template))  # says what is wrong with the template
    texts = render(tokenizer, dialogues)
    rows = tokenizer(texts, add_special_tokens=False, return_attention_mask=False).input_ids
    control = control_tokens(tokenizer, str(tokenizer.chat_template))
    for i, dialogue in enumerate(dialogues):
        if any(control.touches(text) for message in dialogue for text in message.values() if isinstance(text, str)):
            rows[i] = control.encode(texts[i], marked_text(tokenizer, control, dialogue, texts[i]))
    bos = tokenizer.bos_token_id
    if bos is not None and tokenizer("x").input_ids[:1] == [bos]:
        rows = [ids if ids[:1] == [bos] else [bos, *ids] for ids in rows]
    return rows


def encode_responses(tokenizer, texts: list[str]) -> list[list[int]]:
    """Finished responses as ids: the text, in which special tokens count as plain text, and eos.

    What the template already wrote at the prompt's end, such as <think>, is not written again.
    """
    texts = [own_text(tokenizer, text) for text in texts]
    rows = tokenizer(texts, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False).input_ids
    control = control_tokens(tokenizer, str(tokenizer.chat_template), answers=True)
    for i, text in enumerate(texts):
        if control.pattern.search(text):
            rows[i] = control.encode(text, MARK * len(text))
    return [[*ids, tokenizer.eos_token_id] for ids in rows]


def encode_prompt(tokenizer, messages: list[dict]) -> list[int]:
    """One dialogue as ids; see `encode_dialogues`."""
    return encode_dialogues(tokenizer, [messages])[0]


def encode_response(tokenizer, text: str) -> list[int]:
    """One finished response as ids; see `encode_responses`."""
    return encode_responses(tokenizer, [text])[0]


def decode_response(tokenizer, ids: list[int]) -> str:
    """Response ids -> text without special tokens."""
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def render(tokenizer, dialogue: list, header: bool = True):
    """The chat template's text of one dialogue, or of each of a list."""
    return tokenizer.apply_chat_template(
        dialogue, tokenize=False, add_generation_prompt=header, strftime_now=TEMPLATE_DATE.strftime
    )


@lru_cache(16)
def answer_opening(tokenizer, template: str) -> re.Pattern | None:
    """What finds the text that `template`, the tokenizer's, writes at a prompt's end as the beginning of the answer.

    Prints a line if answers cannot follow such prompts well.
    """
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "\ue001"}
    try:
        turn, prompt = render(tokenizer, [user], header=False), render(tokenizer, [user])
        dialogue = render(tokenizer, [user, answer, user], header=False)
    except Exception:  # templates raise their own errors; the rows will show
        return None
    between = dialogue.startswith(turn) and "\ue001" in dialogue
    header = dialogue[len(turn) : dialogue.index("\ue001")] if between else ""
    wrong = ""
    if prompt == turn and header.strip():
        wrong = f"writes no generation prompt, so answers do not follow the header {header!r} as in its dialogues"
    elif tokenizer(prompt, add_special_tokens=False).input_ids[-1:] == [tokenizer.eos_token_id]:
        wrong = f"ends a prompt with the eos token {tokenizer.eos_token}, after which models are used to stop"
    if wrong and int(os.environ.get("RANK", 0)) == 0:
        print(show(f"warning: the chat template of {tokenizer.name_or_path or 'the tokenizer'} {wrong}"), flush=True)
    opening = prompt.removeprefix(turn + header) if prompt.startswith(turn + header) else ""
    text = opening.strip()
    if not text:
        return None
    end = opening[len(opening.rstrip()) :]
    return re.compile(rf"\s*{re.escape(text)}" + r"(?!\w)" * text[-1].isalnum() + f"(?:{re.escape(end)})?")


def own_text(tokenizer, text: str) -> str:
    """A response without the beginning that the template writes at the prompt's end."""
    opening = answer_opening(tokenizer, str(tokenizer.chat_template))
    return text[match.end() :] if opening and (match := opening.match(text)) else text


# ----------------------------------------------------------------------- text of the data is no control token

MARK = "\ue000"  # stands for a character of the data that must not become a part of a control token


class ControlTokens:
    """Tokens that texts of the data must not become, and a tokenizer that knows them by other names."""

    def __init__(self, tokenizer, ids: dict[str, int]):
        self.tokenizer, self.ids, self.backend = tokenizer, ids, None
        self.names = {token: f"{MARK}{secrets.token_hex(8)}{MARK}" for token in ids}
        self.pattern = re.compile("|".join(map(re.escape, sorted(ids, key=len, reverse=True))) or r"(?!)")
        # what the end of a text and the template, or the template and the start of a text, could be one of
        self.starts = {token[:n] for token in ids for n in range(1, len(token))}
        self.ends = {token[n:] for token in ids for n in range(1, len(token))}
        self.longest = max(map(len, ids), default=0)
        normalizer = tokenizer.backend_tokenizer.normalizer if tokenizer.is_fast else None
        after = normalizer and any(tokenizer.added_tokens_decoder[i].normalized for i in ids.values())
        self.normalize = normalizer.normalize_str if after else str  # some are looked for after it

    def touches(self, text: str) -> bool:
        """Whether a text holds a control token, or the half of one at its start or end."""
        return bool(self.pattern.search(text) or self.pattern.search(self.normalize(text)) or self.halves(text))

    def halves(self, text: str) -> list[tuple[int, int]]:
        """(start, end) of a text's first and last characters that can be half of a token, white space aside."""
        first, last = len(text) - len(text.lstrip()), len(text.rstrip())
        sizes = range(min(self.longest, last - first), 0, -1)
        left = next(([(first, first + n)] for n in sizes if text[first : first + n] in self.ends), [])
        return left + next(([(last - n, last)] for n in sizes if text[last - n : last] in self.starts), [])

    def encode(self, text: str, marked: str) -> list[int]:
        """Ids of a text in which only what `marked`, of the same length, still shows can be a control token."""
        parts, end = [], 0
        for match in self.pattern.finditer(marked):
            parts += [text[end : match.start()], match[0]]
            end = match.end()
        parts.append(text[end:])
        if self.tokenizer.is_fast:
            self.backend = self.backend or renamed(self.tokenizer, self.names)
            parts[1::2] = [self.names[token] for token in parts[1::2]]
            return self.backend.encode("".join(parts), add_special_tokens=False).ids
        ids = [self.tokenizer(t, add_special_tokens=False, split_special_tokens=True).input_ids for t in parts[::2]]
        for i, token in enumerate(parts[1::2]):
            ids[i].append(self.ids[token])
        return [i for part in ids for i in part]


@lru_cache(16)
def control_tokens(tokenizer, template: str, answers: bool = False) -> ControlTokens:
    """All special tokens, and of the other added ones those that `template` uses or that look like its marks.

    Of these others an answer may hold what stands in no finished turn: <think> or <tool_call> is the model's to write.
    """
    used = template
    if answers:
        turns = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
        try:
            used = render(tokenizer, turns, header=False)
        except Exception:  # templates raise their own errors
            used = ""
    ids = {}
    for i, token in tokenizer.added_tokens_decoder.items():
        text = token.content
        mark = text in used and re.search(r"[^\w\s]", text) or not answers and text.startswith(("<|", "<\uff5c"))
        if text.strip() and (token.special or mark):
            ids[text] = i
    return ControlTokens(tokenizer, ids)


def marked_text(tokenizer, control: ControlTokens, dialogue: list[dict], text: str) -> str:
    """A dialogue's rendered `text` with MARK in place of what its messages hold of control tokens.

    Where the template looks at such a piece itself, as some do at </think>, what it makes of it is its own.
    """
    spans = []
    for i, message in enumerate(dialogue):
        for key, value in message.items():
            if isinstance(value, str):
                found = [match.span() for match in control.pattern.finditer(value)]
                if key != "role" or not value.isalnum():  # <| and |> around a role's name are the template's
                    found += control.halves(value)
                spans += [(i, key, *span) for span in found]

    def marked(chosen: list) -> str:
        """The text with these spans marked, or nothing if it is another one then."""
        messages = [dict(message) for message in dialogue]
        for i, key, start, end in chosen:
            value = messages[i][key]
            messages[i][key] = value[:start] + re.sub(r"\S", MARK, value[start:end]) + value[end:]
        try:
            out = render(tokenizer, messages)
        except Exception:  # the template refuses it, so it looked
            return ""
        return out if len(out) == len(text) and all(b in (a, MARK) for a, b in zip(text, out)) else ""

    return marked(spans) or marked([span for span in spans if marked([span])]) or text


def renamed(tokenizer, names: dict[str, str]):
    """A copy of the fast tokenizer inside `tokenizer` that knows some tokens by other names alone."""
    from tokenizers import Tokenizer

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state |= {"truncation": None, "padding": None, "post_processor": None}
    for token in state["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = state["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): i for token, i in model["vocab"].items()}
    else:  # Unigram: pieces with their scores
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
        model["merges"] = [pair for pair in pairs if not names.keys() & {*pair, "".join(pair)}]
    return Tokenizer.from_str(json.dumps(state))


# ------------------------------------------------------------------------------------- folders of stage 1


def load_rows(folder: str, split: str, kinds: tuple[str, ...]) -> list[dict]:
    """Rows of one split of a folder that prepare_data.py wrote.

    split: `train` or `test`. Raises UserError when the folder is missing, of another kind, or has no such rows.
    """
    import pyarrow.parquet

    return [row for file in split_files(folder, split, kinds) for row in pyarrow.parquet.read_table(file).to_pylist()]


def load_prompts(folder: str, split: str) -> list[dict]:
    """Rows of one split, of any kind, each prompt once."""
    unique = {}
    for row in load_rows(folder, split, ("prompts", "preference", "trajectories")):
        unique.setdefault(json.dumps(row["prompt"]), row)
    return list(unique.values())


def folder_kind(folder: str) -> str:
    """`preference`, `prompts` or `trajectories`, by the columns of the folder's files."""
    import pyarrow.parquet

    file = next(iter(sorted(Path(folder).glob("*.parquet"))), None)
    if file is None:
        raise UserError(f"data folder {folder} has no .parquet files; prepare_data.py writes them")
    try:
        names = set(pyarrow.parquet.read_schema(file).names)
    except Exception as error:
        raise UserError(f"{file} is not a readable Parquet file ({error}); run prepare_data.py again") from None
    for kind, columns in COLUMNS.items():
        if set(columns) <= names:
            return kind
    raise UserError(f"{file} has columns {sorted(names)}, which no kind of prepare_data.py has")


def encode_prompts(
    tokenizer, rows: list[dict], max_length: int, response_length: int, positions: int | None
) -> list[list[int]]:
    """Prompt ids of rows; a row that leaves no room for the response in the model's positions is an error."""
    prompts = [encode_prompt(tokenizer, row["prompt"]) for row in rows]
    for row, ids in zip(rows, prompts):
        if len(ids) > max_length:
            raise UserError(
                f"row {row['id']}: its prompt has {len(ids)} tokens, more than max_prompt_length {max_length}; "
                "prepare the data with this model's tokenizer and limit"
            )
        if positions is not None and len(ids) + response_length > positions:
            raise UserError(
                f"row {row['id']}: prompt {len(ids)} + response {response_length} tokens exceed the model's "
                f"{positions} positions; lower max_response_length or prepare the data with a lower max_prompt_length"
            )
    return prompts


def show(text: str) -> str:
    """Text that any console can print. Control characters, which could steer it, are escaped, save \\n and \\t."""
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", lambda m: ascii(m[0])[1:-1], text)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def split_files(folder: str, split: str, kinds: tuple[str, ...]) -> list[str]:
    """Files of one split of a folder that prepare_data.py wrote; UserError as for `load_rows`."""
    import pyarrow.parquet

    if not Path(folder).is_dir():
        raise UserError(f"data folder {folder} does not exist; prepare_data.py writes one")
    files = [str(file) for file in sorted(Path(folder).glob(f"{split}-*.parquet"))]
    if not files:
        raise UserError(f"data folder {folder} has no {split}-*.parquet; prepare_data.py writes it")
    kind = folder_kind(folder)
    if kind not in kinds:
        raise UserError(f"data folder {folder} holds {kind}; this needs {' or '.join(kinds)} (prepare_data.py --kind)")
    if not any(pyarrow.parquet.read_metadata(file).num_rows for file in files):
        raise UserError(f"data folder {folder} has no {split} rows; see its report.json")
    return files

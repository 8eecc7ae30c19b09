"""Reading what prepare_data.py wrote, and the functions that turn a dialogue into token ids: all stages use these."""

import json
from pathlib import Path

from utils.config import UserError

COLUMNS = {
    "preference": ("id", "source", "prompt", "chosen", "rejected", "margin", "metadata"),
    "prompts": ("id", "source", "prompt", "ground_truth", "reference", "metadata"),
    "trajectories": ("id", "source", "prompt", "response", "reward", "logprobs", "metadata"),
}


def encode_dialogues(tokenizer, dialogues: list[list[dict]]) -> list[list[int]]:
    """Ids of each dialogue: chat template with the assistant's header, and exactly one bos for models that have one.

    Neighbouring texts never meet inside a token: a response is encoded apart from its prompt, everywhere.
    """
    texts = tokenizer.apply_chat_template(dialogues, tokenize=False, add_generation_prompt=True)
    rows = tokenizer(texts, add_special_tokens=False, return_attention_mask=False).input_ids
    bos = tokenizer.bos_token_id
    if bos is not None and tokenizer("x").input_ids[:1] == [bos]:
        rows = [ids if ids[:1] == [bos] else [bos, *ids] for ids in rows]
    return rows


def encode_responses(tokenizer, texts: list[str]) -> list[list[int]]:
    """Finished responses as ids: the text, in which special tokens count as plain text, and eos."""
    rows = tokenizer(texts, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False).input_ids
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
    import re
    import sys

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

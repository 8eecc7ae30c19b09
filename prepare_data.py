"""Stage 1: raw preferences, prompts or logged trajectories -> a Parquet folder and a data report.

    python prepare_data.py --source data/demo/preferences.jsonl --tokenizer MODEL --output_dir out/data
    python prepare_data.py --config configs/gsm8k_data.yaml --source openai/gsm8k --hub.name main

Reads JSON, JSON lines (.gz too), Parquet, folders and globs of these, and hub names. Each row's shape is
recognised: HH dialogues, prompt with two answers as text or messages, whole conversations on both sides,
GSM8K, prompts with or without a known answer, and prompt-response-reward rows. Rows that cannot be used are
dropped and counted by reason; lengths are measured in tokens after the chat template.
"""

import glob
import gzip
import hashlib
import json
import random
import re
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from utils.config import UserError, open_output_dir, record_run, run_stage, write_json
from utils.data import COLUMNS, encode_prompt, encode_response, show
from utils.tracking import progress_bar

ROWS_PER_SHARD = 100_000
EXAMPLES_PER_REASON = 3
SIDECARS = ("report.json", "run.json", "state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")  # about data
SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")


@dataclass(frozen=True)
class Columns:
    """Names of your columns, where they are not the usual ones."""

    prompt: str | None = None
    """text, or a list of {role, content} messages; also found: question, instruction"""
    chosen: str | None = None
    """the preferred answer"""
    rejected: str | None = None
    """the other answer"""
    margin: str | None = None
    """by how much chosen is better, in reward units"""
    response: str | None = None
    """the logged answer; also found: completion, answer"""
    reward: str | None = None
    """the logged answer's reward"""
    logprobs: str | None = None
    """one log-probability (nats) a response token, from the policy that wrote it"""
    ground_truth: str | None = None
    """the right final answer, for rule rewards"""
    reference: str | None = None
    """a written reference answer"""


@dataclass(frozen=True)
class Hub:
    """Where in a hub dataset to read."""

    name: str | None = None
    """configuration of the dataset, such as `main`"""
    data_dir: str | None = None
    """folder of the dataset, such as `harmless-base`"""
    split: str | None = None
    """default: train"""
    revision: str | None = None
    """commit or tag, for runs that can be repeated"""


@dataclass(frozen=True)
class DataConfig:
    source: str | list[str]
    """files, folders, globs or hub names"""
    tokenizer: str
    """model whose tokenizer and chat template measure the lengths: a folder, a .gguf file or a hub name"""
    output_dir: str
    """folder to write"""
    kind: Literal["preference", "prompts", "trajectories"] | None = None
    """what the rows are; null = detected from the first row, and printed"""
    max_prompt_length: int = 512
    """tokens, inclusive; rows with a longer prompt are dropped"""
    max_response_length: int = 256
    """tokens with eos, inclusive; rows with a longer answer are dropped"""
    eval_fraction: float = 0.05
    """share of the prompts that becomes the test split; a prompt is never in both"""
    prompt_suffix: str = ""
    """appended to the last user turn, for example an instruction on the answer's form"""
    on_bad_row: Literal["skip", "error"] = "skip"
    """skip and count a row that cannot be used, or stop at the first"""
    exclude: str | list[str] | None = None
    """JSONL files of objects with an `id` or a `prompt`, such as a PPO run's suspicious.jsonl: those rows are left out"""
    seed: int = 0
    """decides which prompts are held out"""
    overwrite: bool = False
    """replace the output of an earlier run"""
    columns: Columns = field(default_factory=Columns)
    hub: Hub = field(default_factory=Hub)


class BadRow(Exception):
    """A row that cannot be used: (reason to count it under, detail)."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason)
        self.reason, self.detail = reason, detail


# ---------------------------------------------------------------------------------------------------- reading


def read_source(source: str, hub: Hub) -> Iterator[tuple[str, object]]:
    """Yield (place, row) for each row of a source; a broken row yields its BadRow instead."""
    path = Path(source)
    if path.is_dir():
        files = sorted(str(f) for f in path.rglob("*") if f.name.endswith(SUFFIXES) and f.name not in SIDECARS)
        if not files:
            raise UserError(f"source folder {source} has no {', '.join(SUFFIXES)} files")
    elif path.is_file():
        files = [source]
    else:
        files = sorted(glob.glob(source, recursive=True))
    if files:
        for file in files:
            yield from read_file(file)
    elif re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) and not source.endswith(SUFFIXES):
        yield from read_hub(source, hub)
    else:
        raise UserError(f"source {source} does not exist, and no file matches it")


def read_file(file: str) -> Iterator[tuple[str, object]]:
    if file.endswith(".parquet"):
        import pyarrow.parquet

        try:
            number = 0
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches(1000):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}:{number}", row
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(f"{file}: not a readable Parquet file ({' '.join(str(error).split())})") from None
        return
    if not file.endswith(SUFFIXES):
        raise UserError(f"{file}: unknown file type; known are {', '.join(SUFFIXES)}")
    open_file = gzip.open if file.endswith(".gz") else open
    try:
        with open_file(file, "rb") as stream:
            first = stream.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
        with open_file(file, "rb") as stream:
            if first == b"[":
                yield from read_json_array(file, stream.read())
            else:
                yield from read_json_lines(file, stream)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{file}: cannot be read ({error})") from None


def read_json_array(file: str, data: bytes) -> Iterator[tuple[str, object]]:
    try:
        rows = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 at byte {error.start}; convert the file") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{file}:{error.lineno}:{error.colno}: {error.msg}; a JSON array must be whole") from None
    for number, row in enumerate(rows, 1):
        yield f"{file}:row {number}", row


def read_json_lines(file: str, stream) -> Iterator[tuple[str, object]]:
    """Lines end at \\n alone, so that U+2028 inside a text does not split a row."""
    for number, line in enumerate(stream, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            if text:
                yield f"{file}:{number}", json.loads(text)
        except UnicodeDecodeError as error:
            yield f"{file}:{number}", BadRow("broken_row", f"not UTF-8 at byte {error.start + 1}")
        except json.JSONDecodeError as error:
            yield f"{file}:{number}:{error.colno}", BadRow("broken_row", error.msg)


def read_hub(name: str, hub: Hub) -> Iterator[tuple[str, object]]:
    import datasets

    split = hub.split or "train"
    try:
        rows = datasets.load_dataset(name, hub.name, data_dir=hub.data_dir, split=split, revision=hub.revision)
    except Exception as error:  # the library raises many kinds, all of which mean the same to the user
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"source {name}: neither a file here nor a readable hub dataset ({reason})") from None
    for number, row in enumerate(rows, 1):
        yield f"{name}[{split}]:{number}", row


# ----------------------------------------------------------------------------------------------------- shapes


HH_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")


def parse_hh(text: str) -> list[dict] | None:
    """An HH dialogue as messages, or None if the text is not one.

    >>> parse_hh("\\n\\nHuman: Hi\\n\\nAssistant: Hello")
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]
    """
    parts = HH_TURN.split(text.removeprefix("\n\n"))
    if len(parts) < 3 or parts[0].strip():
        return None
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[r], "content": c.strip()} for r, c in zip(parts[1::2], parts[2::2])]


def merge_turns(messages: list[dict]) -> list[dict]:
    """Join neighbouring turns of one role by a blank line: many chat templates refuse them."""
    merged: list[dict] = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"]:
            merged[-1]["content"] = f"{merged[-1]['content']}\n\n{message['content']}"
        else:
            merged.append(dict(message))
    return merged


def as_messages(value, name: str) -> list[dict]:
    """Text or a list of messages -> [{role, content}], checked."""
    if value is None:
        raise BadRow("empty_prompt", f"{name} is null or missing")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise BadRow("wrong_type", f"{name}: expected text or a list of messages, found {type(value).__name__}")
    messages = []
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not {"role", "content"} <= set(message):
            raise BadRow("wrong_type", f"{name}[{i}]: expected {{role, content}}")
        if not isinstance(message["content"], str) or not isinstance(message["role"], str):
            found = type(message["content"]).__name__
            raise BadRow("wrong_type", f"{name}[{i}].content: expected text, found {found}")
        messages.append({"role": message["role"], "content": message["content"]})
    return messages


def as_answer(value, name: str, prompt: list[dict]) -> str:
    """Text, one assistant message, or a conversation that repeats the prompt -> the answer's text."""
    if value is None:
        raise BadRow("empty_response", f"{name} is null or missing")
    if isinstance(value, list):
        messages = as_messages(value, name)
        if messages[: len(prompt)] == prompt:
            messages = messages[len(prompt) :]
        if len(messages) != 1 or messages[0]["role"] != "assistant":
            raise BadRow("no_final_answer", f"{name}: expected one assistant message after the prompt")
        return messages[0]["content"]
    if not isinstance(value, str):
        raise BadRow("wrong_type", f"{name}: expected text, found {type(value).__name__}")
    return value


def without_prompt(answers: list[str], prompt: list[dict]) -> list[str]:
    """Some sets repeat the prompt in front of every answer; it is taken off where all answers have it.

    A prompt of one or two words can start an answer by chance, so it stays.
    """
    text = prompt[0]["content"] if len(prompt) == 1 else ""
    if len(text.split()) > 2 and all(re.match(r"\s", a[len(text) :]) and a.startswith(text) for a in answers):
        return [a[len(text) :].lstrip() for a in answers]
    return answers


def conversation_pair(chosen, rejected) -> tuple[list[dict], str, str]:
    """Two whole conversations (HH text or message lists) -> (shared prompt, chosen answer, rejected answer)."""
    sides = []
    for name, value in (("chosen", chosen), ("rejected", rejected)):
        if value is None:
            raise BadRow("empty_response", f"{name} is null or missing")
        messages = parse_hh(value) if isinstance(value, str) else as_messages(value, name)
        if messages is None:
            raise BadRow("no_prompt", f"{name} is text without a dialogue, and there is no prompt column")
        if not messages or messages[-1]["role"] != "assistant":
            raise BadRow("no_final_answer", f"{name} does not end with an assistant turn")
        sides.append(messages)
    if sides[0][:-1] != sides[1][:-1]:
        raise BadRow("different_prompts", "chosen and rejected differ before the last answer")
    return sides[0][:-1], sides[0][-1]["content"], sides[1][-1]["content"]


USUAL = {
    "prompt": ("prompt", "question", "instruction", "messages"),
    "response": ("response", "completion", "answer"),
}


OWN_COLUMNS = {
    "preference": ("prompt", "chosen", "rejected", "margin"),
    "prompts": ("prompt", "response", "ground_truth", "reference"),
    "trajectories": ("prompt", "response", "reward", "logprobs"),
}


def find(row: dict, columns: Columns, name: str):
    """The column of `row` that holds `name`, or None if it has none."""
    mapped = getattr(columns, name)
    if mapped is not None:
        if mapped not in row:
            raise BadRow("missing_column", f"no column {mapped!r} (columns.{name}); the row has {sorted(row)}")
        return mapped
    return next((c for c in USUAL.get(name, (name,)) if c in row), None)


def detect_kind(row: dict, columns: Columns) -> str:
    has = {name: find(row, columns, name) for name in ("prompt", "chosen", "rejected", "response", "reward")}
    if has["chosen"] and has["rejected"]:
        return "preference"
    if has["prompt"] and has["response"] and has["reward"]:
        return "trajectories"
    if has["prompt"]:
        return "prompts"
    raise UserError(
        f"the first row has columns {sorted(row)}, of which none is a prompt or a pair of answers; "
        "name them with --columns.prompt, --columns.chosen, --columns.rejected, ..."
    )


def convert(row, kind: str, columns: Columns, suffix: str = "") -> dict:
    """One raw row -> the columns of `kind` without id and source. Raises BadRow."""
    if not isinstance(row, dict):
        raise BadRow("wrong_type", f"expected an object with named columns, found {type(row).__name__}")
    name = {k: find(row, columns, k) for k in Columns.__dataclass_fields__}
    used = {name[k] for k in OWN_COLUMNS[kind] if name[k]}
    value = {k: row[column] if column else None for k, column in name.items()}
    out: dict = {}
    if kind == "preference":
        if name["prompt"] is None or name["prompt"] == "messages":
            prompt, out["chosen"], out["rejected"] = conversation_pair(value["chosen"], value["rejected"])
        else:
            prompt = as_messages(value["prompt"], name["prompt"])
            out["chosen"] = as_answer(value["chosen"], "chosen", prompt)
            out["rejected"] = as_answer(value["rejected"], "rejected", prompt)
            out["chosen"], out["rejected"] = without_prompt([out["chosen"], out["rejected"]], prompt)
        out["margin"] = as_number(value["margin"], "margin")
        answers = ("chosen", "rejected")
    elif kind == "trajectories":
        prompt = as_messages(value["prompt"], name["prompt"] or "prompt")
        out["response"] = as_answer(value["response"], name["response"] or "response", prompt)
        out["reward"] = as_number(value["reward"], "reward")
        if out["reward"] is None:
            raise BadRow("no_reward", "reward is null or missing")
        out["logprobs"] = value["logprobs"]
        if out["logprobs"] is not None:
            if not isinstance(out["logprobs"], list):
                raise BadRow("wrong_type", f"logprobs: expected a list of numbers, found {type(out['logprobs']).__name__}")
            out["logprobs"] = [as_number(x, "logprobs") for x in out["logprobs"]]
        answers = ("response",)
    else:
        prompt = as_messages(value["prompt"], name["prompt"] or "prompt")
        while prompt and prompt[-1]["role"] == "assistant":  # a finished dialogue: its last answer is no prompt
            prompt = prompt[:-1]
        out["reference"] = value["reference"]
        out["ground_truth"] = value["ground_truth"]
        if name["response"] and isinstance(value["response"], str) and out["reference"] is None:
            out["reference"] = value["response"]
        elif name["response"]:
            used.discard(name["response"])
        if out["ground_truth"] is None and isinstance(out["reference"], str) and "####" in out["reference"]:
            out["ground_truth"] = out["reference"].rsplit("####", 1)[1].strip()
            if not out["ground_truth"]:
                raise BadRow("empty_ground_truth", "nothing stands after ####")
        for key in ("reference", "ground_truth"):
            if out[key] is not None and not isinstance(out[key], str):
                out[key] = json.dumps(out[key], ensure_ascii=False)
        answers = ()
    prompt = merge_turns(prompt)
    if not prompt or not prompt[-1]["content"].strip():
        raise BadRow("empty_prompt", "the prompt's last turn is empty")
    if suffix:
        prompt[-1]["content"] += suffix
    for answer in answers:
        if not out[answer].strip():
            raise BadRow("empty_response", f"{answer} is empty")
        out[answer] = out[answer].strip()
    if kind == "preference" and out["chosen"] == out["rejected"]:
        raise BadRow("equal_answers", "chosen and rejected are the same text")
    rest = {k: v for k, v in row.items() if k not in used}
    out["prompt"] = prompt
    out["metadata"] = json.dumps(rest, ensure_ascii=False, default=str) if rest else None
    try:
        json.dumps(out, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise BadRow("broken_text", "a lone surrogate, half of a character, stands in the text") from None
    return out


def as_number(value, name: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadRow("wrong_type", f"{name}: expected a number, found {type(value).__name__}")
    if value != value or value in (float("inf"), float("-inf")):
        raise BadRow("wrong_type", f"{name}: not a finite number")
    return float(value)


def check_lengths(row: dict, kind: str, tokenizer, max_prompt: int, max_response: int) -> dict[str, int]:
    """Token counts of a row as training will see it. Raises BadRow when one is over its limit."""
    try:
        lengths = {"prompt": len(encode_prompt(tokenizer, row["prompt"]))}
    except Exception as error:  # templates raise their own errors, for example on a role they do not know
        raise BadRow("refused_by_template", str(error).strip().splitlines()[0]) from None
    if lengths["prompt"] > max_prompt:
        raise BadRow("prompt_too_long", f"{lengths['prompt']} tokens, limit {max_prompt}")
    answers = {"preference": ("chosen", "rejected"), "trajectories": ("response",)}.get(kind, ())
    ids = {name: encode_response(tokenizer, row[name]) for name in answers}
    for name in answers:
        lengths[name] = len(ids[name])
        if lengths[name] > max_response:
            raise BadRow("response_too_long", f"{name} has {lengths[name]} tokens, limit {max_response}")
    if kind == "preference" and ids["chosen"] == ids["rejected"]:
        raise BadRow("equal_answers", "chosen and rejected are the same tokens")
    if kind == "trajectories" and row["logprobs"] is not None and len(row["logprobs"]) not in (lengths["response"], lengths["response"] - 1):
        raise BadRow("logprobs_length", f"{len(row['logprobs'])} logprobs for {lengths['response']} response tokens with eos")
    return lengths


# ---------------------------------------------------------------------------------------------------- writing


def schema_of(kind: str):
    import pyarrow as pa

    messages = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    types = {"prompt": messages, "margin": pa.float64(), "reward": pa.float64(), "logprobs": pa.list_(pa.float64())}
    return pa.schema([(name, types.get(name, pa.string())) for name in COLUMNS[kind]])


def write_split(rows: list[dict], kind: str, split: str, folder: Path) -> None:
    """Write `split-00000-of-000NN.parquet`; each file appears whole or not at all."""
    import os

    import pyarrow as pa
    import pyarrow.parquet

    shards = max(1, -(-len(rows) // ROWS_PER_SHARD))
    for i in range(shards):
        table = pa.Table.from_pylist(rows[i * ROWS_PER_SHARD : (i + 1) * ROWS_PER_SHARD], schema=schema_of(kind))
        path = folder / f"{split}-{i:05d}-of-{shards:05d}.parquet"
        pyarrow.parquet.write_table(table, path.with_name(f".{path.name}.tmp"))
        os.replace(path.with_name(f".{path.name}.tmp"), path)


def in_test_split(prompt: list[dict], seed: int, fraction: float) -> bool:
    """Decided by the prompt's own hash: the same prompt is always on the same side, whatever else is read."""
    text = json.dumps([seed, prompt], ensure_ascii=False)
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return number < fraction * 2**64


def percentiles(values: list[int]) -> dict[str, int]:
    values = sorted(values)
    return {f"p{p}": values[min(len(values) - 1, len(values) * p // 100)] for p in (0, 50, 90, 99, 100)}


def print_example(row: dict, kind: str, tokenizer) -> None:
    """One row as training will see it; ‹...› marks the tokens that are learned from."""
    prompt = tokenizer.decode(encode_prompt(tokenizer, row["prompt"]))
    print("--- one row, decoded; ‹...› marks the response tokens" if show("‹") == "‹" else "--- one row, decoded")
    print(show(prompt))
    for name in ("chosen", "rejected", "response"):
        if name in row:
            print(show(f"{name}: ‹{tokenizer.decode(encode_response(tokenizer, row[name]))}›"))
    for name in ("margin", "reward", "ground_truth"):
        if row.get(name) is not None:
            print(show(f"{name}: {row[name]}"))
    print("---", flush=True)


def read_excluded(files: list[str]) -> set[str]:
    """Ids and prompts (as JSON) of the objects in JSONL files."""
    excluded = set()
    for file in files:
        if not Path(file).is_file():
            raise UserError(f"exclude {file} is not a file")
    for place, raw in (line for file in files for line in read_file(file)):
        if isinstance(raw, BadRow):  # such as a last line that a killed run left half-written
            print(f"{place}: {raw.reason}, left out of exclude", flush=True)
            continue
        if not isinstance(raw, dict) or not ("id" in raw or "prompt" in raw):
            raise UserError(f"{place}: exclude needs objects with an id or a prompt (a list of messages)")
        excluded |= {raw["id"]} if "id" in raw else set()
        try:
            excluded |= {json.dumps(as_messages(raw["prompt"], "prompt"))} if "prompt" in raw else set()
        except BadRow as bad:
            raise UserError(f"{place}: {bad.detail}") from None
    return excluded


def prepare(cfg: DataConfig) -> dict:
    """Run stage 1; returns the report that is also written to report.json."""
    from utils.models import load_tokenizer

    started = time.time()
    sources = [cfg.source] if isinstance(cfg.source, str) else list(cfg.source)
    if not 0 <= cfg.eval_fraction < 1:
        raise UserError(f"eval_fraction {cfg.eval_fraction} must be at least 0 and below 1")
    if cfg.hub != Hub() and all(Path(s).exists() or glob.glob(s) for s in sources):
        raise UserError("hub.* is set but every source is a local file, so it would have no effect; remove it")
    tokenizer = load_tokenizer(cfg.tokenizer)
    excluded = read_excluded([cfg.exclude] if isinstance(cfg.exclude, str) else cfg.exclude or [])

    # 1. read, convert and check each row
    kept: dict[str, list[dict]] = {"train": [], "test": []}
    dropped: Counter[str] = Counter()
    examples: dict[str, list[dict]] = {}
    lengths: dict[str, list[int]] = {}
    by_source: dict[str, dict[str, int]] = {}
    kind, seen, longer_chosen = cfg.kind, set(), 0
    for source in sources:
        counts = by_source[source] = {"rows": 0, "kept": 0}
        for place, raw in progress_bar(read_source(source, cfg.hub), f"reading {Path(source).name}", unit="rows"):
            counts["rows"] += 1
            try:
                if isinstance(raw, BadRow):
                    raise raw
                if kind is None and isinstance(raw, dict):
                    kind = detect_kind(raw, cfg.columns)
                    print(f"kind: {kind} (detected from {place})", flush=True)
                row = convert(raw, kind or "prompts", cfg.columns, cfg.prompt_suffix)
                row_lengths = check_lengths(row, kind, tokenizer, cfg.max_prompt_length, cfg.max_response_length)
                content = json.dumps({k: v for k, v in row.items() if k != "metadata"}, sort_keys=True, ensure_ascii=False)
                row["id"] = hashlib.sha256(content.encode()).hexdigest()[:16]
                if row["id"] in excluded or json.dumps(row["prompt"]) in excluded:
                    raise BadRow("excluded", "listed in exclude")
                if row["id"] in seen:
                    raise BadRow("duplicate", "the same row stood before")
            except BadRow as bad:
                if cfg.on_bad_row == "error" and bad.reason != "excluded":
                    raise UserError(f"{place}: {bad.reason}: {bad.detail}; --on_bad_row skip drops such rows") from None
                dropped[bad.reason] += 1
                if len(examples.setdefault(bad.reason, [])) < EXAMPLES_PER_REASON:
                    examples[bad.reason].append({"place": place, "detail": bad.detail})
                continue
            seen.add(row["id"])
            row["source"] = source
            counts["kept"] += 1
            for name, n in row_lengths.items():
                lengths.setdefault(name, []).append(n)
            longer_chosen += row_lengths.get("chosen", 0) > row_lengths.get("rejected", 0)
            kept["test" if in_test_split(row["prompt"], cfg.seed, cfg.eval_fraction) else "train"].append(row)

    total = sum(counts["rows"] for counts in by_source.values())
    if not total:
        raise UserError(f"source {', '.join(sources)} has no rows")
    if not kept["train"] and not kept["test"]:
        worst, n = dropped.most_common(1)[0]
        example = examples[worst][0]
        raise UserError(f"all {total} rows were dropped, {n} of them as {worst}: {example['place']}: {example['detail']}")

    # 2. write; nothing is replaced before there is something to put there
    folder = open_output_dir(cfg.output_dir, cfg.overwrite)
    record_run(folder, cfg)
    random.Random(cfg.seed).shuffle(kept["train"])
    for split, rows in kept.items():
        write_split(rows, kind, split, folder)
    report = {
        "kind": kind,
        "rows_in": total,
        "rows_out": {split: len(rows) for split, rows in kept.items()},
        "dropped": dict(dropped.most_common()),
        "dropped_examples": examples,
        "sources": by_source,
        "tokens": {name: percentiles(values) for name, values in lengths.items()},
    }
    if kind == "preference":
        report["longer_answer_chosen"] = round(longer_chosen / (len(kept["train"]) + len(kept["test"])), 4)
    write_json(folder / "report.json", report)
    record_run(folder, cfg, started)

    # 3. say what happened
    print_example((kept["train"] or kept["test"])[0], kind, tokenizer)
    print(f"{total} rows read: {len(kept['train'])} train, {len(kept['test'])} test, {sum(dropped.values())} dropped")
    for reason, n in dropped.most_common():
        print(show(f"  dropped {n} {reason}, e.g. {examples[reason][0]['place']}: {examples[reason][0]['detail']}"))
    print(f"wrote {folder}", flush=True)
    return report


if __name__ == "__main__":
    run_stage(prepare, DataConfig)

"""Stage 1: files of every type, lengths, duplicates, the split, and that every row is accounted for.

The letters and numbers (D01, ...) are those of public bug reports of this field; those about a row's shape are in
test_shapes.py.
"""

import csv
import gzip
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from helpers import ROOT, byte_tokenizer, messages

from dataprep.chunks import WorkerKilled
from dataprep.coverage import CoverageConfig, measure, tfidf, word_rarity
from dataprep.filter import FilterConfig, filter_pairs
from dataprep.folder import workshop
from dataprep.keys import prompt_key
from dataprep.rules import Groups, in_test_split
from dataprep.shapes import Columns
from dataprep.similarity import MINIMA, one_byte, signatures, similarity
from dataprep.sources import Hub, read_source
from prepare_data import DataConfig, Source, prepare
from utils.config import UserError, parse_config
from utils.data import decode_response, encode_dialogues, encode_prompt, encode_response, encode_responses, load_rows
from utils.models import load_tokenizer
from utils.rows import BadRow


def user(text):
    return {"role": "user", "content": text}


def pairs(n, start=0):
    """Rows that are nothing like each other."""
    rng = random.Random(start)
    word = lambda: "".join(rng.choices("abcdefghij", k=6))  # noqa: E731
    return [
        {"prompt": f"{word()} {word()} {word()}", "chosen": f"{word()} {word()}", "rejected": word()} for _ in range(n)
    ]


def write(path, rows):
    """Rows (objects, or raw lines) as JSON lines."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    return str(path)


def run(tmp_path, rows, tiny, name="raw.jsonl", **changes):
    """Prepare rows and return (report, train rows)."""
    settings = dict(tokenizer=tiny, output_dir=str(tmp_path / "out"), eval_fraction=0.0, overwrite=True)
    if "source" not in changes:
        settings["source"] = write(tmp_path / name, rows)
    report = prepare(DataConfig(**settings | changes))
    assert report["candidates"] == sum(s["kept"] for s in report["sources"].values()) + sum(report["dropped"].values())
    return report, load(tmp_path / "out", "train")


def load(folder, split):
    return [
        row
        for file in sorted(Path(folder).glob(f"{split}-*.parquet"))
        for row in pyarrow.parquet.read_table(file).to_pylist()
    ]


def drops(folder):
    return [json.loads(line) for line in (Path(folder) / "dropped.jsonl").read_text(encoding="utf-8").splitlines()]


def texts(rows):
    return {row["prompt"][-1]["content"] for row in rows}


# --- D04, D07, D08, D09, D10: lengths


def rows_of_lengths(prompt, *answers):
    return {"prompt": "p" * prompt, "chosen": "a" * answers[0], "rejected": "b" * answers[1]}


def test_d09_limits_are_inclusive_and_measured_as_training_will_see_them(tmp_path, tiny):
    tokenizer = load_tokenizer(tiny)
    system = [{"role": "system", "content": "s"}, user("hello")]
    n = len(encode_prompt(tokenizer, system))  # with the template and the system turn
    row = {"prompt": system, "chosen": "abc", "rejected": "abcdef"}
    for prompt_limit, response_limit, dropped in [
        (n, 7, {}),
        (n - 1, 7, {"prompt_too_long": 1}),
        (n, 6, {"response_too_long": 1}),
        (n + 1, 8, {}),
    ]:
        report, rows = run(
            tmp_path,
            [row, {"prompt": "x", "chosen": "a", "rejected": "b"}],
            tiny,
            max_prompt_length=prompt_limit,
            max_response_length=response_limit,
        )
        assert report["dropped"] == dropped and len(rows) == 2 - len(dropped)


def test_d08_d09_long_prompts_keep_their_last_turns_or_go(tmp_path, tiny):
    tokenizer = load_tokenizer(tiny)
    turns = [
        {"role": "system", "content": "s"},
        user("one" * 9),
        {"role": "assistant", "content": "two"},
        user("three"),
    ]
    kept = [turns[0], turns[3]]
    rows = [{"prompt": turns, "chosen": "a", "rejected": "b"}, {"prompt": "long" * 50, "chosen": "a", "rejected": "b"}]
    limit = len(encode_prompt(tokenizer, kept))
    report, (row,) = run(tmp_path, rows, tiny, max_prompt_length=limit, long_prompt="keep_last_turns")
    assert row["prompt"] == kept and json.loads(row["metadata"])["_raw"]["prompt"] == turns
    assert report["shortened"] == {"prompt": 1} and report["dropped"] == {
        "prompt_too_long": 1
    }  # one turn cannot be cut
    with pytest.raises(UserError, match="all 2 rows were dropped, 2 of them as prompt_too_long"):
        run(tmp_path, rows, tiny, max_prompt_length=limit, long_prompt="filter")


def test_d07_d08_each_answer_is_cut_by_itself(tmp_path, tiny):
    report, (row,) = run(tmp_path, [rows_of_lengths(6, 3, 20)], tiny, max_response_length=10, long_response="truncate")
    assert (row["chosen"], row["rejected"]) == ("aaa", "b" * 9)  # and eos
    assert json.loads(row["metadata"])["_raw"] == {"rejected": "b" * 20} and report["shortened"] == {"rejected": 1}
    assert report["tokens"]["rejected"]["p100"] == 10
    report, rows = run(tmp_path, [rows_of_lengths(6, 3, 20), rows_of_lengths(5, 3, 4)], tiny, max_response_length=10)
    assert report["dropped"] == {"response_too_long": 1} and len(rows) == 1


def test_d04_pairs_that_become_equal_by_cutting_are_dropped(tmp_path, tiny):
    rows = [
        {"prompt": "w " * 20, "chosen": "same words then X", "rejected": "same words then Y"},
        {
            "prompt": "w " * 20,
            "chosen": "same words here X",
            "rejected": "same words here",
        },  # differ where eos would stand
        {"prompt": "w " * 20, "chosen": "X same words", "rejected": "Y same words"},
    ]
    report, kept = run(tmp_path, rows, tiny, max_response_length=16, long_response="truncate")
    assert report["dropped"] == {"equal_after_truncation": 2} and [r["chosen"] for r in kept] == ["X same words"]


def test_d04_neighbour_other_text_with_the_same_tokens(tmp_path, tiny):
    tokenizer = load_tokenizer(tiny)
    tokenizer.backend_tokenizer.normalizer = __import__("tokenizers").normalizers.Lowercase()
    tokenizer.save_pretrained(tmp_path / "lower")
    (tmp_path / "lower" / "config.json").write_text((Path(tiny) / "config.json").read_text())
    report, _ = run(
        tmp_path,
        [{"prompt": "q", "chosen": "YES", "rejected": "yes"}, {"prompt": "r", "chosen": "a", "rejected": "b"}],
        str(tmp_path / "lower"),
    )
    assert report["dropped"] == {"equal_answers": 1}


@pytest.mark.parametrize("text", ["éèêëéèêë", "😀😀😀", "a😀b😀c", "日本語日本語", "x    y    z   "])
def test_cut_answers_hold_whole_characters_and_fit(tmp_path, tiny, text):
    tokenizer = load_tokenizer(tiny)
    for limit in range(3, len(text.encode()) + 2):
        try:
            _, (row,) = run(
                tmp_path,
                [{"prompt": "q", "response": text, "reward": 1.0}],
                tiny,
                max_response_length=limit,
                long_response="truncate",
            )
        except UserError as error:
            assert "has no token left" in str(error) and len(text[0].encode()) > limit - 1
            continue
        ids = encode_response(tokenizer, row["response"])
        assert len(ids) <= limit and text.startswith(row["response"]) and "\ufffd" not in row["response"]
        assert len(encode_response(tokenizer, text[: len(row["response"]) + 1])) > limit or row["response"] == text


def test_a_shortened_response_must_have_had_the_right_number_of_logprobs(tmp_path, tiny):
    rows = [
        {"prompt": f"q{n}", "response": "a" * 20, "reward": 1, "logprobs": [-1.0] * n} for n in (2, 19, 20, 21, 500)
    ]
    report, kept = run(tmp_path, rows, tiny, max_response_length=6, long_response="truncate")
    assert (
        texts(kept) == {"q20", "q21"}
        and all(len(r["logprobs"]) == 5 for r in kept)
        and report["dropped"] == {"logprobs_length": 3}
    )


def test_logprobs_are_cut_with_their_response_and_their_number_is_checked(tmp_path, tiny):
    row = {"prompt": "q", "response": "abcdefgh", "reward": 1, "logprobs": [-float(i) for i in range(9)]}
    _, (out,) = run(tmp_path, [row], tiny, max_response_length=5, long_response="truncate")
    assert (out["response"], out["logprobs"]) == ("abcd", [-0.0, -1.0, -2.0, -3.0])
    report, _ = run(
        tmp_path,
        [row, row | {"prompt": "r", "logprobs": [-1.0] * 8}, row | {"prompt": "s", "logprobs": [-1.0] * 7}],
        tiny,
    )
    assert report["dropped"] == {"logprobs_length": 1}


# --- D10, D11, D12, D13, D22: one encoding everywhere


def test_d10_d13_ids_are_those_of_prompt_and_answer_apart_in_every_function():
    tokenizer = byte_tokenizer()
    for prompt, answer in [("Answer: ", "yes"), ("Answer:", " yes"), ("line\n", "\nline"), ("a<|end|>", "<|end|>b")]:
        alone = encode_prompt(tokenizer, messages(prompt)), encode_response(tokenizer, answer)
        assert (
            alone[0] == encode_dialogues(tokenizer, [messages("x"), messages(prompt), messages("longer than both")])[1]
        )
        assert alone[1] == encode_responses(tokenizer, ["x", answer])[1] and alone[1][-1] == tokenizer.eos_token_id
        assert decode_response(tokenizer, alone[1]) == answer


@pytest.mark.parametrize("bos, template_has_it, count", [(False, False, 0), (True, False, 1), (True, True, 1)])
def test_d11_d12_one_bos_for_models_that_have_one(bos, template_has_it, count):
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    if bos:
        tokenizer.add_special_tokens({"bos_token": "<|bos|>"})
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.bos_token_id)]
        )
        tokenizer.chat_template = ("<|bos|>" if template_has_it else "") + tokenizer.chat_template
    rows = encode_dialogues(tokenizer, [messages("a"), messages("longer")])
    for ids in [*rows, encode_prompt(tokenizer, messages("a"))]:
        assert (
            None not in ids
            and sum(i == tokenizer.bos_token_id for i in ids) == count
            and (not count or ids[0] == tokenizer.bos_token_id)
        )
    assert tokenizer.bos_token_id not in encode_response(tokenizer, "a")  # an answer never begins with one


def test_d22_no_token_is_added_for_padding(tiny):
    tokenizer = load_tokenizer(tiny)
    assert tokenizer.pad_token_id is not None and tokenizer.pad_token_id < 259 == len(tokenizer)


def test_d15_a_template_that_refuses_a_role_costs_only_its_rows(tmp_path, tiny):
    tokenizer = load_tokenizer(tiny)
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + tokenizer.chat_template
    )
    tokenizer.save_pretrained(tmp_path / "strict")
    (tmp_path / "strict" / "config.json").write_text((Path(tiny) / "config.json").read_text())
    rows = [{"prompt": "a"}, {"prompt": [{"role": "system", "content": "s"}, user("b")]}, {"prompt": "c"}]
    report, kept = run(tmp_path, rows, str(tmp_path / "strict"))
    assert report["dropped"] == {"refused_by_template": 1} and texts(kept) == {"a", "c"}
    assert "no system role" in report["dropped_examples"]["refused_by_template"][0]["detail"]


# --- D17, D18, D19: files


def rows_of(source, hub=Hub()):
    return [row for chunk in read_source(str(source), hub) for _, row in chunk.rows()]


def places_of(source):
    return [place.removeprefix(str(source)) for chunk in read_source(str(source)) for place, _ in chunk.rows()]


def test_d18_broken_lines_are_named_and_the_others_kept(tmp_path, tiny):
    good = {"prompt": "q1", "chosen": "a", "rejected": "b"}
    text = json.dumps(good)
    lines = [
        text,
        "",
        text[:-9],
        '{"prompt": "q\t", "chosen": "a", "rejected": "b"}',
        text * 2,
        text,
        json.dumps({"prompt": "q2", "chosen": "a"}),
        json.dumps({"prompt": "q3\u2028x", "chosen": "a", "rejected": "é 😀"}, ensure_ascii=False),
        '{"prompt": 1' + "0" * 5000 + "}",
        "[" * 100_000,
        "\x00",
    ]
    report, rows = run(tmp_path, lines, tiny)
    assert report["dropped"] == {"broken_row": 6, "duplicate": 1, "missing_column": 1}
    assert report["rows_in"] == 10 == len(rows) + sum(report["dropped"].values())
    assert texts(rows) == {"q1", "q3\u2028x"}
    places = [
        drop["place"].removeprefix(str(tmp_path)) for drop in drops(tmp_path / "out") if drop["reason"] == "broken_row"
    ]
    assert (
        places[0].startswith("/raw.jsonl:3:")
        and places[1].startswith("/raw.jsonl:4:")
        and places[2] == f"/raw.jsonl:5:{len(text) + 1}"
    )


def test_d18_strict_mode_stops_at_the_first_bad_row_and_leaves_nothing(tmp_path, tiny):
    rows = [{"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "q", "chosen": "a", "rejected": "a"}]
    with pytest.raises(UserError, match=r"raw.jsonl:2: equal_answers"):
        run(tmp_path, rows, tiny, on_bad_row="error")
    with pytest.raises(UserError, match=r"raw.jsonl:2: duplicate: with .*raw.jsonl:1"):
        run(tmp_path, rows[:1] * 2, tiny, on_bad_row="error")
    assert not (tmp_path / "out").exists()


def test_all_bad_is_an_error(tmp_path, tiny):
    with pytest.raises(UserError, match="all 2 rows were dropped, 2 of them as equal_answers"):
        run(tmp_path, [{"prompt": "q", "chosen": "a", "rejected": "a"}] * 2, tiny)
    with pytest.raises(UserError, match="has no rows"):
        run(tmp_path, [""], tiny)


ROWS = [{"prompt": "é\u2028x", "n": 1}, {"prompt": "b", "n": 2}, {"prompt": '😀 "quoted"\nline', "n": 3}]


def zst(data):
    with pa.BufferOutputStream() as sink, pa.CompressedOutputStream(sink, "zstd") as packed:
        packed.write(data)
        packed.flush()
        packed.close()
        return sink.getvalue().to_pybytes()


def test_d17_json_in_any_form(tmp_path):
    lines = "\n".join(json.dumps(r, ensure_ascii=False) for r in ROWS)
    contents = {
        "array.json": json.dumps(ROWS),
        "array.jsonl": "\ufeff" + json.dumps(ROWS, indent=2, ensure_ascii=False),
        "lines.json": "\ufeff" + lines,
        "crlf.jsonl": lines.replace("}\n", "}\r\n") + "\r\n\r\n",
        "object.json": json.dumps({"version": 2, "data": ROWS}, indent=1),
        "spaced.json": " \n" + json.dumps(ROWS) + "\n ",
        "minified.json": json.dumps({"version": 2, "data": ROWS}),
    }
    for name, text in contents.items():
        data = text.encode()
        (tmp_path / name).write_bytes(data)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(data[:20]) + gzip.compress(data[20:]))  # two members
        (tmp_path / f"{name}.zst").write_bytes(zst(data))
        for file in (name, f"{name}.gz", f"{name}.zst"):
            assert rows_of(tmp_path / file) == ROWS, file
    (tmp_path / "report.json").write_text("{}")  # about data, as stage 1 and the hub write it
    assert len(rows_of(tmp_path)) == 3 * 3 * len(contents)
    assert len(rows_of(tmp_path / "*lines*")) == 9
    (tmp_path / "one.json").write_text(json.dumps(ROWS[0], indent=2))
    assert rows_of(tmp_path / "one.json") == ROWS[:1]
    mixed = [{"prompt": "a", "id": 1}, {"prompt": "b", "id": "x"}, {"prompt": "c", "id": None}]
    (tmp_path / "mixed.json").write_text(json.dumps(mixed))
    assert rows_of(tmp_path / "mixed.json") == mixed


def test_d17_a_long_array_is_read_in_pieces(tmp_path):
    rows = [
        {"prompt": "x" * 997 + "é😀" + str(i), "n": [i, {"deep": "]},{"}]} for i in range(5000)
    ]  # larger than the pieces
    (tmp_path / "long.json").write_text(json.dumps(rows, ensure_ascii=False, indent=1))
    assert rows_of(tmp_path / "long.json") == rows
    assert max(len(chunk.data) for chunk in read_source(str(tmp_path / "long.json"))) <= 1000
    big = [{"prompt": "y" * 3_000_000}, 7, "text", None, {"prompt": "z"}]
    (tmp_path / "big.json").write_text(json.dumps(big))
    assert rows_of(tmp_path / "big.json") == big


def test_of_two_equal_names_none_is_lost_silently(tmp_path):
    (tmp_path / "twice.jsonl").write_text('{"chosen": "A", "chosen": "B"}\n{"a": {"b": 1, "b": 2}}\n{"c": 1}')
    rows = rows_of(tmp_path / "twice.jsonl")
    assert [r.detail for r in rows[:2]] == ["the key 'chosen' stands twice", "the key 'b' stands twice"] and rows[
        2
    ] == {"c": 1}
    table = pa.table([pa.array(["x"]), pa.array(["y"])], names=["prompt", "prompt"])
    with pa.OSFile(str(tmp_path / "twice.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(UserError, match="two columns have the name 'prompt'"):
        rows_of(tmp_path / "twice.arrow")


def test_folders_with_splits_hidden_and_other_files(tmp_path, capsys):
    for name in ("train-0.jsonl", "test-0.jsonl", "notes.txt", ".git/x.jsonl"):
        (tmp_path / "f" / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / "f" / name, [{"prompt": name}])
    assert (
        rows_of(tmp_path / "f") == [{"prompt": "train-0.jsonl"}]
        and "2 files are not read, such as" in capsys.readouterr().out
    )
    assert rows_of(tmp_path / "f", Hub(split="test")) == [{"prompt": "test-0.jsonl"}]
    for name in ("train/a.jsonl", "train/b.jsonl", "test/a.jsonl"):
        (tmp_path / "g" / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / "g" / name, [{"prompt": name}])
    assert [r["prompt"] for r in rows_of(tmp_path / "g")] == ["train/a.jsonl", "train/b.jsonl"]
    (tmp_path / "dir.jsonl").mkdir()
    write(tmp_path / "h.jsonl", [{"prompt": "h"}])
    assert rows_of(tmp_path / "*.jsonl") == [{"prompt": "h"}]
    for name in (
        "dropped.jsonl",
        "coverage.jsonl",
    ):  # what stage 1 writes about data is read if it is asked for by itself
        write(tmp_path / "g" / name, [{"prompt": name}])
    assert rows_of(tmp_path / "g" / "d*.jsonl") == [{"prompt": "dropped.jsonl"}]
    with pytest.raises(UserError, match=r"\*ed.jsonl has no .jsonl"):
        write(tmp_path / "g" / "contradicted.jsonl", [{"prompt": "c"}])
        rows_of(tmp_path / "g" / "*ed.jsonl")
    with pytest.raises(UserError, match="neither a file here nor"):
        rows_of("x" * 300)


def test_csv_and_tsv(tmp_path):
    for name, delimiter in (("rows.csv", ","), ("rows.tsv", "\t")):
        with open(tmp_path / name, "w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, ["prompt", "n"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows([*ROWS, {"prompt": "", "n": "NULL"}])
        assert rows_of(tmp_path / name) == [{k: str(v) for k, v in row.items()} for row in ROWS] + [
            {"prompt": None, "n": "NULL"}
        ]
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
        (tmp_path / f"{name}.zst").write_bytes(zst((tmp_path / name).read_bytes()))
        assert rows_of(tmp_path / f"{name}.gz") == rows_of(tmp_path / f"{name}.zst") == rows_of(tmp_path / name)
    (tmp_path / "bad.csv").write_bytes(b'prompt,n\na,1\nb\n"c\nd",2,3\n\xff,4\n\ne,5\n"open,6\n')
    rows = rows_of(tmp_path / "bad.csv")
    assert [row["prompt"] for row in rows if isinstance(row, dict)] == ["a", "\udcff", "e"]
    assert [row.detail for row in rows if isinstance(row, BadRow)] == [
        "expected 2 cells, found 1 (lines 3 to 3)",
        "expected 2 cells, found 3 (lines 4 to 5)",
        "unexpected end of data (lines 9 to 9)",
    ]
    assert places_of(tmp_path / "bad.csv") == [":2", ":3", ":4", ":6", ":8", ":9"]
    (tmp_path / "pandas.csv").write_text(",prompt\n0,a\n1,b\n")  # with the index, as pandas writes it
    assert rows_of(tmp_path / "pandas.csv") == [{"Unnamed: 0": "0", "prompt": "a"}, {"Unnamed: 0": "1", "prompt": "b"}]
    (tmp_path / "again.csv").write_text(",Unnamed: 0,prompt\n0,5,a\n")
    assert rows_of(tmp_path / "again.csv") == [{"Unnamed: 0.1": "0", "Unnamed: 0": "5", "prompt": "a"}]
    (tmp_path / "levels.csv").write_text(",,prompt\n0,5,a\n")
    with pytest.raises(UserError, match=re.escape("found ['', '', 'prompt']")):
        rows_of(tmp_path / "levels.csv")
    (tmp_path / "twice.csv").write_text("prompt,prompt\na,b\n")
    with pytest.raises(UserError, match="twice.csv:1: expected one different name"):
        rows_of(tmp_path / "twice.csv")


def test_parquet_arrow_and_saved_datasets(tmp_path):
    import datasets

    table = pa.Table.from_pylist(ROWS * 700)
    pa.parquet.write_table(table, tmp_path / "rows.parquet")
    with pa.OSFile(str(tmp_path / "file.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pa.OSFile(str(tmp_path / "stream.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    pa.feather.write_feather(table, str(tmp_path / "rows.feather"))
    for name in ("rows.parquet", "file.arrow", "stream.arrow", "rows.feather"):
        assert rows_of(tmp_path / name) == ROWS * 700 and places_of(tmp_path / name)[-1] == ":2100", name
    saved = datasets.Dataset.from_list(ROWS)
    saved.select([2, 0]).save_to_disk(tmp_path / "one")  # an order that is not the file's
    datasets.DatasetDict(train=saved, test=saved.select([1])).save_to_disk(tmp_path / "both")
    assert rows_of(tmp_path / "one") == [ROWS[2], ROWS[0]]
    assert rows_of(tmp_path / "both") == ROWS and rows_of(tmp_path / "both", Hub(split="test")) == ROWS[1:2]
    with pytest.raises(UserError, match="has the splits train, test"):
        rows_of(tmp_path / "both", Hub(split="dev"))


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_names_with_split_and_revision(tmp_path, tiny, monkeypatch, streaming):
    """The library reads local files in place of the hub's; what it is asked for is checked."""
    import datasets

    write(tmp_path / "train.jsonl", pairs(30)), write(tmp_path / "dev.jsonl", pairs(30)[:5] + pairs(5, start=3))
    original, asked = datasets.load_dataset, []

    def local(name, config, *, data_dir, split, revision, streaming):
        asked.append((name, config, data_dir, split, revision, streaming))
        return original(
            "json",
            data_files=str(tmp_path / f"{split}.jsonl"),
            split="train",
            streaming=streaming,
            cache_dir=str(tmp_path / "cache"),
        )

    monkeypatch.setattr(datasets, "load_dataset", local)
    hub = Hub(name="main", data_dir="sub", revision="v1", streaming=streaming)
    report, train = run(
        tmp_path,
        [],
        tiny,
        source="org/set",
        hub=hub,
        eval_source=Source("org/set", hub=Hub(split="dev", streaming=streaming)),
        eval_fraction=None,
    )
    assert set(asked) == {
        ("org/set", "main", "sub", "train", "v1", streaming),
        ("org/set", None, None, "dev", None, streaming),
    }
    assert report["rows_out"] == {"train": 25, "test": 10} and report["dropped"] == {"prompt_in_test": 5}
    assert list(report["sources"]) == ["org/set[dev]", "org/set:main:sub:v1[train]"] and {
        r["source"] for r in train
    } == {"org/set:main:sub:v1[train]"}
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *a, **k: (_ for _ in ()).throw(ValueError("no such set\nmore"))
    )
    with pytest.raises(
        UserError, match=r"source org/set: neither a file here nor a readable hub dataset \(no such set\)"
    ):
        run(tmp_path, [], tiny, source="org/set")


def test_d21_hdf5_text_is_text(tmp_path, tiny):
    import h5py

    prompts = ["é\u2028x", "plain", "😀"]
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["prompt"] = prompts  # variable length, UTF-8
        file.create_dataset(
            "chosen", data=[p.encode() for p in ("gut", "ü", "x")], dtype=h5py.string_dtype("utf-8", 8)
        )  # fixed length, NUL-padded
        file["rejected"] = np.array([b"a", b"bb", b"ccc"], dtype="S3")
        file["margin"] = np.array([1, 2.5, 3], dtype=np.float32)
    assert rows_of(tmp_path / "rows.h5")[1] == {"prompt": "plain", "chosen": "ü", "rejected": "bb", "margin": 2.5}
    report, rows = run(tmp_path, [], tiny, source=str(tmp_path / "rows.h5"))
    assert {(r["prompt"][0]["content"], r["chosen"], r["rejected"], r["margin"]) for r in rows} == set(
        zip(prompts, ("gut", "ü", "x"), ("a", "bb", "ccc"), (1.0, 2.5, 3.0))
    )
    with h5py.File(
        tmp_path / "log.h5", "w"
    ) as file:  # trajectories in groups, with ragged and padded-free log-probabilities
        for split in ("a", "b"):
            group = file.create_group(f"runs/{split}")
            group["prompt"], group["response"], group["reward"] = [f"{split} q"], ["ok"], np.array([1], dtype=np.int64)
            ragged = group.create_dataset("logprobs", (1,), dtype=h5py.vlen_dtype(np.float64))
            ragged[0] = [-1.0, -2.0, -0.5]
    report, rows = run(tmp_path, [], tiny, source=str(tmp_path / "log.h5"))
    found = sorted((r["prompt"][0]["content"], r["response"], r["reward"], r["logprobs"]) for r in rows)
    assert found == [("a q", "ok", 1.0, [-1.0, -2.0, -0.5]), ("b q", "ok", 1.0, [-1.0, -2.0, -0.5])]
    assert report["kind"] == "trajectories"
    with h5py.File(tmp_path / "messages.h5", "w") as file:
        file["prompt"], file["chosen"], file["rejected"] = [json.dumps([user("q")])], ["A"], ["B"]
    assert run(tmp_path, [], tiny, source=str(tmp_path / "messages.h5"))[1][0]["prompt"] == [user("q")]
    with h5py.File(tmp_path / "uneven.h5", "w") as file:
        file["prompt"], file["chosen"] = ["a", "b"], ["x"]
    with pytest.raises(UserError, match="uneven.h5: columns of / differ in length"):
        rows_of(tmp_path / "uneven.h5")
    with h5py.File(tmp_path / "latin.h5", "w") as file:
        file["prompt"] = np.array([b"ok", b"\xe9t\xe9"])
    rows = rows_of(tmp_path / "latin.h5")
    assert rows[0] == {"prompt": "ok"} and rows[1].detail == "prompt: not UTF-8 at byte 1"


def test_d21_several_processes_read_one_hdf5_file(tmp_path, tiny):
    import h5py

    rows = pairs(2500)
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        for name in rows[0]:
            file[name] = [row[name] for row in rows]
    report, kept = run(tmp_path, [], tiny, source=str(tmp_path / "rows.h5"), workers=2)
    assert {(r["prompt"][0]["content"], r["chosen"], r["rejected"]) for r in kept} == {tuple(r.values()) for r in rows}


def test_missing_and_unreadable_sources(tmp_path):
    data = gzip.compress(b'{"prompt": "a"}\n' * 100)
    files = {
        "bad.parquet": b"PAR1 nonsense",
        "cut.jsonl.gz": data[:30],
        "bad.jsonl.gz": data[:20] + b"rubbish" * 9,
        "bad.jsonl.zst": b"\x28\xb5\x2f\xfdrubbish",
        "no.json.gz": b"plain",
        "cut.json": b'[{"prompt": "a"},\n{"prompt"',
        "comma.json": b'[{"prompt": "a"}\n {"prompt": "b"}]',
        "after.json": b'[{"prompt": "a"}] x',
        "latin.json": b'[{"prompt": "\xe9"}]',
        "notes.txt": b"x",
        "bad.arrow": b"ARROW1 nonsense",
        "bad.h5": b"\x89HDF nonsense",
        "empty.csv": b"",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for name, message in [
        ("none.jsonl", "does not exist"),
        ("bad.parquet", "not a readable Parquet"),
        ("cut.jsonl.gz", "cannot be read"),
        ("bad.jsonl.gz", "cannot be read"),
        ("bad.jsonl.zst", "cannot be read"),
        ("no.json.gz", "cannot be read"),
        ("cut.json", "cut.json:2:"),
        ("comma.json", "comma.json:2:2: expected , or ]"),
        ("after.json", "after.json:1:.*text after the array"),
        ("latin.json", "not UTF-8"),
        ("notes.txt", "unknown file type"),
        ("bad.arrow", "not a readable Arrow"),
        ("bad.h5", "not a readable HDF5"),
        ("empty.csv", "empty.csv:1"),
    ]:
        with pytest.raises(UserError, match=message):
            rows_of(tmp_path / name)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match="has no .jsonl"):
        rows_of(tmp_path / "nothing")


# --- duplicates, contradictions, near duplicates


def test_duplicates_and_contradictions(tmp_path, tiny):
    rows = [
        {"prompt": "q", "chosen": "left one", "rejected": "right one"},
        {"prompt": "q", "chosen": "left one", "rejected": "right one", "by": "other"},
        {"prompt": "r", "chosen": "up", "rejected": "down"},
        {"prompt": "r", "chosen": "down", "rejected": "up"},
        {"prompt": "r", "chosen": "up", "rejected": "sideways"},
    ]
    report, kept = run(tmp_path, rows, tiny)
    assert report["dropped"] == {"contradicting_labels": 2, "duplicate": 1} and {r["rejected"] for r in kept} == {
        "right one",
        "sideways",
    }
    assert [d["detail"].rsplit(":", 1)[1] for d in drops(tmp_path / "out")] == ["1", "4", "3"]
    rows = [
        {"prompt": "2+2?", "ground_truth": "4"},
        {"prompt": "2+2?", "ground_truth": "5"},
        {"prompt": "1+1?", "ground_truth": "2"},
        {"prompt": "1+1?", "ground_truth": "2", "reference": "easy"},
    ]
    report, kept = run(tmp_path, rows, tiny)
    assert report["dropped"] == {"contradicting_labels": 2} and texts(kept) == {"1+1?"}
    rows = [
        {"prompt": "q", "response": "r", "reward": 1},
        {"prompt": "q", "response": "r", "reward": 0},
        {"prompt": "q", "response": "r", "reward": 1},
    ]
    assert run(tmp_path, rows, tiny)[0]["dropped"] == {
        "duplicate": 1
    }  # a logged answer may well have had several rewards


LONG = (
    "It was a bright cold day in April and the clocks were striking thirteen "
    "while people hurried home through the wind and the dust of the long street"
)


@pytest.mark.parametrize(
    "change, near",
    [
        (lambda t: t.upper() + "!!", True),
        (lambda t: t.replace(" ", "  "), True),
        (lambda t: t + " again", True),
        (lambda t: t.replace("April", "May").replace("wind", "rain").replace("home", "away"), False),
        (lambda t: t.replace("thirteen", "13"), False),
        (lambda t: t[:60], False),
    ],
)
def test_near_duplicates_in_every_field(tmp_path, tiny, change, near):
    first = {"prompt": LONG, "chosen": LONG + " yes", "rejected": "short one"}
    for name in ("prompt", "chosen"):
        report, kept = run(
            tmp_path,
            [first, first | {name: change(first[name])}],
            tiny,
            max_prompt_length=999,
            max_response_length=999,
        )
        assert report["dropped"] == ({"near_duplicate": 1} if near else {}) and len(kept) == 2 - near
    report, _ = run(
        tmp_path,
        [first, first | {"prompt": change(LONG)}],
        tiny,
        max_prompt_length=999,
        max_response_length=999,
        near_duplicates=None,
    )
    assert report["dropped"] == {}


def twins(n, share):
    """Pairs of texts whose three-word runs have about the Jaccard similarity `share`: the second has another end."""
    rng = random.Random(n)
    vocabulary = [f"w{a}{b}" for a in "abcdefgh" for b in "ijklmnopqrstuvwxyz"]
    out = []
    for _ in range(n):
        words = rng.choices(vocabulary, k=82)
        cut = round(80 * 2 * share / (1 + share))  # runs that both have, of 80 each
        out.append((" ".join(words), " ".join([*words[: cut + 2], *rng.choices(vocabulary, k=80 - cut)])))
    return out


@pytest.mark.parametrize("threshold", [0.7, 0.8, 0.9])
def test_near_duplicates_are_found_above_the_threshold_and_not_below(tmp_path, tiny, threshold):
    """The similarity is an estimate: 6 points from the threshold most are told apart, at 12 points nearly all."""
    for share, least, most in [
        (threshold + 0.06, 0.75, 1),
        (threshold - 0.06, 0, 0.15),
        (threshold - 0.12, 0, 0.02),
        (1.0, 1, 1),
    ]:
        texts = zip(twins(100, share), twins(101, share)[1:])
        rows = [
            {"prompt": p, "response": r, "reward": 1}
            for prompts, responses in texts
            for p, r in zip(prompts, responses)
        ]
        report, _ = run(
            tmp_path, rows, tiny, near_duplicates=threshold, max_prompt_length=999, max_response_length=999
        )
        assert (
            least <= (report["dropped"].get("near_duplicate", 0) + report["dropped"].get("duplicate", 0)) / 100 <= most
        ), share


def test_every_train_prompt_is_compared_with_several_test_prompts(tmp_path, tiny):
    """Near to the second test prompt of a family, though not to the first."""
    words = [row["prompt"].split()[0] for row in pairs(80)]
    prompts = [" ".join(words), " ".join(words[:-8] + words[:8]), " ".join(words[:-8] + words[:9])]
    official = write(tmp_path / "official.jsonl", [{"prompt": p} for p in prompts[:2]])
    report, train = run(
        tmp_path,
        [{"prompt": prompts[2]}, {"prompt": "other"}],
        tiny,
        eval_source=official,
        eval_fraction=None,
        near_duplicates=0.9,
        max_prompt_length=999,
    )
    assert texts(train) == {"other"} and report["dropped"] == {"near_test_prompt": 1}


def test_the_same_prompt_with_other_answers_is_no_near_duplicate(tmp_path, tiny):
    rows = [
        {"prompt": LONG, "chosen": f"{a} thing", "rejected": f"{b} thing"}
        for a, b in [("red", "blue"), ("red", "green"), ("green", "blue")]
    ]
    report, kept = run(tmp_path, rows, tiny)
    assert report["dropped"] == {} and len(kept) == 3
    rows = [
        {
            "question": f"Tom has {n} apples and gives away two of them. How many are left for him?",
            "answer": f"#### {n - 2}",
        }
        for n in range(10, 30)
    ]
    assert run(tmp_path, rows, tiny)[0]["dropped"] == {}  # other numbers make another problem


def test_signatures_estimate_jaccard_similarity():
    rng = random.Random(0)
    words = [f"w{i}" for i in range(4000)]
    for share in (0.3, 0.7, 0.9):
        # runs of three words: sets with a known overlap, built from separate triples
        estimates = []
        for _ in range(40):
            common = " ".join(rng.sample(words, 60))
            a, b = signatures([common, " ".join(common.split()[: int(58 * share) + 2])])
            shared = int(58 * share)
            estimates.append(float(similarity(one_byte(a), one_byte(b))) - shared / 58)
        assert abs(np.mean(estimates)) < 0.03 and np.std(estimates) < 3 * np.sqrt(0.25 / MINIMA)
    a, b, c = signatures(["Hello, World", "hello world!", "!!!"])
    assert (a == b).all() and not (a == c).any()
    one, two = signatures(["猫が好き", "猫が好きだ"])
    assert 0 < similarity(one_byte(one), one_byte(two)) < 1
    together = signatures(["a b c d", "x", "", LONG])
    for text, row in zip(["a b c d", "x", "", LONG], together):
        assert (signatures([text])[0] == row).all()  # neighbours in the batch do not matter


def test_groups_find_all_rows_of_a_key(tmp_path):
    """Keys that differ in their first bits, or in the others only; labels come with their rows."""
    low, high = 5, 2**63 + 5
    keys = np.array([low, high, low + 1, high, 9, low, high, low + 1], dtype=np.uint64)
    groups, labels = Groups(tmp_path, "x"), np.arange(8) * 10
    for block in (np.arange(3, 8), np.arange(3)):  # later rows first
        groups.add(keys[block], block, labels[block])
    got = [
        (int(part[0, 0]), part[:, 1].tolist(), part[:, 2].tolist())
        for entries, starts in groups.shared(3)
        for part in np.split(entries, starts[1:])
    ]
    assert got == [(low, [0, 5], [0, 50]), (low + 1, [2, 7], [20, 70]), (high, [1, 3, 6], [10, 30, 60])]
    assert not list(tmp_path.glob("*.bin"))
    many = Groups(tmp_path, "y")
    for block in np.array_split(np.arange(2000), 7):  # row i has the key of row i % 300
        many.add((block % 300).astype(np.uint64) * np.uint64(2**64 // 300), block)
    sizes = [len(part) for entries, starts in many.shared() for part in np.split(entries, starts[1:])]
    assert sizes == [7] * 200 + [6] * 100


# --- D23: the split


def test_d23_split_is_by_prompt_whatever_its_case_and_spaces(tmp_path, tiny):
    rows = [row | {"prompt": prompt} for i, row in enumerate(pairs(150)) for prompt in [f"Prompt Number {i % 50}"]]
    rows += [row | {"prompt": f"prompt  number {i} "} for i, row in enumerate(pairs(50, start=1))]
    report, train = run(tmp_path, rows, tiny, eval_fraction=0.3, near_duplicates=None)
    test = load(tmp_path / "out", "test")
    sides = [{" ".join(r["prompt"][0]["content"].lower().split()) for r in side} for side in (train, test)]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 50 and len(sides[1]) == 17
    assert report["rows_out"] == {"train": len(train), "test": len(test)} == {"train": 132, "test": 68}
    assert not {r["id"] for r in train} & {r["id"] for r in test}
    keys = np.array([prompt_key(messages(f"p{i}")) for i in range(10_000)], dtype=np.uint64)
    assert int(in_test_split(keys, 0, 0.3).sum()) == pytest.approx(3000, abs=150)
    both = in_test_split(keys, 0, 0.3) & in_test_split(keys, 1, 0.3)
    assert int(both.sum()) == pytest.approx(900, abs=100)  # another seed holds out other prompts
    assert not in_test_split(keys, 0, 0.0).any() and (in_test_split(keys, 0, 0.2) <= in_test_split(keys, 0, 0.3)).all()


def test_d23_train_prompts_near_to_a_test_prompt_are_dropped(tmp_path, tiny):
    """40 prompts of 24 words, each a second time with one word more: 24 stay in the train split, 16 leave it."""
    base = [" ".join(row["prompt"] for row in pairs(8, start=100 + i)) for i in range(40)]
    rows = [{"prompt": p, "chosen": "yes", "rejected": r["rejected"]} for p, r in zip(base, pairs(40, start=5))]
    rows += [
        {"prompt": p + " indeed", "chosen": r["chosen"], "rejected": "no"} for p, r in zip(base, pairs(40, start=6))
    ]
    report, train = run(tmp_path, rows, tiny, eval_fraction=0.3, near_duplicates=0.8, max_prompt_length=999)
    test = load(tmp_path / "out", "test")
    stems = [{text.removesuffix(" indeed") for text in texts(side)} for side in (train, test)]
    assert not stems[0] & stems[1] and (len(stems[0]), len(stems[1])) == (24, 16)
    assert report["dropped"] == {"near_test_prompt": 14} and report["rows_out"] == {"train": 48, "test": 18}


def test_files_that_are_left_out_are_named_once(tmp_path, tiny, capsys):
    write(tmp_path / "f.jsonl", pairs(3))
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "a.jsonl", pairs(3)), (tmp_path / "set" / "notes.txt").write_text("x")
    run(tmp_path, [], tiny, source=str(tmp_path / "set"))
    assert capsys.readouterr().out.count("are not read") == 1


def test_d23_an_official_test_set_stays_whole_and_leaves_the_train_set(tmp_path, tiny):
    rows = pairs(30)
    official = write(
        tmp_path / "official.jsonl",
        [row | {"chosen": "another answer"} for row in rows[:10]] + [{"prompt": "x", "chosen": "", "rejected": "b"}],
    )
    report, train = run(tmp_path, rows, tiny, eval_source=official, eval_fraction=None)
    assert report["rows_out"] == {"train": 20, "test": 10} and report["dropped"] == {
        "prompt_in_test": 10,
        "empty_response": 1,
    }
    assert texts(load(tmp_path / "out", "test")) == {r["prompt"] for r in rows[:10]} and texts(train) == {
        r["prompt"] for r in rows[10:]
    }
    # rows that stand in both belong to the test set, and a label of the train set does not shake the test set's
    same = [
        rows[0],
        {**rows[1], "chosen": rows[1]["rejected"], "rejected": rows[1]["chosen"]},
        {**rows[2], "chosen": rows[2]["chosen"].upper()},
        rows[3],
    ]
    official = write(
        tmp_path / "official.jsonl",
        [
            *rows[:3],
            {**rows[4], "chosen": "x y"},
            {**rows[4], "rejected": "x y", "chosen": rows[4]["rejected"]},
            {**rows[4], "chosen": rows[4]["rejected"], "rejected": "x y"},
        ],
    )
    report, train = run(tmp_path, same, tiny, eval_source=official, eval_fraction=None)
    assert texts(train) == {rows[3]["prompt"]} and texts(load(tmp_path / "out", "test")) == {
        r["prompt"] for r in rows[:3]
    }
    assert report["dropped"] == {"prompt_in_test": 2, "contradicting_labels": 3, "duplicate": 1}
    with pytest.raises(UserError, match="eval_fraction would have no effect beside eval_source"):
        run(tmp_path, rows, tiny, eval_source=official, eval_fraction=0.1)


def test_d23_the_encoding_of_accents_makes_no_other_prompt(tmp_path, tiny):
    official = write(tmp_path / "official.jsonl", [{"prompt": "caf\u00e9", "ground_truth": "1,000"}])
    report, train = run(
        tmp_path,
        [{"prompt": "cafe\u0301"}, {"prompt": "b", "ground_truth": "1000"}, {"prompt": "b ", "ground_truth": "1,000"}],
        tiny,
        eval_source=official,
        eval_fraction=None,
    )
    assert report["dropped"] == {"prompt_in_test": 1} and texts(train) == {"b", "b "}


# --- sources, weights, columns, exclusion


def test_weights_and_several_sources(tmp_path, tiny):
    a, b = (write(tmp_path / f"{name}.jsonl", pairs(400, start)) for name, start in (("a", 1), ("b", 2)))
    report, train = run(tmp_path, [], tiny, source=[Source(a, 2.5), Source(b, 0.25)], eval_fraction=0.2)
    test = load(tmp_path / "out", "test")
    counts = {s: sum(r["source"] == s for r in train) for s in (a, b)}
    ids = {s: len({r["id"] for r in train if r["source"] == s}) for s in (a, b)}
    held_out = {s: sum(r["source"] == s for r in test) for s in (a, b)}
    # of a 323 pairs twice or three times, 77 held out; of b 76 once, 73 held out, and the 251 others left out
    assert (counts, ids, held_out) == ({a: 799, b: 76}, {a: 323, b: 76}, {a: 77, b: 73})
    assert report["dropped"] == {"left_out_by_weight": 251}
    assert len({r["id"] for r in test}) == len(test)  # weights are about training
    again, _ = run(tmp_path, [], tiny, source=[Source(a, 2.5), Source(b, 0.25)], eval_fraction=0.2)
    assert again == report and load(tmp_path / "out", "train") == train
    # a row that is left out by its weight takes no equal row of another source with it
    report, train = run(
        tmp_path,
        [],
        tiny,
        source=[Source(a, 0), Source(write(tmp_path / "c.jsonl", pairs(400, 1)), 1)],
        eval_fraction=0.0,
    )
    assert len(train) == 400 and report["dropped"] == {"left_out_by_weight": 400}
    for weight in (-1, 1e9, float("inf"), float("nan")):
        with pytest.raises(UserError, match="weight"):
            run(tmp_path, [], tiny, source=Source(a, weight))
    report, _ = run(tmp_path, [], tiny, source=[a, a])
    assert report["sources"][a] == {"shape": "chosen and rejected", "rows": 800, "kept": 400}
    report, _ = run(
        tmp_path, [], tiny, source=[write(tmp_path / "none.jsonl", [""]), a]
    )  # an empty file says nothing of the kind
    assert report["kind"] == "preference" and report["rows_in"] == 400
    other = write(tmp_path / "prompts.jsonl", [{"prompt": "q"}])
    with pytest.raises(UserError, match="prompts.jsonl:1: .*make no preference"):
        run(tmp_path, [], tiny, source=[a, other])


def test_answers_in_rows_of_their_own_become_pairs(tmp_path, tiny):
    rows = [
        {"prompt": "q", "completion": "good", "label": True, "by": 1},
        {"prompt": "r", "completion": "alone", "label": True},
        {"prompt": "q", "completion": "bad", "label": False, "by": 2},
        {"prompt": "s", "completion": "", "label": False},
    ]
    report, (row,) = run(tmp_path, rows, tiny)
    assert (report["kind"], row["prompt"], row["chosen"], row["rejected"], row["margin"]) == (
        "preference",
        [user("q")],
        "good",
        "bad",
        None,
    )
    assert report["rows_in"] == 4 and report["candidates"] == 3
    assert report["dropped"] == {"no_counterpart": 1, "empty_response": 1} and [
        r["by"] for r in json.loads(row["metadata"])["rows"]
    ] == [1, 2]
    rated = [{"prompt": f"q{i % 3}", "response": f"answer {i}", "helpfulness": i} for i in range(9)]
    report, kept = run(tmp_path, rated, tiny, kind="preference", columns=Columns(reward="helpfulness"))
    assert {(r["prompt"][0]["content"], r["chosen"], r["rejected"], r["margin"]) for r in kept} == {
        (f"q{i}", f"answer {i + 6}", f"answer {i}", 6.0) for i in range(3)
    }
    report, kept = run(tmp_path, rated, tiny, kind="preference", columns=Columns(reward="helpfulness"), pairs="all")
    assert len(kept) == 9 and report["candidates"] == 9 == report["rows_in"]
    report, kept = run(tmp_path, rows, tiny, kind="trajectories")
    assert {(r["response"], r["reward"]) for r in kept} == {("good", 1.0), ("alone", 1.0), ("bad", 0.0)}


def test_excluded_rows_are_left_out_by_id_or_prompt(tmp_path, tiny):
    """In strict mode too, for they are no bad rows; a half-written last line is passed over."""
    rows = [{"prompt": f"q{i}", "chosen": "yes", "rejected": "no"} for i in range(4)]
    ids = {row["prompt"][0]["content"]: row["id"] for row in run(tmp_path, rows, tiny)[1]}
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"id": ids["q0"]})
        + "\n"
        + json.dumps({"prompt": [{"content": "q2", "role": "user"}]})
        + '\n{"id": "'
    )
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "q3"}))
    report, kept = run(
        tmp_path, rows, tiny, on_bad_row="error", exclude=[str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    )
    assert report["dropped"] == {"excluded": 3} and [row["prompt"] for row in kept] == [[user("q1")]]
    (tmp_path / "c.jsonl").write_text('{"x": 1}')
    with pytest.raises(
        UserError, match="exclude suspicious is not a file"
    ):  # a mistyped name is not looked up on the hub
        run(tmp_path, rows, tiny, exclude="suspicious")
    with pytest.raises(UserError, match="c.jsonl:1: exclude needs objects with an id or a prompt"):
        run(tmp_path, rows, tiny, exclude=str(tmp_path / "c.jsonl"))


# --- refresh


def test_refresh_adds_only_what_is_new_and_moves_nothing(tmp_path, tiny):
    rows = pairs(120)
    first = write(tmp_path / "first.jsonl", rows[:80])
    run(tmp_path, [], tiny, source=first, eval_fraction=0.3)
    before = {split: load(tmp_path / "out", split) for split in ("train", "test")}
    more = [
        *rows[60:],
        {"prompt": before["test"][0]["prompt"][0]["content"], "chosen": "brand new", "rejected": "nothing"},
    ]
    more += [
        {"prompt": r["prompt"][0]["content"], "chosen": r["rejected"], "rejected": r["chosen"]}
        for r in before["train"][:3]
    ]
    second = write(tmp_path / "second.jsonl", more)
    # another fraction and another seed must not move a prompt
    report, train = run(
        tmp_path, [], tiny, source=[first, second], eval_fraction=0.6, seed=1, refresh=True, overwrite=False
    )
    test = load(tmp_path / "out", "test")
    assert train[: len(before["train"])] == before["train"] and test[: len(before["test"])] == before["test"]
    assert not texts(train) & texts(test) and texts(train) | texts(test) == {r["prompt"] for r in rows}
    assert "brand new" in {r["chosen"] for r in test}
    assert report["dropped"] == {"already_there": 80 + 20, "contradicting_labels": 3}
    assert (
        report["added"]["rows"]
        == {"train": len(train) - len(before["train"]), "test": len(test) - len(before["test"])}
        and sum(report["added"]["rows"].values()) == 41
    )
    assert report["rows_out"] == {"train": len(train), "test": len(test)} and report["earlier"][0]["rows_in"] == 80
    assert sorted(f.name for f in (tmp_path / "out").glob("*.parquet")) == [
        f"{s}-0000{i}-of-00002.parquet" for s in ("test", "train") for i in (0, 1)
    ]
    # nothing new: nothing changes
    report, again = run(tmp_path, [], tiny, source=[first, second], refresh=True, overwrite=False, eval_fraction=0.3)
    assert (
        again == train
        and load(tmp_path / "out", "test") == test
        and sum(report["added"]["rows"].values()) == 0
        and len(report["earlier"]) == 2
    )
    with pytest.raises(UserError, match="holds preference, so prompts cannot be added"):
        run(tmp_path, [], tiny, source=first, refresh=True, overwrite=False, kind="prompts")


def test_refresh_refuses_what_would_mix_the_splits_and_keeps_other_files(tmp_path, tiny):
    rows = pairs(40)
    official = write(tmp_path / "official.jsonl", pairs(6, start=4))
    source = write(tmp_path / "raw.jsonl", [*rows[:30], "broken"])
    run(tmp_path, [], tiny, source=source, eval_source=official, eval_fraction=None, prompt_suffix="!")
    (tmp_path / "out" / "NOTES.txt").write_text("mine")
    again = dict(source=source, refresh=True, overwrite=False, eval_fraction=None)
    with pytest.raises(UserError, match="has prompt_suffix '!'"):
        run(tmp_path, [], tiny, **again, eval_source=official)
    with pytest.raises(UserError, match="has an eval_source"):
        run(tmp_path, [], tiny, **again, prompt_suffix="!")
    with pytest.raises(UserError, match="exclude cannot take rows out"):
        run(tmp_path, [], tiny, **again, prompt_suffix="!", eval_source=official, exclude=official)
    more = write(tmp_path / "more.jsonl", [*rows[20:], "broken too"])
    report, train = run(tmp_path, [], tiny, **again | {"source": more}, prompt_suffix="!", eval_source=official)
    assert (tmp_path / "out" / "NOTES.txt").read_text() == "mine" and [
        d["reason"] for d in drops(tmp_path / "out") if d["reason"] == "broken_row"
    ] == ["broken_row"] * 2
    assert (
        report["rows_out"] == {"train": 40, "test": 6}
        and report["added"]["rows"] == {"train": 10, "test": 0}
        and len(train) == 40
    )
    import yaml

    assert yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["source"] == [source, more]
    # a new test row that is near to an earlier train prompt stays out, whatever its answers
    run(tmp_path, [r | {"prompt": f"{LONG} {r['prompt']}"} for r in rows[:6]], tiny)
    near = write(
        tmp_path / "near.jsonl",
        [r | {"prompt": f"{LONG} {q['prompt']} now"} for q, r in zip(rows, rows[10:16])] + [rows[30]],
    )
    report, _ = run(
        tmp_path,
        [],
        tiny,
        source=str(tmp_path / "raw.jsonl"),
        refresh=True,
        overwrite=False,
        eval_source=near,
        eval_fraction=None,
        near_duplicates=0.8,
    )
    assert texts(load(tmp_path / "out", "test")) == {rows[30]["prompt"]} and report["dropped"]["prompt_in_train"] == 6


def test_refresh_of_nothing_starts(tmp_path, tiny):
    report, rows = run(tmp_path, pairs(3), tiny, refresh=True, overwrite=False)
    assert len(rows) == 3 and "added" not in report


# --- killed runs, workers


def test_the_output_does_not_depend_on_the_number_of_workers(tmp_path, tiny):
    write(tmp_path / "raw.jsonl", [*pairs(3200), "broken", *pairs(10)])
    for workers in (1, 3):
        report, _ = run(
            tmp_path,
            [],
            tiny,
            source=str(tmp_path / "raw.jsonl"),
            workers=workers,
            output_dir=str(tmp_path / f"out{workers}"),
            eval_fraction=0.1,
        )
        assert report["dropped"] == {"duplicate": 10, "broken_row": 1}
    a, b = (tmp_path / f"out{w}" for w in (1, 3))
    assert {f.name for f in a.iterdir()} == {f.name for f in b.iterdir()} and not list(tmp_path.glob(".out*"))
    for file in a.iterdir():
        if file.name not in ("run.json", "config.yaml"):
            assert file.read_bytes() == (b / file.name).read_bytes(), file.name


def test_train_rows_are_shuffled_and_test_rows_keep_their_order(tmp_path, tiny):
    rows = pairs(2500)
    _, train = run(tmp_path, rows, tiny, eval_fraction=0.2)
    position = {row["prompt"]: i for i, row in enumerate(rows)}
    order = [position[r["prompt"][0]["content"]] for r in train]
    assert np.corrcoef(order, np.arange(len(order)))[0, 1] == pytest.approx(0, abs=0.1) and order != sorted(order)
    test = [position[r["prompt"][0]["content"]] for r in load(tmp_path / "out", "test")]
    assert test == sorted(test)


def started(tmp_path, tiny, rows, *options, **popen):
    """Stage 1 in a process of its own with two workers, which has finished three chunks or more.

    Returns (process, raw file, folder of chunks).
    """
    raw, chunks = write(tmp_path / "raw.jsonl", pairs(rows)), tmp_path / ".out.partial" / "chunks"
    command = [
        sys.executable,
        "prepare_data.py",
        "--source",
        raw,
        "--tokenizer",
        tiny,
        "--output_dir",
        str(tmp_path / "out"),
        "--workers",
        "2",
        *options,
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, **{"stderr": subprocess.DEVNULL} | popen)
    while len(list(chunks.glob("*.arrow"))) < 3 and process.poll() is None:
        time.sleep(0.02)
    return process, raw, chunks


def workers_of(process):
    return [
        int(pid)
        for task in Path(f"/proc/{process.pid}/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]


def test_a_run_that_is_killed_leaves_the_old_output_and_goes_on(tmp_path, tiny):
    run(tmp_path, pairs(5, start=9), tiny)
    old = load(tmp_path / "out", "train")
    process, raw, chunks = started(tmp_path, tiny, 20_000, "--overwrite", "true", start_new_session=True)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert load(tmp_path / "out", "train") == old  # a reader sees the whole old output
    done = {f.name: f.stat().st_mtime_ns for f in chunks.glob("*.arrow")}
    assert 3 <= len(done) < 20
    report, rows = run(tmp_path, [], tiny, source=raw, eval_fraction=None)
    assert report["rows_in"] == 20_000 and not (tmp_path / ".out.partial").exists()
    # the same as without the interruption
    whole, again = run(tmp_path, [], tiny, source=raw, eval_fraction=None, output_dir=str(tmp_path / "whole"))
    assert whole == report and load(tmp_path / "whole", "train") == rows


def test_chunks_of_a_killed_run_are_used_again_only_if_nothing_changed(tmp_path, tiny, monkeypatch):
    import prepare_data
    from dataprep import chunks

    raw = write(tmp_path / "raw.jsonl", pairs(2500))
    made = []
    original = chunks.process_chunk
    monkeypatch.setattr(
        chunks, "process_chunk", lambda chunk, work, file: made.append(file.name) or original(chunk, work, file)
    )
    monkeypatch.setattr(prepare_data, "decide", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt()))
    for changes, expected in [({}, 3), ({}, 0), ({"max_prompt_length": 100}, 3), ({"max_prompt_length": 100}, 0)]:
        made.clear()
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, [], tiny, source=raw, workers=1, **changes)
        assert len(made) == expected, changes
    (tmp_path / "exclude.jsonl").write_text(json.dumps({"id": "0" * 16}))
    for expected in (3, 0):
        made.clear()
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, [], tiny, source=raw, workers=1, exclude=str(tmp_path / "exclude.jsonl"))
        assert len(made) == expected
    (tmp_path / "exclude.jsonl").write_text(json.dumps({"id": "1" * 16}))  # as a PPO run goes on writing to it
    made.clear()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, [], tiny, source=raw, workers=1, exclude=str(tmp_path / "exclude.jsonl"))
    assert len(made) == 3
    write(tmp_path / "raw.jsonl", pairs(1500))
    made.clear()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, [], tiny, source=raw, workers=1, max_prompt_length=100)
    assert len(made) == 2


def test_workers_end_with_a_run_that_is_killed_and_two_runs_do_not_mix(tmp_path, tiny):
    process, raw, _ = started(tmp_path, tiny, 40_000)
    workers = workers_of(process)
    with pytest.raises(UserError, match="another run is preparing"):
        run(tmp_path, [], tiny, source=raw, eval_fraction=None)
    process.kill()
    process.wait()
    deadline = time.time() + 10
    while (
        any(
            Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3]
            for pid in workers
        )
        and time.time() < deadline
    ):
        time.sleep(0.1)
    assert len(workers) == 2 and time.time() < deadline
    assert run(tmp_path, [], tiny, source=raw, eval_fraction=None)[0]["rows_in"] == 40_000


def test_a_killed_worker_is_one_line_and_what_is_finished_is_kept(tmp_path, tiny, monkeypatch):
    process, _, chunks = started(tmp_path, tiny, 40_000, stderr=subprocess.PIPE, text=True)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    error = process.communicate(timeout=120)[1]
    assert (
        process.returncode == 2 and error.count("\n") == 1 and error.startswith("error: a worker process was killed")
    ), error
    done = {file.name: file.stat().st_mtime_ns for file in chunks.glob("*.arrow")}
    assert 3 <= len(done) < 40
    at_the_end, original = {}, shutil.rmtree

    def look(folder, *args, **kwargs):  # when the second run tidies up
        if Path(folder).name == ".out.partial":
            at_the_end.update({name: (chunks / name).stat().st_mtime_ns for name in done})
        original(folder, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", look)
    assert prepare(parse_config(DataConfig, process.args[2:]))["rows_in"] == 40_000 and at_the_end == done


def test_chunks_are_promised_and_kept_only_where_the_next_run_can_use_them(tmp_path):
    for about in ("all that counts", None):  # of the hub nobody can say whether it changed
        with pytest.raises(UserError) as error, workshop(tmp_path / "out", about):
            raise WorkerKilled("a worker was killed")
        kept = about is not None
        assert str(error.value) == "a worker was killed" + "; what is finished is kept" * kept
        assert (tmp_path / ".out.partial").exists() == kept


def test_options_without_effect_are_refused_before_the_earlier_output_is_read(tmp_path, tiny, monkeypatch):
    import prepare_data

    run(tmp_path, [{"prompt": "a", "ground_truth": "1"}], tiny)
    monkeypatch.setattr(prepare_data, "read_file", None)
    with pytest.raises(UserError, match="pairs would have no effect on prompts; remove it"):
        run(
            tmp_path,
            [{"prompt": "b", "ground_truth": "2"}],
            tiny,
            refresh=True,
            overwrite=False,
            eval_fraction=None,
            pairs="all",
        )


def test_odd_places_for_the_output(tmp_path, tiny, monkeypatch):
    raw = write(tmp_path / "raw.jsonl", pairs(4))
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for place in (str(tmp_path / "link"), "a/b/c/", "../here/a/b/d"):
        for overwrite in (False, True):
            prepare(DataConfig(source=raw, tokenizer=tiny, output_dir=place, overwrite=overwrite, eval_fraction=0.0))
    assert (tmp_path / "link").is_symlink() and all(
        len(load(folder, "train")) == 4 for folder in (tmp_path / "real", "a/b/c", "a/b/d")
    )
    for place in (".", "..", "/"):
        with pytest.raises(UserError, match="holds the current folder"):
            prepare(DataConfig(source=raw, tokenizer=tiny, output_dir=place))
    with pytest.raises(UserError, match="lies in output_dir"):
        prepare(
            DataConfig(
                source=str(next((tmp_path / "real").glob("train*"))),
                tokenizer=tiny,
                output_dir=str(tmp_path / "real"),
                overwrite=True,
            )
        )


def test_a_run_that_was_killed_while_replacing_is_restored(tmp_path, tiny):
    run(tmp_path, pairs(5), tiny)
    (tmp_path / "out").rename(tmp_path / ".out.old")  # as between the two renames
    with pytest.raises(UserError, match="is not empty"):
        run(tmp_path, pairs(5), tiny, overwrite=False)
    assert len(load(tmp_path / "out", "train")) == 5 and not (tmp_path / ".out.old").exists()


def test_shards_and_row_groups(tmp_path, tiny, monkeypatch):
    from dataprep import folder

    monkeypatch.setattr(folder, "ROWS_PER_SHARD", 1200)
    report, rows = run(tmp_path, pairs(3000), tiny)
    files = sorted((tmp_path / "out").glob("train-*.parquet"))
    assert [f.name for f in files] == [f"train-0000{i}-of-00003.parquet" for i in range(3)]
    assert [pyarrow.parquet.read_metadata(f).num_rows for f in files] == [1200, 1200, 600]
    assert max(pyarrow.parquet.read_metadata(f).row_group(0).num_rows for f in files) <= 1000
    assert len({r["id"] for r in rows}) == 3000


# --- what is written


def test_output_is_what_datasets_pandas_and_a_second_run_expect(tmp_path, tiny):
    import datasets

    rows = [row | {"extra": i} for i, row in enumerate(pairs(20))] + [{"prompt": "x", "chosen": "", "rejected": "y"}]
    run(tmp_path, rows, tiny, eval_fraction=0.5)
    loaded = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert set(loaded) == {"train", "test"} and loaded["train"].num_rows + loaded["test"].num_rows == 20
    row = loaded["train"][0]
    assert list(row) == ["id", "source", "prompt", "chosen", "rejected", "margin", "metadata"]
    assert row["prompt"] == messages(row["prompt"][0]["content"]) and set(json.loads(row["metadata"])) == {"extra"}
    table = pyarrow.parquet.read_table(next((tmp_path / "out").glob("train-*")))
    assert table.column_names == list(row)
    with pytest.raises(UserError, match="is not empty"):
        run(tmp_path, rows, tiny, overwrite=False)
    report, _ = run(
        tmp_path, [], tiny, source=str(tmp_path / "out"), output_dir=str(tmp_path / "again")
    )  # its own output is a source
    assert (
        report["rows_in"] == loaded["train"].num_rows and report["dropped"] == {}
    )  # the train split of a folder that has splits


def test_pandas_reads_the_output(tmp_path, tiny):
    pandas = pytest.importorskip("pandas")
    run(tmp_path, [{"prompt": "q", "response": "r", "reward": 0.5, "logprobs": [-1, -2]}], tiny)
    frame = pandas.read_parquet(next((tmp_path / "out").glob("train-*")))
    assert (
        frame["reward"].tolist() == [0.5]
        and frame["logprobs"][0].tolist() == [-1.0, -2.0]
        and frame["prompt"][0][0] == user("q")
    )


def test_report_page_and_the_numbers_in_it(tmp_path, tiny):
    rows = [{"prompt": f"q{i} <b>", "chosen": "much longer & better", "rejected": "no"} for i in range(6)] + [
        {"prompt": "r", "chosen": "a", "rejected": "longer"}
    ]
    report, _ = run(tmp_path, [*rows, {"prompt": "x", "chosen": "a", "rejected": "a"}], tiny, near_duplicates=None)
    assert report["longer_answer_chosen"] == round(6 / 7, 4)
    even = run(
        tmp_path,
        [{"prompt": f"q{i}", "chosen": "ab", "rejected": "cd"} for i in range(3)],
        tiny,
        output_dir=str(tmp_path / "even"),
        near_duplicates=None,
    )[0]
    assert even["longer_answer_chosen"] == 0.5  # no preference for length
    assert report["tokens"]["chosen"] == {"p0": 2, "p50": 21, "p90": 21, "p99": 21, "p100": 21}
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert (
        "equal_answers" in page
        and "<svg" in page
        and "&lt;b&gt;" in page
        and "<b>" not in page
        and "<mark>much longer &amp; better" in page
    )
    assert "http" not in page.replace("http://www.w3.org", "").replace("http://creativecommons.org", "").replace(
        "http://purl.org", ""
    ).replace("https://matplotlib.org", "")


def test_d16_one_decoded_example_is_printed_with_its_marks(tmp_path, tiny, capsys):
    run(tmp_path, [{"prompt": "What?", "chosen": "That.", "rejected": "No."}], tiny)
    printed = capsys.readouterr().out
    assert (
        "<|start|>user\nWhat?<|end|>\n<|start|>assistant\n" in printed
        and "chosen: ‹That.<|end|>›" in printed
        and "preference, chosen and rejected (from " in printed
    )


def test_tfidf_by_hand():
    """Four texts: "the" stands in all (weight log(5/5) + 1 = 1), cat and dog in one each (log(5/2) + 1); twice counts
    1 + log 2."""
    rarity = word_rarity(iter([["the cat", "the dog"], ["the", "The the"]]))
    a, b, c = tfidf(["the cat", "The DOG", "cat cat the"], rarity)
    assert a @ b == pytest.approx(0.214033, abs=1e-6)  # 1 / (1 + 1.916291²)
    assert a @ c == pytest.approx(0.983484, abs=1e-6)  # twice weighs 1.916291 * 1.693147 = 3.244562
    assert a @ a == pytest.approx(1, abs=1e-6)


TRAIN_PROMPTS = [
    "How do I bake sourdough bread at home?",
    "Write a poem about the autumn rain.",
    "Explain how vaccines protect people.",
    "What is the best way to learn chess?",
]


def test_coverage_finds_close_neighbours_and_lists_prompts_without(tmp_path, tiny, capsys):
    dialogue = [user("hi"), {"role": "assistant", "content": "?"}, user("Explain how vaccines protect people.")]
    real = write(
        tmp_path / "real.jsonl",
        [
            {"prompt": "how can I bake bread with sourdough at home"},
            {"prompt": "Fix my kubernetes ingress controller"},
            {"prompt": dialogue},
        ],
    )
    run(tmp_path, [{"prompt": p} for p in TRAIN_PROMPTS], tiny)
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    result = measure(CoverageConfig(str(tmp_path / "out"), real, 0.5))
    assert result["covered"] == 2 and result["share"] == 0.6667
    lines = [json.loads(line) for line in (tmp_path / "out" / "coverage.jsonl").read_text().splitlines()]
    assert [line["covered"] for line in lines] == [False, True, True] and lines[0]["place"] == f"{real}:2"
    assert lines[1]["nearest"] == TRAIN_PROMPTS[0] and lines[2]["similarity"] == pytest.approx(1, abs=1e-3)
    assert result["loneliest"] == lines and json.loads((tmp_path / "out" / "coverage.json").read_text()) == result
    after = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert set(after) - set(before) == {"coverage.json", "coverage.jsonl"} and before.items() <= after.items()
    printed = capsys.readouterr().out
    assert "66.7% of 3 real prompts have a close train prompt" in printed and "kubernetes" in printed
    # what is written about data is no data
    assert len(rows_of(tmp_path / "out")) == 4
    with pytest.raises(UserError, match="bad.jsonl:1: .*prompts needs rows with a prompt"):
        measure(CoverageConfig(str(tmp_path / "out"), write(tmp_path / "bad.jsonl", [{"x": 1}])))


def test_coverage_compares_without_the_prompt_suffix(tmp_path, tiny):
    """Which stage 1 appended, and which would make all prompts alike."""
    run(
        tmp_path,
        [{"prompt": p} for p in TRAIN_PROMPTS],
        tiny,
        prompt_suffix=" Think, then write the number after ####.",
    )
    assert all(text.endswith(" ####.") for text in texts(load(tmp_path / "out", "train")))
    real = write(tmp_path / "real.jsonl", [{"prompt": TRAIN_PROMPTS[3]}, {"prompt": "Write the number after that."}])
    result = measure(CoverageConfig(str(tmp_path / "out"), real))
    lonely, same = result["loneliest"]
    assert (same["similarity"], same["nearest"]) == (1.0, TRAIN_PROMPTS[3]) and result["covered"] == 1
    assert lonely["similarity"] < 0.5 and lonely["nearest"] in TRAIN_PROMPTS


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory, tiny, preferences) -> str:
    """Folder of a reward model that learned yes over no."""
    from train_reward import RewardTrainConfig, train
    from utils.config import ModelConfig

    folder = tmp_path_factory.mktemp("rm")
    settings = dict(lora=None, train_batch_size=16, epochs=6, lr=3e-3, report_to="none")
    train(RewardTrainConfig(ModelConfig(tiny), preferences, str(folder), **settings))
    return str(folder / "final")


def test_noise_filter_writes_contradicted_train_pairs_aside(tmp_path, tiny, reward_model):
    """A reward model that learned yes over no contradicts pairs whose labels were swapped; the test split stays."""
    rows = [{"prompt": f"p{i}", "chosen": f"yes {i % 7}", "rejected": f"no {i % 5}"} for i in range(40)]
    for i in range(0, 40, 8):
        rows[i]["chosen"], rows[i]["rejected"] = rows[i]["rejected"], rows[i]["chosen"]
    _, train_before = run(tmp_path, rows, tiny, eval_fraction=0.3, near_duplicates=None, prompt_suffix="")
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in (tmp_path / "out").iterdir()}
    cfg = FilterConfig(str(tmp_path / "out"), reward_model, str(tmp_path / "filtered"))
    report = filter_pairs(cfg)
    assert {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in (tmp_path / "out").iterdir()} == before
    test, kept = load(tmp_path / "filtered", "test"), load(tmp_path / "filtered", "train")
    aside = [json.loads(line) for line in (tmp_path / "filtered" / "contradicted.jsonl").read_text().splitlines()]
    swapped = {f"p{i}" for i in range(0, 40, 8)}
    assert (
        texts(aside) == swapped - texts(test)
        and texts(kept) == {f"p{i}" for i in range(40)} - texts(test) - swapped
        and texts(test) & swapped
    )
    assert report["dropped"] == {"contradicted_by_reward_model": len(aside)} and all(
        a["score_chosen"] < a["score_rejected"] and a["probability"] < 0.05 for a in aside
    )
    assert test == load(tmp_path / "out", "test") and kept == [r for r in train_before if r not in kept_out(aside)]
    assert report["rows_out"] == {"train": len(kept), "test": len(test)} and report["rows_in"] == 40
    assert json.loads((tmp_path / "filtered" / "report.json").read_text()) == report
    # it is a data folder like another: how its rows were made, and no rows among what is about them
    assert (tmp_path / "filtered" / "config.yaml").read_text() == (tmp_path / "out" / "config.yaml").read_text()
    assert rows_of(tmp_path / "filtered") == kept and load_rows(cfg.output_dir, "train", ("preference",)) == kept
    assert not list(tmp_path.glob(".filtered*"))


def kept_out(aside):
    """Rows of contradicted.jsonl as they were."""
    return [{k: v for k, v in row.items() if not k.startswith(("score_", "probability"))} for row in aside]


def test_a_pair_of_weight_two_is_filtered_twice_and_listed_once(tmp_path, tiny, reward_model):
    rows = [{"prompt": f"p{i}", "chosen": "yes 1", "rejected": "no 1"} for i in range(6)]
    rows[2] = {"prompt": "p2", "chosen": "no 1", "rejected": "yes 1"}
    source = Source(write(tmp_path / "raw.jsonl", rows), 2)
    run(tmp_path, [], tiny, source=source, near_duplicates=None)
    report = filter_pairs(FilterConfig(str(tmp_path / "out"), reward_model, str(tmp_path / "filtered")))
    assert report["rows_in"] == 12 and report["rows_out"] == {"train": 10, "test": 0}
    assert report["dropped"] == {"contradicted_by_reward_model": 2}
    assert (tmp_path / "filtered" / "contradicted.jsonl").read_text().count("\n") == 1


def test_the_filter_refuses_what_it_cannot_do(tmp_path, tiny, reward_model):
    run(tmp_path, [{"prompt": f"p{i}", "chosen": "no 1", "rejected": "yes 1"} for i in range(3)], tiny)
    data, full = str(tmp_path / "out"), tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("mine")
    for changes, message in [
        ({"output_dir": str(full)}, "is not empty"),
        ({"output_dir": str(full), "overwrite": True}, "holds files that no run wrote"),
        ({"output_dir": data, "overwrite": True}, "output_dir .* and data .* overlap"),
        ({"output_dir": data + "/inside"}, "output_dir .* and data .* overlap"),
        ({"output_dir": str(Path(reward_model).parent), "overwrite": True}, "reward_model .* lies in output_dir"),
        ({"min_probability": 0.5}, "min_probability 0.5 must be above 0 and below 0.5"),
        ({"micro_batch_size": 0}, "micro_batch_size 0"),
        ({"reward_model": "nowhere"}, "reward_model nowhere is not a folder"),
        ({"data": str(tmp_path / "nowhere")}, "nowhere does not exist"),
        ({}, "contradicts all 3 train rows"),
    ]:
        settings = dict(data=data, reward_model=reward_model, output_dir=str(tmp_path / "filtered"))
        with pytest.raises(UserError, match=message):
            filter_pairs(FilterConfig(**settings | changes))
    assert len(load(data, "train")) == 3 and [f.name for f in full.iterdir()] == ["mine.txt"]
    assert not (tmp_path / "filtered").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("module", ["dataprep.coverage", "dataprep.filter"])
def test_commands_on_a_folder_end_in_one_line(tmp_path, module):
    command = [sys.executable, "-m", module, "--dat", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: unknown option --dat; did you mean 'data'?\n"


def test_folders_of_the_wrong_kind_are_refused(tmp_path, tiny):
    run(tmp_path, [{"prompt": "q"}], tiny)
    with pytest.raises(UserError, match="holds prompts; this needs preference"):
        load_rows(str(tmp_path / "out"), "train", ("preference",))
    with pytest.raises(UserError, match="has no test rows"):
        load_rows(str(tmp_path / "out"), "test", ("prompts",))
    with pytest.raises(UserError, match="does not exist"):
        load_rows(str(tmp_path / "nowhere"), "train", ("prompts",))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"eval_fraction": 1.0}, "eval_fraction"),
        ({"near_duplicates": 0.2}, "near_duplicates"),
        ({"workers": 0}, "workers"),
        ({"max_response_length": 1}, "max_response_length"),
        ({"kind": "prompts", "long_response": "truncate"}, "no effect on prompts"),
        ({"kind": "prompts", "pairs": "all"}, "no effect on prompts"),
        ({"refresh": True}, "refresh keeps"),
        ({"source": '[{"pth": "x"}]'}, "is not valid"),
        ({"source": Source("raw.jsonl", -1)}, "weight"),
        ({"hub": Hub(name="main")}, "hub.* is set"),
        ({"source": []}, "source is empty"),
        (
            {"columns": Columns(reward="rejected")},
            "columns.reward would have no effect on preference, chosen and rejected",
        ),
        ({"columns": Columns(prompt="ask")}, "no column 'ask'"),
        ({"source": ".", "output_dir": "out"}, "lies inside the source"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, tiny, changes, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "raw.jsonl", pairs(2)), (tmp_path / "conftest.py").write_text("")
    with pytest.raises(UserError, match=message.replace("*", r"\*")):
        run(tmp_path, [], tiny, **{"source": "raw.jsonl"} | changes)
    assert not (tmp_path / "out").exists()


# --- random damage


def damage(rng, text):
    """One random wrong thing: a byte, a cut, a swapped value, a type, a key."""
    data = bytearray(text.encode("utf-8"))
    what = rng.randrange(8)
    if what == 0:
        data[rng.randrange(len(data))] = rng.randrange(256)
    elif what == 1:
        del data[rng.randrange(len(data)) :]
    elif what == 2:
        del data[rng.randrange(len(data))]
    elif what == 3:
        data[rng.randrange(len(data)) : 0] = bytes(rng.choices(range(256), k=3))
    else:
        row = json.loads(text)
        key = rng.choice(list(row))
        value = rng.choice(
            [
                None,
                7,
                -1.5,
                True,
                "",
                " ",
                [],
                {},
                [None],
                {"a": 1},
                "\ud83d",
                "\x00",
                "é" * 3,
                [user("q")],
                [{"role": None, "content": "x"}],
                10**30,
                float("nan"),
                float("inf"),
            ]
        )
        if what == 4:
            del row[key]
        elif what == 5:
            row[rng.choice(["prompt", "chosen", "reward", "x"])] = value
        else:
            row[key] = value
        data = bytearray(json.dumps(row).encode())
    return bytes(data).replace(b"\n", b" ")


@pytest.mark.parametrize(
    "good",
    [
        {"prompt": "What is a cat?", "chosen": "An animal é 😀.", "rejected": "A plant.", "margin": 1.5},
        {
            "chosen": "\n\nHuman: hi\n\nAssistant: Hello there",
            "rejected": "\n\nHuman: hi\n\nAssistant: Go away",
            "meta": {"x": [1]},
        },
        {
            "prompt": [user("q"), {"role": "assistant", "content": "r"}, user("s")],
            "response": "t",
            "reward": 0.5,
            "logprobs": [-1, -2],
        },
        {"prompt": "q", "responses": ["a", "b", "c"], "scores": [1, 2, 3]},
        {"question": "2+2?", "answer": "#### 4", "level": None},
    ],
)
def test_random_damage_never_gives_a_traceback_a_loss_or_a_literal_none(tmp_path, tiny, good):
    rng = random.Random(json.dumps(good))
    text = json.dumps(good, ensure_ascii=False)
    lines = [text.encode()] + [damage(rng, text) for _ in range(1000)]
    (tmp_path / "raw.jsonl").write_bytes(b"\n".join(lines))
    report, rows = run(tmp_path, [], tiny, source=str(tmp_path / "raw.jsonl"), eval_fraction=0.1)
    everything = rows + load(tmp_path / "out", "test")
    assert report["rows_in"] == sum(bool(line.strip()) for line in lines) and report["candidates"] == len(
        everything
    ) + sum(report["dropped"].values())
    assert len(drops(tmp_path / "out")) == sum(report["dropped"].values()) and everything
    for row in everything:
        for part in [m["content"] for m in row["prompt"]] + [
            row.get(name) or "" for name in ("chosen", "rejected", "response", "ground_truth", "reference")
        ]:
            assert part == part.encode().decode() and not re.search(r"None|b'|\bnan\b|\x00", part)
    for reason in report["dropped"]:
        assert reason.isidentifier()
    # a damaged file of a binary or nested format is an error in one line, never a traceback
    array = json.dumps([good] * 30).encode()
    pa.parquet.write_table(pa.Table.from_pylist([good] * 30), tmp_path / "whole.parquet")
    whole = (tmp_path / "whole.parquet").read_bytes()
    for _ in range(40):
        for name, data in (
            ("d.json", array),
            ("d.parquet", whole),
            ("d.jsonl.gz", gzip.compress(array)),
            ("d.csv", array),
        ):
            data = bytearray(data)
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            (tmp_path / name).write_bytes(data)
            try:
                run(tmp_path, [], tiny, source=str(tmp_path / name), output_dir=str(tmp_path / "damaged"))
            except UserError as error:
                assert "\n" not in str(error) and name in str(error)

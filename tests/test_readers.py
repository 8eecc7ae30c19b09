"""Stage 1's readers: one table in every file type, damaged files, layouts of known sets, many rows, large rows."""

import csv
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from helpers import ROOT
from test_data import drops, load, messages, pairs, places_of, rows_of, run, user, write

from dataprep.chunks import far_too_long
from dataprep.readers import pairs_from_scores
from dataprep.shapes import Columns, detect_source
from dataprep.sources import read_source
from prepare_data import DataConfig, prepare
from utils.config import UserError
from utils.loader import CHUNK_ROWS, Batches
from utils.rows import BadRow


@pytest.fixture(autouse=True)
def without_the_page(monkeypatch):
    """Drawing it would take most of the time."""
    monkeypatch.setattr("prepare_data.report_page", lambda *args: "")


# --- the same table in every file type

TABLES = {
    "preference": [
        {"prompt": [user("é one")], "chosen": "A", "rejected": 'B,\n"b"', "margin": 2.5},
        {
            "prompt": [user("two words"), {"role": "assistant", "content": "x"}, user("y")],
            "chosen": "C",
            "rejected": "D",
        },
        {"prompt": [user("three")], "chosen": "[1]", "rejected": "2", "margin": 0.0},
    ],
    "prompts": [
        {"prompt": [user("what is 6 * 7")], "ground_truth": 42, "reference": "six sevens"},
        {"prompt": [user("who sings")], "ground_truth": None, "reference": None},
        {"prompt": [user("half")], "ground_truth": 0.5, "reference": "1/2"},
    ],
    "trajectories": [
        {"prompt": [user("a")], "response": "ok", "reward": 1.0, "logprobs": [-1.0, -2.0, -0.5]},
        {"prompt": [user("b")], "response": " no", "reward": -2.5, "logprobs": [-1.0, -2.0, -0.5, -0.25]},
        {"prompt": [user("c")], "response": "ja", "reward": 0.0, "logprobs": [-0.5, -0.5, -0.5]},
    ],
}


def write_types(folder, rows, as_text: bool) -> list[str]:
    """One table in every file type; as_text: messages as JSON text where the type could hold them as they are."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    rows = [{name: row.get(name) for name in names} for row in rows]
    texts = [row | {"prompt": json.dumps(row["prompt"])} for row in rows]
    cells = [{k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()} for row in texts]
    rows = texts if as_text else rows
    write(folder / "t.jsonl", rows), write(folder / "t.NDJSON", rows), write(folder / "t.json", [json.dumps(rows)])
    (folder / "t.jsonl.gz").write_bytes(gzip.compress((folder / "t.jsonl").read_bytes()))
    table = pa.Table.from_pylist(rows)
    pa.parquet.write_table(table, folder / "t.parquet")
    with pa.OSFile(str(folder / "t.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    for name, delimiter in (("t.csv", ","), ("t.tsv", "\t")):
        with open(folder / name, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names, delimiter=delimiter)
            writer.writeheader(), writer.writerows(cells)
    with h5py.File(folder / "t.h5", "w") as file:
        for name in names:
            values = [row[name] for row in cells]
            if any(isinstance(v, str) for v in values):
                file[name] = ["" if v is None else v for v in values]
            else:
                file[name] = np.array([np.nan if v is None else v for v in values])
    return sorted(str(f) for f in folder.iterdir() if f.name.startswith("t."))


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("kind", TABLES)
def test_one_table_gives_the_same_rows_in_every_file_type(tmp_path, tiny, kind, as_text):
    files = write_types(tmp_path, TABLES[kind], as_text)
    assert len(files) == 9
    wanted = None
    for file in files:
        report, rows = run(tmp_path, [], tiny, source=file, kind=kind)
        found = sorted(({k: v for k, v in row.items() if k != "source"} for row in rows), key=lambda row: row["id"])
        wanted = wanted or found
        assert found == wanted and len(found) == 3 and not report["dropped"], file
    values = {row["prompt"][0]["content"]: row for row in wanted}
    if kind == "preference":
        assert [values[k]["margin"] for k in ("é one", "two words", "three")] == [2.5, None, 0.0]
        assert values["é one"]["rejected"] == 'B,\n"b"' and values["three"]["chosen"] == "[1]"
    elif kind == "prompts":
        assert [values[k]["ground_truth"] for k in ("what is 6 * 7", "who sings", "half")] == ["42", None, "0.5"]
    else:
        assert values["b"]["logprobs"] == [-1.0, -2.0, -0.5, -0.25] and values["b"]["reward"] == -2.5


def test_a_text_that_only_looks_like_messages_stays_text(tmp_path, tiny):
    texts = ['{"from": "Berlin", "to": "Rome"}', '[{"a": 1}]', '{"role": "cook"}', "[1, 2]"]
    rows = [{"prompt": text, "chosen": f"yes {text}", "rejected": "no"} for text in texts]
    assert {row["prompt"][0]["content"] for row in run(tmp_path, rows, tiny)[1]} == set(texts)


# --- CSV: quotes


def test_quotes_after_a_backslash(tmp_path):
    """In the way of most programs, and with a backslash; text that has both is read by the way that fits."""
    cells = ['say "hi",\nyou, there', 'C:\\new\\"x"', 'ends in "quotes"', "back\\slash"]
    escaped = [cell.replace("\\", "\\\\").replace('"', '\\"') for cell in cells]
    (tmp_path / "e.csv").write_text("prompt,n\n" + "".join(f'"{c}","{i}"\n' for i, c in enumerate(escaped)))
    assert rows_of(tmp_path / "e.csv") == [{"prompt": cell, "n": str(i)} for i, cell in enumerate(cells)]
    assert places_of(tmp_path / "e.csv") == [":2", ":4", ":5", ":6"]
    with open(tmp_path / "d.csv", "w", newline="") as file:
        csv.writer(file).writerows([["prompt", "n"], *([cell, "1"] for cell in cells)])
    assert [row["prompt"] for row in rows_of(tmp_path / "d.csv")] == cells
    (tmp_path / "path.csv").write_text('prompt,n\n"C:\\dir\\",1\n"b",2\n')  # a backslash at the end of a cell
    assert [row["prompt"] for row in rows_of(tmp_path / "path.csv")] == ["C:\\dir\\", "b"]
    (tmp_path / "e.csv.gz").write_bytes(gzip.compress((tmp_path / "e.csv").read_bytes()))
    assert rows_of(tmp_path / "e.csv.gz") == rows_of(tmp_path / "e.csv")


@pytest.mark.parametrize(
    "lines, good, lost",
    [
        (["q0,a", 'q1,"open', *(f"q{i},a" for i in range(2, 9))], [2], [*range(3, 11)]),
        (['"he said "hi", ok', "and, then", 'more" now",x', "q,1", "r,2", "s,3"], [5, 6, 7], [2, 3, 4]),
        (['"he said "hi", ok', "and, then", "last, line"], [], [2, 3, 4]),
        (["q0,a", 'q1,"a" b', "q2,c", "q3,d", "", "q4,e"], [2, 4, 5, 7], [3]),
        (["a,b,c", "d,e"], [3], [2]),
    ],
)
def test_lines_around_a_wrong_quote_are_counted_and_none_becomes_a_row_of_its_own(tmp_path, lines, good, lost):
    (tmp_path / "x.csv").write_text("\n".join(["prompt,n", *lines]) + "\n")
    rows = [(int(place[1:]), row) for place, row in zip(places_of(tmp_path / "x.csv"), rows_of(tmp_path / "x.csv"))]
    assert [line for line, row in rows if isinstance(row, dict)] == good
    assert [line for line, row in rows if isinstance(row, BadRow)] == lost
    assert all(f"lines {lost[0]} to" in row.detail for line, row in rows if line == lost[0])


# --- splits in file names


@pytest.mark.parametrize(
    "train, held_out",
    [
        ("pairs.jsonl", "test.jsonl"),
        ("split=train/a.jsonl", "split=test/a.jsonl"),
        ("a.ndjson", "validation/a.ndjson"),
        ("hh_train.JSONL", "hh_test.JSONL"),
        ("pairs.jsonl", "my-dev-00000-of-00001.jsonl"),
        ("latest.jsonl", "split=eval/x.jsonl"),
    ],
)
def test_held_out_files_are_not_trained_on(tmp_path, tiny, capsys, train, held_out):
    for name, text in ((train, "learn"), (held_out, "keep")):
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / "d" / name, [{"prompt": text, "chosen": "a", "rejected": "b"}])
    report, rows = run(tmp_path, [], tiny, source=str(tmp_path / "d"))
    assert [row["prompt"][0]["content"] for row in rows] == ["learn"] and report["rows_in"] == 1
    out = capsys.readouterr().out
    assert "1 files are not read" in out and held_out in out and "eval_source" in out


def test_a_folder_of_held_out_files_alone_is_read(tmp_path):
    write(tmp_path / "test-0.jsonl", [{"prompt": "x"}]), write(tmp_path / "test-1.jsonl", [{"prompt": "y"}])
    assert rows_of(tmp_path) == [{"prompt": "x"}, {"prompt": "y"}]


# --- layouts of public sets


def only(tmp_path, tiny, row, **changes):
    report, rows = run(tmp_path, [row], tiny, **changes)
    assert report["kind"] == "preference"
    return [(r["prompt"], r["chosen"], r["rejected"], r["margin"]) for r in rows]


@pytest.mark.parametrize(
    "row, chosen, margin",
    [
        (
            {
                "question": {"full_text": "q", "id": "1"},
                "answer_0": "A",
                "score_0": -0.5,
                "answer_1": "B",
                "score_1": 0.5,
            },
            "B",
            1.0,
        ),
        (
            {"question": {"full_text": "q"}, "answer_0": "A", "score_0": 0.25, "answer_1": "B", "score_1": -0.25},
            "A",
            0.5,
        ),
        ({"instruction": "q", "input": "", "output_1": "A", "output_2": "B", "preference": 1}, "A", None),
        ({"instruction": "q", "input": "", "output_1": "A", "output_2": "B", "preference": 2}, "B", None),
        ({"qid": 1, "question": "q", "response_j": "A", "response_k": "B"}, "A", None),
        (
            {
                "prompt": '["q"]',
                "response_a": '["A"]',
                "response_b": '["B"]',
                "winner_model_a": 0,
                "winner_model_b": 1,
                "winner_tie": 0,
            },
            "B",
            None,
        ),
        ({"prompt": "q", "response_a": "A", "response_b": "B", "winner_model_a": 1, "winner_model_b": 0}, "A", None),
    ],
)
def test_layouts_of_public_sets_are_pairs(tmp_path, tiny, row, chosen, margin):
    rejected = "B" if chosen == "A" else "A"
    assert only(tmp_path, tiny, row) == [([user("q")], chosen, rejected, margin)]


@pytest.mark.parametrize(
    "row, changes, reason",
    [
        ({"question": {"full_text": "q"}, "answer_0": "A", "score_0": 0, "answer_1": "B", "score_1": 0}, {}, "tie"),
        ({"instruction": "q", "output_1": "A", "output_2": "B", "preference": 0}, {}, "tie"),
        (
            {
                "prompt": "q",
                "response_a": "A",
                "response_b": "B",
                "winner_model_a": 0,
                "winner_model_b": 0,
                "winner_tie": 1,
            },
            {},
            "tie",
        ),
        (
            {
                "prompt": "q",
                "response_a": "A",
                "response_b": "B",
                "winner_model_a": 0,
                "winner_model_b": 0,
                "winner_tie": 1,
            },
            {
                "columns": Columns(
                    answer_a="response_a", answer_b="response_b", choice="winner_model_a", choice_a=1, choice_b=0
                )
            },
            "tie",
        ),
        (
            {
                "prompt": '["q", "r"]',
                "response_a": '["A", "B"]',
                "response_b": '["C", "D"]',
                "winner_model_a": 1,
                "winner_model_b": 0,
            },
            {},
            "different_prompts",
        ),
    ],
)
def test_ties_of_public_sets_are_no_wins(tmp_path, tiny, row, changes, reason):
    good = {"prompt": "p", "chosen": "x", "rejected": "y"}
    sources = [write(tmp_path / "good.jsonl", [good]), write(tmp_path / "ties.jsonl", [row])]
    if changes:
        sources = sources[1:]
        with pytest.raises(UserError, match=f"1 of them as {reason}"):
            run(tmp_path, [], tiny, source=sources, **changes)
    else:
        assert run(tmp_path, [], tiny, source=sources)[0]["dropped"] == {reason: 1}


@pytest.mark.parametrize(
    "row, way_out",
    [
        ({"prompt": "p", "output": ["best", "mid", "worst"]}, "--columns.answers output"),
        ({"question": "p", "responses": ["x", "y"]}, "--columns.answers responses"),
        ({"prompt": "p", "answer_a": "x", "answer_b": "y"}, "answer_a, answer_b look like answers"),
        ({"prompt": "p", "best_response": "x", "worst_response": "y"}, "best_response, worst_response look like"),
        ({"prompt": "p", "generation_1": "x", "generation_2": "y"}, "generation_1, generation_2 look like"),
    ],
)
def test_answers_are_never_taken_for_prompts_without_a_word(row, way_out):
    with pytest.raises(UserError, match=f"f:1: .*{way_out}.*--kind prompts"):
        detect_source([("f:1", row)], Columns())
    assert detect_source([("f:1", row)], Columns(), "prompts")[1].kind == "prompts"


def test_a_ranked_list_makes_pairs_once_its_column_is_named(tmp_path, tiny):
    row, columns = {"prompt": "q", "output": ["best", "mid", "worst"]}, Columns(answers="output")
    assert only(tmp_path, tiny, row, columns=columns) == [([user("q")], "best", "worst", None)]
    every = only(tmp_path, tiny, row, columns=columns, pairs="all")
    assert {pair[1:3] for pair in every} == {("best", "mid"), ("best", "worst"), ("mid", "worst")}


# --- one bad row never ends the run

GOOD = pairs(3)


def nested(depth: int, end: str = "1") -> str:
    return "[" * depth + end + "]" * depth


@pytest.mark.parametrize(
    "bad",
    [
        '{"instruction": [], "input": "x", "chosen": "a", "rejected": "b"}',
        '{"prompt": "q", "chosen": "a", "rejected": "b", "u": ' + nested(480, "NaN") + "}",
        '{"prompt": "q", "chosen": "a", "rejected": "b", "u": ' + nested(100_000) + "}",
        '{"prompt": ' + nested(900) + ', "chosen": "a", "rejected": "b"}',
        '{"prompt": {"role": {}, "content": 1}, "chosen": {"a": 1}, "rejected": []}',
        '{"prompt": "q", "chosen": "a", "rejected": "b", "margin": 1' + "0" * 400 + "}",
    ],
)
@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_a_bad_row_costs_only_itself(tmp_path, tiny, bad, name):
    if name == "x.json" and len(bad) > 100_000:
        pytest.skip("an array must be whole")
    lines = [bad, *map(json.dumps, GOOD)]
    (tmp_path / name).write_text("[" + ",\n".join(lines) + "]" if name == "x.json" else "\n".join(lines))
    report, rows = run(tmp_path, [], tiny, source=str(tmp_path / name))
    good = {row["prompt"] for row in GOOD}
    assert good <= {row["prompt"][0]["content"] for row in rows} and report["rows_in"] == 4
    for drop in drops(tmp_path / "out"):
        assert drop["place"].startswith(str(tmp_path / name))


@pytest.mark.parametrize("depth", [500, 900])
def test_deep_rows_reach_the_workers(tmp_path, tiny, depth):
    rows = pairs(2500)
    lines = [json.dumps(row | {"u": 0})[:-2] + nested(depth) + "}" for row in rows[:1]] + list(
        map(json.dumps, rows[1:])
    )
    (tmp_path / "x.json").write_text("[" + ",".join(lines) + "]")
    report, kept = run(tmp_path, [], tiny, source=str(tmp_path / "x.json"), workers=2, near_duplicates=None)
    assert len(kept) == 2500 and not report["dropped"]


def test_a_deep_cell_of_csv_and_hdf5_is_a_broken_row(tmp_path, tiny):
    deep = '[{"a":' * 1000 + "1" + "}]" * 1000
    rows = [{"prompt": deep, "chosen": "a", "rejected": "b"}, *GOOD]
    with open(tmp_path / "x.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(GOOD[0]))
        writer.writeheader(), writer.writerows(rows)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name in GOOD[0]:
            file[name] = [row[name] for row in rows]
    for name in ("x.csv", "x.h5"):
        report, kept = run(tmp_path, [], tiny, source=str(tmp_path / name))
        assert report["dropped"] == {"broken_row": 1} and len(kept) == 3, name


def test_the_first_object_may_come_late(tmp_path, tiny):
    for i in range(12):
        (tmp_path / "d").mkdir(exist_ok=True)
        write(tmp_path / "d" / f"{i:02d}.jsonl", ["1"] if i < 11 else GOOD)
    report, rows = run(tmp_path, [], tiny, source=str(tmp_path / "d"))
    assert report["dropped"] == {"wrong_type": 11} and len(rows) == 3


def test_names_of_files_may_be_any_bytes(tmp_path, tiny):
    name = os.fsdecode(os.fsencode(str(tmp_path)) + b"/b\xe4d.jsonl")
    with open(name, "w") as file:
        file.write('{"prompt": "q", "chosen": "a"}\n' + json.dumps(GOOD[0]))
    report, rows = run(tmp_path, [], tiny, source=name)
    assert report["dropped"] == {"missing_column": 1} and rows[0]["source"].endswith("b\\udce4d.jsonl")
    assert drops(tmp_path / "out")[0]["place"].endswith("b\\udce4d.jsonl:1")


def test_rows_of_a_damaged_hdf5_chunk_are_broken_and_the_others_read(tmp_path, tiny):
    rows = pairs(300)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name in GOOD[0]:
            cells = np.array([row[name].encode() for row in rows])
            file.create_dataset(name, data=cells, chunks=(50,), compression="gzip", fletcher32=True)
        offset = file["prompt"].id.get_chunk_info(3).byte_offset
    data = bytearray((tmp_path / "x.h5").read_bytes())
    data[offset + 20 : offset + 40] = b"\xff" * 20
    (tmp_path / "x.h5").write_bytes(data)
    report, kept = run(tmp_path, [], tiny, source=str(tmp_path / "x.h5"), near_duplicates=None)
    assert report["dropped"] == {"broken_row": 50} and len(kept) == 250
    assert drops(tmp_path / "out")[0]["place"] == f"{tmp_path}/x.h5:row 151"
    with pytest.raises(UserError, match="row 151: broken_row"):
        list(zip(range(300), Batches(str(tmp_path / "x.h5"), "train", ("preference",), 1, shuffle=False).batches(0)))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_damaged_offset_of_arrow_is_a_broken_row(tmp_path, tiny, workers):
    rows = pairs(1500)
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    data = (tmp_path / "x.arrow").read_bytes()
    offsets = table["rejected"].chunk(0).buffers()[1].to_pybytes()[: 4 * 1501]
    at = data.index(offsets) + 4 * 700
    (tmp_path / "x.arrow").write_bytes(data[:at] + b"\xff\xff\xff\x7f" + data[at + 4 :])
    report, kept = run(tmp_path, [], tiny, source=str(tmp_path / "x.arrow"), workers=workers, near_duplicates=None)
    assert report["dropped"] == {"broken_row": 2} and len(kept) == 1498
    assert [d["place"].rsplit(":")[-1] for d in drops(tmp_path / "out")] == ["700", "701"]


# --- one prompt, many rows


def brute_force(rated):
    """Every pair, in order of score; the first of the widest that differ."""
    ordered = sorted(rated, key=lambda item: -item[1])
    every = [(a, b) for i, a in enumerate(ordered) for b in ordered[i + 1 :] if a[1] > b[1]]
    differ = [p for p in every if p[0][0].strip() != p[1][0].strip()]
    return max(differ, key=lambda p: p[0][1] - p[1][1], default=every[0])


def test_best_and_worst_are_those_of_all_pairs():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        n = int(rng.integers(2, 7))
        rated = [
            ("xyz"[rng.integers(3)] + " " * int(rng.integers(2)), float(rng.integers(4)), {"i": i}) for i in range(n)
        ]
        if len({score for _, score, _ in rated}) == 1:
            continue
        a, b = brute_force(rated)
        (pair,) = pairs_from_scores(rated, "best_worst")
        if a[0].strip() != b[0].strip():
            assert pair["metadata"] == {"chosen": a[2], "rejected": b[2]}, rated
        else:
            assert pair["chosen"].strip() == pair["rejected"].strip()


@pytest.mark.parametrize("scored", ["label", "reward"])
def test_many_answers_to_one_prompt_are_linear_and_counted(tmp_path, tiny, scored):
    rows = [
        {"prompt": "q", "response": f"answer {i}", scored: i % 2 == 0 if scored == "label" else i, "note": "n" * 200}
        for i in range(20_000)
    ]
    report, kept = run(tmp_path, rows, tiny, kind="preference")
    assert [(r["chosen"], r["rejected"]) for r in kept] == [
        ("answer 0", "answer 1") if scored == "label" else ("answer 19999", "answer 0")
    ]
    assert report["rows_in"] == 20_000 and report["unused_rows"] == 19_998
    assert len(kept[0]["metadata"]) < 1000
    report, kept = run(
        tmp_path, [*rows, *rows[:0], GOOD[0] | {"response": "x", scored: rows[1][scored]}], tiny, kind="preference"
    )
    assert report["unused_rows"] == 19_998 and report["dropped"] == {"no_counterpart": 1}
    with pytest.raises(UserError, match="too_many_pairs: 20000 answers|as too_many_pairs"):
        run(tmp_path, rows, tiny, kind="preference", pairs="all")


def test_of_all_pairs_each_has_only_its_own_answers_in_its_metadata(tmp_path, tiny):
    rows = [{"prompt": "q", "response": f"answer {i}", "reward": i, "note": f"note {i}"} for i in range(20)]
    report, kept = run(tmp_path, rows, tiny, kind="preference", pairs="all")
    assert len(kept) == 190 and "unused_rows" not in report
    for row in kept:
        good, bad = (int(row[name].split()[1]) for name in ("chosen", "rejected"))
        assert json.loads(row["metadata"]) == {"rows": [{"reward": i, "note": f"note {i}"} for i in (good, bad)]}
    listed = {"prompt": "q", "responses": [f"answer {i}" for i in range(20)], "scores": list(range(20)), "by": "me"}
    report, kept = run(tmp_path, [listed], tiny, pairs="all")
    assert len(kept) == 190 and {row["metadata"] for row in kept} == {'{"by": "me"}'}


@pytest.mark.parametrize("one_file_each", [True, False])
def test_thumbs_in_two_sources_are_paired_with_each_other(tmp_path, tiny, one_file_each):
    up = [{"prompt": f"question {i} {i * 7}", "completion": f"good {i}", "label": True} for i in range(5)]
    down = [{"prompt": f"question {i} {i * 7}", "completion": f"bad {i}", "label": False} for i in range(1, 6)]
    files = [write(tmp_path / "up.jsonl", up), write(tmp_path / "down.jsonl", down)]
    extra = [] if one_file_each else [write(tmp_path / "more.jsonl", GOOD)]
    report, rows = run(tmp_path, [], tiny, source=[files[0], *extra, files[1]], near_duplicates=None)
    found = {(r["prompt"][0]["content"], r["chosen"], r["rejected"]) for r in rows}
    assert {(f"question {i} {i * 7}", f"good {i}", f"bad {i}") for i in range(1, 5)} <= found
    assert report["dropped"] == {"no_counterpart": 2} and len(rows) == 4 + 3 * len(extra)
    assert report["sources"][f"{files[0]} + {files[1]}"] == {"shape": "thumbs", "rows": 10, "kept": 4}


# --- memory


def peak_mb(code: str) -> float:
    """Largest resident memory of a process that runs this code, in MB."""
    code += "\nimport resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=300)
    assert not done.returncode, done.stderr
    return float(done.stdout.split()[-1])


PREPARE = """
from prepare_data import DataConfig, prepare
r = prepare(DataConfig(source={file!r}, tokenizer={tiny!r}, output_dir={out!r}, workers=1, eval_fraction=0.0))
assert r["dropped"] == {{"response_too_long": {n}}} and r["rows_out"]["train"] == 1, r["dropped"]
"""


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_memory_does_not_grow_with_long_rows(tmp_path, tiny, suffix):
    rows = [{"prompt": f"q{i}", "chosen": f"{i} a" * 250_000, "rejected": "b"} for i in range(150)] + GOOD[:1]
    file = tmp_path / f"x.{suffix}"
    if suffix == "jsonl":
        write(file, rows)
    elif suffix == "csv":
        with open(file, "w", newline="") as out:
            writer = csv.DictWriter(out, list(GOOD[0]))
            writer.writeheader(), writer.writerows(rows)
    else:
        pa.parquet.write_table(pa.Table.from_pylist(rows), file)
    base = peak_mb("from prepare_data import prepare; from utils import models; import transformers, datasets")
    peak = peak_mb(PREPARE.format(file=str(file), tiny=tiny, out=str(tmp_path / "out"), n=150))
    assert peak < base + 250, (peak, base)  # 150 rows are 120 MB as text


@pytest.mark.parametrize("role", ["prompt", "chosen", "rejected", "system", "earlier"])
def test_over_long_text_is_dropped_by_its_beginning(tmp_path, tiny, monkeypatch, role):
    from transformers import PreTrainedTokenizerFast

    longest, original = [0], PreTrainedTokenizerFast.__call__

    def measured(self, text, *args, **kwargs):
        longest[0] = max(longest[0], *(len(t) for t in ([text] if isinstance(text, str) else text)))
        return original(self, text, *args, **kwargs)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", measured)
    long = "word " * 200_000
    row = {"prompt": [user("q")], "chosen": "a", "rejected": "b"}
    if role in ("chosen", "rejected"):
        row[role] = long
    elif role == "prompt":
        row["prompt"] = [user(long)]
    elif role == "system":
        row["prompt"] = [{"role": "system", "content": long}, user("q")]
    else:
        row["prompt"] = [user(long), {"role": "assistant", "content": "x"}, user("q")]
    report, rows = run(tmp_path, [row, *GOOD], tiny, workers=1)
    reason = "response_too_long" if role in ("chosen", "rejected") else "prompt_too_long"
    assert report["dropped"] == {reason: 1} and len(rows) == 3 and longest[0] <= 64 * 512 + 100


def test_long_text_that_fits_is_kept(tmp_path, tiny):
    """White space around a prompt is cut off by many templates, and thoughts of earlier turns by others."""
    limits = dict(max_prompt_length=200, max_response_length=30)
    thoughts = [user("q"), {"role": "assistant", "content": "<think>" + "x" * 50_000 + "</think>y"}, user("z")]
    rows = [
        {"prompt": thoughts, "chosen": "a", "rejected": "b"},
        {"prompt": "q2", "chosen": "c" * 29, "rejected": "d"},
    ]
    from utils.models import load_tokenizer

    tokenizer = load_tokenizer(tiny)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "m['content']", "m['content'].split('</think>')[-1] | trim"
    )
    tokenizer.save_pretrained(tmp_path / "thinks")
    rows.append({"prompt": " " * 50_000 + "q3", "chosen": "a", "rejected": "b"})
    report, kept = run(tmp_path, rows, str(tmp_path / "thinks"), **limits)
    assert report["dropped"] == {} and len(kept) == 3


def test_a_large_row_group_is_read_in_slices(tmp_path):
    n = 25 * CHUNK_ROWS + 300
    rows = {"prompt": [f"q{i}" for i in range(n)], "source": pa.array(["a"] * n).dictionary_encode()}
    pa.parquet.write_table(pa.table(rows), tmp_path / "one.parquet", row_group_size=n)
    batches = Batches(str(tmp_path / "one.parquet"), "train", ("prompts",), 100, buffer_rows=2000)
    assert {block.rows for block in batches.blocks} == {CHUNK_ROWS, 300} and batches.rows == n
    epoch = [row for _, batch in zip(range(batches.per_epoch), batches.batches(0)) for row in batch]
    assert sorted(int(row["prompt"][0]["content"][1:]) for row in epoch) == list(range(n))
    assert {row["source"] for row in epoch} == {"a"}
    assert all(row["id"].endswith(f":{int(row['prompt'][0]['content'][1:]) + 1}") for row in epoch)
    again = [row["id"] for _, batch in zip(range(3), batches.batches(50)) for row in batch]
    assert again == [row["id"] for row in epoch[5000:5300]]


@pytest.mark.parametrize("ends", [b"\n", b"\r\n", b" \n"])
def test_a_gz_of_line_ends_ends(tmp_path, ends):
    data = gzip.compress(b'{"prompt": "a"}\n') + gzip.compress(ends * 10_000_000) + gzip.compress(b'{"prompt": "b"}\n')
    (tmp_path / "x.jsonl.gz").write_bytes(data)
    chunks = list(read_source(str(tmp_path / "x.jsonl.gz")))
    rows = [row for chunk in chunks for row in chunk.rows()]
    assert [row for _, row in rows] == [{"prompt": "a"}, {"prompt": "b"}] and len(chunks) == 2
    assert rows[1][0].endswith(":10000002")


def test_far_too_long_is_never_said_of_what_may_fit(tiny):
    from types import SimpleNamespace

    from dataprep.lengths import Limits
    from utils.models import load_tokenizer

    rules = SimpleNamespace(tokenizer=load_tokenizer(tiny), limits=Limits(10, 10, "filter", "truncate"))
    row = {"prompt": messages("x" * 1000), "chosen": "y" * 1000, "rejected": "z"}
    assert far_too_long(row, "preference", rules) == ("prompt_too_long", "more than 20 tokens, limit 10")
    assert far_too_long(row | {"prompt": messages("x" * 640)}, "preference", rules) is None  # measured exactly, later
    rules.limits = Limits(10, 10, "keep_last_turns", "filter")
    several = [user("x" * 1000), {"role": "assistant", "content": "a"}, user("b")]
    assert far_too_long({"prompt": several, "chosen": "y", "rejected": "z"}, "preference", rules) is None


# --- the loader


def test_a_number_without_end_is_one_line(tmp_path):
    lines = [
        f'{{"prompt": "q", "chosen": "a", "rejected": "b", "margin": {n}}}'
        for n in ("1" + "0" * 400, "1e400", "-1e300")
    ]
    for line in lines:
        (tmp_path / "x.jsonl").write_text(line)
        with pytest.raises(UserError, match="x.jsonl:1: margin: expected a number"):
            next(Batches(str(tmp_path / "x.jsonl"), "train", ("preference",), 1).batches(0))


# --- two runs, and coverage


def test_an_output_that_another_run_finished_meanwhile_is_not_replaced(tmp_path, tiny, monkeypatch):
    import prepare_data

    source = write(tmp_path / "x.jsonl", GOOD)
    cfg = DataConfig(source=source, tokenizer=tiny, output_dir=str(tmp_path / "out"), eval_fraction=0.0)
    original = prepare_data.fingerprint

    def slow(*args):  # the other run ends between this one's check and its lock
        monkeypatch.setattr(prepare_data, "fingerprint", original)
        about = original(*args)
        prepare(cfg)
        return about

    monkeypatch.setattr(prepare_data, "fingerprint", slow)
    with pytest.raises(UserError, match="is not empty"):
        prepare(cfg)
    assert len(load(tmp_path / "out", "train")) == 3
    more = DataConfig(**{**vars(cfg), "source": write(tmp_path / "y.jsonl", pairs(2, 9)), "refresh": True})
    monkeypatch.setattr(prepare_data, "fingerprint", slow)
    slow_cfg, cfg = more, DataConfig(**{**vars(more), "source": write(tmp_path / "z.jsonl", pairs(2, 10))})
    with pytest.raises(UserError, match="was changed by another run meanwhile"):
        prepare(slow_cfg)
    assert len(load(tmp_path / "out", "train")) == 5


def test_a_bad_row_of_the_real_prompts_is_left_out(tmp_path, tiny, capsys):
    from dataprep.coverage import CoverageConfig, measure

    run(tmp_path, GOOD, tiny)
    real = write(tmp_path / "real.jsonl", [{"prompt": GOOD[0]["prompt"]}, {"prompt": 3}, "{", {"prompt": []}])
    result = measure(CoverageConfig(data=str(tmp_path / "out"), prompts=real))
    assert (result["prompts"], result["covered"]) == (1, 1) and "3 rows of" in capsys.readouterr().out


def test_a_full_disk_is_one_line_and_what_is_finished_is_kept(tmp_path, tiny, monkeypatch):
    import errno

    import prepare_data

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device", "train-00000.parquet")

    source = write(tmp_path / "x.jsonl", GOOD)
    monkeypatch.setattr(prepare_data, "write_splits", full)
    cfg = DataConfig(source=source, tokenizer=tiny, output_dir=str(tmp_path / "out"), workers=1)
    with pytest.raises(UserError, match="train-00000.parquet: No space left on device; what is finished is kept"):
        prepare(cfg)
    assert len(list(Path(tmp_path / ".out.partial/chunks").glob("*.arrow"))) == 1

"""Stage 1: what becomes of each shape of row, and of bad ones."""

import gzip
import json

import pytest

from conftest import byte_tokenizer, messages
from prepare_data import BadRow, Columns, DataConfig, Hub, check_lengths, convert, detect_kind, in_test_split, parse_hh, prepare, read_source
from utils.config import UserError
from utils.data import encode_prompt, encode_response, load_rows


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def reason(row, kind="preference", **kwargs):
    with pytest.raises(BadRow) as caught:
        convert(row, kind, Columns(**kwargs))
    return caught.value.reason


def run(tmp_path, rows, tiny, name="raw.jsonl", **changes):
    """Prepare rows (objects, or raw lines) and return (report, train rows, test rows)."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (tmp_path / name).write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    settings = dict(source=str(tmp_path / name), tokenizer=tiny, output_dir=str(tmp_path / "out"), eval_fraction=0.0, overwrite=True)
    report = prepare(DataConfig(**settings | changes))
    return report, load_rows(str(tmp_path / "out"), "train", (report["kind"],))


# --- shapes


def test_hh_prompt_ends_before_the_last_answer():
    start = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: "
    row = convert({"chosen": start + "X", "rejected": start + "Y"}, "preference", Columns())
    assert row["prompt"] == [user("a"), assistant("b"), user("c")]
    assert (row["chosen"], row["rejected"]) == ("X", "Y")


def test_hh_marker_inside_a_text_is_no_turn():
    text = "\n\nHuman: what does\nAssistant: mean? And Human: too\n\nAssistant: It is a label."
    assert parse_hh(text) == [user("what does\nAssistant: mean? And Human: too"), assistant("It is a label.")]


def test_hh_neighbouring_turns_of_one_role_are_joined():
    start = "\n\nHuman: a\n\nHuman: b\n\nAssistant: "
    assert convert({"chosen": start + "X", "rejected": start + "Y"}, "preference", Columns())["prompt"] == [user("a\n\nb")]


def test_hh_rows_that_cannot_be_pairs():
    start = "\n\nHuman: a\n\nAssistant: "
    assert reason({"chosen": start + "x\n\nHuman: y", "rejected": start + "x"}) == "no_final_answer"
    assert reason({"chosen": start + "x", "rejected": "\n\nHuman: b\n\nAssistant: x"}) == "different_prompts"
    assert reason({"chosen": start + "x", "rejected": start}) == "empty_response"
    assert reason({"chosen": "plain text", "rejected": "other text"}) == "no_prompt"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "A", "rejected": "B"},
        {"question": "q", "chosen": "A", "rejected": "B"},
        {"prompt": [user("q")], "chosen": [assistant("A")], "rejected": [assistant("B")]},
        {"prompt": "q", "chosen": [user("q"), assistant("A")], "rejected": [user("q"), assistant("B")]},
        {"chosen": [user("q"), assistant("A")], "rejected": [user("q"), assistant("B")]},
        ],
)
def test_preference_shapes(row):
    out = convert(row, detect_kind(row, Columns()), Columns())
    assert (out["prompt"], out["chosen"], out["rejected"], out["margin"]) == ([user("q")], "A", "B", None)


@pytest.mark.parametrize(
    "prompt, chosen, rejected, kept",
    [
        ("What is a cat?", "What is a cat? An animal.", "What is a cat?\nA plant.", ("An animal.", "A plant.")),  # repeated in front of both
        ("What is a cat?", "What is a cat? An animal.", "A plant.", ("What is a cat? An animal.", "A plant.")),
        ("Hi", "Hi there! How can I help?", "Hi you", ("Hi there! How can I help?", "Hi you")),  # a greeting, no repetition
        ("I", "It is good", "It is bad", ("It is good", "It is bad")),
        ("one two three", "one two threefold", "one two threes", ("one two threefold", "one two threes")),
    ],
)
def test_a_repeated_prompt_is_used_once_and_answers_keep_their_start(prompt, chosen, rejected, kept):
    out = convert({"prompt": prompt, "chosen": chosen, "rejected": rejected}, "preference", Columns())
    assert (out["prompt"], out["chosen"], out["rejected"]) == ([user(prompt)], *kept)


def test_columns_of_other_kinds_are_kept_as_metadata():
    row = {"prompt": "q", "chosen": "A", "rejected": "B", "reward": 2, "reference": "r", "answer": "a", "other": 1}
    out = convert(row, "preference", Columns())
    assert json.loads(out["metadata"]) == {"reward": 2, "reference": "r", "answer": "a", "other": 1}


def test_gsm8k():
    row = {"question": "2+2?", "answer": "2+2 = <<2+2=4>>4\n#### 1,004"}
    out = convert(row, detect_kind(row, Columns()), Columns(), " Think.")
    assert out["prompt"] == [user("2+2? Think.")] and out["ground_truth"] == "1,004" and out["reference"] == row["answer"]
    assert reason({"question": "2+2?", "answer": "no idea\n#### "}, "prompts") == "empty_ground_truth"


def test_trajectories():
    row = {"prompt": "q", "response": "r", "reward": 1, "logprobs": [-1, -2.5], "annotator": "x"}
    out = convert(row, detect_kind(row, Columns()), Columns())
    assert (out["response"], out["reward"], out["logprobs"]) == ("r", 1.0, [-1.0, -2.5])
    assert json.loads(out["metadata"]) == {"annotator": "x"}
    assert reason(row | {"reward": None}, "trajectories") == "no_reward"
    assert reason(row | {"reward": "1"}, "trajectories") == "wrong_type"
    assert reason(row | {"reward": float("nan")}, "trajectories") == "wrong_type"


def test_mapped_columns():
    row = {"ask": "q", "good": "A", "bad": "B", "by": 2}
    out = convert(row, "preference", Columns(prompt="ask", chosen="good", rejected="bad", margin="by"))
    assert (out["prompt"], out["chosen"], out["rejected"], out["margin"], out["metadata"]) == ([user("q")], "A", "B", 2.0, None)
    assert reason(row, prompt="question") == "missing_column"


# --- bad rows


@pytest.mark.parametrize(
    "row, why",
    [
        ({"prompt": "q", "chosen": "", "rejected": "b"}, "empty_response"),
        ({"prompt": "q", "chosen": "a", "rejected": None}, "empty_response"),
        ({"prompt": "   ", "chosen": "a", "rejected": "b"}, "empty_prompt"),
        ({"prompt": None, "chosen": "a", "rejected": "b"}, "empty_prompt"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "equal_answers"),
        ({"prompt": "q", "chosen": "a ", "rejected": "a"}, "equal_answers"),
        ({"prompt": "q", "chosen": 3, "rejected": "b"}, "wrong_type"),
        ({"prompt": [{"role": "user", "content": None}], "chosen": "a", "rejected": "b"}, "wrong_type"),
        ({"prompt": [{"role": "user"}], "chosen": "a", "rejected": "b"}, "wrong_type"),
        ({"prompt": "q", "chosen": "a", "rejected": "\ud800"}, "broken_text"),
        ([1, 2], "wrong_type"),
        ("text", "wrong_type"),
    ],
)
def test_bad_rows(row, why):
    assert reason(row) == why


def test_every_row_is_accounted_for(tmp_path, tiny, capsys):
    good = {"prompt": "q1", "chosen": "a", "rejected": "b"}
    lines = [
        json.dumps(good), "", json.dumps(good)[:-9], '{"prompt": "q\t", "chosen": "a", "rejected": "b"}', json.dumps(good) * 2,
        json.dumps(good), json.dumps({"prompt": "q2", "chosen": "a"}), json.dumps({"prompt": "q3\u2028x", "chosen": "a", "rejected": "é 😀"}, ensure_ascii=False),
    ]
    report, rows = run(tmp_path, lines, tiny)
    assert report["dropped"] == {"broken_row": 3, "duplicate": 1, "empty_response": 1}
    assert report["rows_in"] == 7 == len(rows) + sum(report["dropped"].values())
    assert {r["prompt"][0]["content"] for r in rows} == {"q1", "q3\u2028x"}
    places = [example["place"].removeprefix(str(tmp_path)) for example in report["dropped_examples"]["broken_row"]]
    assert places[0].startswith("/raw.jsonl:3:") and places[1].startswith("/raw.jsonl:4:") and places[2] == f"/raw.jsonl:5:{len(json.dumps(good)) + 1}"


def test_strict_mode_stops_at_the_first_bad_row(tmp_path, tiny):
    with pytest.raises(UserError, match=r"raw.jsonl:2: equal_answers"):
        run(tmp_path, [{"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "q", "chosen": "a", "rejected": "a"}], tiny, on_bad_row="error")
    assert not (tmp_path / "out").exists()


def test_all_bad_is_an_error(tmp_path, tiny):
    with pytest.raises(UserError, match="all 2 rows were dropped, 2 of them as equal_answers"):
        run(tmp_path, [{"prompt": "q", "chosen": "a", "rejected": "a"}] * 2, tiny)


# --- files


def test_json_array_gz_bom_and_parquet(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet

    rows = [{"prompt": "é"}, {"prompt": "b"}]
    (tmp_path / "array.jsonl").write_text(json.dumps(rows), encoding="utf-8-sig")
    (tmp_path / "lines.json").write_text("\ufeff" + "\n".join(json.dumps(r, ensure_ascii=False) for r in rows), encoding="utf-8")
    with gzip.open(tmp_path / "lines.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\r\n".join(map(json.dumps, rows)))
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for name in ("array.jsonl", "lines.json", "lines.jsonl.gz", "rows.parquet"):
        assert [row for _, row in read_source(str(tmp_path / name), Hub())] == rows, name
    (tmp_path / "report.json").write_text("{}")  # about data, as stage 1 and the hub write it
    assert len(list(read_source(str(tmp_path), Hub()))) == 8
    assert len(list(read_source(str(tmp_path / "*lines*"), Hub()))) == 4


def test_missing_and_unreadable_sources(tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nonsense")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 100)[:30])
    (tmp_path / "bad.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 100)[:20] + b"rubbish" * 9)
    (tmp_path / "cut.json").write_text('[{"prompt": "a"},')
    (tmp_path / "notes.txt").write_text("x")
    for name, message in [
        ("none.jsonl", "does not exist"), ("bad.parquet", "not a readable Parquet"), ("cut.jsonl.gz", "cannot be read"), ("bad.jsonl.gz", "cannot be read"),
        ("cut.json", "cut.json:1:"), ("notes.txt", "unknown file type"),
    ]:
        with pytest.raises(UserError, match=message):
            list(read_source(str(tmp_path / name), Hub()))


# --- lengths, split, output


def test_length_limits_are_inclusive_and_measured_after_the_template():
    tokenizer = byte_tokenizer()
    row = {"prompt": messages("hello"), "chosen": "abc", "rejected": "abcdef"}
    n = len(encode_prompt(tokenizer, row["prompt"]))
    assert check_lengths(row, "preference", tokenizer, n, 7) == {"prompt": n, "chosen": 4, "rejected": 7}  # eos counts
    for limits, why in [((n - 1, 7), "prompt_too_long"), ((n, 6), "response_too_long")]:
        with pytest.raises(BadRow) as caught:
            check_lengths(row, "preference", tokenizer, *limits)
        assert caught.value.reason == why
    assert encode_response(tokenizer, "abc")[-1] == tokenizer.eos_token_id


def test_a_template_that_refuses_a_role_drops_the_row():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"
    with pytest.raises(BadRow) as caught:
        check_lengths({"prompt": [{"role": "system", "content": "s"}, user("q")]}, "prompts", tokenizer, 99, 99)
    assert caught.value.reason == "refused_by_template" and "no system role" in caught.value.detail


def test_split_is_by_prompt(tmp_path, tiny):
    rows = [{"prompt": f"q{i % 50}", "chosen": f"a{i}", "rejected": "b"} for i in range(100)]
    report, train = run(tmp_path, rows, tiny, eval_fraction=0.3)
    test = load_rows(str(tmp_path / "out"), "test", ("preference",))
    sides = [{r["prompt"][0]["content"] for r in side} for side in (train, test)]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 50 and 8 <= len(sides[1]) <= 22
    assert report["rows_out"] == {"train": len(train), "test": len(test)} and len(train) + len(test) == 100
    assert sum(in_test_split(messages(f"p{i}"), 0, 0.3) for i in range(10_000)) == pytest.approx(3000, abs=150)


def test_excluded_rows_are_left_out_by_id_or_prompt(tmp_path, tiny):
    """In strict mode too, for they are no bad rows; a half-written last line is passed over; other objects are refused."""
    rows = [{"prompt": f"q{i}", "chosen": "yes", "rejected": "no"} for i in range(4)]
    ids = {row["prompt"][0]["content"]: row["id"] for row in run(tmp_path, rows, tiny)[1]}
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": ids["q0"]}) + "\n" + json.dumps({"prompt": [{"content": "q2", "role": "user"}]}) + '\n{"id": "')
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "q3"}))
    report, kept = run(tmp_path, rows, tiny, on_bad_row="error", exclude=[str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")])
    assert report["dropped"] == {"excluded": 3} and [row["prompt"] for row in kept] == [[user("q1")]]
    (tmp_path / "c.jsonl").write_text('{"x": 1}')
    with pytest.raises(UserError, match="exclude suspicious is not a file"):  # a mistyped name is not looked up on the hub
        run(tmp_path, rows, tiny, exclude="suspicious")
    with pytest.raises(UserError, match="c.jsonl:1: exclude needs objects with an id or a prompt"):
        run(tmp_path, rows, tiny, exclude=str(tmp_path / "c.jsonl"))


def test_output_is_what_datasets_and_a_second_run_expect(tmp_path, tiny):
    import datasets

    rows = [{"prompt": f"q{i}", "chosen": f"a{i}", "rejected": "b", "extra": i} for i in range(20)]
    run(tmp_path, rows, tiny, eval_fraction=0.5)
    loaded = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert set(loaded) == {"train", "test"} and loaded["train"].num_rows + loaded["test"].num_rows == 20
    row = loaded["train"][0]
    assert list(row) == ["id", "source", "prompt", "chosen", "rejected", "margin", "metadata"]
    assert row["prompt"] == messages(row["prompt"][0]["content"]) and set(json.loads(row["metadata"])) == {"extra"}
    with pytest.raises(UserError, match="is not empty"):
        run(tmp_path, rows, tiny, overwrite=False)


def test_folders_of_the_wrong_kind_are_refused(tmp_path, tiny):
    run(tmp_path, [{"prompt": "q"}], tiny)
    with pytest.raises(UserError, match="holds prompts; this needs preference"):
        load_rows(str(tmp_path / "out"), "train", ("preference",))
    with pytest.raises(UserError, match="has no test rows"):
        load_rows(str(tmp_path / "out"), "test", ("prompts",))
    with pytest.raises(UserError, match="does not exist"):
        load_rows(str(tmp_path / "nowhere"), "train", ("prompts",))

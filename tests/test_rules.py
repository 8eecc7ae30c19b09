"""Rules that need all rows: what is a near duplicate and what is not, contradictions, and the split of dialogues."""

import json
import random

import numpy as np
import pytest
from test_data import drops, load, pairs, run, texts, user, write

from dataprep.convert import convert
from dataprep.rules import Decisions, Groups, drop_contradictions
from dataprep.shapes import Columns, Shape
from dataprep.similarity import exact_parts, one_byte, signatures, similarity
from utils.config import UserError
from utils.rows import BadRow, TextRow

WORDS = ["".join(random.Random(i).choices("abcdefghijklmnop", k=6)) for i in range(2000)]
LIMITS = dict(max_prompt_length=9999, max_response_length=9999)


def words(n, seed):
    return " ".join(random.Random(seed).choices(WORDS, k=n))


# --- near duplicates: what many rows share is not compared


@pytest.mark.parametrize("n, shared", [(5, 80), (60, 50), (60, 200)])
@pytest.mark.parametrize("place", ["system", "few-shot turns", "suffix", "first in the turn", "last in the turn"])
def test_different_questions_with_a_shared_part_are_no_near_duplicates(tmp_path, tiny, n, shared, place):
    """A question of eight words, as much of it as can be, and twice the same: one row of 61 goes."""
    if n < 20 and place.endswith("turn"):
        pytest.skip("five rows do not show what a template is")
    text, rows = words(shared, "shared"), []
    for i in [*range(n), 0]:
        question = words(8, i) + "!" * (len(rows) == n)
        rows.append(
            {
                "system": {"system": text, "prompt": question},
                "few-shot turns": {"prompt": [user(text), {"role": "assistant", "content": "so"}, user(question)]},
                "suffix": {"prompt": question},
                "first in the turn": {"prompt": f"{text}\n\n{question}"},
                "last in the turn": {"prompt": f"{question}\n\n{text}"},
            }[place]
            | {"chosen": "yes indeed", "rejected": "no"}
        )
    suffix = {"prompt_suffix": " " + text} if place == "suffix" else {}
    report, kept = run(tmp_path, rows, tiny, **LIMITS, **suffix)
    assert report["dropped"] == {"near_duplicate": 1} and len(kept) == n
    assert drops(tmp_path / "out")[0]["place"].endswith(f":{n + 1}")


def test_a_shared_part_does_not_hide_that_another_instruction_is_another_prompt(tmp_path, tiny):
    rows = [
        {"prompt": f"{words(40, instruction)} {words(8, i)}", "reference": "r"}
        for instruction in "ab"
        for i in range(40)
    ]
    assert run(tmp_path, rows, tiny, **LIMITS)[0]["dropped"] == {}
    rows = [{"system": words(40, s), "prompt": words(8, i)} for s in "ab" for i in range(3)]
    assert run(tmp_path, rows, tiny, **LIMITS)[0]["dropped"] == {}


def test_multiple_choice_questions_with_equal_letters(tmp_path, tiny):
    template = words(60, "template") + "\n{}\nA) true B) false C) both D) none\nAnswer with a letter."
    rows = [{"prompt": template.format(words(12, i)), "reference": "ABCD"[i % 4]} for i in range(100)]
    assert run(tmp_path, rows, tiny, **LIMITS)[0]["dropped"] == {}


# --- near duplicates: one of a group stays, and signs count


@pytest.mark.parametrize("n", [2, 18, 200])
@pytest.mark.parametrize(
    "change", [lambda t, i: t + "!" * (i % 50) + "?" * (i // 50), lambda t, i: t.upper()[:i] + t[i:]]
)
@pytest.mark.parametrize("groups", [1, 3])
def test_of_a_group_of_near_rows_the_first_one_stays(tmp_path, tiny, n, change, groups):
    base = [f"Tell me of {words(3, g)} and then of {' '.join(WORDS)[g : g + 250]}" for g in range(groups)]
    rows = [
        {"prompt": change(text, i), "chosen": "once upon a time", "rejected": "no"} for i in range(n) for text in base
    ]
    report, kept = run(tmp_path, rows, tiny, **LIMITS)
    assert texts(kept) == {change(text, 0) for text in base}
    assert sum(report["dropped"].values()) == groups * (n - 1)


def test_near_answers_to_one_prompt_leave_one(tmp_path, tiny):
    text = words(150, "answer")
    rows = [{"prompt": "q", "response": f"{text} {WORDS[i]}", "reward": 1} for i in range(100)]
    report, kept = run(tmp_path, rows, tiny, **LIMITS)
    assert report["dropped"] == {"near_duplicate": 99} and kept[0]["response"] == rows[0]["response"]


@pytest.mark.parametrize(
    "one, other",
    [
        ("Is 7 + 3 even", "Is 7 - 3 even"),
        ("Is 7 + 3 even", "Is 7 \u2212 3 even"),
        ("is a < b then", "is a > b then"),
        ("is a <= b then", "is a < b then"),
        ("is a != b then", "is a = b then"),
        ("Explain C to me", "Explain C++ to me"),
        ("Explain C++ to me", "Explain C# to me"),
        ("What is 2 * (3 + 4)", "What is (2 * 3) + 4"),
        ("What is -5 in words", "What is 5 in words"),
        ("What is \u20135 in words", "What is 5 in words"),
        ("Solve x\u00b2 = 4", "Solve x\u00b3 = 4"),
        ("Is it \u00bd or", "Is it \u00bc or"),
        ("It costs $5 now", "It costs \u20ac5 now"),
        ("p & q is", "p | q is"),
        ("not \u00acp is", "not p is"),
        ("x \u2208 A so", "x \u2209 A so"),
        ("50% of it", "50 of it"),
        ("I feel \U0001f642 today", "I feel \U0001f641 today"),
        ("\U0001f642", "\U0001f641"),
        ("\u0e01\u0e34\u0e19", "\u0e01\u0e31\u0e19"),
        ("\u0915\u093f\u0932\u093e", "\u0915\u0940\u0932\u093e"),
        ("\u05e9\u05c1\u05dd", "\u05e9\u05c2\u05dd"),
    ],
)
def test_signs_symbols_and_vowels_make_another_prompt(tmp_path, tiny, one, other):
    rows = [{"prompt": text, "chosen": "yes indeed", "rejected": "no"} for text in (one, other)]
    assert run(tmp_path, rows, tiny)[0]["dropped"] == {}


@pytest.mark.parametrize(
    "one, other",
    [
        ("Is it so?", "is it so ..."),
        ("He said: \u201cwell, yes\u201d", "he said 'well yes'"),
        ("Use `x` here", "Use x here"),
        ("Is 7 \u2212 3 even", "Is 7 - 3 even?"),
        ("\u0915\u093f\u0932\u093e \u0939\u0948\u0964", "\u0915\u093f\u0932\u093e \u0939\u0948"),
        ("Caf\u00e9 au lait", "CAFE\u0301 au lait!"),
        ("\u732b\u304c\u597d\u304d\u3002", "\u732b\u304c\u597d\u304d"),
    ],
)
def test_punctuation_and_case_do_not(tmp_path, tiny, one, other):
    rows = [{"prompt": text, "chosen": "yes indeed", "rejected": "no"} for text in (one, other)]
    assert run(tmp_path, rows, tiny)[0]["dropped"] == {"near_duplicate": 1}


def test_of_small_sums_none_goes(tmp_path, tiny):
    rows = [{"prompt": f"What is {a} {o} {b}?"} for a in range(1, 21) for b in range(1, 16) for o in "+-*/"]
    report, kept = run(tmp_path, rows, tiny)
    assert report["dropped"] == {} and len(kept) == 1200


def test_words_with_marks_are_compared_as_words():
    thai = "\u0e09\u0e31\u0e19\u0e01\u0e34\u0e19\u0e02\u0e49\u0e32\u0e27"
    a, b = signatures([thai, thai.replace("\u0e34", "\u0e31")])
    assert 0 < similarity(one_byte(a), one_byte(b)) < 0.6
    a, b = signatures(["\u0928\u092e\u0938\u094d\u0924\u0947 " * 3, "\u0928\u092e\u0938\u094d\u0924\u093e " * 3])
    assert similarity(one_byte(a), one_byte(b)) < 0.1
    assert exact_parts("Is 7.5 \u2212 (3, 4) `so`, \u201cC++\u201d?") == "7 5 - ( 3 4 ) + +"


def test_a_rule_that_takes_more_than_a_fifth_is_named(tmp_path, tiny, capsys):
    def said(same):
        rows = [{"prompt": words(8, i), "reference": "r"} for i in range(10 - same)]
        run(tmp_path, rows + [rows[0] | {"prompt": rows[0]["prompt"] + "!" * i} for i in range(1, same + 1)], tiny)
        return [line for line in capsys.readouterr().out.splitlines() if "warning" in line]

    assert said(2) == [] and len(said(3)) == 1
    run(tmp_path, pairs(4) + [{"prompt": "p", "chosen": "c"}] * 4, tiny)
    assert "missing_column takes 4 of 8 rows" in capsys.readouterr().out


# --- contradictions


def test_contradictions_name_the_first_row_that_says_otherwise(tmp_path, tiny):
    rows = [{"prompt": "p", "ground_truth": t} for t in "AABAC"] + [{"prompt": "q", "ground_truth": "A"}] * 2
    rows = [row | {"n": i} for i, row in enumerate(rows)]
    report, kept = run(tmp_path, rows, tiny, near_duplicates=None)
    assert report["dropped"] == {"contradicting_labels": 3, "duplicate": 3} and texts(kept) == {"q"}
    why = {d["place"].rsplit(":", 1)[1]: d["detail"].rsplit(":", 1)[1] for d in drops(tmp_path / "out")}
    assert {k: why[k] for k in "135"} == {"1": "3", "3": "1", "5": "1"}


def test_many_right_answers_to_one_prompt_take_no_longer_than_other_rows(tmp_path, tiny):
    """4,000 labels were 8 million comparisons."""
    n, subjects = 300_000, Groups(tmp_path, "subject")
    d = Decisions([{"kept": n}])
    subjects.add(np.full(n, 7, dtype=np.uint64), np.arange(n), np.arange(n))
    drop_contradictions(subjects, d)
    assert (d.code > 0).all() and d.twin[0] == 1 and (d.twin[1:] == 0).all()


# --- the split of dialogues


def dialogue(*turns):
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


def hh_like(n):
    """Dialogues of three depths, each of which goes on with one of the answers before it; the depths are mixed."""
    rows = []
    for i in range(n):
        q, a, b = (words(4, f"{x}{i}") for x in "qab")
        rows.append({"prompt": dialogue(q), "chosen": a, "rejected": b})
        deeper = dialogue(q, b if i % 2 else a.upper(), words(4, f"r{i}"))
        rows.append({"prompt": deeper, "chosen": words(3, f"c{i}"), "rejected": words(3, f"d{i}")})
        deepest = [*deeper, *dialogue("x", words(3, f"d{i}"))[1:], user(words(3, f"s{i}"))]
        rows.append({"prompt": deepest, "chosen": words(2, f"e{i}"), "rejected": words(2, f"f{i}")})
    return random.Random(0).sample(rows, len(rows))


def firsts(rows):
    return {row["prompt"][0]["content"] for row in rows}


@pytest.mark.parametrize("change", [lambda row: row, lambda row: row | {"system": "Be kind."}])
@pytest.mark.parametrize("suffix", ["", " Think."])
def test_a_dialogue_at_several_depths_is_on_one_side(tmp_path, tiny, change, suffix):
    rows = [change(row) for row in hh_like(60)]
    report, train = run(tmp_path, rows, tiny, eval_fraction=0.3, prompt_suffix=suffix, **LIMITS)
    test = load(tmp_path / "out", "test")
    assert report["dropped"] == {} and len(train) + len(test) == 180
    # every depth is there, together
    for side, other in ((train, test), (test, train)):
        roots, others = (
            {row["prompt"][int("system" in rows[0])]["content"].removesuffix(suffix) for row in rows_of_side}
            for rows_of_side in (side, other)
        )
        assert not roots & others and len(side) == 3 * len(roots)
    assert 10 < len(test) / 3 < 26


def test_dialogues_that_only_begin_alike_are_split_apart(tmp_path, tiny):
    """Examples as turns before each question: no row is the beginning of another."""
    shots = dialogue("2+2?", "4", "3+3?", "6")
    rows = [{"prompt": [*shots, user(words(6, i))]} for i in range(200)]
    report, train = run(tmp_path, rows, tiny, eval_fraction=0.3, **LIMITS)
    assert report["rows_out"]["train"] + report["rows_out"]["test"] == 200 and 40 < report["rows_out"]["test"] < 80


def test_the_side_of_a_prompt_is_its_own_unless_another_is_in_its_dialogue(tmp_path, tiny):
    rows = hh_like(40)
    alone = [row for row in rows if len(row["prompt"]) == 1]
    run(tmp_path, rows, tiny, eval_fraction=0.3, **LIMITS)
    together = firsts(load(tmp_path / "out", "test"))
    run(tmp_path, alone, tiny, eval_fraction=0.3, **LIMITS)
    assert firsts(load(tmp_path / "out", "test")) == together


def test_a_dialogue_goes_on_on_the_side_of_the_earlier_output_and_not_where_it_is_tested(tmp_path, tiny):
    rows = hh_like(40)
    short, long = ([row for row in rows if (len(row["prompt"]) == 1) == want] for want in (True, False))
    for first, later in ((short, long), (long, short)):
        run(tmp_path, first, tiny, eval_fraction=0.5, **LIMITS)
        # held out with another share and seed, the new rows would be elsewhere
        run(tmp_path, later, tiny, "new.jsonl", eval_fraction=0.1, seed=3, refresh=True, overwrite=False, **LIMITS)
        train, test = (load(tmp_path / "out", split) for split in ("train", "test"))
        assert len(train) + len(test) == 120 and not firsts(train) & firsts(test) and len(firsts(test)) > 10
    official = write(tmp_path / "official.jsonl", [row for row in long if len(row["prompt"]) == 3][:10])
    report, train = run(tmp_path, rows, tiny, eval_source=official, eval_fraction=None, **LIMITS)
    assert report["dropped"]["prompt_in_test"] == 30 and report["rows_out"] == {"train": 90, "test": 10}


def test_rules_do_not_depend_on_the_number_of_workers(tmp_path, tiny):
    rows = (
        hh_like(400) + [{"prompt": words(8, i) + "!" * (i % 3), "chosen": "a", "rejected": "b"} for i in range(30)] * 2
    )
    outputs = []
    for workers in (1, 2):
        report, train = run(tmp_path, rows, tiny, eval_fraction=0.2, workers=workers, **LIMITS)
        outputs.append((report["dropped"], train, load(tmp_path / "out", "test")))
    assert outputs[0] == outputs[1] and outputs[0][0] == {"duplicate": 30}


# --- what a row says besides its text


LABELLED = Shape("preference", "chosen and rejected")
TOOL = {"type": "function", "function": {"name": "f"}}


def said(text, **more):
    return {"role": "assistant", "content": text} | more


@pytest.mark.parametrize(
    "more, dropped",
    [
        ({"tools": [TOOL]}, True),
        ({"tools": json.dumps([TOOL])}, True),
        ({"functions": [{"name": "f"}]}, True),
        ({"images": ["a.png"]}, True),
        ({"image": "a.png"}, True),
        ({"image": {"bytes": b"x", "path": None}}, True),
        ({"audio": b"RIFF"}, True),
        ({"tools": []}, False),
        ({"tools": "[]"}, False),
        ({"tools": " "}, False),
        ({"tools": None, "images": []}, False),
        ({"tools": "a hammer"}, False),
        ({"video": False}, False),
    ],
)
@pytest.mark.parametrize("form", [dict, TextRow])
def test_a_row_with_tools_or_media_is_dropped_by_name(more, dropped, form):
    row = form({"prompt": "What is this <image>?", "chosen": "a", "rejected": "b"} | more)
    if dropped:
        with pytest.raises(BadRow, match=f"tools_or_media.*{next(iter(more))}"):
            convert(row, LABELLED, Columns())
    else:
        assert convert(row, LABELLED, Columns())[0]["chosen"] == "a"


def test_pictures_among_the_parts_of_a_message_are_named():
    parts = [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "What is it?"}]
    row = {"prompt": [{"role": "user", "content": parts}], "chosen": "a", "rejected": "b"}
    with pytest.raises(BadRow, match="tools_or_media.*found image_url"):
        convert(row, LABELLED, Columns())
    row["prompt"][0]["content"] = parts[1:] * 2
    assert convert(row, LABELLED, Columns())[0]["prompt"] == [user("What is it?What is it?")]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_part_of_the_answer(key):
    prompt = [user("q"), said("a", **{key: "so\n"}), user("r")]
    row = {"prompt": prompt, "chosen": [said("4", **{key: "2+2"})], "rejected": [said("4", **{key: "guess"})]}
    (out,) = convert(row, LABELLED, Columns())
    assert (out["chosen"], out["rejected"]) == ("<think>\n2+2\n</think>\n\n4", "<think>\nguess\n</think>\n\n4")
    assert out["prompt"][1]["content"] == "<think>\nso\n</think>\n\na"
    same = [said("<think>x</think>4", **{key: "x"})]
    assert convert(row | {"chosen": same}, LABELLED, Columns())[0]["chosen"] == "<think>x</think>4"
    none = convert(row | {"chosen": [said("4", **{key: " "})]}, LABELLED, Columns())[0]
    assert none["chosen"] == "4"


def test_what_no_template_gets_is_counted_and_said(tmp_path, tiny, capsys):
    rows = [
        {"prompt": [user(f"q{i}") | {"name": "Ann" if i < 3 else None}], "chosen": "a", "rejected": "b"}
        for i in range(4)
    ]
    rows.append({"prompt": "p", "chosen": [said("a", weight=1)], "rejected": [said("a", weight=0)]})
    rows.append({"prompt": "p", "chosen": [said("a")], "rejected": [said("a")]})
    rows.append({"prompt": "p", "chosen": "a", "rejected": "b", "tools": [TOOL]})
    report, kept = run(tmp_path, rows, tiny)
    assert report["only_in_metadata"] == {"name": 3, "weight": 1} and len(kept) == 4
    assert report["dropped"] == {"equal_text": 1, "equal_answers": 1, "tools_or_media": 1}
    assert sum("Ann" in (row["metadata"] or "") for row in kept) == 3
    out = capsys.readouterr().out
    assert "3 rows have messages with name; " in out and "dropped 1 tools_or_media" in out
    assert "kept as metadata alone" in (tmp_path / "out" / "report.html").read_text()
    rated = [{"prompt": "p", "response": x, "reward": i, "images": ["x.png"]} for i, x in enumerate("abc")]
    with pytest.raises(UserError, match="all 3 rows were dropped, 3 of them as tools_or_media"):
        run(tmp_path, rated, tiny, kind="preference")

"""Stage 1: what becomes of each shape of row, that nothing of it is lost, and what becomes of bad rows.

The letters and numbers (D01, ...) are those of public bug reports of this field; each stands for a kind, and has
neighbours.
"""

import json

import pytest

from dataprep.convert import convert
from dataprep.messages import hh_text, parse_hh
from dataprep.shapes import Columns, Shape, detect_shape, detect_source
from utils.config import UserError
from utils.rows import BadRow, TextRow


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def make(row, kind=None, suffix="", pairs="best_worst", **columns):
    """All rows that one raw row becomes."""
    columns = Columns(**columns)
    return convert(row, detect_shape(row, columns, kind), columns, suffix, pairs)


def one(row, kind=None, **columns):
    (out,) = make(row, kind, **columns)
    return out


def reason(row, shape=Shape("preference", "chosen and rejected"), **columns):
    with pytest.raises(BadRow) as caught:
        convert(row, shape, Columns(**columns))
    assert "\n" not in caught.value.detail and "None" not in caught.value.detail
    return caught.value.reason


def pair(out):
    return out["prompt"], out["chosen"], out["rejected"]


HH = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: "


# --- D01: the prompt ends before the last answer


def test_d01_hh_prompt_ends_at_the_last_assistant_marker():
    out = one({"chosen": HH + "X", "rejected": HH + "Y"})
    assert pair(out) == ([user("a"), assistant("b"), user("c")], "X", "Y") and out["metadata"] is None


@pytest.mark.parametrize(
    "text, turns",
    [
        (
            "\n\nHuman: what does\nAssistant: mean? And Human: too\n\nAssistant: It is a label.",
            [user("what does\nAssistant: mean? And Human: too"), assistant("It is a label.")],
        ),
        ("\n\nHuman: a\n\nAssistant: b\n\nAssistants: c", [user("a"), assistant("b\n\nAssistants: c")]),
        ("\n\nHuman: a\n\n  Assistant: b\n\nAssistant: c", [user("a\n\n  Assistant: b"), assistant("c")]),
        ("no dialogue", None),
        ("Preface.\n\nHuman: a\n\nAssistant: b", None),
    ],
)
def test_d01_a_marker_counts_only_after_a_blank_line(text, turns):
    assert parse_hh(text) == turns


def test_d01_neighbours_conversations_that_part_too_early_or_do_not_end():
    start = "\n\nHuman: a\n\nAssistant: "
    assert reason({"chosen": start + "x\n\nHuman: y", "rejected": start + "x"}) == "no_final_answer"
    assert reason({"chosen": start + "x", "rejected": "\n\nHuman: b\n\nAssistant: x"}) == "different_prompts"
    both = [user("q"), assistant("a"), user("r"), assistant("b")]
    assert (
        reason({"chosen": both, "rejected": [user("q"), assistant("c"), user("r"), assistant("d")]})
        == "different_prompts"
    )


# --- D03: a prompt is never silently empty


def test_d03_without_a_prompt_column_it_is_found_in_the_dialogue_or_missed():
    assert one({"chosen": "\n\nHuman: q\n\nAssistant: A", "rejected": "\n\nHuman: q\n\nAssistant: B"})["prompt"] == [
        user("q")
    ]
    assert reason({"chosen": "plain text", "rejected": "other text"}) == "no_prompt"
    assert reason({"chosen": [assistant("A")], "rejected": [assistant("B")]}) == "empty_prompt"
    with pytest.raises(UserError, match=r"columns \['text'\] are none that stage 1 knows.*--columns.prompt"):
        make({"text": "x"})
    with pytest.raises(UserError, match="make no trajectories"):
        make({"prompt": "q", "chosen": "A", "rejected": "B"}, kind="trajectories")


# --- D05, D06: equal, empty and null answers


@pytest.mark.parametrize("rejected", ["a", "a ", "\ta\n", "a\u00a0"])
def test_d05_answers_that_are_equal_apart_from_white_space(rejected):
    assert reason({"prompt": "q", "chosen": "a", "rejected": rejected}) == "equal_answers"


@pytest.mark.parametrize(
    "row, why",
    [
        ({"prompt": "q", "chosen": "", "rejected": "b"}, "empty_response"),
        ({"prompt": "q", "chosen": "a", "rejected": None}, "empty_response"),
        ({"prompt": "q", "chosen": "a", "rejected": "\n \t"}, "empty_response"),
        ({"prompt": "   ", "chosen": "a", "rejected": "b"}, "empty_prompt"),
        ({"prompt": None, "chosen": "a", "rejected": "b"}, "empty_prompt"),
        ({"prompt": [], "chosen": "a", "rejected": "b"}, "empty_prompt"),
        ({"prompt": "\u200b", "chosen": "a", "rejected": "b"}, "empty_prompt"),
        ({"prompt": [{"role": "system", "content": "s"}], "chosen": "a", "rejected": "b"}, "empty_prompt"),
        ({"prompt": "q", "chosen": "a"}, "missing_column"),
        ({"prompt": [{"role": "user", "content": None}], "chosen": "a", "rejected": "b"}, "wrong_type"),
        ({"prompt": [{"role": "user"}], "chosen": "a", "rejected": "b"}, "wrong_type"),
        (
            {"prompt": "q", "chosen": [assistant("a")], "rejected": [{"role": "assistant", "content": None}]},
            "wrong_type",
        ),
        ({"prompt": [user("q"), assistant("a")], "chosen": "a", "rejected": "b"}, "no_final_answer"),
        ({"prompt": "q", "chosen": [user("q"), assistant("a"), user("more")], "rejected": "b"}, "no_final_answer"),
    ],
)
def test_d06_empty_and_null_fields(row, why):
    assert reason(row) == why


# --- D15: turns in odd orders


def test_d15_neighbouring_turns_of_one_role_are_joined_and_can_be_taken_apart():
    start = "\n\nHuman: a\n\nHuman: b\n\nAssistant: "
    out = one({"chosen": start + "X", "rejected": start + "Y"})
    assert out["prompt"] == [user("a\n\nb")] and json.loads(out["metadata"])["_raw"]["prompt"] == [
        user("a"),
        user("b"),
    ]
    three = [user("a"), assistant("b"), assistant("c"), user("d")]
    assert one({"prompt": three, "chosen": "X", "rejected": "Y"})["prompt"] == [
        user("a"),
        assistant("b\n\nc"),
        user("d"),
    ]


def test_d15_a_system_turn_only_where_there_is_one():
    assert one({"prompt": "q", "chosen": "A", "rejected": "B"})["prompt"] == [user("q")]
    assert one({"system": "s", "question": "q", "chosen": "A", "rejected": "B"})["prompt"] == [
        {"role": "system", "content": "s"},
        user("q"),
    ]
    assert one({"system": "", "question": "q", "chosen": "A", "rejected": "B"})["prompt"] == [user("q")]
    assert (
        one(
            {
                "prompt": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}],
                "chosen": "A",
                "rejected": "B",
            }
        )["prompt"][0]["role"]
        == "system"
    )


# --- D16: a prompt that is repeated in the answers


@pytest.mark.parametrize(
    "prompt, chosen, rejected, kept",
    [
        (
            "What is a cat?",
            "What is a cat? An animal.",
            "What is a cat?\nA plant.",
            ("An animal.", "A plant."),
        ),  # repeated in front of both
        ("What is a cat?", "What is a cat? An animal.", "A plant.", ("What is a cat? An animal.", "A plant.")),
        (
            "Hi",
            "Hi there! How can I help?",
            "Hi you",
            ("Hi there! How can I help?", "Hi you"),
        ),  # a greeting, no repetition
        ("I", "It is good", "It is bad", ("It is good", "It is bad")),
        ("one two three", "one two threefold", "one two threes", ("one two threefold", "one two threes")),
    ],
)
def test_d16_a_repeated_prompt_is_used_once_and_answers_keep_their_start(prompt, chosen, rejected, kept):
    assert pair(one({"prompt": prompt, "chosen": chosen, "rejected": rejected})) == ([user(prompt)], *kept)


def test_d16_neighbours_the_prompt_as_dialogue_text_or_messages():
    prompt = HH.rstrip()
    out = one({"prompt": prompt, "chosen": HH + "X", "rejected": HH + "Y"})
    assert pair(out) == ([user("a"), assistant("b"), user("c")], "X", "Y")
    static = one(
        {"prompt": prompt, "chosen": " X", "rejected": " Y"}
    )  # the prompt with its markers, the answers without
    assert pair(static) == pair(out)
    whole = [user("q"), assistant("A")]
    assert pair(one({"prompt": "q", "chosen": whole, "rejected": [user("q"), assistant("B")], "messages": whole})) == (
        [user("q")],
        "A",
        "B",
    )


# --- every shape, and that it can be put together again


def rebuilt(out, name="prompt"):
    """The raw text or messages of one side, from the new row alone."""
    raw = json.loads(out["metadata"] or "{}").get("_raw", {})
    if name != "prompt":
        return raw.get(name, out[name])
    if raw.get("prompt_format") == "hh":
        return hh_text(out["prompt"]) + "\n\nAssistant:"
    return raw.get("prompt", out["prompt"][-1]["content"] if len(out["prompt"]) == 1 else out["prompt"])


SHAPES = {
    "text": ({"prompt": "q", "chosen": "A", "rejected": "B"}, ["q"], ["A"], ["B"]),
    "white space": ({"prompt": " q\n", "chosen": "\nA ", "rejected": " B\t"}, [" q\n"], ["\nA "], [" B\t"]),
    "messages": (
        {"prompt": [user("q")], "chosen": [assistant("A")], "rejected": [assistant("B")]},
        ["q"],
        ["A"],
        ["B"],
    ),
    "a message": (
        {"prompt": [user("q")], "chosen": assistant(" A"), "rejected": assistant("B")},
        ["q"],
        [" A"],
        ["B"],
    ),
    "conversations": (
        {"chosen": [user("q"), assistant("A")], "rejected": [user("q"), assistant("B")]},
        ["q"],
        ["A"],
        ["B"],
    ),
    "sharegpt": (
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "A"},
            "rejected": {"from": "gpt", "value": "B"},
        },
        ["q"],
        ["A"],
        ["B"],
    ),
    "two turns": (
        {"prompt": [user("q"), assistant("r"), user("s")], "chosen": "A", "rejected": "B"},
        [[user("q"), assistant("r"), user("s")]],
        ["A"],
        ["B"],
    ),
    "content parts": (
        {
            "prompt": [{"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "text", "text": "r"}]}],
            "chosen": "A",
            "rejected": "B",
        },
        [[{"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "text", "text": "r"}]}]],
        ["A"],
        ["B"],
    ),
    "named messages": (
        {"prompt": [user("q") | {"name": "Ann"}], "chosen": [assistant("A") | {"weight": 1}], "rejected": "B"},
        [[user("q") | {"name": "Ann"}]],
        [[assistant("A") | {"weight": 1}]],
        ["B"],
    ),
    "alpaca": (
        {"instruction": "Translate.", "input": "Hund", "chosen": "dog", "rejected": "cat"},
        ["Translate.\n\nHund"],
        ["dog"],
        ["cat"],
    ),
    "repeated prompt": (
        {"prompt": "What is it?", "chosen": "What is it?  A", "rejected": "What is it?\nB"},
        ["What is it?"],
        ["What is it?  A"],
        ["What is it?\nB"],
    ),
    "hh prompt": (
        {"prompt": "\n\nHuman: q\n\nAssistant:", "chosen": " A", "rejected": " B"},
        ["\n\nHuman: q\n\nAssistant:"],
        [" A"],
        [" B"],
    ),
    "hh prompt, odd": (
        {"prompt": "Human: q\n\nAssistant: ", "chosen": "A", "rejected": "B"},
        ["Human: q\n\nAssistant: "],
        ["A"],
        ["B"],
    ),
    "PKU-SafeRLHF": (
        {"prompt": "q", "response_0": "B", "response_1": "A", "better_response_id": 1, "safer_response_id": 0},
        ["q"],
        ["A"],
        ["B"],
    ),
    "SHP": (
        {"history": "q", "human_ref_A": "A", "human_ref_B": "B", "labels": 1, "score_A": 9, "score_B": 2},
        ["q"],
        ["A"],
        ["B"],
    ),
    "HelpSteer2 pairs": (
        {"prompt": "q", "response_1": "B", "response_2": "A", "preference_strength": 2},
        ["q"],
        ["A"],
        ["B"],
    ),
    "arena": (
        {
            "conversation_a": [user("q"), assistant("B")],
            "conversation_b": [user("q"), assistant("A")],
            "winner": "model_b",
        },
        ["q"],
        ["A"],
        ["B"],
    ),
    "rated": ({"prompt": "q", "responses": ["C", "A", "B"], "scores": [2, 3, 1.5]}, ["q"], ["A"], ["B"]),
    "rated objects": (
        {
            "instruction": "q",
            "completions": [
                {"response": "B", "overall_score": 1},
                {"response": "A", "overall_score": 8.5, "model": "m"},
            ],
        },
        ["q"],
        ["A"],
        ["B"],
    ),
    "ranked": (
        {"prompt": "q", "answers": [{"answer": "B", "rank": 2}, {"answer": "A", "rank": 1}]},
        ["q"],
        ["A"],
        ["B"],
    ),
    "rated, all pairs": (
        {"prompt": "q", "responses": ["C", "A", "B"], "scores": [2, 3, 2]},
        ["q"] * 2,
        ["A", "A"],
        ["C", "B"],
    ),
    "Unicode": (
        {"prompt": "什么是猫？", "chosen": "动物 🐈‍⬛", "rejected": "e\u0301\u2028x"},
        ["什么是猫？"],
        ["动物 🐈‍⬛"],
        ["e\u0301\u2028x"],
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_preference_shapes_round_trip(name):
    row, prompts, chosen, rejected = SHAPES[name]
    outs = make(row, pairs="all" if "all" in name else "best_worst")
    assert [rebuilt(out) for out in outs] == prompts
    assert [rebuilt(out, "chosen") for out in outs] == chosen and [
        rebuilt(out, "rejected") for out in outs
    ] == rejected
    for out in outs:
        assert out["chosen"] == out["chosen"].strip() and out["rejected"] == out["rejected"].strip()


@pytest.mark.parametrize(
    "prompt, sides",
    [
        ("\n\nHuman: a", ("X", "Y")),
        ("\n\nHuman: a ", (" X\n", "Y")),  # white space is part of the turns
        ("\n\nHuman: a\n\nAssistant:\n\nHuman: b", ("X", "Y")),  # a turn without text
        ("Human: a", ("X", "Y")),  # no blank line at the start
        ("\n\nHuman: a\n\nHuman: b", ("X", "Y")),
        ("\n\nHuman:a\n\nAssistant:  b\n\nHuman: c", ("X\n\nY", "Y")),
    ],
)
def test_hh_dialogues_round_trip(prompt, sides):
    row = {"chosen": f"{prompt}\n\nAssistant: {sides[0]}", "rejected": f"{prompt}\n\nAssistant: {sides[1]}"}
    out = one(row)
    raw = json.loads(out["metadata"] or "{}").get("_raw", {})
    for name in ("chosen", "rejected"):
        text = raw.get(name, out[name])
        whole = text if text == row[name] else hh_text([*raw.get("prompt", out["prompt"]), assistant(text)])
        assert whole == row[name]


def test_margins():
    rated = {"prompt": "q", "responses": ["A", "B", "C"], "scores": [1, 4, 2.5]}
    assert [out["margin"] for out in make(rated)] == [3.0]
    assert [(o["chosen"], o["rejected"], o["margin"]) for o in make(rated, pairs="all")] == [
        ("B", "C", 1.5),
        ("B", "A", 3.0),
        ("C", "A", 1.5),
    ]
    assert one({"prompt": "q", "response_1": "A", "response_2": "B", "preference_strength": -3})["margin"] == 3.0
    assert one({"prompt": "q", "chosen": "A", "rejected": "B", "margin": 2})["margin"] == 2.0
    assert one({"prompt": "q", "answers": [{"text": "A", "rank": 1}, {"text": "B", "rank": 4}]})["margin"] == 3.0


@pytest.mark.parametrize(
    "row, why",
    [
        ({"prompt": "q", "response_0": "A", "response_1": "B", "better_response_id": 2}, "wrong_type"),
        ({"prompt": "q", "response_0": "A", "response_1": "B", "better_response_id": None}, "tie"),
        ({"prompt": "q", "response_1": "A", "response_2": "B", "preference_strength": 0}, "tie"),
        (
            {
                "conversation_a": [user("q"), assistant("A")],
                "conversation_b": [user("q"), assistant("B")],
                "winner": "tie (bothbad)",
            },
            "tie",
        ),
        ({"prompt": "q", "responses": ["A", "B"], "scores": [1, 1]}, "tie"),
        ({"prompt": "q", "responses": ["A"], "scores": [1]}, "no_counterpart"),
        ({"prompt": "q", "responses": ["A", "B"], "scores": [1]}, "wrong_type"),
        ({"prompt": "q", "responses": ["A", "B"], "scores": [1, None]}, "wrong_type"),
        ({"prompt": "q", "responses": ["A", None], "scores": [1, 2]}, "empty_response"),
        ({"prompt": "q", "chosen": "A", "rejected": "B", "margin": -2}, "negative_margin"),
        ({"prompt": "q", "responses": ["A", 3], "scores": [1, 2]}, "wrong_type"),
    ],
)
def test_choices_and_ratings_that_say_nothing(row, why):
    with pytest.raises(BadRow) as caught:
        make(row)
    assert caught.value.reason == why


def test_one_bad_answer_costs_only_its_own_pairs():
    row = {"prompt": "q", "responses": ["A", "", "C", "D"], "scores": [4, 3, 2, None]}
    outs = make(row, pairs="all")
    assert [(o["chosen"], o["rejected"]) for o in outs if isinstance(o, dict)] == [("A", "C")]
    assert [o.reason for o in outs if isinstance(o, BadRow)] == ["empty_response", "wrong_type"]
    best = make({"prompt": "q", "responses": ["same", "same", "other"], "scores": [5, 1, 3]})
    assert [(o["chosen"], o["rejected"], o["margin"]) for o in best] == [("same", "other", 2.0)]
    equal = make({"prompt": "q", "responses": ["x", "x", "y"], "scores": [3, 2, 1]}, pairs="all")
    assert [o.reason if isinstance(o, BadRow) else (o["chosen"], o["rejected"]) for o in equal] == [
        "equal_answers",
        ("x", "y"),
        ("x", "y"),
    ]


def test_the_chosen_answer_is_the_better_one_in_every_layout():
    for value, better in ((0, "x"), (1, "y")):
        assert (
            one({"prompt": "q", "response_0": "x", "response_1": "y", "better_response_id": value})["chosen"] == better
        )
    for value, better in ((1, "x"), (0, "y")):
        assert one({"history": "q", "human_ref_A": "x", "human_ref_B": "y", "labels": value})["chosen"] == better
    for value, better in ((-1, "x"), (3, "y")):
        assert (
            one({"prompt": "q", "response_1": "x", "response_2": "y", "preference_strength": value})["chosen"]
            == better
        )
    mapped = dict(prompt="q", answer_a="left", answer_b="right", choice="winner")
    for value, better in (("A", "x"), ("option_b", "y")):
        assert one({"q": "q", "left": "x", "right": "y", "winner": value}, **mapped)["chosen"] == better
    for value, better in ((1, "x"), (2, "y"), (1.0, "x"), ("2.0", "y")):  # tables write 1.0 for 1
        assert (
            one({"q": "q", "left": "x", "right": "y", "winner": value}, **mapped, choice_a="1", choice_b=2)["chosen"]
            == better
        )
    for value in (0, -1, "skip", None, ""):
        with pytest.raises(BadRow) as caught:
            one({"q": "q", "left": "x", "right": "y", "winner": value}, **mapped, choice_a="1", choice_b=2)
        assert caught.value.reason == "tie"
    with pytest.raises(UserError, match="choice_a and columns.choice_b belong together"):
        one({"q": "q", "left": "x", "right": "y", "winner": 1}, **mapped, choice_a=1)
    with pytest.raises(BadRow, match="columns.choice_a"):
        one({"q": "q", "left": "x", "right": "y", "winner": 1}, **mapped)


def test_what_belongs_to_a_prompt_is_part_of_it():
    dolly = one({"instruction": "Who?", "context": "Ann sings.", "response": "Ann", "reward": 1.0})
    assert dolly["prompt"] == [user("Who?\n\nAnn sings.")]
    chat = one({"instruction": "c", "input": "", "history": [["a", "b"]], "chosen": "A", "rejected": "B"})
    assert chat["prompt"] == [user("a"), assistant("b"), user("c")]
    system = {"role": "system", "content": "s"}
    assert one({"system": "s", "prompt": [system, user("q")], "chosen": "A", "rejected": "B"})["prompt"] == [
        system,
        user("q"),
    ]
    whole = {
        "prompt": "q ",
        "chosen": [system, user("q"), assistant("A")],
        "rejected": [system, user("q"), assistant("B")],
    }
    assert pair(one(whole)) == ([system, user("q")], "A", "B")  # the conversation knows more than the column
    hh = {
        "prompt": "What is it?",
        "chosen": "\n\nHuman: What is it?\n\nAssistant: A",
        "rejected": "\n\nHuman: What is it?\n\nAssistant: B",
    }
    assert pair(one(hh)) == ([user("What is it?")], "A", "B")
    assert reason(hh | {"prompt": "Another?"}) == "different_prompts"
    assert one(
        {
            "prompt": [{"role": "User", "content": "q"}],
            "chosen": [{"role": "Assistant", "content": "A"}],
            "rejected": "B",
        }
    )["prompt"] == [user("q")]
    assert one({"input": "q", "chosen": "A", "rejected": "B"})["prompt"] == [user("q")]


def test_a_source_is_judged_by_more_than_its_first_row():
    good, poor = {"prompt": "q", "chosen": "A", "rejected": "B"}, {"prompt": "q", "chosen": "A"}
    assert detect_source([("f:1", poor), ("f:2", good)], Columns()) == (
        "f:2",
        Shape("preference", "chosen and rejected"),
    )
    kto = [
        ("f:1", {"prompt": "q", "completion": "a", "label": None}),
        ("f:2", {"prompt": "q", "completion": "a", "label": True}),
    ]
    assert detect_source(kto, Columns())[1] == Shape("preference", "thumbs")
    for row in (
        poor,
        {"prompt": "q", "response_a": "x", "response_b": "y", "winner_model_a": 1},
        {"prompt": "q", "completion": "a", "label": "good"},
    ):
        with pytest.raises(UserError, match="f:1: the columns .* look like answers.*--kind prompts"):
            detect_source([("f:1", row)], Columns())
        assert detect_source([("f:1", row)], Columns(), "prompts")[1].kind == "prompts"


def test_summaries():
    info = {"id": "t3", "subreddit": "cats", "title": "My cat", "post": "It purrs.\n", "article": None}
    row = {
        "info": info,
        "summaries": [{"text": " Bad.", "policy": "p"}, {"text": " Good.", "policy": "r"}],
        "choice": 1,
        "worker": "w",
    }
    out = one(row)
    assert pair(out) == ([user("SUBREDDIT: r/cats\n\nTITLE: My cat\n\nPOST: It purrs.\n\n\nTL;DR:")], "Good.", "Bad.")
    assert json.loads(out["metadata"])["summaries"] == row["summaries"] and rebuilt(out, "chosen") == " Good."
    news = one(row | {"info": {"article": "News.", "post": None}})
    assert news["prompt"] == [user("News.\n\nTL;DR:")]


def test_helpsteer_turns():
    prompt = "a\n<extra_id_1>Assistant\nb\n<extra_id_1>User\nc"
    out = one({"prompt": prompt, "response_1": "A", "response_2": "B", "preference_strength": -1})
    assert out["prompt"] == [user("a"), assistant("b"), user("c")] and rebuilt(out) == prompt


def test_columns_of_other_kinds_and_unknown_ones_are_kept_as_metadata():
    row = {
        "prompt": "q",
        "chosen": "A",
        "rejected": "B",
        "reward": 2,
        "reference": "r",
        "answer": "a",
        "other": {"x": [1, None]},
        "annotator": "é",
    }
    assert json.loads(one(row)["metadata"]) == {
        k: v for k, v in row.items() if k not in ("prompt", "chosen", "rejected")
    }
    odd = one(
        {
            "prompt": "q",
            "chosen": "A",
            "rejected": "B",
            "nan": float("nan"),
            "bytes": "é".encode(),
            "deep": [float("inf")],
        }
    )
    assert json.loads(odd["metadata"]) == {"nan": None, "bytes": "é", "deep": [None]}


def test_prompts():
    assert one({"prompt": "q"}) == {"prompt": [user("q")], "reference": None, "ground_truth": None, "metadata": None}
    assert one({"prompt": "q", "ground_truth": 42})["ground_truth"] == "42"
    gsm = {"question": "2+2?", "answer": "2+2 = <<2+2=4>>4\n#### 1,004"}
    (out,) = make(gsm, suffix=" Think.")
    assert (
        out["prompt"] == [user("2+2? Think.")] and out["ground_truth"] == "1,004" and out["reference"] == gsm["answer"]
    )
    assert (
        reason({"question": "2+2?", "answer": "no idea\n#### "}, Shape("prompts", "prompts")) == "empty_ground_truth"
    )
    markdown = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a\n#### Summary\nDone."}]}
    assert (
        one(markdown)["ground_truth"] is None
        and one({"prompt": "q", "reference": "#### Title\ntext"})["ground_truth"] is None
    )
    twice = one({"messages": [user("q"), assistant("a"), assistant("b")]})
    assert twice["reference"] == "a\n\nb" and twice["prompt"] == [user("q")]
    math = one({"problem": "x?", "solution": r"So $\boxed{1}$ or $\boxed{\frac{1}{2}}$.", "level": "5"})
    assert (math["ground_truth"], math["reference"]) == (r"\frac{1}{2}", r"So $\boxed{1}$ or $\boxed{\frac{1}{2}}$.")
    assert one({"problem": "x?", "solution": "long", "answer": "7"})["ground_truth"] == "7"
    verl = {
        "data_source": "gsm8k",
        "prompt": [user("q")],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 0},
    }
    out = one(verl)
    assert (out["prompt"], out["ground_truth"]) == ([user("q")], "4") and json.loads(out["metadata"])["reward_model"][
        "style"
    ] == "rule"
    bench = {"question_id": 81, "category": "writing", "turns": ["first", "second"], "reference": ["r1", "r2"]}
    out = one(bench)
    assert (
        out["prompt"] == [user("first")]
        and json.loads(out["metadata"])["turns"] == ["first", "second"]
        and json.loads(out["reference"]) == ["r1", "r2"]
    )
    finished = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    out = one(finished)
    assert (out["prompt"], out["reference"]) == ([user("q")], "a") and json.loads(out["metadata"])["_raw"][
        "conversations"
    ] == finished["conversations"]


def test_trajectories():
    row = {
        "prompt": "q",
        "response": "r",
        "reward": 1,
        "logprobs": [-1, -2.5],
        "annotator": "x",
        "score_type": "human",
    }
    out = one(row)
    assert (out["response"], out["reward"], out["logprobs"]) == ("r", 1.0, [-1.0, -2.5])
    assert json.loads(out["metadata"]) == {"annotator": "x", "score_type": "human"}
    shape = Shape("trajectories", "logged answers")
    assert reason(row | {"reward": None}, shape) == "no_reward"
    for change in (
        {"reward": "1"},
        {"reward": True},
        {"reward": float("nan")},
        {"reward": float("-inf")},
        {"logprobs": "x"},
        {"logprobs": [-1, None]},
        {"logprobs": [-1, float("nan")]},
    ):
        assert reason(row | change, shape) == "wrong_type", change
    assert one(row | {"response": " r\n"})["response"] == " r\n"  # its log-probabilities are those of these tokens
    assert reason({"prompt": "q", "completion": "r", "label": 3}, Shape("trajectories", "thumbs")) == "wrong_type"
    for missing in (None, float("nan")):
        assert (
            reason({"prompt": "q", "completion": "r", "label": missing}, Shape("trajectories", "thumbs"))
            == "no_reward"
        )
    thumbs = {"prompt": "q", "completion": "r", "label": False}
    assert (
        one(thumbs, "trajectories")["reward"] == 0.0 and one(thumbs | {"label": True}, "trajectories")["reward"] == 1.0
    )


def test_mapped_columns():
    row = {"ask": "q", "good": "A", "bad": "B", "by": 2}
    out = one(row, prompt="ask", chosen="good", rejected="bad", margin="by")
    assert (*pair(out), out["margin"], out["metadata"]) == ([user("q")], "A", "B", 2.0, None)
    assert reason(row, prompt="question") == "missing_column"


# --- D17, D18, D19: wrong types, control characters, broken text


@pytest.mark.parametrize(
    "row, detail",
    [
        ({"prompt": "q", "chosen": 3, "rejected": "b"}, "chosen: expected text, found number '3'"),
        (
            {"prompt": 7, "chosen": "a", "rejected": "b"},
            "prompt: expected text or a list of messages, found number '7'",
        ),
        (
            {"prompt": "q", "chosen": "a", "rejected": ["x", "y", "z"]},
            "rejected[0]: expected {role, content}, found text 'x'",
        ),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": "2"}, "margin: expected a number, found text '2'"),
        (
            {"prompt": [{"role": 1, "content": "x"}], "chosen": "a", "rejected": "b"},
            "prompt[0].role: expected text, found number '1'",
        ),
        ([1, 2], "expected an object with named columns, found list"),
        ("text", "expected an object with named columns, found text 'text'"),
        (
            {"prompt": "q", "chosen": b"\xff", "rejected": "b"},
            "chosen: expected text, found bytes that are not UTF-8 at byte 1",
        ),
        (
            {"prompt": [{"role": "assistant", "content": "x", "tool_calls": [1]}], "chosen": "a", "rejected": "b"},
            "prompt[0]: expected a message of text, found tool calls or images",
        ),
    ],
)
def test_d17_wrong_types_say_field_expected_and_found(row, detail):
    with pytest.raises(BadRow) as caught:
        convert(row, Shape("preference", "chosen and rejected"), Columns())
    assert (caught.value.reason, caught.value.detail) == ("wrong_type", detail)


@pytest.mark.parametrize(
    "text, why",
    [
        ("a\x00b", "U+0000 near 'a'"),
        ("\x1b[31mred", "U+001B near ''"),
        ("don\x92t", "U+0092 near 'don'"),
        ("x\x7f", "U+007F near 'x'"),
    ],
)
def test_d18_control_characters_are_named(text, why):
    for row in ({"prompt": text, "chosen": "a", "rejected": "b"}, {"prompt": "q", "chosen": text, "rejected": "b"}):
        with pytest.raises(BadRow) as caught:
            one(row)
        assert (caught.value.reason, caught.value.detail) == ("control_characters", why)


def test_d18_characters_that_texts_need_are_kept():
    text = "tab\tline\r\nnext\u2028sep \u200fעברית\u200e 👩\u200d👧 ن\u200cه \ufffd"
    assert one({"prompt": text, "chosen": text, "rejected": "b"})["chosen"] == text


@pytest.mark.parametrize("place", ["prompt", "chosen", "other"])
def test_d19_a_lone_surrogate_is_reported(place):
    assert reason({"prompt": "q", "chosen": "a", "rejected": "b"} | {place: "x\ud800"}) == "broken_text"


# --- rows of formats without nesting


def test_text_rows_hold_numbers_and_messages_as_text():
    out = one(TextRow(prompt="q", chosen="A", rejected="B", margin="2.5", note="[1]"))
    assert (*pair(out), out["margin"]) == ([user("q")], "A", "B", 2.5) and json.loads(out["metadata"]) == {
        "note": "[1]"
    }
    assert one(TextRow(prompt=json.dumps([user("q")]), chosen="1", rejected="[2]"))["prompt"] == [user("q")]
    assert one(TextRow(prompt="42", chosen="1", rejected="[2]"))["rejected"] == "[2]"  # text stays text
    out = one(TextRow(prompt="q", response="r", reward="-1e-1", logprobs="[-1, -2]"))
    assert (out["reward"], out["logprobs"]) == (-0.1, [-1.0, -2.0])
    assert one(TextRow(history="q", human_ref_A="x", human_ref_B="y", labels="0"))["chosen"] == "y"
    assert (
        reason(TextRow(prompt="q", response="r", reward="high"), Shape("trajectories", "logged answers"))
        == "wrong_type"
    )
    assert one(TextRow(prompt="q", completion="r", label="True"), "trajectories")["reward"] == 1.0

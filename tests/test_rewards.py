"""Final numbers of answers, by value; and reward functions that misbehave."""

from fractions import Fraction

import pytest
from helpers import messages

from utils.config import UserError
from utils.rewards import (
    RewardConfig,
    check_ground_truth,
    check_reward_config,
    final_number,
    function_scorer,
    gsm8k_score,
    numbers,
)


@pytest.mark.parametrize(
    "text, answer",
    [
        ("She has 48 left, in all.", 48),
        ("#### ,", None),
        ("48,", 48),
        ("6,512,", 6512),
        ("The answer is 42.", 42),
        ("#### 41 then #### 42", 42),
        ("42", 42),
        ("no digits", None),
        ("", None),
        ("#### 72\nso 5 apples", 72),
        ("**$48,000**", 48000),
        ("48 000", 48000),
        ("#### 48 000", 48000),
        ("#### 48,000", 48000),
        (".25", Fraction(1, 4)),
        ("1/4", Fraction(1, 4)),
        ("15.0", 15),
        ("15 apples", 15),
        ("15%", 15),
        ("It costs $36.00.", 36),
        ("1/0", None),
        ("#### -3", -3),
        ("\u22123", -3),
        ("- 3", -3),
        ("-$1,234.5", Fraction(-2469, 2)),
        ("5-3", 3),
        ("5 - 3", 3),
        ("x=-3", -3),
        (r"\boxed{12} wait, \boxed{15}", 15),
        (r"\fbox{9}", 9),
        (r"\boxed{9", 9),
        (r"\boxed{\frac{3}{4}} of 9", Fraction(3, 4)),
        (r"\boxed{\frac{3}{8}}", Fraction(3, 8)),
        (r"\boxed{x} 7", 7),
        ("#### 3 apples and 2 pears", 3),
    ],
)
def test_final_number(text, answer):
    assert final_number(text) == answer


@pytest.mark.parametrize(
    "text, found",
    [
        ("[2.5,7.25]", [2.5, 7.25]),
        ("6,512", [6512]),
        ("12,34", [12, 34]),
        ("3,000,000", [3e6]),
        ("(1,2)", [1, 2]),
        ("1,2345", [1, 2345]),
        ("1.5.", [1.5]),
        ("2-1", [2, 1]),
        ("(3)-2", [3, 2]),
        ("is -2, not (-4)", [-2, -4]),
        ("covid-19", [19]),
    ],
)
def test_numbers(text, found):
    assert [float(x) for x in numbers(text)] == found


def test_strict_needs_the_mark():
    assert [final_number(t, strict=True) for t in ("The answer is 42.", "#### 41 ... #### 42", "42")] == [
        None,
        42,
        None,
    ]


@pytest.mark.parametrize("gold", ["N/A", "", ","])
def test_an_unreadable_gold_answer_never_pays(gold):
    assert gsm8k_score("N/A 5", gold) == 0.0
    with pytest.raises(UserError, match="row r1: ground_truth"):
        check_ground_truth([{"id": "r1", "ground_truth": gold}])


def test_gsm8k_score():
    assert [gsm8k_score(answer, "-3") for answer in ("-3", "3", "\u22123", "- 3")] == [1, 0, 1, 1]
    assert gsm8k_score("so it is 3,000.00", "3000") == 1


def test_only_the_key_of_the_style_may_be_set():
    with pytest.raises(UserError, match="needs reward_model.path"):
        check_reward_config(RewardConfig())
    with pytest.raises(UserError, match="reward_model.rule has no effect"):
        check_reward_config(RewardConfig(path="x", rule="gsm8k"))


def one_score(prompts, responses, **columns):
    return [1.0]


def nan_score(prompts, responses, **columns):
    return [1.0, float("nan")]


def none_score(prompts, responses, **columns):
    return [None] * len(responses)


def no_score(prompts, responses, **columns):
    return None


def text_score(prompts, responses, **columns):
    return ["a"] * len(responses)


def uses_columns(prompts, responses, *, ground_truth, **columns):
    return [float(r == g) + len(p) for p, r, g in zip(prompts, responses, ground_truth)]


@pytest.mark.parametrize(
    "name, message",
    [
        ("one_score", "1 scores for 2"),
        ("nan_score", "nan for the response 'b'"),
        ("none_score", "None"),
        ("no_score", "a NoneType, not one"),
        ("text_score", "a for"),
    ],
)
def test_wrong_reward_functions_are_named(name, message):
    with pytest.raises(UserError, match=f"test_rewards:{name} returned {message}"):
        function_scorer(f"test_rewards:{name}")([messages("x")] * 2, ["a", "b"], {})


def test_reward_function_gets_columns():
    scorer = function_scorer("test_rewards:uses_columns")
    assert scorer([messages("x")] * 2, ["a", "b"], {"ground_truth": ["a", "c"], "id": [1, 2]}) == [2.0, 1.0]


@pytest.mark.parametrize("name", ["no_such_module:f", "test_rewards:no_such_name", "test_rewards", ":f"])
def test_missing_reward_function(name):
    with pytest.raises(UserError, match="module:name"):
        function_scorer(name)

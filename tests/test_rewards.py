"""Final numbers of answers, by value; and reward functions that misbehave."""

from fractions import Fraction

import pytest
import torch
from helpers import CPU, byte_tokenizer, messages

from utils.config import ModelConfig, UserError
from utils.models import load_tokenizer, new_reward_model, template_fingerprint, write_stats
from utils.rewards import (
    RewardConfig,
    RewardModel,
    boxed,
    check_ground_truth,
    check_reward_config,
    final_number,
    function_scorer,
    gsm8k_score,
    numbers,
    open_reward_model,
    open_scorer,
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
    with pytest.raises(UserError, match=f"reward function {name}: .*write it as module:name") as caught:
        function_scorer(name)
    assert "\n" not in str(caught.value)


# --- boxes


@pytest.mark.parametrize(
    "text, inside",
    [
        (r"a \boxed{ {x} } b", "{x}"),
        (r"\boxed{1} and \fbox {2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}.", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{12} wait, \boxed{15", "12"),
        (r"\boxed{1 \boxed{2} 3}", "2"),
        (r"} \boxed{3} {", "3"),
        (r"\boxed{}", ""),
        (r"\boxed{open", None),
        ("none {x}", None),
        (r"\boxed{" * 20_000, None),  # in milliseconds
    ],
)
def test_boxed(text, inside):
    assert boxed(text) == inside


# --- reward models and the dispatch


def lengths(ids, mask):
    return mask.sum(1).float()


def test_scores_are_of_whole_rows_in_the_order_given():
    """A forward that counts tokens: 20 of the template and the letter q, those of the response, and eos."""
    prompts, texts = [messages("q")] * 4, ["aaaa", "", "aa", "<|end|>"]
    model = RewardModel(lengths, byte_tokenizer(), CPU, mean=20.0, std=4.0)
    for micro in (1, 3, 64):
        assert model.scores(prompts, texts, micro) == [25, 21, 23, 28]  # text is no control token
    assert model.scorer(2)(prompts, texts, {}) == [25, 21, 23, 28]
    assert model.scorer(2, scaled=True)(prompts, texts, {}) == [1.25, 0.25, 0.75, 2.0]
    short = RewardModel(lambda ids, mask: ids[:, :24].sum(1) * 0 + ids[:, -1] + mask.sum(1), byte_tokenizer(), CPU, 24)
    assert short.scores(prompts[:1], texts[:1], 1) == [24 + 2]  # cut to 24 tokens, of which the last is eos
    broken = RewardModel(lambda ids, mask: torch.tensor([float("nan")]), byte_tokenizer(), CPU)
    with pytest.raises(UserError, match="the reward model gives nan to the response 'aaaa'; try model.dtype float32"):
        broken.scores(prompts[:1], texts[:1], 1)


@pytest.fixture
def folder(tmp_path, tiny) -> str:
    new_reward_model(ModelConfig(tiny, dtype="float32"), CPU, 3).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    return str(tmp_path)


def write(folder, tmp_path, **changes):
    stats = {"score_mean": 0.5, "score_std": 2.0, "temperature": 1.5}
    write_stats(tmp_path, stats | {"template_fingerprint": template_fingerprint(load_tokenizer(folder))} | changes)


def test_one_opener_reads_what_scores_mean(folder, tmp_path):
    cfg, batch = RewardConfig(path=folder), ([messages("q")] * 2, ["yes", "no"], {})
    opened = open_reward_model(folder, CPU, "float32")
    assert (opened.mean, opened.std, opened.temperature, opened.positions) == (0.0, 1.0, 1.0, 256)
    raw = opened.scores(*batch[:2], 1)
    assert abs(raw[0] - raw[1]) > 1e-3
    write(folder, tmp_path)
    opened = open_reward_model(folder, CPU, "float32")
    assert (opened.mean, opened.std, opened.temperature) == (0.5, 2.0, 1.5)
    assert open_scorer(cfg, 2, CPU, "float32")(*batch) == pytest.approx(raw, abs=1e-5)
    assert open_scorer(cfg, 2, CPU, "float32", scaled=True)(*batch) == pytest.approx(
        [(score - 0.5) / 2 for score in raw], abs=1e-5
    )
    given = open_reward_model(folder, CPU, forward=lengths, positions=9)
    assert (given.forward, given.positions, given.std) == (lengths, 9, 2.0)  # no second model is loaded
    assert open_scorer(cfg, 2, CPU, reward=given, scaled=True)(*batch) == [4.25, 4.25]  # (9 - 0.5) / 2
    write(folder, tmp_path, score_std=0.0)
    assert open_reward_model(folder, CPU, forward=lengths).std == 1e-6


def test_a_reward_model_of_another_template_is_refused(folder, tmp_path):
    other = byte_tokenizer()
    other.chat_template = "{{ messages[0]['content'] }}"
    write(folder, tmp_path)
    with pytest.raises(UserError, match="another chat template or tokenizer than the policy has, so its scores"):
        open_reward_model(folder, CPU, forward=lengths, tokenizer=other)
    write(folder, tmp_path, template_fingerprint="x")
    with pytest.raises(UserError, match="another chat template or tokenizer than its folder holds, so its scores"):
        open_reward_model(folder, CPU, "float32")


def test_rules_and_functions_are_opened_by_their_style():
    columns = {"ground_truth": ["4", "5"], "id": [1, 2]}
    batch = [messages("x")] * 2, ["it is 4", "#### 5"], columns
    assert open_scorer(RewardConfig("rule", rule="gsm8k"), 1, CPU, scaled=True)(*batch) == [1.0, 1.0]
    assert open_scorer(RewardConfig("rule", rule="gsm8k_strict"), 1, CPU)(*batch) == [0.0, 1.0]
    named = RewardConfig("function", function="test_rewards:uses_columns")
    assert open_scorer(named, 1, CPU, scaled=True)([messages("x")] * 2, ["4", "6"], columns) == [2.0, 1.0]

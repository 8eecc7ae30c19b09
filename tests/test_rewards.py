"""Final numbers of answers, by value; and reward functions that misbehave."""

import dataclasses
import functools
import json
import re
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy
import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml
from helpers import CPU, base_config, byte_tokenizer, messages

from train_ppo import train
from utils.config import ModelConfig, UserError
from utils.data import COLUMNS
from utils.models import load_tokenizer, new_reward_model, template_fingerprint, write_stats
from utils.rewards import (
    RewardConfig,
    RewardModel,
    RewardPart,
    boxed,
    check_ground_truth,
    check_reward_config,
    final_number,
    function_scorer,
    gsm8k_score,
    numbers,
    open_reward_model,
    open_scorer,
    open_scorers,
    unpayable,
    weighted_scores,
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


def as_dict(prompts, responses, **columns):
    return dict.fromkeys(responses, 1.0)


def as_set(prompts, responses, **columns):
    return {1.0, 2.0}


def as_keys(prompts, responses, **columns):
    return dict.fromkeys(responses, 1.0).keys()


def as_text(prompts, responses, **columns):
    return "12"


def as_true(prompts, responses, **columns):
    return True


def short_generator(prompts, responses, **columns):
    yield 1.0


def endless_generator(prompts, responses, **columns):
    while True:
        yield 1.0


async def in_the_future(prompts, responses, **columns):
    return [1.0] * len(responses)


def rows_of_one(prompts, responses, **columns):
    return torch.ones(len(responses), 1)


def one_tensor(prompts, responses, **columns):
    return torch.tensor(1.0)


def huge(prompts, responses, **columns):
    return [1.0, 1e300]


def huge_integer(prompts, responses, **columns):
    return [10**5000, 1]


def complex_number(prompts, responses, **columns):
    return [1j, 1]


def clears(prompts, responses, **columns):
    prompts.clear(), responses.clear(), columns["id"].clear()
    return []


@pytest.mark.parametrize(
    "name, message",
    [
        ("as_dict", "a dict, not one number a response"),
        ("as_set", "a set, not one number a response"),
        ("as_keys", "a dict_keys, not one number a response"),
        ("as_text", "a str, not one number a response"),
        ("as_true", "a bool, not one number a response"),
        ("in_the_future", "a coroutine, not one number a response"),
        ("one_tensor", "a float, not one number a response"),
        ("short_generator", "1 scores for 2 responses"),
        ("endless_generator", "more scores for 2 responses"),
        ("clears", "0 scores for 2 responses"),
        ("rows_of_one", r"\[1.0\] for row x7, the response 'a'"),
        ("nan_score", "nan for row x8, the response 'b'"),
        ("huge", "1e\\+300 for row x8, the response 'b'"),
        ("huge_integer", "too large a number for row x7, the response 'a'"),
        ("complex_number", "1j for row x7, the response 'a'"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine")
def test_what_is_no_list_of_scores_is_refused_by_row(name, message):
    with pytest.raises(UserError, match=f"^reward function test_rewards:{name} returned {message}") as caught:
        function_scorer(f"test_rewards:{name}")([messages("x")] * 2, ["a", "b"], {"id": ["x7", "x8"]})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "scores",
    [
        [True, False],
        (1, 0),
        iter([1.0, 0.0]),
        numpy.array([1, 0]),
        numpy.array([True, False]),
        numpy.float32([1, 0]),
        torch.tensor([1.0, 0.0], requires_grad=True),
        torch.tensor([1, 0], dtype=torch.bfloat16),
        [torch.tensor(1.0), numpy.float64(0)],
        [Fraction(1), Decimal(0)],
        dict(a=1.0, b=0.0).values(),
    ],
    ids=lambda value: type(value).__name__,  # an address in a name would differ between the processes
)
def test_anything_that_is_a_list_of_numbers_is_scores(scores):
    scorer = function_scorer(RewardConfig("function", function=lambda prompts, responses: scores).function)
    found = scorer([messages("x")] * 2, ["a", "b"], {"id": [1, 2]})
    assert found == [1.0, 0.0] and {type(score) for score in found} == {float}


def spoils(prompts, responses, **columns):
    scores = [float(len(p) + len(r)) for p, r in zip(prompts, responses)]
    for prompt in prompts:
        prompt[0]["content"] = "spoilt"
        prompt.append({})
    responses.reverse()
    columns["metadata"][0]["a"] = 9
    for values in columns.values():
        values.clear()
    return scores


def test_a_reward_function_cannot_change_its_inputs():
    prompts, responses, columns = (
        [messages("x"), messages("y")],
        ["a", "bbb"],
        {"id": [1, 2], "metadata": [{"a": 1}, 0]},
    )
    assert function_scorer("test_rewards:spoils")(prompts, responses, columns) == [2.0, 4.0]
    assert prompts == [messages("x"), messages("y")] and responses == ["a", "bbb"]
    assert columns == {"id": [1, 2], "metadata": [{"a": 1}, 0]}


def only_truth(prompts, responses, ground_truth):
    return [float(r == g) for r, g in zip(responses, ground_truth)]


def only_ended(prompts, responses, *, ended, **columns):
    return [float(end) for end in ended]


def test_reward_function_gets_the_columns_that_it_names():
    batch = [messages("x")] * 2, ["a", "b"], {"ground_truth": ["a", "c"], "id": [1, 2], "ended": [False, True]}
    assert function_scorer("test_rewards:only_truth")(*batch) == [1.0, 0.0]
    assert function_scorer("test_rewards:only_ended")(*batch) == [0.0, 1.0]


def fails_at_b(prompts, responses, **columns):
    return [{"a": 1.0}[r] for r in responses]


def fails_in_library(prompts, responses, **columns):
    return [json.loads(r) for r in responses]


def fails_in_pairs(prompts, responses, **columns):
    return [1.0] if len(responses) == 1 else [1 / 0]


def fails_late(prompts, responses, **columns):
    for response in responses:
        yield float(response.index("a"))


def needs_more(prompts, responses, judge, **columns):
    return [1.0] * len(responses)


def line_of(function) -> int:
    return function.__code__.co_firstlineno


@pytest.mark.parametrize(
    "function, message",
    [
        (fails_at_b, rf"row x8: KeyError: 'b' \(.*test_rewards.py:{line_of(fails_at_b) + 1}\)"),
        (
            fails_in_library,
            rf"row x7: JSONDecodeError: Expecting .* \(.*test_rewards.py:{line_of(fails_in_library) + 1}\)",
        ),
        (
            fails_in_pairs,
            rf"a batch: ZeroDivisionError: division .*\(.*test_rewards.py:{line_of(fails_in_pairs) + 1}\)",
        ),
        (fails_late, rf"row x8: ValueError: substring not found \(.*test_rewards.py:{line_of(fails_late) + 2}\)"),
        (needs_more, "row x7: TypeError: needs_more.* missing 1 required positional argument: 'judge'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_exception_in_a_reward_function_is_one_line(function, message):
    name = f"test_rewards:{function.__name__}"
    with pytest.raises(UserError, match=f"^reward function {name} failed at {message}$") as caught:
        function_scorer(name)([messages("x")] * 2, ["a", "b"], {"id": ["x7", "x8"]})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line, error", [("1 / 0", "ZeroDivisionError"), ("def f(:", "SyntaxError")])
def test_a_module_that_cannot_be_imported_is_one_line(tmp_path, monkeypatch, line, error):
    (tmp_path / "broken_reward.py").write_text("x = 1\n" + line)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"reward function broken_reward:f cannot be imported: {error}: .*py.*2"):
        function_scorer("broken_reward:f")
    with pytest.raises(UserError, match="reward function test_rewards:CONSTANT is a int; give the name of a function"):
        function_scorer("test_rewards:CONSTANT")


CONSTANT = 1


# --- functions of a notebook


class Judge:
    def __init__(self, worth):
        self.worth = worth

    def __call__(self, prompts, responses):
        return [self.worth] * len(responses)


def test_a_function_itself_can_be_given():
    """Its name stands for it, so that files and the check of a resumed run see the same."""
    cfg = RewardConfig("function", function=one_score)
    assert cfg.function == "test_rewards:one_score" and cfg == RewardConfig("function", function=one_score)
    assert yaml.safe_load(yaml.safe_dump(dataclasses.asdict(cfg)))["function"] == "test_rewards:one_score"
    assert dataclasses.replace(cfg, weight=2.0).function == cfg.function
    assert open_scorer(cfg, 1, CPU)([messages("x")], ["a"], {"id": [1]}) == [1.0]
    batch = [messages("x")] * 2, ["a", "bb"], {"id": [1, 2]}
    kinds = [lambda p, r: [1, 2], lambda p, r: [3, 4], functools.partial(Judge.__call__, Judge(5)), Judge(6), Judge(7)]
    configs = [RewardConfig("function", function=kind) for kind in kinds]
    assert [open_scorer(c, 1, CPU)(*batch) for c in configs] == [[1, 2], [3, 4], [5, 5], [6, 6], [7, 7]]
    assert RewardConfig("function", function=kinds[1]) == configs[1]


# --- cut-off answers


def test_a_cut_off_answer_is_not_paid_by_accident():
    batch = [messages("q")] * 3, ["20 cups to feed 20 chickens", "#### 20", "so 20"]
    columns = {"id": [1, 2, 3], "ground_truth": ["20"] * 3, "ended": [False, False, True]}
    assert open_scorer(RewardConfig("rule", rule="gsm8k", ended_only=True), 1, CPU)(*batch, columns) == [0, 0, 1]
    assert open_scorer(RewardConfig("rule", rule="gsm8k"), 1, CPU)(*batch, columns) == [1, 1, 1]
    strict = RewardConfig("rule", rule="gsm8k_strict", ended_only=True)
    assert open_scorer(strict, 1, CPU)(*batch, columns) == [0, 0, 0]
    with pytest.raises(UserError, match="reward_model.ended_only has no effect with style function"):
        check_reward_config(RewardConfig("function", function="a:b", ended_only=True))


def test_rules_that_can_pay_nothing_are_named():
    strict, loose = RewardConfig("rule", rule="gsm8k_strict"), RewardConfig("rule", rule="gsm8k")
    message = "rule gsm8k_strict finds no answer in any of the 2 responses.* a number after ####, as in '#### 42': ask"
    assert re.match(message, unpayable(strict, ["so 42", "Step 3"], [True, True]))
    assert unpayable(strict, ["so 42", "#### 3"], [True, True]) is None
    assert unpayable(loose, ["so 42", "no idea"], [True, True]) is None
    assert re.match("rule gsm8k finds no .*as in 'The answer is 42.'", unpayable(loose, ["no", "x"], [True, False]))
    ended_only = RewardConfig("rule", rule="gsm8k", ended_only=True)
    assert re.match("all 2 responses were cut off, so rule gsm8k", unpayable(ended_only, ["42", "x"], [False, False]))
    assert unpayable(ended_only, ["42", "x"], [False, True]) is None
    assert unpayable(loose, ["42", "x"], [False, False]) is None
    assert unpayable(RewardConfig("function", function="a:b"), ["x"], [False]) is None
    extra = RewardConfig("function", function="a:b", also=[RewardPart("rule", rule="gsm8k_strict")])
    assert re.match("rule gsm8k_strict finds", unpayable(extra, ["42"], [True]))


# --- weighted sums and warnings, in a run


def letters(prompts, responses, **columns):
    return [response.count("a") / 8 for response in responses]


def test_a_run_logs_each_part_and_goes_on_with_functions_given(tiny, preferences, tmp_path):
    ended = RewardPart("function", function=lambda prompts, responses, ended: ended, weight=-3.0)
    reward = RewardConfig("function", function=letters, weight=2.0, also=[ended])
    cfg = base_config(tiny, preferences, tmp_path / "out", reward_model=reward, total_steps=1, save_every=1)
    (step,) = train(cfg)
    share = 1 - step["rollout/truncated_fraction"]
    assert step["objective/score_lambda_mean"] == pytest.approx(share)
    total = 2 * step["objective/score_letters_mean"] - 3 * share
    assert step["objective/score_mean"] == pytest.approx(total, abs=1e-6)
    resolved = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["reward_model"]
    assert (resolved["function"], resolved["also"][0]["weight"]) == ("test_rewards:letters", -3.0)
    more = train(dataclasses.replace(cfg, total_steps=2, resume="auto"))
    assert [m["step"] for m in more] == [2]
    alone = base_config(
        tiny, preferences, tmp_path / "one", reward_model=RewardConfig("function", function=letters), total_steps=1
    )
    assert "objective/score_letters_mean" not in train(alone)[0]  # it would be score_mean again


def always_fails(prompts, responses, **columns):
    raise ValueError(columns["id"][0])


def test_an_exception_ends_a_run_with_the_row(tiny, preferences, tmp_path):
    reward = RewardConfig("function", function=always_fails)
    cfg = base_config(tiny, preferences, tmp_path / "out", reward_model=reward, total_steps=1)
    with pytest.raises(UserError, match=r"failed at row (\S+): ValueError: \1 \(.*test_rewards.py:\d+\)$"):
        train(cfg)


def test_a_run_says_that_no_reply_can_be_read(tiny, tmp_path, capsys):
    rows = [
        dict.fromkeys(COLUMNS["prompts"]) | {"id": str(i), "prompt": messages(f"q{i}"), "ground_truth": str(i)}
        for i in range(4)
    ]
    for split in ("train", "test"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{split}-00000-of-00001.parquet")
    reward = RewardConfig("rule", rule="gsm8k_strict")
    cfg = base_config(tiny, str(tmp_path), tmp_path / "out", reward_model=reward, total_steps=2, eval_every=2)
    train(cfg)
    printed = capsys.readouterr().out
    assert printed.count("warning: ") == 1
    assert "warning: rule gsm8k_strict finds no answer in any of the 8 responses, so each gets 0; it looks" in printed
    rows[3]["ground_truth"] = "(1, 2)"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "test-00000-of-00001.parquet")
    with pytest.raises(UserError, match=r"row 3: ground_truth '\(1, 2\)' is not a number"):
        train(dataclasses.replace(cfg, output_dir=str(tmp_path / "out2")))


# --- weighted sums


def test_scores_are_weighted_sums(folder):
    lengths_of = RewardPart("function", function="test_rewards:uses_columns", weight=0.1)
    cfg = RewardConfig("rule", rule="gsm8k", weight=2.0, also=[lengths_of, RewardPart(path=folder, weight=-1.0)])
    check_reward_config(cfg)
    batch = [messages("q")] * 2, ["5", "it is 4"], {"id": [1, 2], "ground_truth": ["5", "5"]}
    scorers = open_scorers(cfg, 2, CPU, "float32")
    name = re.sub(r"\W+", "_", Path(folder).name)
    assert list(scorers) == ["gsm8k", "uses_columns", name]
    total, parts = weighted_scores(scorers, *batch)
    raw = open_reward_model(folder, CPU, "float32").scores(*batch[:2], 1)
    assert (parts["gsm8k"], parts["uses_columns"]) == ([1, 0], [2, 1])
    assert parts[name] == pytest.approx(raw, abs=1e-5)
    assert total == pytest.approx([2 * 1 + 0.1 * 2 - raw[0], 2 * 0 + 0.1 * 1 - raw[1]], abs=1e-5)
    assert open_scorer(cfg, 2, CPU, "float32")(*batch) == pytest.approx(total, abs=1e-5)


@pytest.mark.parametrize(
    "part, message",
    [
        (RewardPart("rule"), r"reward_model.also\[1\].style rule needs reward_model.also\[1\].rule"),
        (RewardPart(path="x", rule="gsm8k"), r"reward_model.also\[1\].rule has no effect with"),
        (RewardPart(path="x", weight=float("nan")), r"reward_model.also\[1\].weight nan must be a finite number"),
    ],
)
def test_each_part_is_checked(part, message):
    with pytest.raises(UserError, match=message):
        check_reward_config(RewardConfig(path="x", also=[RewardPart(path="y"), part]))


def test_parts_have_names_of_their_own():
    parts = [
        RewardPart("rule", rule="gsm8k"),
        RewardPart("rule", rule="gsm8k_strict"),
        RewardPart("rule", rule="gsm8k"),
    ]
    assert list(open_scorers(RewardConfig("rule", rule="gsm8k", also=parts), 1, CPU)) == [
        "gsm8k", "gsm8k_2", "gsm8k_strict", "gsm8k_4"
    ]  # fmt: skip
    names = [RewardPart(path=path).name for path in ("out/reward/final", "org/Small-RM", "/a/b/", "final", "../x.y")]
    assert names == ["reward", "Small_RM", "b", "model", "x_y"]
    assert RewardPart("function", function="a.b:short_is_good").name == "short_is_good"


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
    third = RewardModel(lambda ids, mask: torch.where(mask.sum(1) == 23, float("inf"), 0.0), byte_tokenizer(), CPU)
    with pytest.raises(UserError, match="^row x3: the reward model gives inf to the response 'aa'"):
        third.scorer(2)(prompts, texts, {"id": ["x1", "x2", "x3", "x4"]})


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

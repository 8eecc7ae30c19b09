"""Stage 4: its numbers by hand, its KL against a loop over the vocabulary, a whole run with given answers."""

import dataclasses
import functools
import hashlib
import json
import math
import shutil

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
import yaml
from helpers import CPU, ROOT, TEMPLATE, byte_tokenizer, launch, messages, ppo_config, tiny_llama

import evaluate as stage
from evaluate import (
    EvaluateConfig,
    bootstrap_interval,
    compare,
    evaluate,
    exact_kl,
    html_report,
    kl_per_token,
    paired_share_interval,
    training_curves,
    wins,
)
from utils.config import ModelConfig, UserError
from utils.data import COLUMNS, encode_prompt, encode_responses
from utils.models import load_tokenizer, new_reward_model, read_stats, score_scale, template_fingerprint, write_stats
from utils.rewards import RewardConfig, RewardModel, open_reward_model

# --- comparison


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    "differences, interval",
    [
        ([0.25], [0.25, 0.25]),  # one prompt: every draw is that prompt
        ([-2.0] * 7, [-2.0, -2.0]),
        ([0.0, 1.0], [0.0, 1.0]),  # means 0, 1/2, 1 with probability 1/4, 1/2, 1/4
        ([0.0, 1.0, 1.0], [0.0, 1.0]),  # P(0) = 1/27 = 3.7%: below the 2.5th percentile's end, above the 5th's, 1/3
        ([-1.0, 0.0, 1.0], [-1.0, 1.0]),  # both ends at 3.7%; a 90% interval ends at 2/3
        ([0.0, 0.0, 0.0, 1.0, 1.0, 1.0], [0.16667, 0.83333]),  # P(0) = 1/64 = 1.6%; a 98% interval ends at 0 and 1
    ],
)
def test_the_interval_of_95_percent(differences, interval, seed):
    assert bootstrap_interval(differences, seed) == interval


def test_the_interval_depends_on_the_seed_alone():
    values = torch.randn(50, generator=torch.Generator().manual_seed(0)).tolist()
    assert bootstrap_interval(values, 3) == bootstrap_interval(values, 3) != bootstrap_interval(values, 4)


def test_a_comparison_by_hand():
    # differences 3, 3, 3: paired by prompt they leave no doubt, unpaired they would spread from -17 to 23
    assert compare([0.0, 10.0, 20.0], [3.0, 13.0, 23.0], 0) == {
        "baseline": 10.0,
        "policy": 13.0,
        "difference": 3.0,
        "ci95": [3.0, 3.0],
        "n": 3,
    }
    assert compare([1.0, 1.0, 0.0], [0.0, 1.0, 0.0], 0) == {
        "baseline": 0.66667,
        "policy": 0.33333,
        "difference": -0.33333,
        "ci95": [-0.79234, 0.41533],  # none up and one down of 3 pairs, each 0 or 1
        "n": 3,
    }


def score_statistic(up: int, down: int, n: int, difference: float) -> float:
    """Tango's statistic, with the rate of downs that makes the counts most likely found by search."""
    rates = [max(0.0, -difference) + i / 20_000 for i in range(20_001)]
    rates = [rate for rate in rates if rate + difference >= 0 and 2 * rate + difference <= 1]

    def likelihood(rate):
        cells = zip((up, down, n - up - down), (rate + difference, rate, 1 - 2 * rate - difference))
        return sum(count * math.log(max(p, 1e-300)) for count, p in cells if count)

    rate = max(rates, key=likelihood)
    return (up - down - n * difference) / math.sqrt(n * (2 * rate + difference - difference**2))


@pytest.mark.parametrize(
    "up, down, n, interval",
    [
        (1, 7, 21, [-0.517, -0.026]),  # airway hyper-responsiveness (Bentur et al. 2009), as textbooks give it
        (0, 0, 64, [-0.0566, 0.0566]),  # z^2 / (n + z^2): nothing seen in 64 does not say that nothing happens
        (0, 0, 46, [-0.0771, 0.0771]),
        (0, 0, 1, [-0.7935, 0.7935]),
        (64, 0, 64, [0.8868, 1.0]),
        (0, 64, 64, [-1.0, -0.8868]),
    ],
)
def test_the_interval_of_a_share_by_the_book(up, down, n, interval):
    low, high = paired_share_interval(up, down, n)
    assert [low, high] == pytest.approx(interval, abs=6e-4 if n == 21 else 6e-5)
    assert paired_share_interval(down, up, n) == pytest.approx([-high, -low])


@pytest.mark.parametrize("up, down, n", [(1, 7, 21), (3, 0, 46), (40, 20, 160), (5, 5, 10), (2, 9, 30)])
def test_the_ends_of_a_shares_interval_are_where_the_score_statistic_is_1_96(up, down, n):
    low, high = paired_share_interval(up, down, n)
    assert score_statistic(up, down, n, low) == pytest.approx(1.96, abs=0.005)
    assert score_statistic(up, down, n, high) == pytest.approx(-1.96, abs=0.005)


@pytest.mark.parametrize("n", [20, 46, 200])
@pytest.mark.parametrize("up, down", [(0.02, 0.0), (0.02, 0.02), (0.1, 0.05), (0.3, 0.2)])
def test_rare_events_are_covered(n, up, down):
    import numpy

    ends = functools.cache(paired_share_interval)
    draws = numpy.random.default_rng(0).multinomial(n, [up, down, 1 - up - down], 3000).tolist()
    covered = sum(ends(a, b, n)[0] <= up - down <= ends(a, b, n)[1] for a, b, _ in draws) / len(draws)
    assert covered > 0.925  # the bootstrap: 0.58 at 46 pairs and 2%


@pytest.mark.parametrize(
    "baseline, policy, interval",
    [
        ([0.0] * 64, [0.0] * 64, [-0.05662, 0.05662]),
        ([1.0] * 64, [1.0] * 64, [-0.05662, 0.05662]),
        ([False] * 64, [False] * 64, [-0.05662, 0.05662]),  # cut off or not
        ([-1.0] * 64, [-1.0] * 64, [-0.11325, 0.11325]),  # a reward of 1 or -1: twice the share
        ([0.5] * 64, [0.5] * 64, [-0.02831, 0.02831]),  # all ties: half the share
        ([1.0] + [0.0] * 20, [0.0] + [1.0] * 7 + [0.0] * 13, [0.026, 0.51723]),
        ([0.25] * 64, [0.25] * 64, [0.0, 0.0]),  # no share: equal scores
        ([0.0] * 3, [0.5, 1.0, 1.0], [0.5, 1.0]),  # part of a point is no share either
    ],
)
def test_shares_have_a_shares_interval(baseline, policy, interval):
    assert compare(baseline, policy, 0)["ci95"] == interval


def test_the_bootstrap_needs_no_more_memory_for_more_prompts():
    import tracemalloc

    tracemalloc.start()
    low, high = bootstrap_interval([i % 7 for i in range(20_000)], 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40e6 and 2.95 < low < 2.99 < 3.01 < high < 3.05  # 3 +- 1.96 * 2 / sqrt(20,000)


def test_a_win_a_loss_and_a_tie():
    assert wins([1.0, 2.0, 3.0, -1.0], [1.5, 1.0, 3.0, -1.0]) == [1.0, 0.0, 0.5, 0.5]


# --- KL


PROMPTS = [[5, 9, 40], [7], [100, 101, 102, 103, 104, 105, 106], [30, 31], [8, 8, 8, 8]]
RESPONSES = [[3, 200, 17, 2], [250], [61, 62, 63, 64, 65, 66, 67, 68, 69, 2], [90, 91, 92, 93, 94, 95], [12, 2]]


@pytest.fixture(scope="module")
def pair():
    return tiny_llama(0).eval(), tiny_llama(1).eval()


def kl_by_hand(policy, baseline, prompt: list[int], response: list[int]) -> float:
    """Mean over the response's tokens of the sum over the vocabulary of p (log p - log q), in Python's floats."""
    with torch.no_grad():
        logits = [model(torch.tensor([prompt + response])).logits[0].double() for model in (policy, baseline)]
    p, q = (x.log_softmax(-1).tolist() for x in logits)
    total = 0.0
    for position in range(len(prompt) - 1, len(prompt) + len(response) - 1):  # what is read before each token
        for a, b in zip(p[position], q[position]):
            total += math.exp(a) * (a - b)
    return total / len(response)


def test_exact_kl_of_two_coins():
    # p = 1/2, 1/2 and q = 1/4, 3/4: KL(p||q) = ln 2 / 2 + ln(2/3) / 2, KL(q||p) = ln(1/2) / 4 + 3 ln(3/2) / 4
    p, q = torch.tensor([[0.5, 0.5]]).log() + 3, torch.tensor([[0.25, 0.75]]).log() - 5  # a shift of logits is nothing
    assert exact_kl(p, q).item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), rel=1e-5)
    assert exact_kl(q, p).item() == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), rel=1e-5)
    assert exact_kl(p.bfloat16(), q.bfloat16()).dtype == torch.float32


def test_kl_is_that_of_a_loop_over_the_vocabulary(pair):
    wanted = [kl_by_hand(*pair, *row) for row in zip(PROMPTS, RESPONSES)]
    assert kl_per_token(*pair, PROMPTS, RESPONSES, 2) == pytest.approx(wanted, rel=1e-4)
    back = [kl_by_hand(*pair[::-1], *row) for row in zip(PROMPTS, RESPONSES)]
    assert kl_per_token(*pair[::-1], PROMPTS, RESPONSES, 2) == pytest.approx(back, rel=1e-4)
    assert all(abs(a - b) > 0.01 * a for a, b in zip(wanted, back))  # so that the direction is seen
    assert kl_per_token(pair[0], pair[0], PROMPTS, RESPONSES, 2) == [0.0] * 5


@pytest.mark.parametrize("micro", [1, 3, 5, 64])
@pytest.mark.parametrize("chunk", [1, 7, 256])
def test_kl_depends_on_no_batch_size_and_no_order(pair, micro, chunk, monkeypatch):
    wanted = kl_per_token(*pair, PROMPTS, RESPONSES, 2)
    monkeypatch.setattr(stage, "LOGITS_CHUNK", chunk)
    assert kl_per_token(*pair, PROMPTS, RESPONSES, micro) == pytest.approx(wanted, rel=1e-4)
    assert kl_per_token(*pair, PROMPTS[::-1], RESPONSES[::-1], micro)[::-1] == pytest.approx(wanted, rel=1e-4)


# --- the whole stage, with given answers


# right answer, answer before, whether it ended, answer after, whether it ended
ANSWERS = [
    ("1", "#### 1", True, "#### 1 aa", True),
    ("2", "it is 2 a", True, "it is 3", False),
    ("3", "aaaa", False, "3 aaaaa", True),
    ("4", "a 9", True, "#### 4 aaa", False),
]
BEFORE = [(text, ended) for _, text, ended, _, _ in ANSWERS]
AFTER = [(text, ended) for _, _, _, text, ended in ANSWERS]


def count_a(prompts, responses, *, id, ground_truth, reference, **columns):
    """The letter a, counted; every column must be that of the prompt."""
    assert [prompt[-1]["content"] for prompt in prompts] == [f"q{i}" for i in id] and set(columns) == {
        "metadata",
        "ended",
    }
    assert ground_truth == [answer[0] for answer in ANSWERS][: len(id)] and reference == [f"r{i}" for i in id]
    return [response.count("a") for response in responses]


def shortness(prompts, responses, **columns):
    return [-len(response) for response in responses]


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny):
    """Folders: `policy`, another tiny model; `reward`, a reward model whose scores are far from its scale; `data`."""
    folder = tmp_path_factory.mktemp("world")
    tiny_llama(1).save_pretrained(folder / "policy")
    byte_tokenizer().save_pretrained(folder / "policy")
    reward = new_reward_model(ModelConfig(tiny, dtype="float32"), CPU, 3)
    reward.save_pretrained(folder / "reward")
    byte_tokenizer().save_pretrained(folder / "reward")
    fingerprint = template_fingerprint(load_tokenizer(str(folder / "reward")))
    write_stats(folder / "reward", {"score_mean": 7.0, "score_std": 3.0, "template_fingerprint": fingerprint})
    (folder / "data").mkdir()
    for split, first in (("train", "t"), ("test", "q")):
        rows = [
            dict.fromkeys(COLUMNS["prompts"])
            | {"id": str(i), "prompt": messages(f"{first}{i}"), "ground_truth": row[0], "reference": f"r{i}"}
            for i, row in enumerate(ANSWERS)
        ]
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder


def run_config(world, tiny, name: str, **changes) -> EvaluateConfig:
    settings = dict(
        policy=ModelConfig(str(world / "policy"), dtype="float32"),
        baseline=ModelConfig(tiny, dtype="float32"),
        data=str(world / "data"),
        output_dir=str(world / name),
        max_response_length=12,
        micro_batch_size_per_gpu=3,
    )
    return EvaluateConfig(**settings | changes)


def given_ids(tokenizer, answers) -> list[list[int]]:
    return [
        ids if ended else ids[:-1]
        for ids, (_, ended) in zip(encode_responses(tokenizer, [text for text, _ in answers]), answers)
    ]


@pytest.fixture
def given(monkeypatch, world):
    """The models answer what stands in ANSWERS: the first that is asked BEFORE, the second AFTER."""
    tokenizer, turns = load_tokenizer(str(world / "policy")), []

    def answers(model, prompts, *rest, **named):
        turns.append(model)
        return given_ids(tokenizer, (BEFORE, AFTER)[len(turns) - 1])[: len(prompts)]

    monkeypatch.setattr(stage, "generate", answers)


def means(report: dict) -> dict:
    return {name: (c["baseline"], c["policy"], c["difference"]) for name, c in report["comparison"].items()}


def test_every_number_of_a_report(world, tiny, given, pair, capsys):
    cfg = run_config(
        world,
        tiny,
        "all",
        reward_model=RewardConfig(style="function", function="test_evaluate:shortness"),
        gold_function="test_evaluate:count_a",
        rules=["gsm8k", "gsm8k_strict"],
    )
    report = evaluate(cfg)
    tokenizer = load_tokenizer(tiny)
    prompts = [encode_prompt(tokenizer, messages(f"q{i}")) for i in range(4)]
    kl = [kl_by_hand(*pair[::-1], *row) for row in zip(prompts, given_ids(tokenizer, AFTER))]
    assert means(report) == {
        "reward_score": (-5.5, -8.25, -2.75),  # -6 -9 -4 -3, then -9 -7 -7 -10
        "gold_score": (1.5, 2.5, 1.0),  # 0 1 4 1, then 2 0 5 3
        "gsm8k": (0.5, 0.75, 0.25),  # 1 1 0 0, then 1 0 1 1
        "gsm8k_strict": (0.25, 0.5, 0.25),  # 1 0 0 0, then 1 0 0 1
        "response_length": (6.25, 8.75, 2.5),  # tokens with eos: 7 10 4 4, then 10 7 8 10
        "truncated": (0.25, 0.5, 0.25),
        "win_rate": (0.5, 0.75, 0.25),  # by the gold score: won, lost, won, won
        "kl_per_token": (0.0, *[pytest.approx(sum(kl) / 4, abs=2e-5)] * 2),  # each response counts alike
    }
    assert report["win_rate_judge"] == "gold_score" and report["temperature"] == 0.0
    assert (report["policy"], report["baseline"]) == (str(world / "policy"), tiny)
    comparison = report["comparison"]
    assert {c["n"] for c in comparison.values()} == {4} and {tuple(c) for c in comparison.values()} == {
        ("baseline", "policy", "difference", "ci95", "n")
    }
    # of 2, -1, 1, 2: P(mean -1) = 1/256 and P(mean <= -1/2) = 5/256, P(mean <= 0) > 3%; P(mean 2) = 1/16
    assert comparison["gold_score"]["ci95"] == [-0.25, 2.0]
    assert comparison["win_rate"]["ci95"] == [-0.19936, 0.45441]  # half of 3 up and 1 down in 4

    samples = report["samples"]
    assert [s["prompt"] for s in samples] == ["q0", "q1", "q2", "q3"]
    assert [(s["baseline"]["response"], s["policy"]["response"]) for s in samples] == [
        (before, after) for _, before, _, after, _ in ANSWERS
    ]
    assert [s["policy"]["truncated"] for s in samples] == [False, True, False, True]
    assert [s["policy"]["kl_per_token"] for s in samples] == pytest.approx(kl, rel=1e-4)
    for metric in ("reward_score", "gold_score", "gsm8k", "gsm8k_strict", "response_length", "truncated"):
        for side in ("baseline", "policy"):
            assert sum(s[side][metric] for s in samples) / 4 == comparison[metric][side], (metric, side)

    assert json.loads((world / "all" / "report.json").read_text()) == report
    resolved = yaml.safe_load((world / "all" / "config.yaml").read_text())
    assert (resolved["policy"]["path"], resolved["max_prompts"]) == (str(world / "policy"), None)
    assert (resolved["gold_function"], resolved["rules"]) == ("test_evaluate:count_a", ["gsm8k", "gsm8k_strict"])
    page = (world / "all" / "report.html").read_text()
    for line in (
        "<td>gold score</td><td>1.500</td><td>2.500</td><td>+1.000</td><td>[-0.250, +2.000]</td>",
        "<td>reward score</td><td>-5.500</td><td>-8.250</td><td>-2.750</td>",
        "<td>win rate</td><td>0.500</td><td>0.750</td><td>+0.250</td><td>[-0.199, +0.454]</td>",
        "<td>gsm8k</td><td>0.500</td><td>0.750</td><td>+0.250</td>",
        "<td>cut off (share)</td><td>0.250</td><td>0.500</td><td>+0.250</td>",
        "4 held-out prompts, temperature 0.0; win rate judged by gold_score",
        "<td>it is 2 a<br><small>1.000</small></td><td>it is 3<br><small>0.000</small></td>",
    ):
        assert line in page, line
    assert json.loads(page.split('id="comparison">')[1].split("</script>")[0]) == comparison
    out = capsys.readouterr().out
    assert "4 held-out prompts; win rate judged by gold_score" in out
    assert any(line.split() == "gold score 1.500 2.500 +1.000 [-0.250, +2.000]".split() for line in out.splitlines())


@pytest.mark.parametrize(
    "changes, judge, win_rate",
    [
        (dict(reward_model=RewardConfig(style="function", function="test_evaluate:shortness")), "reward_score", 0.25),
        (dict(rules=["gsm8k", "gsm8k_strict"]), "gsm8k", 0.625),  # tie, lost, won, won
        (dict(rules=["gsm8k_strict", "gsm8k"]), "gsm8k_strict", 0.625),  # tie, tie, tie, won
        (dict(reward_model=RewardConfig(style="rule", rule="gsm8k")), "reward_score", 0.625),
        (dict(gold_function="test_evaluate:count_a", rules=["gsm8k"]), "gold_score", 0.75),
    ],
)
def test_the_judge_is_the_truest_score_that_there_is(world, tiny, given, tmp_path, changes, judge, win_rate):
    report = evaluate(run_config(world, tiny, "judge", output_dir=str(tmp_path / "out"), **changes))
    assert report["win_rate_judge"] == judge and report["comparison"]["win_rate"]["policy"] == win_rate


def test_max_prompts_takes_the_first(world, tiny, given, tmp_path):
    report = evaluate(
        run_config(
            world, tiny, "", output_dir=str(tmp_path / "out"), max_prompts=2, gold_function="test_evaluate:count_a"
        )
    )
    assert [s["prompt"] for s in report["samples"]] == ["q0", "q1"] and report["comparison"]["gold_score"]["n"] == 2
    assert means(report)["gold_score"] == (0.5, 1.0, 0.5)


def test_a_reward_models_scores_are_of_the_text_and_in_the_unit_of_training(world, tiny, given, tmp_path):
    from transformers import AutoModelForSequenceClassification

    report = evaluate(
        run_config(
            world, tiny, "", output_dir=str(tmp_path / "out"), reward_model=RewardConfig(path=str(world / "reward"))
        )
    )
    plain = AutoModelForSequenceClassification.from_pretrained(world / "reward", dtype=torch.float32).eval()
    tokenizer = byte_tokenizer()
    for i, sample in enumerate(report["samples"]):
        for side in ("baseline", "policy"):  # a cut-off answer is scored as a finished one
            text = f"<|start|>user\nq{i}<|end|>\n<|start|>assistant\n{sample[side]['response']}<|end|>"
            ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
            with torch.no_grad():
                wanted = plain.score(plain.model(ids).last_hidden_state[0, -1]).item()
            assert sample[side]["reward_score"] == pytest.approx((wanted - 7.0) / 3.0, abs=1e-4)


def test_a_reward_model_of_another_template_is_refused(world, tiny, given, tmp_path):
    shutil.copytree(world / "reward", tmp_path / "other")
    write_stats(tmp_path / "other", {"score_mean": 0.0, "score_std": 1.0, "template_fingerprint": "another"})
    cfg = run_config(
        world, tiny, "", output_dir=str(tmp_path / "out"), reward_model=RewardConfig(path=str(tmp_path / "other"))
    )
    with pytest.raises(UserError, match="another chat template or tokenizer than its folder holds"):
        evaluate(cfg)
    assert not (tmp_path / "out").exists()


def test_without_a_common_vocabulary_there_is_no_kl(world, tiny, given, tmp_path):
    folder = tmp_path / "wide"
    tiny_llama(1, vocab_size=260).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<|more|>"])
    tokenizer.save_pretrained(folder)
    report = evaluate(
        run_config(
            world,
            tiny,
            "",
            policy=ModelConfig(str(folder), dtype="float32"),
            output_dir=str(tmp_path / "out"),
            gold_function="test_evaluate:count_a",
        )
    )
    assert set(report["comparison"]) == {"gold_score", "response_length", "truncated", "win_rate"}


def test_the_training_run_around_the_policy_is_shown(tmp_path):
    (tmp_path / "final").mkdir()
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": i, "objective/kl_per_token": 0.1 * i}) + "\n" for i in (1, 2))
    )
    curves = training_curves(str(tmp_path / "final"))
    assert [line["objective/kl_per_token"] for line in curves] == [0.1, 0.2] and training_curves("a/hub-name") == []
    side = {"response": "<b>", "score": 1.0}
    report = {
        "comparison": {"score": compare([1.0], [1.0], 0)},
        "win_rate_judge": "score",
        "temperature": 0.5,
        "policy": "p",
        "baseline": "b",
        "samples": [{"prompt": "<i>", "baseline": side, "policy": side}],
    }
    with_curves, without = html_report(report, curves), html_report(report, [])
    assert "<h2>Training</h2>" in with_curves and "<h2>Training</h2>" not in without
    assert "<td>&lt;i&gt;</td><td>&lt;b&gt;<br>" in without and "<b>" not in without.split("</style>")[1]


# --- the whole stage, as the models answer


def test_a_model_is_as_good_as_itself(world, tiny, tmp_path):
    report = evaluate(
        run_config(
            world,
            tiny,
            "",
            policy=ModelConfig(tiny, dtype="float32"),
            output_dir=str(tmp_path / "out"),
            temperature=1.0,
            reward_model=RewardConfig(path=str(world / "reward")),
        )
    )
    assert all(s["policy"]["response"] == s["baseline"]["response"] != "" for s in report["samples"])  # one seed
    comparison = report["comparison"]
    assert all(c["difference"] == 0 for c in comparison.values())
    shares = {"truncated": [-0.48989, 0.48989], "win_rate": [-0.24495, 0.24495]}  # z^2 / (4 + z^2), and half of it
    assert {name: c["ci95"] for name, c in comparison.items()} == dict.fromkeys(comparison, [0, 0]) | shares
    assert report["comparison"]["win_rate"]["policy"] == 0.5 and report["comparison"]["kl_per_token"]["policy"] == 0


def test_two_ranks_report_what_one_reports(world, tiny, tmp_path):
    cfg = run_config(
        world, tiny, "", output_dir=str(tmp_path / "one"), reward_model=RewardConfig(path=str(world / "reward"))
    )
    one = evaluate(cfg)
    options = {
        "policy.path": cfg.policy.path,
        "policy.dtype": "float32",
        "baseline.path": tiny,
        "baseline.dtype": "float32",
        "data": cfg.data,
        "output_dir": tmp_path / "two",
        "max_response_length": 12,
        "reward_model.path": cfg.reward_model.path,
    }
    launch(
        "multi_cpu.yaml", ROOT / "evaluate.py", *(x for name, value in options.items() for x in (f"--{name}", value))
    )
    two = json.loads((tmp_path / "two" / "report.json").read_text())
    assert [(s["prompt"], s["policy"]["response"]) for s in two["samples"]] == [
        (s["prompt"], s["policy"]["response"]) for s in one["samples"]
    ]
    for metric, values in one["comparison"].items():
        for name, value in values.items():
            assert two["comparison"][metric][name] == pytest.approx(value, abs=1e-4), (metric, name)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, "nothing to compare by: give reward_model.path, rules or gold_function"),
        (dict(rules=["gsm8k"], temperature=-0.1), "temperature -0.1 must be at least 0"),
        (dict(rules=["gsm8k"], seed=-1), "seed -1 must be at least 0"),
        (dict(rules=["gsm8k"], max_prompts=0), "max_prompts 0 must be at least 1"),
        (dict(rules=["gsm8k"], max_response_length=0), "max_response_length 0 must be at least 1"),
        (dict(rules=["gsm8k"], micro_batch_size_per_gpu=0), "micro_batch_size_per_gpu 0 must be at least 1"),
        (dict(reward_model=RewardConfig(style="rule")), "needs reward_model.rule"),
        (
            dict(rules=["gsm8k"], baseline=ModelConfig("m", gradient_checkpointing=True)),
            "baseline.gradient_checkpointing has no effect",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(world, tiny, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        evaluate(run_config(world, tiny, "", output_dir=str(tmp_path / "out"), **changes))
    assert not (tmp_path / "out").exists()


# --- one text, one score


def by_shape(ids, mask):
    """A forward whose scores depend on the batch, as those of low precision do."""
    return mask.sum(1) + 0.01 * len(ids) + 0.0001 * ids.shape[1]


def test_one_text_has_one_score_whatever_stands_beside_it():
    rows = []

    def forward(ids, mask):
        rows.extend(ids.tolist())
        return by_shape(ids, mask)

    model = RewardModel(forward, byte_tokenizer(), CPU)
    prompts, texts = [messages("q"), messages("qq")] * 4, ["a", "bb", "cc" * 9, "a", "a", "bb", "", "d" * 80]
    scores = model.scores(prompts, texts, 4)
    assert len(rows) == 6  # (q, a), (qq, bb), (q, cc), (qq, a), (q, ""), (qq, d): each once
    for micro in (1, 3, 64):
        alone = [model.scores([p], [t], micro)[0] for p, t in zip(prompts, texts)]
        assert alone == scores == model.scores(prompts[::-1], texts[::-1], micro)[::-1]
    assert scores[0] == scores[4] != scores[3] and scores[1] == scores[5]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_reward_models_score_is_that_of_the_text_alone(world, dtype):
    model = open_reward_model(str(world / "reward"), CPU, dtype)
    prompts, texts = [messages(f"q{i}") for i in range(7)], ["yes", "no" * 20, "", "a" * 50, "b c", "d", "yes yes"]
    together = model.scores(prompts, texts, 4)
    assert together == [model.scores([p], [t], 1)[0] for p, t in zip(prompts, texts)]
    assert len(set(together)) == 7


def test_the_shape_of_a_batch_on_a_gpu_is_decided_by_the_rows_own_length():
    model = RewardModel(by_shape, byte_tokenizer(), torch.device("cuda"))
    rows = [(7,) * n for n in (3, 64, 65, 100, 128, 129, 200, 3, 64)]
    seen = {}
    for given in (rows, rows[::-1], rows[2:5], rows[:1], rows * 3):
        for part, width in model.batches(given, 4):
            for row in part:
                assert seen.setdefault(row, (len(part), width)) == (4, width) and len(row) <= width < len(row) + 64
        assert {row for part, _ in model.batches(given, 4) for row in part} == set(given)
    assert {width for _, width in seen.values()} == {64, 128, 192, 256}
    short = dataclasses.replace(model, positions=100)  # a model with learned positions has no more of them
    assert short.batches([(7,) * 100, (7,) * 65, (7,) * 3], 1) == [
        ([(7,) * n], w) for n, w in ((100, 100), (65, 100), (3, 64))
    ]


@pytest.mark.parametrize("n, forwards", [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_ranks_that_need_equally_many_forwards_get_them_whatever_is_equal(n, forwards):
    calls = []

    def forward(ids, mask):
        calls.append(len(ids))
        return by_shape(ids, mask)

    model = RewardModel(forward, byte_tokenizer(), CPU, synced=True)
    for texts in (["a"] * n, [str(i) for i in range(n)]):
        calls.clear()
        assert len(set(model.scores([messages("q")] * n, texts, 4))) <= 2 and len(calls) == forwards
    assert len(set(model.scores([messages("q")] * n, ["a"] * n, 4))) == 1


def noisy(prompts, responses, **columns):
    noisy.calls.append(list(zip((prompt[-1]["content"] for prompt in prompts), responses, columns["id"])))
    return [len(noisy.calls) + i / 100 for i in range(len(responses))]


@pytest.mark.parametrize(
    "after, asked",
    [
        (["x", "b", "y", "d"], [0, 2]),  # two answers are as they were
        (["a", "b", "c", "d"], []),
        (["w", "x", "y", "z"], [0, 1, 2, 3]),
    ],
)
def test_an_equal_answer_is_a_tie_whatever_scores(world, tiny, monkeypatch, tmp_path, after, asked):
    tokenizer, turns, noisy.calls = load_tokenizer(str(world / "policy")), [], []

    def answers(model, prompts, *rest, **named):
        turns.append(model)
        return given_ids(tokenizer, [(text, True) for text in (["a", "b", "c", "d"], after)[len(turns) - 1]])

    monkeypatch.setattr(stage, "generate", answers)
    report = evaluate(
        run_config(world, tiny, "", output_dir=str(tmp_path / "out"), gold_function="test_evaluate:noisy")
    )
    import test_evaluate  # the module that the stage imported, which is not this one

    calls = test_evaluate.noisy.calls
    assert calls[0] == [(f"q{i}", "abcd"[i], str(i)) for i in range(4)]
    assert calls[1:] == ([[(f"q{i}", after[i], str(i)) for i in asked]] if asked else [])
    ties = [s["policy"]["gold_score"] == s["baseline"]["gold_score"] for s in report["samples"]]
    assert ties == [i not in asked for i in range(4)]
    assert report["comparison"]["win_rate"]["policy"] == 0.5 + 0.5 * len(asked) / 4


# --- what a reward model was trained with


DATED = TEMPLATE.replace("{% for", "{{ strftime_now('%d %B %Y') }}\n{% for", 1)


def on_day(monkeypatch, *date):
    import datetime

    from transformers.utils import chat_template_utils

    class Day(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(*date)

    monkeypatch.setattr(chat_template_utils, "datetime", Day)


def tokenizer_with(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_a_template_that_prints_the_date_gives_one_text_one_score_every_day(world, monkeypatch, capsys, tmp_path):
    folder, scores, prints = str(tmp_path / "reward"), [], []
    shutil.copytree(world / "reward", folder)
    tokenizer_with(DATED).save_pretrained(folder)
    for date in ((2026, 5, 1), (2026, 9, 28)):
        on_day(monkeypatch, *date)
        tokenizer = load_tokenizer(folder)
        if not scores:
            stats = {"score_mean": 0.0, "score_std": 1.0, "template_fingerprint": template_fingerprint(tokenizer)}
            write_stats(tmp_path / "reward", stats)
        assert tokenizer.decode(encode_prompt(tokenizer, messages("q"))).startswith("26 July 2024\n<|start|>user\nq")
        model = open_reward_model(folder, CPU, "float32")  # and is not refused
        scores.append(model.scores([messages("q")] * 2, ["yes", "no"], 2))
        prints.append(template_fingerprint(tokenizer))
    assert scores[0] == scores[1] and prints[0] == prints[1] != template_fingerprint(byte_tokenizer())
    assert prints[0] != template_fingerprint(tokenizer_with(DATED.replace("%B", "%b")))
    said = f"the chat template of {folder} prints the date; all stages read it as 26 Jul 2024"
    assert capsys.readouterr().out.splitlines().count(said) == 1


def test_a_fingerprint_is_that_of_the_ids():
    one = template_fingerprint(byte_tokenizer())
    comment = tokenizer_with("{# a comment that writes nothing #}" + TEMPLATE)
    assert template_fingerprint(comment) == one == template_fingerprint(byte_tokenizer())
    for changed in (
        TEMPLATE.replace("<|start|>assistant", "<|start|> assistant"),  # the header
        TEMPLATE.replace("<|end|>\n", "<|end|>"),
        TEMPLATE.replace("m['content']", "m['content'] | trim | replace('2', 'two')"),  # of a later turn
        TEMPLATE.replace("{% for m", "{% if messages|length > 2 %}x{% endif %}{% for m"),
        "{% if messages[0].role == 'system' %}s{% endif %}" + TEMPLATE,
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}" + TEMPLATE,
    ):
        assert template_fingerprint(tokenizer_with(changed)) != one, changed
    larger, other_end = byte_tokenizer(), byte_tokenizer()
    larger.add_tokens(["<|more|>"])
    other_end.eos_token = "<|start|>"
    assert len({one, *map(template_fingerprint, (larger, other_end))}) == 3
    with pytest.raises(UserError, match="the chat template cannot write one user turn: never"):
        template_fingerprint(tokenizer_with("{{ raise_exception('never') }}"))


def test_of_several_named_templates_the_default_one_counts(world, tiny, given, tmp_path):
    named = {"default": TEMPLATE, "tool_use": "tools: " + TEMPLATE}
    one = template_fingerprint(byte_tokenizer())
    assert template_fingerprint(tokenizer_with(named)) == one
    assert template_fingerprint(tokenizer_with(named | {"tool_use": "x"})) == one
    assert template_fingerprint(tokenizer_with(named | {"default": "x" + TEMPLATE})) != one
    for name in ("reward", "policy"):
        shutil.copytree(world / name, tmp_path / name)
        tokenizer_with(named).save_pretrained(tmp_path / name)
    cfg = run_config(world, tiny, "", output_dir=str(tmp_path / "out"), max_prompts=2)
    cfg = dataclasses.replace(
        cfg,
        policy=ModelConfig(str(tmp_path / "policy"), dtype="float32"),
        reward_model=RewardConfig(path=str(tmp_path / "reward")),
    )
    assert evaluate(cfg)["comparison"]["reward_score"]["n"] == 2
    tokenizer_with(named | {"default": "x" + TEMPLATE}).save_pretrained(tmp_path / "reward")
    with pytest.raises(UserError, match="another chat template or tokenizer than its folder holds"):
        open_reward_model(str(tmp_path / "reward"), CPU)
    tokenizer_with({"rag": TEMPLATE, "tool_use": TEMPLATE}).save_pretrained(tmp_path / "none")
    with pytest.raises(UserError, match="has chat templates rag, tool_use and none named default"):
        load_tokenizer(str(tmp_path / "none"))


def older_fingerprint(tokenizer) -> str:
    """As folders of earlier versions hold it."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    text = "\0".join([tokenizer.chat_template, str(tokenizer.eos_token_id), vocabulary])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_older_folders_are_read_where_their_fingerprint_says_enough(tmp_path):
    stats = {"score_mean": 1, "score_std": 2.0}
    for template, accepted in ((TEMPLATE, True), (DATED, False)):
        tokenizer = tokenizer_with(template)
        write_stats(tmp_path, stats | {"template_fingerprint": older_fingerprint(tokenizer)})
        if accepted:
            assert score_scale(str(tmp_path), tokenizer) == (1.0, 2.0)
        else:
            with pytest.raises(UserError, match="its scores would mean nothing; train it again"):
                score_scale(str(tmp_path), tokenizer)
        assert score_scale(str(tmp_path)) == (1.0, 2.0)


@pytest.mark.parametrize(
    "text, why",
    [
        ("{", "JSONDecodeError"),
        ("[1, 2]", "TypeError"),
        ('{"score_mean": 1.0, "template_fingerprint": "x"}', "KeyError\\('score_std'\\)"),
        ('{"score_mean": 1.0, "score_std": 2.0}', "KeyError\\('template_fingerprint'\\)"),
        ('{"score_mean": null, "score_std": 2.0, "template_fingerprint": "x"}', "TypeError"),
        ('{"score_mean": NaN, "score_std": 2.0, "template_fingerprint": "x"}', "mean nan"),
        ('{"score_mean": 1, "score_std": Infinity, "template_fingerprint": "x"}', "deviation inf"),
        ('{"score_mean": 1, "score_std": -2, "template_fingerprint": "x"}', "deviation -2.0"),
        ('{"score_mean": 1, "score_std": 2, "temperature": 0, "template_fingerprint": "x"}', "temperature 0.0"),
    ],
)
def test_unusable_stats_are_named(tmp_path, text, why):
    (tmp_path / "reward_stats.json").write_text(text)
    with pytest.raises(UserError, match=f"reward_stats.json says nothing usable \\(.*{why}") as caught:
        read_stats(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_every_reader_of_a_reward_model_checks_it(world, tiny, tmp_path, capsys, preferences):
    from dataprep.filter import FilterConfig, filter_pairs
    from train_ppo import CriticConfig, build_roles

    other, bare = tmp_path / "other", tmp_path / "bare"
    for folder in (other, bare):
        shutil.copytree(world / "reward", folder)
    tokenizer_with("x" + TEMPLATE).save_pretrained(other)
    (bare / "reward_stats.json").unlink()
    refused = "another chat template or tokenizer than its folder holds"
    settings = FilterConfig(preferences, str(other), str(tmp_path / "filtered"))
    with pytest.raises(UserError, match=refused):
        filter_pairs(settings)
    with pytest.raises(UserError, match=refused):
        evaluate(
            run_config(world, tiny, "", output_dir=str(tmp_path / "o"), reward_model=RewardConfig(path=str(other)))
        )
    assert not (tmp_path / "o").exists() and not (tmp_path / "filtered").exists()
    write_stats(other, {"score_mean": 0.0, "score_std": 1.0, "template_fingerprint": "trained otherwise"})
    critic = ppo_config(tiny, critic=CriticConfig("separate", path=str(other)))
    with pytest.raises(UserError, match="another chat template or tokenizer than the policy has"):
        build_roles(critic, CPU)
    capsys.readouterr()
    for _ in range(2):
        open_reward_model(str(bare), CPU, "float32")
    line = f"{bare} has no reward_stats.json: its scores are used as they are, and its chat template is not checked"
    assert capsys.readouterr().out.splitlines() == [line]


# --- embeddings of different sizes


@pytest.mark.parametrize("rows", [(320, 259), (259, 320), (320, 288), (320, 320)])
def test_kl_of_models_with_spare_rows_is_over_the_rows_of_both(rows):
    policy, baseline = (tiny_llama(seed, vocab_size=n).eval() for seed, n in enumerate(rows))
    known = min(rows)

    def by_hand(prompt, response):
        end = next((i for i, token in enumerate(response) if token >= known), len(response) - 1)
        read = [*prompt, *response[:end]]
        with torch.no_grad():
            logits = [m(torch.tensor([read])).logits[0, :, :known].double() for m in (policy, baseline)]
        p, q = (x.log_softmax(-1)[len(prompt) - 1 :] for x in logits)
        return (p.exp() * (p - q)).sum(-1).mean().item()

    responses = [[3, 200, 17, 2], [known - 1], [61, 300, 63, 2], [319, 2], [5, 6, known, known + 1]]
    responses = [[min(token, rows[0] - 1) for token in response] for response in responses]
    wanted = [by_hand(*row) for row in zip(PROMPTS, responses)]
    assert kl_per_token(policy, baseline, PROMPTS, responses, 2) == pytest.approx(wanted, rel=1e-4)
    assert len({round(kl, 6) for kl in wanted}) == 5


def test_a_policy_with_more_rows_than_its_baseline_is_compared(world, tiny, tmp_path):
    tiny_llama(1, vocab_size=320).save_pretrained(tmp_path / "wide")
    byte_tokenizer().save_pretrained(tmp_path / "wide")
    for name, policy, baseline in (("a", str(tmp_path / "wide"), tiny), ("b", tiny, str(tmp_path / "wide"))):
        report = evaluate(
            run_config(
                world,
                tiny,
                "",
                policy=ModelConfig(policy, dtype="float32"),
                baseline=ModelConfig(baseline, dtype="float32"),
                output_dir=str(tmp_path / name),
                temperature=5.0,  # so that rows without a token are drawn
                rules=["gsm8k"],
            )
        )
        assert report["comparison"]["kl_per_token"]["policy"] > 0.01

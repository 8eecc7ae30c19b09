"""Stage 4: its numbers by hand, its KL against a loop over the vocabulary, a whole run with given answers."""

import json
import math

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
import yaml
from helpers import CPU, ROOT, byte_tokenizer, launch, messages, tiny_llama

import evaluate as stage
from evaluate import (
    EvaluateConfig,
    bootstrap_interval,
    compare,
    evaluate,
    exact_kl,
    html_report,
    kl_per_token,
    training_curves,
    wins,
)
from utils.config import ModelConfig, UserError
from utils.data import COLUMNS, encode_prompt, encode_responses
from utils.models import load_tokenizer, new_reward_model, template_fingerprint, write_stats
from utils.rewards import RewardConfig

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
        "ci95": [-1.0, 0.0],  # of -1, 0, 0: P(-1) = 3.7%
        "n": 3,
    }


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
    assert comparison["win_rate"]["ci95"] == [-0.25, 0.5]  # of 1/2, -1/2, 1/2, 1/2: P(-1/2) = 1/256, P(<= -1/4) = 5%

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
        "<td>win rate</td><td>0.500</td><td>0.750</td><td>+0.250</td><td>[-0.250, +0.500]</td>",
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


def test_a_reward_models_scores_are_raw_and_of_the_text(world, tiny, given, tmp_path):
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
            assert sample[side]["reward_score"] == pytest.approx(wanted, abs=1e-4)


def test_a_reward_model_of_another_template_is_refused(world, tiny, given, tmp_path):
    import shutil

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
    assert all(c["difference"] == 0 and c["ci95"] == [0, 0] for c in report["comparison"].values())
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

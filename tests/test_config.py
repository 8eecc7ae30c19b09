"""Configuration, and bad input: one line that says what to do, exit code 2."""

import json
import os
import subprocess
import sys

import pytest
from helpers import ROOT, byte_tokenizer, tiny_llama

from dataprep.filter import FilterConfig
from evaluate import EvaluateConfig
from prepare_data import DataConfig
from train_ppo import PPOConfig, check_config, count_steps
from train_reward import RewardTrainConfig
from utils.config import UserError, known_keys, parse_config
from utils.run import open_output_dir

PPO = ["--model.path", "m", "--data", "d", "--output_dir", "o", "--reward_model.path", "r", "--total_steps", "1"]


def ppo(*more):
    return parse_config(PPOConfig, [*PPO, *more])


def test_yaml_then_command_line_and_the_last_wins(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "lr: 1e-6\nlora: {r: 4}\nalgorithm: {kl_ctrl: {method: adaptive, target_kl: 0.1}}\n"
    )
    (tmp_path / "b.yaml").write_text("lr: 2e-6\nlora: null\n")
    a, b = str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")
    cfg = ppo("--config", a)
    assert (cfg.lr, cfg.lora.r, cfg.lora.lora_alpha, cfg.algorithm.kl_ctrl.target_kl) == (1e-6, 4, 16, 0.1)
    cfg = ppo("--config", a, "--config", b)
    assert (cfg.lr, cfg.lora) == (2e-6, None)
    assert ppo("--config", a, "--lr", "3e-5", "--lora.r", "8").lr == 3e-5
    assert ppo("--config", b, "--lora.r", "8").lora.r == 8


@pytest.mark.parametrize(
    "option, message",
    [
        ("--learning_rat", "unknown option --learning_rat"),
        ("--kl_coef", "did you mean 'algorithm.kl_coef'"),
        ("--lora.rr", "did you mean 'lora.r'"),
        ("--algoritm.lam", "did you mean 'algorithm.lam'"),
        ("--model.pth", "did you mean 'model.path'"),
    ],
)
def test_unknown_option_names_the_nearest(option, message):
    with pytest.raises(UserError, match=message):
        ppo(option, "1")


def test_unknown_yaml_key_names_file_and_nearest(tmp_path):
    (tmp_path / "a.yaml").write_text("algorithm: {clip_ration: 0.1}\n")
    with pytest.raises(
        UserError, match="a.yaml: unknown key 'algorithm.clip_ration'; did you mean 'algorithm.clip_ratio'"
    ):
        ppo("--config", str(tmp_path / "a.yaml"))
    (tmp_path / "a.yaml").write_text("- a\n")
    with pytest.raises(UserError, match="expected `key: value` lines"):
        ppo("--config", str(tmp_path / "a.yaml"))
    (tmp_path / "a.yaml").write_text("a: [\n")
    with pytest.raises(UserError, match="not valid YAML"):
        ppo("--config", str(tmp_path / "a.yaml"))
    with pytest.raises(UserError, match="cannot be read"):
        ppo("--config", str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    "option, value",
    [("--lr", "fast"), ("--ppo_epochs", "1.5"), ("--critic.kind", "adaptor"), ("--overwrite", "perhaps")],
)
def test_wrong_types_name_the_key(option, value):
    with pytest.raises(UserError, match=option[2:]) as caught:
        ppo(option, value)
    assert "\n" not in str(caught.value)


def test_a_missing_required_key_is_named():
    with pytest.raises(UserError, match="model.path"):
        parse_config(PPOConfig, PPO[2:])


@pytest.mark.parametrize("config", [DataConfig, RewardTrainConfig, PPOConfig, EvaluateConfig])
def test_every_option_is_described(config, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_config(config, ["--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    branches = {key.rsplit(".", 1)[0] for key in known_keys(config) if "." in key}
    for key in set(known_keys(config)) - branches:
        assert f"--{key}" in text, key
    import dataclasses

    from docstring_parser import parse_from_object

    described = {p.arg_name for p in parse_from_object(config).params if p.description}
    nested = {key.split(".")[0] for key in branches}
    assert {f.name for f in dataclasses.fields(config)} - nested <= described


@pytest.mark.parametrize(
    "options, message",
    [
        (["--rollout.temperature", "0"], "rollout.temperature 0.0 must be above 0"),
        (["--algorithm.kl_ctrl.method", "adaptive"], "needs target_kl"),
        (["--algorithm.kl_ctrl.method", "adaptive", "--algorithm.kl_ctrl.target_kl", "-1"], "needs target_kl"),
        (
            [
                "--algorithm.kl_ctrl.method",
                "adaptive",
                "--algorithm.kl_ctrl.target_kl",
                "1",
                "--algorithm.kl_ctrl.horizon",
                "0",
            ],
            "algorithm.kl_ctrl.horizon 0 must be at least 1",
        ),
        (["--algorithm.kl_ctrl.target_kl", "0.1"], "have no effect with method fixed"),
        (["--reward_model.rule", "gsm8k"], "reward_model.rule has no effect"),
        (["--reward_model.style", "rule"], "needs reward_model.rule"),
        (["--algorithm.kl_ctrl.decay", "0.5"], "have no effect with method fixed"),
        (
            [
                "--algorithm.kl_ctrl.method",
                "adaptive",
                "--algorithm.kl_ctrl.target_kl",
                "1",
                "--algorithm.kl_ctrl.decay",
                "0.5",
            ],
            "decay is for",
        ),
        (["--algorithm.kl_in", "loss", "--algorithm.kl_estimator", "k1"], "k1 has a gradient of 0"),
        (["--algorithm.clip_ratio_c", "1.1"], r"clip_ratio_c must be above 1 \+ clip_ratio"),
        (["--score.clip", "0"], "score.clip 0.0 must be above 0"),
        (["--algorithm.adv_estimator", "rloo"], "set rollout.n to 2"),
        (
            [
                "--algorithm.adv_estimator",
                "grpo",
                "--rollout.n",
                "2",
                "--algorithm.lam",
                "1",
                "--critic.kind",
                "shared",
                "--critic.lr",
                "1",
            ],
            "algorithm.lam, critic.lr has no effect",
        ),
        (["--critic.kind", "shared", "--critic.path", "x"], "critic.path has no effect"),
        (["--guards.enabled", "true", "--save_every", "0"], "guards.enabled needs checkpoints"),
        (["--guards.enabled", "true", "--save_every", "1", "--keep_last", "1"], "keep_last to 2"),
        (
            ["--guards.enabled", "true", "--save_every", "1", "--guards.max_skips", "0"],
            "guards.max_skips 0 must be at least 1",
        ),
        (
            ["--guards.enabled", "true", "--save_every", "1", "--guards.rollback_lr_factor", "-1"],
            "must be between 0 and 1",
        ),
        (["--algorithm.gamma", "-1"], "algorithm.gamma -1.0 must be between 0 and 1"),
        (["--eval_prompts", "3"], "eval_prompts has no effect without eval_every"),
        (["--keep_last", "3", "--save_every", "0"], "keep_last has no effect without save_every"),
        (["--guards.max_rollbacks", "9"], "guards.* has no effect"),
        (["--lora", "null"], "critic.kind adapter needs lora"),
        (["--critic.loss_coef", "0.5"], "critic.loss_coef has no effect"),
        (["--total_epochs", "1"], "total_steps or total_epochs"),
        (["--total_steps", "0"], "total_steps 0 must be at least 1"),
        (["--lr", "-1"], "^lr -1.0 must be above 0"),
        (["--lr", ".nan"], "^lr nan must be above 0"),
        (["--critic.lr", "0"], "critic.lr 0.0 must be above 0"),
        (["--seed", "-1"], "seed -1 must be at least 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        check_config(ppo(*options))


@pytest.mark.parametrize(
    "batch, mini, micro, n, world, message",
    [
        (8, 3, 1, 1, 1, "train_batch_size 8 is not a multiple of ppo_mini_batch_size 3"),
        (8, 16, 8, 1, 1, "train_batch_size 8 is not a multiple of ppo_mini_batch_size 16"),
        (8, 8, 8, 1, 9, "train_batch_size 8 is below the 9 processes"),
        (8, 8, 8, 3, 1, "train_batch_size 8 is not a multiple of rollout.n 3"),
        (8, 8, 0, 1, 1, "ppo_micro_batch_size_per_gpu 0 must be at least 1"),
        (8, 8, 8, 0, 1, "rollout.n 0 must be at least 1"),
    ],
)
def test_batch_sizes_that_do_not_divide(batch, mini, micro, n, world, message):
    sizes = [
        "--train_batch_size",
        batch,
        "--ppo_mini_batch_size",
        mini,
        "--ppo_micro_batch_size_per_gpu",
        micro,
        "--rollout.n",
        n,
    ]
    with pytest.raises(UserError, match=message):
        cfg = ppo(*map(str, sizes))
        check_config(cfg)
        count_steps(cfg, 100, world)


def test_steps_of_epochs():
    cfg = parse_config(
        PPOConfig,
        [
            *PPO[:-2],
            "--total_epochs",
            "2",
            "--train_batch_size",
            "8",
            "--ppo_mini_batch_size",
            "8",
            "--rollout.n",
            "2",
        ],
    )
    assert count_steps(cfg, 5, 1) == 3  # 4 prompts a step, 10 prompts in all


GROUP = " is a group of options and has no value of its own; write "


@pytest.mark.parametrize(
    "options, message",
    [
        (["--critic", "null"], f"critic{GROUP}--critic.kind VALUE"),
        (["--critic=null"], f"critic{GROUP}--critic.kind VALUE"),
        (["--algorithm.kl_ctrl", "adaptive"], f"algorithm.kl_ctrl{GROUP}--algorithm.kl_ctrl.method VALUE"),
        (["--model", "out/sft"], f"model{GROUP}--model.path out/sft"),
        (["--lora", "none"], "lora: write null, not none"),
        (["--lr", "None"], "lr: write null, not None"),
        (["--lora", "8"], "lora must be a group of options or null, not 8"),
        (["--lora.r", "none"], "lora.r must be a whole number at least 1, not none"),
        (["--lr", "fast"], "lr must be a number above 0 or null, not fast"),
        (["--overwrite", "1"], "overwrite must be true or false, not 1"),
        (["--resume", "true"], "resume must be auto, partial or null, not true"),
        (["--lr="], "lr must be a number above 0 or null, not empty"),
        (["--config"], "--config needs a YAML file; configs/ has examples"),
        (["--lr", ".inf"], "lr inf must be a finite number"),
        (["--algorithm.kl_coef", ".nan"], "algorithm.kl_coef nan must be at least 0"),
        (["--algorithm.entropy_coef", ".nan"], "algorithm.entropy_coef nan must be a finite number"),
        (["--score.missing_eos_penalty=-.inf"], "score.missing_eos_penalty -inf must be a finite number"),
        (["--guards.max_empty", ".nan"], "guards.max_empty nan must be a finite number"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_its_key(options, message):
    with pytest.raises(UserError) as caught:
        ppo(*options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "text, message",
    [
        ("critic: null", f"critic{GROUP}--critic.kind VALUE"),
        ("critic:", f"critic{GROUP}--critic.kind VALUE"),
        ("guards: true", f"guards{GROUP}--guards.enabled VALUE"),
        ("model: [a]", f"model{GROUP}--model.path VALUE"),
        ("algorithm: {kl_ctrl: null}", f"algorithm.kl_ctrl{GROUP}--algorithm.kl_ctrl.method VALUE"),
        ("lora: none", "lora: write null, not none"),
        ("algorithm: {lr: 1e-4}", "unknown key 'algorithm.lr'; did you mean 'lr'?"),
        ("model: {lr: 1e-4}", "unknown key 'model.lr'; did you mean 'lr'?"),
        ("critc: {lr: 1e-4}", "unknown key 'critc'; did you mean 'critic'?"),
        ("critic: {kl_coef: 1}", "unknown key 'critic.kl_coef'; did you mean 'algorithm.kl_coef'?"),
        ("rollout: {train_batch_size: 4}", "unknown key 'rollout.train_batch_size'; did you mean 'train_batch_size'?"),
    ],
)
def test_a_group_without_a_name_and_a_name_at_the_wrong_level(tmp_path, text, message):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        ppo("--config", str(tmp_path / "a.yaml"))
    assert str(caught.value) == f"{tmp_path / 'a.yaml'}: {message}"


@pytest.mark.parametrize(
    "option, nearest",
    [
        ("critc.lr", "critic.lr"),
        ("optimizer.lr", "lr"),
        ("reward.path", "reward_model.path"),
        ("path", "model.path"),
        ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_coef"),
    ],
)
def test_a_known_name_is_suggested_at_the_likeliest_level(option, nearest):
    with pytest.raises(UserError, match=f"did you mean '{nearest}'"):
        ppo(f"--{option}", "1")


def test_a_switch_needs_no_value():
    assert ppo("--overwrite").overwrite and ppo("--overwrite", "--lr", "1e-4").lr == 1e-4
    assert ppo("--overwrite", "yes").overwrite and not ppo("--overwrite", "false").overwrite
    assert ppo("--algorithm.whiten_advantages").algorithm.whiten_advantages is True
    assert ppo("--score.length_penalty", "-1.5").score.length_penalty == -1.5


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "---\n", "{}\n"])
def test_an_empty_file_says_nothing(tmp_path, text):
    (tmp_path / "a.yaml").write_text(text)
    for given in (["--config", str(tmp_path / "a.yaml")], [f"--config={tmp_path / 'a.yaml'}"]):
        assert ppo(*given) == ppo()
        with pytest.raises(UserError, match="required: model.path, data, output_dir; give --model.path VALUE"):
            parse_config(PPOConfig, given)


@pytest.mark.parametrize("config", [DataConfig, RewardTrainConfig, PPOConfig, EvaluateConfig, FilterConfig])
def test_help_begins_with_one_line_of_usage(config, capsys):
    with pytest.raises(SystemExit):
        parse_config(config, ["--help"])
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("usage: ") and first.endswith(" [--config FILE.yaml ...] [--key.subkey value ...]")
    assert second == "" and f"{config.__doc__.removesuffix('.')}:" in rest
    assert not any("functools" in line or "object at 0x" in line for line in rest)


def test_a_resumed_run_keeps_its_configuration(tmp_path):
    from utils.run import check_same_config, record_run

    cfg = ppo("--seed", "3")
    record_run(tmp_path, cfg)
    check_same_config(
        tmp_path, ppo("--seed", "3", "--log_every", "9", "--total_steps", "99", "--resume", "auto", "--lr", "1e-7")
    )
    for option, value in (
        ("--algorithm.lam", "0.9"),
        ("--algorithm.kl_coef", "0.5"),
        ("--seed", "4"),
        ("--lora", "null"),
    ):
        with pytest.raises(UserError, match=option[2:]):
            check_same_config(tmp_path, ppo("--seed", "3", option, value))


@pytest.mark.parametrize("by", ["file", "command line"])
def test_groups_in_a_list_have_known_keys(tmp_path, by):
    also = '[{"style": "rule", "rule": "gsm8k", "weight": 0.5}, {"style": "rule", "rule": "gsm8k", "wieght": 1}]'
    file = tmp_path / "r.yaml"
    file.write_text(f"reward_model: {{also: {also}}}")
    place = f"{file}: " if by == "file" else ""
    with pytest.raises(UserError, match=rf"^{place}reward_model.also\[1\]: unknown key 'wieght'.*weight"):
        ppo(*(["--config", str(file)] if by == "file" else ["--reward_model.also", also]))
    right = ppo("--reward_model.also", also.replace("wieght", "weight"))
    assert [part.weight for part in right.reward_model.also] == [0.5, 1.0]


def test_output_dir_of_another_run(tmp_path):
    folder = tmp_path / "run"
    open_output_dir(str(folder), False)
    (folder / "run.json").write_text("{}")
    with pytest.raises(UserError, match="--resume auto"):
        open_output_dir(str(folder), False, can_resume=True)
    open_output_dir(str(folder), False, "auto")
    assert (folder / "run.json").exists()
    open_output_dir(str(folder), True)
    assert not (folder / "run.json").exists()
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="files that no run wrote"):
        open_output_dir(str(folder), True)
    with pytest.raises(UserError, match="is a file"):
        open_output_dir(str(folder / "thesis.txt"), True)


# --- whole commands


def run(stage, *options, env=None):
    command = [sys.executable, str(ROOT / stage), *map(str, options)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
    )


def test_benchmarks_import_from_the_project():
    """Each of them starts with its own folder on the path, whose data.py must not hide the folder data/."""
    code = (
        "import runpy, sys; sys.path[0] = 'benchmarks'; runpy.run_path(f'benchmarks/{sys.argv[1]}.py'); "
        "import data.demo.gold, utils.data; print(data.demo.gold.__file__, utils.data.__file__)"
    )
    for name in ("ppo_step", "loader"):
        result = subprocess.run([sys.executable, "-c", code, name], cwd=ROOT, capture_output=True, text=True)
        found = [str(ROOT / "data" / "demo" / "gold.py"), str(ROOT / "utils" / "data.py")]
        assert (result.returncode, result.stdout.split()) == (0, found), result.stderr


def test_bad_input_ends_with_one_line_and_code_2(tmp_path, tiny, preferences):
    tiny_llama(max_position_embeddings=20).save_pretrained(tmp_path / "short")
    byte_tokenizer().save_pretrained(tmp_path / "short")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "run.json").write_text("{}")
    out = tmp_path / "out"
    base = ["--model.path", tiny, "--data", preferences, "--output_dir", out, "--report_to", "none"]
    rl = [*base, "--total_steps", 1, "--train_batch_size", 8, "--ppo_mini_batch_size", 8, "--max_response_length", 8]
    cases = [
        ("train_reward.py", [*base, "--epoch", 1], "did you mean 'epochs'"),
        ("train_reward.py", [*base, "--data", tmp_path / "nowhere"], "data folder .*nowhere does not exist"),
        ("train_reward.py", [*base, "--model.path", tmp_path / "nowhere"], "model folder .*nowhere does not exist"),
        ("train_reward.py", [*base, "--output_dir", tmp_path / "used"], "is not empty"),
        ("train_reward.py", [*base, "--model.path", tmp_path / "short"], "the model has 20 positions"),
        ("train_reward.py", [*base, "--lora.target_modules", '["no_such"]'], "lora.target_modules"),
        ("train_ppo.py", [*rl, "--reward_model.path", tiny], "without a score head"),
        (
            "train_ppo.py",
            [*rl, "--reward_model.style", "rule", "--reward_model.rule", "gsm8k"],
            "ground_truth None is not a number",
        ),
        (
            "train_ppo.py",
            [*rl, "--reward_model.path", tiny, "--ppo_mini_batch_size", 3],
            "not a multiple of ppo_mini_batch_size 3",
        ),
        (
            "train_ppo.py",
            [*rl, "--reward_model.style", "function", "--reward_model.function", "nope:f"],
            "reward function nope:f",
        ),
        (
            "train_ppo.py",
            [
                *rl,
                "--reward_model.style",
                "function",
                "--reward_model.function",
                "test_ppo:constant",
                "--model.path",
                tmp_path / "short",
            ],
            "exceed the model's 20 positions",
        ),
        (
            "prepare_data.py",
            ["--source", tmp_path / "none.jsonl", "--tokenizer", tiny, "--output_dir", out],
            "none.jsonl does not exist",
        ),
        (
            "evaluate.py",
            ["--policy.path", tiny, "--baseline.path", tiny, "--data", preferences, "--output_dir", out],
            "nothing to compare by",
        ),
        (
            "evaluate.py",
            [
                "--policy.path",
                tiny,
                "--baseline.path",
                tiny,
                "--data",
                preferences,
                "--output_dir",
                out,
                "--rules",
                '["gsm8k"]',
                "--policy.gradient_checkpointing",
                "true",
            ],
            "policy.gradient_checkpointing has no effect",
        ),
    ]
    for stage, options, message in cases:
        result = run(stage, *options, env={"PYTHONPATH": str(ROOT / "tests")})
        lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert result.returncode == 2, (stage, options, result.stderr[-2000:])
        assert len(lines) == 1 and "Traceback" not in result.stderr, result.stderr[-2000:]
        assert __import__("re").search(message, lines[0]), lines[0]
    assert not out.exists() and (tmp_path / "used" / "run.json").read_text() == "{}"


def test_any_console_can_show_any_text(tmp_path, tiny):
    row = {"prompt": "你好 😀 e\u0301", "chosen": "ответ", "rejected": "\u2028x"}
    (tmp_path / "raw.jsonl").write_text(json.dumps(row), encoding="utf-8")
    result = run(
        "prepare_data.py",
        "--source",
        tmp_path / "raw.jsonl",
        "--tokenizer",
        tiny,
        "--output_dir",
        tmp_path / "out",
        "--eval_fraction",
        0,
        env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C"},
    )
    assert result.returncode == 0 and "\\u4f60" in result.stdout, result.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["rows_out"] == {"train": 1, "test": 0}


def test_importing_a_stage_does_nothing_and_needs_no_deepspeed():
    code = (
        "import sys, prepare_data, train_reward, train_ppo, evaluate; "
        "assert not {'deepspeed', 'vllm', 'matplotlib'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout == "", result.stderr

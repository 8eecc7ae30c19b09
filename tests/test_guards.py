"""Guards: each limit with its event and its action, roll-backs that end, checkpoints that survive damage and kills."""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from accelerate import Accelerator
from helpers import CPU, ROOT, base_config, given_rollouts, ppo_config, run_of, stir, weights_of
from safetensors.torch import load_file

import train_ppo
from train_ppo import (
    AlgorithmConfig,
    CriticConfig,
    RolloutConfig,
    build_roles,
    experience,
    mini_batch_step,
    new_state,
    train,
    update,
)
from utils.checkpoint import load_checkpoint, state_text, weight_hashes
from utils.config import RunStopped, UserError
from utils.data import load_prompts
from utils.guards import GO_ON, GuardConfig, Guards, Verdict
from utils.rewards import RewardConfig


def events(folder):
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def guards(folder, **limits):
    return Guards(
        GuardConfig(enabled=True, **limits), folder, {"rollbacks": 0, "skips": 0, "warned": [], "kl_history": []}, True
    )


def healthy(**changes):
    return {
        "objective/kl": 0.1,
        "objective/kl_per_token": 0.01,
        "objective/score_mean": 0.0,
        "objective/score_std": 0.1,
        "objective/entropy": 2.0,
        "rollout/empty_fraction": 0.0,
        "rollout/truncated_fraction": 0.0,
        "rollout/distinct_2": 0.9,
    } | changes


# --- each guard alone


def test_update_kl_by_value(tmp_path):
    guard = guards(tmp_path, update_kl=0.02)
    assert guard.check_update(3, 0.02) == GO_ON
    assert guard.check_update(3, 0.03) == Verdict("skip rest", "update_kl")
    assert guard.check_update(3, 0.03, last=True) == GO_ON  # nothing is left to skip
    for value in (0.05, float("nan"), float("inf")):
        expected = Verdict("roll back", "update_kl", before=2, lr_factor=0.1, kl_factor=1.0)
        assert guard.check_update(3, value) == guard.check_update(3, value, last=True) == expected
    assert [(e["guard"], e["action"], e["step"], e["limit"]) for e in events(tmp_path)[:2]] == [
        ("update_kl", "skipping the rest of the step", 3, 0.02),
        ("update_kl", "rolling back", 3, 0.02),
    ]


def test_update_kl_skips_what_is_left_of_the_step(tiny, tmp_path):
    """A limit that the first optimizer step crosses: the weights are those after exactly one."""
    cfg = ppo_config(tiny, train_batch_size=8, ppo_mini_batch_size=4)

    def run(limit, once=False):
        model = build_roles(cfg, CPU)
        rows = given_rollouts(cfg, model)
        for row in rows:
            row.logprobs, row.ref_logprobs = list(row.ref_logprobs), list(row.ref_logprobs)  # on policy
        optimizer = torch.optim.SGD(model.trainable().values(), lr=2.0)
        tensors, _ = experience(rows, cfg, 0.1)
        guard = guards(tmp_path, update_kl=limit)
        seen = []
        check = guard.check_update
        guard.check_update = lambda step, kl, last=False: seen.append(kl) or check(step, kl, last)
        if once:
            order = torch.randperm(8, generator=torch.Generator().manual_seed(101)).tolist()
            mini_batch_step(run_of(cfg, model, optimizer), order[:4], rows, tensors)
        else:
            update(run_of(cfg, model, optimizer, guard), rows, tensors)
        return {n: p.detach().clone() for n, p in model.trainable().items()}, seen

    _, seen = run(1e9)
    assert seen[0] < 1e-9 and seen[1] > 1e-7 and len(seen) == 5  # four mini-batches and a look at the end
    stopped, again = run(seen[1] * 0.75)
    assert len(again) == 2 and again == seen[:2]
    one, _ = run(None, once=True)
    for name in one:
        assert torch.equal(stopped[name], one[name]), name


def test_bad_gradients_are_skipped_then_rolled_back(tiny, tmp_path):
    cfg = ppo_config(tiny, train_batch_size=8, ppo_mini_batch_size=4, ppo_epochs=1)
    model = build_roles(cfg, CPU)
    stir(model, 0.1)
    rows = given_rollouts(cfg, model)
    tensors, _ = experience(rows, cfg, 0.1)
    optimizer = torch.optim.AdamW(model.trainable().values(), lr=0.1)
    before = {n: p.detach().clone() for n, p in model.trainable().items()}
    guard = guards(tmp_path, update_kl=None, grad_norm=1e-9, max_skips=3)
    _, verdict = update(run_of(cfg, model, optimizer, guard), rows, tensors)
    assert verdict.action == "skip step"
    assert (
        all(torch.equal(p, before[n]) and p.grad is None for n, p in model.trainable().items()) and not optimizer.state
    )
    assert guard.state["skips"] == 2 and len(events(tmp_path)) == 2  # one for each optimizer step
    _, verdict = update(run_of(cfg, model, optimizer, guard, step=2), rows, tensors)
    assert verdict == Verdict("roll back", "grad_norm", before=1, lr_factor=0.1)
    assert {e["guard"] for e in events(tmp_path)} == {"grad_norm"} and events(tmp_path)[-1]["action"] == "rolling back"
    guard = guards(tmp_path, update_kl=None, grad_norm=None)  # no limit, but not finite is bad all the same
    assert guard.check_gradients(1, {"policy": 1e9, "critic": float("nan")}) == Verdict("skip step", "grad_norm")
    assert guard.state["skips"] == 1
    update(run_of(cfg, model, optimizer, guard, step=3), rows, tensors)
    assert guard.state["skips"] == 0 and any(not torch.equal(p, before[n]) for n, p in model.trainable().items())


def test_reference_kl_goes_back_to_what_is_known_to_be_good(tmp_path):
    """KL is measured on the rollouts of step 7, so the policy after step 6 is bad and that after step 5 was good."""
    guard = guards(tmp_path, reference_kl=0.5)
    assert guard.check_rollouts(7, healthy(**{"objective/kl_per_token": 0.5}), [], [], "d") == GO_ON
    verdict = guard.check_rollouts(7, healthy(**{"objective/kl_per_token": float("nan")}), [], [], "d")
    assert verdict == Verdict("roll back", "reference_kl", before=5, lr_factor=1.0, kl_factor=2.0)


@pytest.mark.parametrize(
    "limit, metric, value, cause",
    [
        ({"max_empty": 0.2}, "rollout/empty_fraction", 0.3, "ends at once"),
        ({"max_truncated": 0.5}, "rollout/truncated_fraction", 0.6, "do not end"),
        ({"min_distinct_2": 0.3}, "rollout/distinct_2", 0.2, "alike or repeat"),
        ({"min_entropy": 0.5}, "objective/entropy", 0.4, "collapsed"),
    ],
)
def test_warnings_say_the_likely_cause_once(tmp_path, limit, metric, value, cause):
    guard = guards(tmp_path, reward_std=None, **limit)
    for step, now in enumerate(
        (healthy(), healthy(**{metric: value}), healthy(**{metric: value}), healthy(), healthy(**{metric: value})), 1
    ):
        guard.check_rollouts(step, now, [], [], "d")
    assert [(e["step"], e["guard"], e["action"]) for e in events(tmp_path)] == [
        (2, *limit, "going on"),
        (5, *limit, "going on"),
    ]
    assert cause in events(tmp_path)[0]["message"]


def test_a_lasting_negative_kl_is_explained(tmp_path):
    """Mean over five steps, with the guards off too; four steps, or a small negative value, are chance."""
    guard = Guards(GuardConfig(), tmp_path, new_state(ppo_config("m")), True)
    for step, kl in enumerate((-9.0, -1.0, -1.0, 40.0, -0.01, -0.01, -0.01, -0.01, -0.01, -2.0), 1):
        guard.check_rollouts(step, healthy(**{"objective/kl": kl}), [], [], "d")
    assert [(e["step"], e["guard"]) for e in events(tmp_path)] == [(10, "negative_kl")]
    assert events(tmp_path)[0]["value"] == pytest.approx(-2.04 / 5)


def test_a_first_ratio_that_is_not_one_is_explained(tiny, tmp_path):
    """Stored log-probabilities at another temperature."""
    cfg = ppo_config(tiny, train_batch_size=8, ppo_mini_batch_size=8, ppo_epochs=1)
    model = build_roles(cfg, CPU)
    rows = given_rollouts(dataclasses.replace(cfg, rollout=RolloutConfig(temperature=0.5)), model)
    tensors, _ = experience(rows, cfg, 0.1)
    guard = Guards(GuardConfig(), tmp_path, new_state(cfg), True)
    update(run_of(cfg, model, torch.optim.SGD(model.trainable().values(), lr=0.0), guard), rows, tensors)
    (event,) = events(tmp_path)
    assert event["guard"] == "first_ratio" and "temperature" in event["message"]


# --- whole runs


def uneven(prompts, responses, **columns):
    """One in eight is an outlier."""
    return [100.0 if i % 8 == 3 else 0.0 for i in range(len(responses))]


def test_scattered_rewards_are_written_aside_and_the_run_goes_on(tiny, preferences, tmp_path):
    cfg = base_config(
        tiny,
        preferences,
        tmp_path / "run",
        total_steps=3,
        save_every=1,
        lr=1e-4,
        guards=GuardConfig(enabled=True, update_kl=None, grad_norm=None),
        reward_model=RewardConfig(style="function", function="test_guards:uneven"),
    )
    assert len(train(cfg)) == 3
    assert [(e["guard"], e["step"]) for e in events(tmp_path / "run")] == [("reward_std", 1)]
    lines = [json.loads(line) for line in (tmp_path / "run" / "suspicious.jsonl").read_text().splitlines()]
    assert [(line["step"], line["score"]) for line in lines] == [(1, 100.0), (2, 100.0), (3, 100.0)]
    command = events(tmp_path / "run")[0]["message"].split("python ")[1].split(" --output_dir")[0].split()
    from prepare_data import DataConfig, prepare
    from utils.config import parse_config

    report = prepare(parse_config(DataConfig, [*command[1:], "--output_dir", str(tmp_path / "clean")]))
    assert (
        report["dropped"]["excluded"] == len({line["id"] for line in lines}) == 3
        and report["rows_out"]["train"] == len(load_prompts(preferences, "train")) - 3
    )


def test_rolling_back_restores_everything_and_ends(tiny, preferences, tmp_path, monkeypatch):
    """Any move from the reference is too far: back to step 0, with other prompts and twice the kl_coef, then exit."""
    chosen = []
    order = train_ppo.prompt_order
    monkeypatch.setattr(train_ppo, "prompt_order", lambda *args: chosen.append(order(*args)) or chosen[-1])
    cfg = base_config(
        tiny,
        preferences,
        tmp_path / "run",
        save_every=1,
        keep_last=2,
        guards=GuardConfig(
            enabled=True, update_kl=None, grad_norm=None, reward_std=None, reference_kl=1e-9, max_rollbacks=2
        ),
    )
    with pytest.raises(RunStopped, match="last good checkpoint is .*step_000000"):
        train(cfg)
    found = events(tmp_path / "run")
    assert [e["guard"] for e in found] == [
        "reference_kl",
        "rollback",
        "reference_kl",
        "rollback",
        "reference_kl",
        "max_rollbacks",
    ]
    assert len(chosen) == 6 and chosen == [
        order(len(load_prompts(preferences, "train")), 8 * i, 8, 0) for i in range(6)
    ]  # never the same prompts again
    state = json.loads((tmp_path / "run" / "checkpoints" / "step_000000" / "state.json").read_text())["state"]
    assert state["rollbacks"] == 2 and state["kl_coef"] == pytest.approx(0.05 * 4) and state["lr_scale"] == 1.0
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000000"]
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""  # the steps were taken back
    started = build_roles(cfg, CPU).trainable()
    saved = load_file(tmp_path / "run" / "checkpoints" / "step_000000" / "trained.safetensors")
    assert all(torch.equal(saved[name], started[name]) for name in started)


def test_rolling_back_never_deletes_the_last_checkpoint_and_adds_up(tiny, preferences, tmp_path, monkeypatch):
    """KL is said to be too high in steps 7 and 6 of checkpoints 5 and 6: back to 5, and to 5 again, the oldest."""
    bad = iter([7, 6])
    crossing = [next(bad)]
    check = Guards.check_rollouts

    def check_rollouts(self, step, metrics, *rest):
        if crossing and step == crossing[0]:
            crossing[:] = [next(bad, None)]
            metrics = metrics | {"objective/kl_per_token": 9.0}
        return check(self, step, metrics, *rest)

    monkeypatch.setattr(Guards, "check_rollouts", check_rollouts)
    cfg = base_config(
        tiny,
        preferences,
        tmp_path / "run",
        save_every=1,
        total_steps=8,
        lr=1e-3,
        guards=GuardConfig(enabled=True, update_kl=None, grad_norm=None, reward_std=None, reference_kl=5.0),
    )
    steps = train(cfg)
    assert [e["action"] for e in events(tmp_path / "run") if e["guard"] == "rollback"] == [
        "going on from step 5",
        "going on from step 5",
    ]
    assert [s["step"] for s in steps] == list(range(1, 9))
    assert [round(s["objective/kl_coef"], 6) for s in steps] == [0.05] * 5 + [0.2] * 3  # doubled twice


def test_checkpoints_are_ordered_by_their_number(tmp_path):
    from utils.checkpoint import checkpoints

    for step in (999_999, 1_000_000, 20, 150_000):
        (tmp_path / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".step_000030.tmp").mkdir()
    assert [f.name for f in checkpoints(tmp_path)] == ["step_000020", "step_150000", "step_999999", "step_1000000"]


def test_only_damaged_checkpoints_are_no_new_start(tiny, preferences, tmp_path):
    cfg = base_config(tiny, preferences, tmp_path / "run", save_every=2, total_steps=2)
    train(cfg)
    (tmp_path / "run" / "checkpoints" / "step_000002" / "state.json").write_text("")
    with pytest.raises(UserError, match="no checkpoint under .* can be read"):
        train(dataclasses.replace(cfg, resume="auto", total_steps=3))
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2  # nothing was lost
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(UserError, match="no checkpoint under .* can be read"):
        load_checkpoint(tmp_path / "run", Accelerator(cpu=True), None, None, set(), before=1)


def test_without_a_limit_on_update_kl_no_forward_is_spent_on_it(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(train_ppo, "update_kl", lambda *args: pytest.fail("a forward for nothing"))
    cfg = ppo_config(tiny, train_batch_size=8, ppo_mini_batch_size=8, ppo_epochs=1)
    model = build_roles(cfg, CPU)
    rows = given_rollouts(cfg, model)
    optimizer = torch.optim.SGD(model.trainable().values(), lr=0.1)
    run = run_of(cfg, model, optimizer, guards(tmp_path, update_kl=None))
    update(run, rows, experience(rows, cfg, 0.1)[0])


def test_steps_that_were_all_skipped_can_be_gone_on_from(tiny, preferences, tmp_path):
    """No optimizer step is taken, so checkpoints hold no moments: the third in a row goes back, the next ends."""
    cfg = base_config(
        tiny,
        preferences,
        tmp_path / "run",
        save_every=1,
        total_steps=2,
        ppo_epochs=1,
        ppo_mini_batch_size=8,
        guards=GuardConfig(
            enabled=True, update_kl=None, grad_norm=1e-9, reward_std=None, max_skips=3, max_rollbacks=1
        ),
    )
    assert [s["step"] for s in train(cfg)] == [1, 2]
    with pytest.raises(RunStopped, match="is used up at step 5; the last good checkpoint is .*step_000004"):
        train(dataclasses.replace(cfg, resume="auto", total_steps=9))


def test_a_learning_rate_far_too_high_recovers(tiny, preferences, tmp_path):
    """1000 times the rate of the toy task. Roll-backs lower it until the run learns."""
    cfg = base_config(
        tiny,
        preferences,
        tmp_path / "run",
        lora=None,
        critic=CriticConfig("shared"),
        train_batch_size=64,
        ppo_mini_batch_size=32,
        ppo_micro_batch_size_per_gpu=32,
        log_prob_micro_batch_size_per_gpu=64,
        total_steps=25,
        lr=3.0,
        save_every=1,
        algorithm=AlgorithmConfig(kl_coef=0.0),
        guards=GuardConfig(enabled=True, update_kl=0.15, grad_norm=None, reward_std=None),
    )
    steps = train(cfg)
    rollbacks = [e for e in events(tmp_path / "run") if e["guard"] == "rollback"]
    assert 1 <= len(rollbacks) <= 3 and "going on from step 0" in rollbacks[0]["action"]
    assert [s["step"] for s in steps] == list(range(1, 26)) and steps[-1]["policy/lr"] == pytest.approx(
        3.0 * 0.1 ** len(rollbacks)
    )
    assert steps[-1]["objective/score_mean"] > steps[0]["objective/score_mean"] + 0.3


def test_exit_code_3(tiny, preferences, tmp_path):
    cfg = base_config(
        tiny,
        preferences,
        tmp_path / "run",
        save_every=1,
        guards=GuardConfig(enabled=True, reference_kl=1e-9, max_rollbacks=0, update_kl=None),
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(dataclasses.asdict(cfg)))
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, str(ROOT / "train_ppo.py"), "--config", str(tmp_path / "run.yaml")]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 3 and result.stderr.strip().splitlines()[-1].startswith(
        "stopped: guards.max_rollbacks 0 is used up at step 2"
    )
    finished = subprocess.run(
        [*command, "--resume", "auto", "--total_steps", "1"], capture_output=True, text=True, env=environment
    )
    assert finished.returncode == 0 and (tmp_path / "run" / "final" / "model.safetensors").exists()
    assert "Traceback" not in result.stderr


# --- checkpoints


def test_a_damaged_checkpoint_is_left_out(tiny, preferences, tmp_path, capsys):
    cfg = base_config(tiny, preferences, tmp_path / "run", save_every=1, keep_last=3)
    train(cfg)
    wanted = weights_of(tmp_path / "run")
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert [c.name for c in checkpoints] == ["step_000002", "step_000003", "step_000004"]
    with open(checkpoints[2] / "trained.safetensors", "r+b") as file:  # one byte of a weight
        file.seek(-5, 2)
        file.write(bytes([file.read(1)[0] ^ 1]))
    (checkpoints[1] / "state.json").write_text('{"state": {"st')
    capsys.readouterr()
    steps = train(dataclasses.replace(cfg, resume="auto"))
    out = capsys.readouterr().out
    assert (
        f"{checkpoints[2]} is damaged" in out
        and f"{checkpoints[1]} is damaged" in out
        and f"resumed from {checkpoints[0]}" in out
    )
    assert [s["step"] for s in steps] == [3, 4]
    again = weights_of(tmp_path / "run")
    assert all(torch.equal(wanted[f][n], again[f][n]) for f in wanted for n in wanted[f])


def test_a_checkpoint_that_lacks_something_names_it(tiny, preferences, tmp_path):
    cfg = base_config(tiny, preferences, tmp_path / "run", save_every=2, total_steps=2)
    train(cfg)
    file = tmp_path / "run" / "checkpoints" / "step_000002" / "state.json"
    content = json.loads(file.read_text())
    del content["state"]["kl_coef"], content["state"]["scores"]
    file.write_text(state_text(content["state"], weight_hashes(file.parent)))
    more = dataclasses.replace(cfg, total_steps=3, resume="auto")
    with pytest.raises(UserError, match="lacks kl_coef, scores; --resume partial goes on"):
        train(more)
    steps = train(dataclasses.replace(more, resume="partial"))
    assert [s["step"] for s in steps] == [3] and steps[0]["objective/kl_coef"] == cfg.algorithm.kl_coef


@pytest.mark.slow
def test_killed_at_any_moment_a_run_ends_as_if_it_had_not_been(tiny, preferences, tmp_path):
    """kill -9 at 20 random moments: between two steps, within one, while a checkpoint is written; resumed ."""
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
    }  # sums depend on the number of threads

    def command(folder):
        cfg = base_config(
            tiny,
            preferences,
            tmp_path / folder,
            total_steps=100,
            save_every=1,
            lr=1e-3,
            rollout=RolloutConfig(n=2),
            resume="auto",
            algorithm=AlgorithmConfig(kl_coef=0.02),
        )
        (tmp_path / f"{folder}.yaml").write_text(yaml.safe_dump(dataclasses.asdict(cfg)))
        return [sys.executable, str(ROOT / "train_ppo.py"), "--config", str(tmp_path / f"{folder}.yaml")]

    subprocess.run(command("straight"), env=environment, check=True, capture_output=True)
    metrics, rng = tmp_path / "killed" / "metrics.jsonl", random.Random(0)

    def written():
        return metrics.read_bytes() if metrics.exists() else b""

    for _ in range(20):
        before, process = (
            written(),
            subprocess.Popen(command("killed"), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL),
        )
        while process.poll() is None and written() == before:
            time.sleep(0.005)  # until this process has done a step
        time.sleep(rng.uniform(0, 0.6))
        assert process.poll() is None, "the run ended before it was killed often enough"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert subprocess.run(command("killed"), env=environment, capture_output=True).returncode == 0
    a, b = weights_of(tmp_path / "straight"), weights_of(tmp_path / "killed")
    assert a.keys() == b.keys() and all(torch.equal(a[f][n], b[f][n]) for f in a for n in a[f])
    lines = [
        [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("straight", "killed")
    ]
    timing = ("time/", "memory/", "rollout/tokens_per")
    cleaned = [[{k: v for k, v in line.items() if not k.startswith(timing)} for line in run] for run in lines]
    assert cleaned[0] == cleaned[1] and len(cleaned[0]) == 100

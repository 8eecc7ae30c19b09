"""A run when things go wrong: uneven ranks, kills, flipped bits, scores and gradients that are no numbers."""

import dataclasses
import json
import math
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
import torch
from accelerate import Accelerator
from helpers import CPU, ROOT, base_config, close, given_rollouts, launch, ppo_config, run_of, stir, tiny_llama
from test_loader import reward_config, write_pairs

import train_ppo
import train_reward
from train_ppo import (
    AlgorithmConfig,
    CriticConfig,
    KLControl,
    RolloutConfig,
    build_roles,
    control_kl,
    count_steps,
    experience,
    micro_batch_loss,
    micro_batches,
    new_state,
    sample,
    train,
)
from utils import checkpoint, contracts
from utils.checkpoint import (
    check_same_inputs,
    checkpoints,
    clean_checkpoints,
    fingerprint,
    load_checkpoint,
    read_checkpoint,
    rewrite_state,
    save_checkpoint,
)
from utils.config import RunStopped, UserError
from utils.data import load_prompts
from utils.guards import GuardConfig, Guards
from utils.rewards import RewardConfig
from utils.tracking import Metrics, keep_lines, read_metrics

# --- any number of ranks


@pytest.mark.parametrize("world", [1, 2, 3, 5, 6, 7, 8, 16, 64])
def test_the_default_sizes_fit_any_number_of_ranks(tiny, world):
    cfg = ppo_config(tiny, total_epochs=1.5)  # 64 responses to 64 prompts a step
    assert count_steps(cfg, 640, world) == 15
    assert count_steps(dataclasses.replace(cfg, rollout=RolloutConfig(n=4)), 640, world) == 60
    assert count_steps(dataclasses.replace(cfg, total_epochs=None, total_steps=7), 640, world) == 7


def test_more_ranks_than_responses_are_refused(tiny):
    with pytest.raises(UserError, match="train_batch_size 64 is below the 65 processes: launch fewer"):
        count_steps(ppo_config(tiny, total_steps=1), 640, 65)


def of_rank(run, rank, world):
    run.accelerator = SimpleNamespace(process_index=rank, num_processes=world, device=CPU)
    return run


@pytest.mark.parametrize("world", [1, 2, 3, 5, 6, 7, 8])
def test_ranks_sample_equally_many_and_together_the_batch(tiny, monkeypatch, world):
    monkeypatch.setattr(train_ppo, "respond", lambda run, rows, *rest: rows)
    cfg = ppo_config(tiny, train_batch_size=8, rollout=RolloutConfig(n=2))
    run = run_of(cfg, None, None)
    run.rows, run.prompts = [{}] * 20, [[5]] * 20
    shares = [sample(of_rank(run, rank, world)) for rank in range(world)]
    assert {len(share) for share in shares} == {math.ceil(8 / world)}
    assert sum(shares, [])[:8] == sample(of_rank(run, 0, 1))


@pytest.mark.parametrize("world, micro", [(2, 2), (3, 1), (3, 2), (5, 4), (6, 1), (8, 3)])
def test_uneven_shares_add_up_to_the_gradient_of_one_rank(tiny, world, micro):
    """All ranks run equally many forwards; shares of tokens add up to 1, and gradients to that of one rank."""
    cfg = ppo_config(tiny, ppo_micro_batch_size_per_gpu=micro, algorithm=AlgorithmConfig(entropy_coef=0.1))
    model = build_roles(cfg, CPU)
    stir(model, 0.1)
    rows = given_rollouts(cfg, model)
    tensors, _ = experience(rows, cfg, 0.1)
    mini, results = [6, 0, 3, 2, 7, 1], []
    for ranks in (1, world):
        model.zero_grad()
        forwards, total = set(), 0.0
        for rank in range(ranks):
            run = of_rank(run_of(cfg, model, None), rank, ranks)
            parts = list(micro_batches(run, mini, rows, tensors))
            assert [last for *_, last in parts] == [False] * (len(parts) - 1) + [True]
            forwards.add(len(parts))
            for batch, old, share, _ in parts:
                (micro_batch_loss(run, batch, old)[0] * share).backward()
                total += share
        assert len(forwards) == 1 and total == pytest.approx(1)
        results.append({name: p.grad.clone() for name, p in model.trainable().items()})
    for name, gradient in results[0].items():
        close(results[1][name], gradient)


@pytest.mark.slow
def test_three_ranks_give_the_update_of_one(tiny, tmp_path):
    """Mini-batches of 4 responses and of 7 pairs, plain and under ZeRO-3."""
    outputs = []
    for config, processes in (("cpu.yaml", 1), ("multi_cpu.yaml", 3), ("zero3.yaml", 3)):
        launch(config, ROOT / "tests" / "update_worker.py", tiny, tmp_path / config, processes=processes)
        outputs.append(torch.load(tmp_path / config, weights_only=True))
    assert [output["world"] for output in outputs] == [1, 3, 3]
    for case, wanted in outputs[0]["results"].items():
        for other in outputs[1:]:
            for name, weight in wanted["weights"].items():
                close(other["results"][case]["weights"][name], weight)
            assert other["results"][case]["metrics"] == pytest.approx(wanted["metrics"], rel=1e-4, abs=1e-5), case


# --- checkpoints


def small_run(folder, steps=1, keep_last=2):
    """A module, its optimizer and checkpoints of the steps 1 to `steps`."""
    torch.manual_seed(0)
    module, accelerator = torch.nn.Linear(3, 2), Accelerator(cpu=True)
    optimizer = SimpleNamespace(optimizer=torch.optim.AdamW(module.parameters()))
    module(torch.ones(1, 3)).sum().backward()
    for step in range(1, steps + 1):
        optimizer.optimizer.step()
        save_checkpoint(
            folder, accelerator, module, optimizer, {"step": step, "kl_coef": 1e-05, "x": [0.1, None]}, keep_last
        )
    return module, accelerator, optimizer


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_any_flipped_bit_of_a_checkpoint_is_seen(tmp_path, capsys):
    small_run(tmp_path)
    (folder,) = checkpoints(tmp_path)
    assert read_checkpoint(folder) == {"step": 1, "kl_coef": 1e-05, "x": [0.1, None]}
    files = {file: file.read_bytes() for file in folder.iterdir()}
    for file, content in files.items():
        bits = (
            range(8 * len(content)) if file.suffix == ".json" else random.Random(0).sample(range(8 * len(content)), 50)
        )
        for bit in bits:
            broken = bytearray(content)
            broken[bit // 8] ^= 1 << bit % 8
            file.write_bytes(broken)
            assert read_checkpoint(folder) is None, (file.name, bit)
        file.write_bytes(content)
    assert read_checkpoint(folder)["step"] == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content | {"sha256": {}},
        lambda content: {"state": content["state"]},
        lambda content: content | {"sha256": content["sha256"] | {"optimizer.safetensors": "0" * 64}},
        lambda content: content | {"state": content["state"] | {"kl_coef": 0.5}},
        lambda content: content["state"],
        lambda content: [content],
    ],
)
def test_a_state_without_its_hash_is_damaged(tmp_path, change):
    small_run(tmp_path)
    file = checkpoints(tmp_path)[0] / "state.json"
    file.write_text(json.dumps(change(json.loads(file.read_text())), indent=2) + "\n")
    assert read_checkpoint(file.parent) is None


def test_a_rewritten_state_is_whole(tmp_path):
    _, accelerator, _ = small_run(tmp_path)
    rewrite_state(tmp_path, {"step": 1, "draw": 4}, accelerator)
    assert read_checkpoint(checkpoints(tmp_path)[0]) == {"step": 1, "draw": 4}


@pytest.mark.parametrize("call", [1, 2, 3])
def test_killed_while_an_old_checkpoint_is_deleted_nothing_stays(tmp_path, monkeypatch, call):
    """The n-th deletion removes one file and dies; the next start and the next save leave what they always leave."""
    module, accelerator, optimizer = small_run(tmp_path, steps=2)
    count, rmtree = [], shutil.rmtree

    def dies(path, **options):
        if Path(path).exists():
            count.append(path)
        if len(count) == call:
            next(Path(path).iterdir()).unlink()
            raise KeyboardInterrupt
        rmtree(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "rmtree", dies)
        with pytest.raises(KeyboardInterrupt):
            for step in range(3, 8):
                save_checkpoint(tmp_path, accelerator, module, optimizer, {"step": step}, 2)
    newest = max(path for path in checkpoints(tmp_path))
    assert all(read_checkpoint(folder) for folder in checkpoints(tmp_path))  # no half one under a whole one's name
    state = load_checkpoint(tmp_path, accelerator, module, optimizer, {"step"})
    assert f"step_{state['step']:06d}" == newest.name
    clean_checkpoints(tmp_path, accelerator, state["step"], 2)
    assert names(tmp_path) == [f"step_{step:06d}" for step in (state["step"] - 1, state["step"])]


def test_a_start_keeps_later_checkpoints_and_a_save_removes_them(tmp_path):
    module, accelerator, optimizer = small_run(tmp_path, steps=4, keep_last=4)
    (tmp_path / "checkpoints" / ".step_000001.tmp").mkdir()
    clean_checkpoints(tmp_path, accelerator, 3, 2)
    assert names(tmp_path) == ["step_000002", "step_000003", "step_000004"]
    save_checkpoint(tmp_path, accelerator, module, optimizer, {"step": 3}, 2)
    assert names(tmp_path) == ["step_000002", "step_000003"]


# --- what a run is resumed with


def test_a_fingerprint_sees_every_kind_of_change(tmp_path):
    def prints(**files):
        shutil.rmtree(tmp_path / "m", ignore_errors=True)
        (tmp_path / "m").mkdir()
        for name, content in files.items():
            (tmp_path / "m" / name.replace("_", ".")).write_bytes(content)
        return fingerprint(str(tmp_path / "m"))

    first = prints(a_parquet=b"x" * 5000, b_safetensors=b"y" * 3_000_000)
    assert first == prints(a_parquet=b"x" * 5000, b_safetensors=b"y" * 3_000_000, report_json=b"another time")
    changed = [
        prints(a_parquet=b"x" * 4999 + b"z", b_safetensors=b"y" * 3_000_000),
        prints(a_parquet=b"x" * 5000, b_safetensors=b"y" * 3_000_001),
        prints(a_parquet=b"x" * 5000, b_safetensors=b"z" + b"y" * 2_999_999),
        prints(a_parquet=b"x" * 5000, b_safetensors=b"y" * 2_999_999 + b"z"),
        prints(c_parquet=b"x" * 5000, b_safetensors=b"y" * 3_000_000),
        prints(a_parquet=b"x" * 5000),
        fingerprint("org/name"),
        fingerprint("org/other"),
    ]
    assert len({first, *changed}) == 9


def test_changed_inputs_are_named(tmp_path):
    now = {"inputs": {"data": "1", "model.path": "2"}}
    check_same_inputs(now, now, tmp_path)
    check_same_inputs({}, now, tmp_path)  # --resume partial
    with pytest.raises(UserError, match="the files of model.path are not those that the run was started with"):
        check_same_inputs({"inputs": {"data": "1", "model.path": "3"}}, now, tmp_path)


def test_resume_takes_other_sizes_and_rates_and_refuses_other_inputs(tiny, preferences, tmp_path, capsys):
    model, data = tmp_path / "model", tmp_path / "data"
    shutil.copytree(tiny, model)
    shutil.copytree(preferences, data)
    cfg = base_config(str(model), str(data), tmp_path / "run", save_every=1, total_steps=2)
    train(cfg)
    more = dataclasses.replace(cfg, resume="auto", total_steps=3)
    with pytest.raises(UserError, match="is at step 2, beyond 1; set total_steps to 2 or more"):
        train(dataclasses.replace(more, total_steps=1))
    tiny_llama(seed=1).save_pretrained(model)
    with pytest.raises(UserError, match="the files of model.path are not those"):
        train(more)
    shutil.copytree(tiny, model, dirs_exist_ok=True)
    file = sorted(data.glob("train-*"))[0]
    content = file.read_bytes()
    table = pyarrow.parquet.read_table(file)
    answers = ["yes!", *table["chosen"].to_pylist()[1:]]
    pyarrow.parquet.write_table(table.set_column(3, "chosen", [answers]), file)
    with pytest.raises(UserError, match="the files of data are not those"):
        train(more)
    file.write_bytes(content)
    other = dict(
        ppo_micro_batch_size_per_gpu=3,
        log_prob_micro_batch_size_per_gpu=5,
        rollout=RolloutConfig(micro_batch_size_per_gpu=3),
        lr=1e-4,
        guards=GuardConfig(enabled=True, update_kl=None),
    )
    (step,) = train(dataclasses.replace(more, **other))
    assert (step["step"], step["policy/lr"]) == (3, 1e-4)
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "lr: 0.0001" in config and "enabled: true" in config


# --- the logs


def test_logs_hold_no_broken_and_no_doubled_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "a"')
    (tmp_path / "samples.jsonl").write_bytes('{"step": 2, "response": "ü"}\n{"step": 3, "response": "ü'.encode()[:-1])
    Metrics(tmp_path, Accelerator(cpu=True), 2)
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2}]
    assert (tmp_path / "samples.jsonl").read_text() == '{"step": 2, "response": "ü"}\n'
    (tmp_path / "events.jsonl").write_bytes(b'{"draw": 3, "step": 3}\n{"draw": 4, "step": 2}\n7\n{"draw"')
    (tmp_path / "suspicious.jsonl").write_bytes('{"draw": 3, "response": "ü"}\n{"draw": 4}\n{"draw": "ü'.encode()[:-1])
    Guards(GuardConfig(), tmp_path, {"draw": 3}, True).forget_later()
    assert (tmp_path / "events.jsonl").read_text() == '{"draw": 3, "step": 3}\n'
    assert (tmp_path / "suspicious.jsonl").read_text() == '{"draw": 3, "response": "ü"}\n'
    (tmp_path / "empty.jsonl").write_bytes(b"")
    keep_lines(tmp_path / "empty.jsonl", "step", 3)
    assert (tmp_path / "empty.jsonl").read_bytes() == b""


def test_a_resumed_run_writes_each_event_once(tiny, preferences, tmp_path):
    """Killed after step 3, whose checkpoint is lost: its outliers and the event of step 1 stand there once."""
    cfg = base_config(
        tiny,
        preferences,
        tmp_path / "run",
        save_every=1,
        total_steps=3,
        lr=1e-5,
        guards=GuardConfig(enabled=True, update_kl=None, grad_norm=None),
        reward_model=RewardConfig(style="function", function="test_guards:uneven"),
    )
    train(cfg)

    def lines(name):
        return (tmp_path / "run" / name).read_text().splitlines()

    wanted = [(json.loads(line)["step"], json.loads(line)["id"]) for line in lines("suspicious.jsonl")]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000003")
    with open(tmp_path / "run" / "events.jsonl", "a") as file:
        file.write('{"step": 3, "draw": 3, "gu')
    train(dataclasses.replace(cfg, resume="auto"))
    assert [(json.loads(line)["step"], json.loads(line)["id"]) for line in lines("suspicious.jsonl")] == wanted
    assert [json.loads(line)["guard"] for line in lines("events.jsonl")] == ["reward_std"]
    assert [json.loads(line)["step"] for line in lines("metrics.jsonl")] == [1, 2, 3]


# --- scores and outputs that are no numbers

BAD = {}


def bad_once(prompts, responses, ids=None, **columns):
    """Scores of 0, and BAD["value"] for the first response of the calls in BAD["calls"]."""
    BAD["seen"] += 1
    return [BAD["value"] if i == 0 and BAD["seen"] in BAD["calls"] else float(i % 2) for i in range(len(responses))]


def bad_config(tiny, preferences, folder, value, calls, **changes):
    BAD.update(value=value, calls=calls, seen=0)
    reward = RewardConfig(style="function", function="test_robust:bad_once")
    return base_config(tiny, preferences, folder, reward_model=reward, save_every=1, lr=1e-5, **changes)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300, -1e30])
def test_a_bad_score_is_named_and_the_run_can_go_on(tiny, preferences, tmp_path, value):
    cfg = bad_config(tiny, preferences, tmp_path / "run", value, {2}, total_steps=2)
    chosen = train_ppo.prompt_order(len(load_prompts(preferences, "train")), 8, 8, 0)
    row = load_prompts(preferences, "train")[chosen[0]]["id"]
    with pytest.raises(UserError, match=f"step 2: the score of row {row} is {re.escape(f'{value:g}')}, .*guards"):
        train(cfg)
    BAD["seen"] = 1  # the same draw again
    guarded = dataclasses.replace(cfg, resume="auto", guards=GuardConfig(enabled=True, update_kl=None))
    (step,) = train(guarded)
    (event,) = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert (event["step"], event["guard"], event["action"]) == (2, "score", "going on with other prompts")
    assert row in event["message"] and step["step"] == 2 and math.isfinite(step["objective/score_mean"])
    assert read_checkpoint(tmp_path / "run" / "checkpoints" / "step_000002")["draw"] == 3


def test_scores_that_stay_bad_end_the_run(tiny, preferences, tmp_path):
    guards = GuardConfig(enabled=True, update_kl=None, max_skips=2)
    cfg = bad_config(tiny, preferences, tmp_path / "run", math.nan, {2, 3}, total_steps=3, guards=guards)
    with pytest.raises(RunStopped, match="step 2: the score of row .* is nan.*2 steps in a row; mend the reward"):
        train(cfg)
    assert read_checkpoint(checkpoints(tmp_path / "run")[-1])["step"] == 1


@pytest.mark.parametrize("critic_lr", [None, 1e-3])
def test_an_absurd_learning_rate_breaks_no_checkpoint(tiny, preferences, tmp_path, critic_lr):
    """One update a step, so that nothing but the look after it sees what it did."""
    sizes = dict(ppo_epochs=1, ppo_mini_batch_size=8, save_every=1, total_steps=2)
    cfg = base_config(tiny, preferences, tmp_path / "run", critic=CriticConfig(lr=critic_lr), **sizes)
    train(dataclasses.replace(cfg, total_steps=1))
    worse = dataclasses.replace(cfg, resume="auto", lr=1e20)
    with pytest.raises(UserError, match="step 2: after the update the outputs .* are not finite.*lower lr"):
        train(worse)
    assert read_checkpoint(checkpoints(tmp_path / "run")[-1])["step"] == 1
    assert [step["step"] for step in train(dataclasses.replace(worse, lr=1e-4))] == [2]


def test_guards_bring_an_absurd_learning_rate_down_or_stop(tiny, preferences, tmp_path):
    sizes = dict(ppo_epochs=1, ppo_mini_batch_size=8, save_every=1, total_steps=2)
    guards = GuardConfig(enabled=True, update_kl=None, grad_norm=None, max_rollbacks=1, reward_std=None)
    cfg = base_config(tiny, preferences, tmp_path / "run", lr=1e20, guards=guards, **sizes)
    with pytest.raises(RunStopped, match="max_rollbacks 1 is used up at step 1; the last good checkpoint is .*000000"):
        train(cfg)
    found = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["guard"] for event in found] == ["outputs", "rollback", "outputs", "max_rollbacks"]
    steps = train(dataclasses.replace(cfg, resume="auto", lr=1e-4))  # the new rate, and not a tenth of it
    assert [(step["step"], step["policy/lr"]) for step in steps] == [(1, 1e-4), (2, 1e-4)]
    found = [json.loads(line)["guard"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert found == ["outputs", "rollback", "outputs", "max_rollbacks"]  # kept, for the run goes on after them


def test_a_policy_without_finite_logits_is_one_line(tiny, preferences, tmp_path, monkeypatch):
    model = tiny_llama()
    model.model.norm.weight.data.fill_(math.nan)
    shutil.copytree(tiny, tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match="model: the policy's logits are not finite; its weights are damaged"):
        train(base_config(str(tmp_path / "model"), preferences, tmp_path / "run"))
    monkeypatch.setattr(contracts, "check_start", lambda *rest: {})
    with pytest.raises(UserError, match="step 1: the policy's logits are not finite.*lower lr"):
        train(base_config(str(tmp_path / "model"), preferences, tmp_path / "run"))


# --- the reward stage


@pytest.mark.parametrize("kind, message", [("loss", "the loss is nan"), ("gradient", "the gradient is not finite")])
def test_stage_2_stops_before_a_bad_update(tiny, preferences, tmp_path, monkeypatch, kind, message):
    loss, calls = train_reward.bradley_terry_loss, []

    def breaks(chosen, rejected, margin=None):
        value, metrics = loss(chosen, rejected, margin)
        calls.extend([] if margin is None else [1])  # an evaluation has no margins
        if margin is not None and len(calls) == 3:
            value = value * math.nan if kind == "loss" else value + (chosen * 0).sqrt().sum()  # 0, slope without end
        return value, metrics

    cfg = reward_config(tiny, preferences, tmp_path / "run", train_batch_size=4, save_every=1, max_pairs=16)
    monkeypatch.setattr(train_reward, "bradley_terry_loss", breaks)
    with pytest.raises(UserError, match=f"{message}; rows ([0-9a-z-]+, ){{3}}[0-9a-z-]+; lower lr"):
        train_reward.train(cfg)
    assert not (tmp_path / "run" / "final").exists()
    assert read_checkpoint(checkpoints(tmp_path / "run")[-1])["step"] == 2
    assert [step["step"] for step in read_metrics(tmp_path / "run")] == [1, 2]
    monkeypatch.setattr(train_reward, "bradley_terry_loss", loss)
    result = train_reward.train(dataclasses.replace(cfg, resume="auto", lr=1e-4))
    assert math.isfinite(result["loss"]) and (tmp_path / "run" / "final").is_dir()


@pytest.mark.parametrize("batch, save_every", [(8, 0), (8, 1), (4, 1)])
def test_stage_2_never_saves_what_gives_no_numbers(tiny, preferences, tmp_path, batch, save_every):
    """lr 1e30 in the only step, or in the first of two: in final/ and in checkpoints stands nothing."""
    sizes = dict(train_batch_size=batch, max_pairs=8, save_every=save_every)
    cfg = reward_config(tiny, preferences, tmp_path / "run", lr=1e30, **sizes)
    with pytest.raises(UserError, match="the trained model scores it nan and nan, so it is not saved; lower lr"):
        train_reward.train(cfg)
    assert not (tmp_path / "run" / "final").exists() and checkpoints(tmp_path / "run") == []


def test_equal_pairs_are_told_before_anything_is_written(tiny, tmp_path):
    write_pairs(tmp_path, [True] * 7)
    with pytest.raises(UserError, match="the tokens of all 7 training pairs are equal, so none is left"):
        train_reward.train(reward_config(tiny, tmp_path, tmp_path / "run", epochs=48))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "margins, given, wanted",
    [
        ([1.0, 3.0, None], None, 1.0),
        ([100.0, 5.0], None, 0.03),
        ([-60.0, 5.0], None, 0.05),
        ([None, None], None, 1.0),
        ([100.0], 1.0, 1.0),
        ([100.0], 0.0, 0.0),
    ],
)
def test_margins_of_ratings_are_scaled_down(tiny, tmp_path, margins, given, wanted):
    from utils.data import COLUMNS

    columns = {name: [""] * len(margins) for name in COLUMNS["preference"]} | {"margin": margins}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "train-0.parquet")
    cfg = reward_config(tiny, tmp_path, tmp_path / "run", margin_scale=given)
    assert train_reward.margin_factor(cfg) == pytest.approx(wanted)


def test_the_interval_of_dependent_pairs_is_that_of_their_prompts(tiny, monkeypatch):
    """Ten prompts with four pairs each that agree, eight prompts right: Wilson's interval of 8 of 10."""
    right = torch.tensor([1.0] * 32 + [0.0] * 8)
    pairs = [{"id": str(i), "prompt": (i // 4,)} for i in range(40)]
    monkeypatch.setattr(train_reward, "score_pairs", lambda *args: (right, torch.full((40,), 0.5)))
    result = train_reward.evaluate_pairs(None, pairs, 0, 1, None)
    assert (result["accuracy_ci95"], result["n"]) == ([0.4902, 0.9433], 40)
    alone = [pair | {"prompt": (i,)} for i, pair in enumerate(pairs)]
    assert train_reward.evaluate_pairs(None, alone, 0, 1, None)["accuracy_ci95"] == train_reward.wilson_interval(
        0.8, 40
    )


# --- guards that fire when they should


def log_ratio_rollouts(generator, kl, count):
    """Responses whose summed log ratio is normal with mean kl and variance 2 kl, as that of a small move is."""
    sums = (kl + math.sqrt(2 * kl) * torch.randn(count, generator=generator)).tolist()
    return [SimpleNamespace(logprobs=[value, 0.0], ref_logprobs=[0.0, 0.0]) for value in sums]


@pytest.mark.parametrize("batch", [8, 64])
@pytest.mark.parametrize("kl", [0.01, 0.05, 0.5])
def test_a_small_kl_is_not_called_negative_by_chance(tmp_path, batch, kl):
    guard = Guards(GuardConfig(), tmp_path, new_state(ppo_config("m")), True)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 2001):
        rows = log_ratio_rollouts(generator, kl, batch)
        guard.check_rollouts(step, {"objective/kl": sum(r.logprobs[0] for r in rows) / batch}, rows, [], "d")
    assert not (tmp_path / "events.jsonl").exists()


def test_a_kl_that_is_negative_for_a_reason_is_still_told(tmp_path):
    """Sampling at half the temperature: each response is some nats likelier than the policy has it."""
    guard = Guards(GuardConfig(), tmp_path, new_state(ppo_config("m")), True)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 6):
        rows = log_ratio_rollouts(generator, 0.3, 8)
        rows = [SimpleNamespace(logprobs=[r.logprobs[0] - 2.0], ref_logprobs=[0.0]) for r in rows]
        guard.check_rollouts(step, {"objective/kl": sum(r.logprobs[0] for r in rows) / 8}, rows, [], "d")
    assert json.loads((tmp_path / "events.jsonl").read_text())["guard"] == "negative_kl"


@pytest.mark.parametrize("ratio", [12.0, 30.0, -12.0])
def test_one_token_does_not_rule_the_measured_kl(tiny, ratio):
    """A token counts 10 nats at most, whichever of the two has it for far likelier."""
    rows = [
        train_ppo.Rollout(i, [5], [6] * 100, "x", True, 0.0, [-1.0] * 100, [-1.0] * 100, [0.3] * 100) for i in range(4)
    ]
    rows[0].ref_logprobs = [-1.0 + ratio] + [-1.0] * 99
    cfg = ppo_config(tiny, rollout=RolloutConfig(n=2), algorithm=AlgorithmConfig("rloo"))
    _, metrics = experience(rows, cfg, 0.1)
    assert metrics["objective/kl_per_token"] == pytest.approx(10.0 / 400)
    assert metrics["objective/kl"] == pytest.approx(-ratio / 4)


@pytest.mark.parametrize("outlier", [0.5, 127.0, 1e6])
def test_one_step_does_not_rule_the_moving_average(tiny, outlier):
    """At half the target, a step far above it raises the coefficient twice; without a bound it would for 12 steps."""
    control = KLControl("moving_average", target_kl=0.1, horizon=1000)
    cfg = ppo_config(tiny, algorithm=AlgorithmConfig(kl_ctrl=control))
    state, above = new_state(cfg), []
    for kl in (0.05, outlier, *[0.05] * 10):
        control_kl(cfg, state, kl)
        above.append(state["kl_average"] > 0.1)
    assert above == [False, True, True, *[False] * 9]


def test_scores_of_a_reward_model_do_not_count_as_scattered():
    """Their deviation is 1 on held-out data; that of a share of right answers is at most one half."""
    assert GuardConfig().reward_std == 2.0

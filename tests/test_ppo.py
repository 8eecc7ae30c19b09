"""The PPO stage as a whole: invariances of the update, resume, ranks, and that it learns."""

import dataclasses
import json
import shutil

import pytest
import torch
import yaml
from accelerate import Accelerator
from helpers import (
    CPU,
    ROOT,
    base_config,
    byte_tokenizer,
    close,
    given_rollouts,
    launch,
    ppo_config,
    rollouts,
    run_of,
    stir,
    tiny_llama,
    weights_of,
)

import train_ppo
from train_ppo import (
    AlgorithmConfig,
    CriticConfig,
    KLControl,
    RolloutConfig,
    ScoreConfig,
    add_logprobs_and_values,
    build_roles,
    experience,
    mini_batch_step,
    prompt_order,
    train,
    update,
)
from train_reward import RewardTrainConfig, build_model, encode_pairs, micro_batches, optimizer_step
from train_reward import train as train_reward_model
from utils.config import LoraOptions, ModelConfig, UserError
from utils.data import load_rows
from utils.guards import GuardConfig
from utils.rewards import RewardConfig
from utils.tracking import read_metrics


def letters_a(prompts, responses, **columns):
    """Share of the response that is lower-case letters a to m."""
    return [sum("a" <= c <= "m" for c in r) / max(1, len(r)) for r in responses]


def constant(prompts, responses, **columns):
    return [100.0] * len(responses)


def updated(cfg, pad_id=0):
    """Trained weights and metrics after one update on the same rollouts."""
    torch.manual_seed(0)
    model = build_roles(cfg, CPU)
    stir(model, 0.1)
    rows = given_rollouts(cfg, model)
    optimizer = torch.optim.SGD([{"params": parameters} for parameters in model.groups().values()], lr=0.1)
    tensors, values = experience(rows, cfg, 0.1)
    metrics, _ = update(run_of(cfg, model, optimizer, pad_id=pad_id), rows, tensors)
    return {n: p.detach().clone() for n, p in model.trainable().items()}, metrics | values


VARIANTS = {
    "adapter": {},
    "shared": dict(critic=CriticConfig("shared")),
    "separate": dict(
        critic=CriticConfig("separate"), algorithm=AlgorithmConfig(entropy_coef=0.1, whiten_rewards=True)
    ),
    "full": dict(lora=None, critic=CriticConfig("shared"), algorithm=AlgorithmConfig(entropy_coef=0.1)),
    "full separate": dict(lora=None, critic=CriticConfig("separate")),
    "rloo": dict(
        rollout=RolloutConfig(n=2),
        algorithm=AlgorithmConfig("rloo", kl_in="loss", kl_estimator="k2", entropy_coef=0.1),
    ),
    "grpo": dict(rollout=RolloutConfig(n=4), algorithm=AlgorithmConfig("grpo", kl_in="loss", clip_ratio_c=3.0)),
    "full grpo": dict(
        lora=None,
        rollout=RolloutConfig(n=4, temperature=0.7),
        algorithm=AlgorithmConfig("grpo", kl_estimator="k3", whiten_advantages=True),
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_update_does_not_depend_on_micro_batch_size_or_padding_id(tiny, variant):
    cfg = ppo_config(tiny, train_batch_size=8, ppo_mini_batch_size=4, **VARIANTS[variant])
    weights, metrics = updated(dataclasses.replace(cfg, ppo_micro_batch_size_per_gpu=4))
    for micro, pad_id in ((1, 0), (2, 55)):
        other, other_metrics = updated(dataclasses.replace(cfg, ppo_micro_batch_size_per_gpu=micro), pad_id)
        for name in weights:
            close(other[name], weights[name])
        for name in metrics:
            assert other_metrics[name] == pytest.approx(metrics[name], abs=1e-5), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_before_the_first_update_ratio_is_one_and_kl_zero(tiny, variant):
    """One mini-batch, one epoch: what the update sees is what the rollout stored."""
    cfg = ppo_config(
        tiny,
        train_batch_size=8,
        ppo_mini_batch_size=8,
        ppo_epochs=1,
        ppo_micro_batch_size_per_gpu=2,
        **VARIANTS[variant],
    )
    model, rows = build_roles(cfg, CPU), rollouts((2, 5, 12, 7, 1, 9, 3, 3))
    add_logprobs_and_values(rows, model, cfg, 0, CPU)
    for i, row in enumerate(rows):
        row.score = float(i)
    tensors, values = experience(rows, cfg, 0.1)
    assert values["objective/kl"] == pytest.approx(0, abs=1e-5) and values["objective/kl_per_token"] == pytest.approx(
        0, abs=1e-5
    )
    optimizer = torch.optim.SGD(model.trainable().values(), lr=0.1)
    metrics, _ = update(run_of(cfg, model, optimizer), rows, tensors)
    assert metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-5) and metrics["policy/approx_kl"] == pytest.approx(
        0, abs=1e-5
    )
    assert metrics["policy/clip_fraction"] == 0 and metrics.get("policy/kl_loss", 0) == pytest.approx(0, abs=1e-6)
    assert ("critic/loss" in metrics) == (cfg.algorithm.adv_estimator == "gae")


def test_kl_in_the_loss_pulls_towards_the_reference(tiny):
    """With equal scores only the KL term acts: a stirred policy comes nearer to the reference, with each estimator."""
    for estimator in ("k2", "k3"):
        cfg = ppo_config(
            tiny,
            train_batch_size=8,
            ppo_mini_batch_size=8,
            ppo_epochs=30,
            rollout=RolloutConfig(n=4),
            algorithm=AlgorithmConfig("grpo", kl_in="loss", kl_estimator=estimator),
        )
        model = build_roles(cfg, CPU)
        stir(model, 0.05)
        rows = rollouts((2, 5, 12, 7, 1, 9, 3, 3))
        add_logprobs_and_values(rows, model, cfg, 0, CPU)
        tensors, before = experience(rows, cfg, 0.1)
        assert not tensors["advantages"].any()
        run = run_of(cfg, model, torch.optim.SGD(model.trainable().values(), lr=0.05))
        run.state["kl_coef"] = 1.0
        update(run, rows, tensors)
        add_logprobs_and_values(rows, model, cfg, 0, CPU)
        after = experience(rows, cfg, 0.1)[1]
        assert after["objective/kl_per_token"] < 0.5 * before["objective/kl_per_token"], estimator


def test_group_advantages_stand_on_every_token(tiny):
    """Two prompts with two responses, scores 1 and 3, 5 and 5, no KL: rloo gives -2, 2, 0, 0 and grpo -1, 1, 0, 0."""
    rows = rollouts((2, 3, 1, 4))
    for row, value in zip(rows, (1.0, 3.0, 5.0, 5.0)):
        row.score, row.logprobs, row.ref_logprobs = (
            value,
            [-1.0] * len(row.response_ids),
            [-1.0] * len(row.response_ids),
        )
        row.entropy = row.logprobs
    for estimator, wanted in (("rloo", [-2.0, 2.0, 0.0, 0.0]), ("grpo", [-1.0, 1.0, 0.0, 0.0])):
        cfg = ppo_config(tiny, rollout=RolloutConfig(n=2), algorithm=AlgorithmConfig(estimator))
        tensors, metrics = experience(rows, cfg, 0.1)
        close(tensors["advantages"], torch.where(tensors["mask"], torch.tensor(wanted)[:, None], 0.0), 1e-4)
        assert metrics["objective/return_mean"] == pytest.approx((2 * 1 + 3 * 3 + 5 * 5) / 10)


@pytest.mark.parametrize("micro", [1, 2])
def test_token_mean_over_the_mini_batch(tiny, micro):
    """Replies of 2 and 6 tokens with advantages -1 and 0 at ratio 1: the loss is 2 / 8, whatever the micro-batches."""
    cfg = ppo_config(
        tiny,
        train_batch_size=2,
        ppo_mini_batch_size=2,
        ppo_micro_batch_size_per_gpu=micro,
        rollout=RolloutConfig(n=2),
        algorithm=AlgorithmConfig("rloo"),
    )
    model, rows = build_roles(cfg, CPU), rollouts((2, 6))
    add_logprobs_and_values(rows, model, cfg, 0, CPU)
    tensors, _ = experience(rows, cfg, 0.1)
    tensors["advantages"] = torch.where(tensors["mask"], torch.tensor([[-1.0], [0.0]]), 0.0)
    optimizer = torch.optim.SGD(model.trainable().values(), lr=0.1)
    metrics, verdict = mini_batch_step(run_of(cfg, model, optimizer), [0, 1], rows, tensors)
    assert metrics["policy/loss"] == pytest.approx(0.25, abs=1e-6) and verdict.action == "go on"


def test_warmup_moves_the_critic_only(tiny):
    cfg = ppo_config(
        tiny,
        critic=CriticConfig(warmup_steps=1),
        train_batch_size=8,
        ppo_mini_batch_size=8,
        ppo_micro_batch_size_per_gpu=4,
    )
    torch.manual_seed(0)
    before = build_roles(cfg, CPU)
    stir(before, 0.1)
    after, _ = updated(cfg)
    for name, parameter in before.trainable().items():
        assert torch.equal(after[name], parameter) == (not before._is_critic(name)), name


@pytest.mark.parametrize("lora, lr", [(LoraOptions(r=4), 1e-4), (None, 1e-5)])
def test_default_learning_rates(tiny, preferences, tmp_path, lora, lr):
    cfg = base_config(
        tiny, preferences, tmp_path / "run", lora=lora, lr=None, critic=CriticConfig(kind="separate"), total_steps=1
    )
    assert [(s["policy/lr"], s["critic/lr"]) for s in train(cfg)] == [(lr, lr)]


@pytest.mark.parametrize("kind", ["adapter", "shared"])
def test_warmup_leaves_the_policy_and_its_optimizer_alone(tiny, preferences, tmp_path, kind):
    cfg = base_config(
        tiny, preferences, tmp_path / "run", critic=CriticConfig(kind=kind, warmup_steps=2), total_steps=3
    )
    steps = train(cfg)
    assert [s["policy/lr"] for s in steps] == [0, 0, cfg.lr]
    assert all(s["objective/kl_per_token"] == 0 for s in steps) and all(
        s["policy/approx_kl"] < 1e-9 for s in steps[:2]
    )
    assert steps[2]["policy/approx_kl"] > 1e-6


def test_experience_by_hand(tiny):
    """One response of two tokens: KL coefficient 0.5, score 1, lambda and gamma 1."""
    cfg = ppo_config(tiny, algorithm=AlgorithmConfig(lam=1.0, gamma=1.0))
    row = train_ppo.Rollout(0, [5], [6, 2], "x", True, 1.0, [-1.0, -2.0], [-1.5, -1.0], [0.3, 0.5], [0.2, 0.1])
    tensors, metrics = experience([row], cfg, 0.5)
    # token rewards: -.5 * .5 = -.25; 1 - .5 * -1 = 1.5. returns: 1.25, 1.5
    close(tensors["returns"], torch.tensor([[1.25, 1.5]]))
    close(tensors["advantages"], torch.tensor([[-1.0, 1.0]]), 1e-3)  # 1.05 and 1.4, whitened
    wanted = {
        "objective/kl": 0.5 - 1.0,
        "objective/kl_per_token": ((2.718281828**-0.5 - 1 + 0.5) + (2.718281828 - 1 - 1)) / 2,
        "objective/score_mean": 1.0,
        "objective/reward_mean": 1.25,
        "objective/return_mean": 1.375,
        "objective/entropy": 0.4,
        "critic/explained_variance": 1 - (0.175**2) / (0.125**2),
        "rollout/response_length_mean": 2,
        "rollout/truncated_fraction": 0,
    }
    for name, value in wanted.items():
        assert metrics[name] == pytest.approx(value, abs=1e-5), name


def test_metrics_do_not_depend_on_padding(tiny):
    """A batch with one long response gives the others the same share of each token mean."""
    cfg = ppo_config(tiny)
    model = build_roles(cfg, CPU)
    rows = given_rollouts(cfg, model)
    tensors, _ = experience(rows, cfg, 0.1)
    assert not tensors["advantages"][~tensors["mask"]].any() and not tensors["returns"][~tensors["mask"]].any()
    shifted = [dataclasses.replace(row, score=row.score + 50) for row in rows]
    flat = ppo_config(tiny, algorithm=AlgorithmConfig(lam=1.0))
    close(experience(shifted, flat, 0.1)[0]["advantages"], experience(rows, flat, 0.1)[0]["advantages"], 1e-4)


def test_prompt_order_covers_each_epoch_once():
    order = prompt_order(5, 0, 15, seed=7)
    assert [sorted(order[i : i + 5]) for i in (0, 5, 10)] == [list(range(5))] * 3 and order[:5] != order[5:10]
    assert prompt_order(5, 3, 4, seed=7) == order[3:7] and prompt_order(5, 0, 15, seed=8) != order


# --- whole runs


@pytest.mark.parametrize("variant", VARIANTS)
def test_resume_is_bit_equal(tiny, preferences, tmp_path, variant):
    settings = dict(VARIANTS[variant])
    control = KLControl("moving_average" if "grpo" in variant else "adaptive", target_kl=0.01, horizon=40)
    settings["algorithm"] = dataclasses.replace(settings.get("algorithm", AlgorithmConfig()), kl_ctrl=control)
    cfg = base_config(
        tiny, preferences, tmp_path / "straight", save_every=2, score=ScoreConfig(normalize=True), **settings
    )
    straight = train(cfg)
    first = dataclasses.replace(cfg, output_dir=str(tmp_path / "resumed"), total_steps=2)
    train(first)
    with open(tmp_path / "resumed" / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "objec')  # a step that was cut off while it was written
    second = train(dataclasses.replace(first, total_steps=4, resume="auto"))
    assert [s["step"] for s in second] == [3, 4]
    for a, b in zip(straight[2:], second):
        different = {k for k in a if a[k] != b[k] and not k.startswith(("time/", "memory/", "rollout/tokens_per"))}
        assert not different
    a, b = weights_of(tmp_path / "straight"), weights_of(tmp_path / "resumed")
    assert a.keys() == b.keys() and all(torch.equal(a[f][n], b[f][n]) for f in a for n in a[f])
    assert [m["step"] for m in read_metrics(tmp_path / "resumed")] == [1, 2, 3, 4]
    assert straight[0]["objective/kl_coef"] != straight[-1]["objective/kl_coef"]


def test_resume_refuses_another_configuration(tiny, preferences, tmp_path):
    cfg = base_config(tiny, preferences, tmp_path / "run", save_every=1, total_steps=1)
    train(cfg)
    with pytest.raises(UserError, match="started with lora.r 4, not 8"):
        train(dataclasses.replace(cfg, resume="auto", lora=LoraOptions(r=8), total_steps=2))


def test_resume_after_the_end_without_checkpoints_is_refused(tiny, preferences, tmp_path):
    cfg = base_config(tiny, preferences, tmp_path / "run", total_steps=1)
    train(cfg)
    before = weights_of(tmp_path / "run")
    with pytest.raises(UserError, match="finished run without checkpoints"):
        train(dataclasses.replace(cfg, resume="auto", total_steps=2))
    with pytest.raises(UserError, match="reward function no:f"):
        train(dataclasses.replace(cfg, overwrite=True, reward_model=RewardConfig(style="function", function="no:f")))
    after = weights_of(tmp_path / "run")  # nothing was lost
    assert before.keys() == after.keys() and [m["step"] for m in read_metrics(tmp_path / "run")] == [1]


def test_resume_trims_samples(tiny, preferences, tmp_path):
    cfg = base_config(tiny, preferences, tmp_path / "run", total_steps=2, save_every=1, eval_every=1, eval_prompts=3)
    train(cfg)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000002")
    train(dataclasses.replace(cfg, resume="auto"))
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert steps == [1, 1, 1, 2, 2, 2]


def test_divergence_ends_with_a_message(tiny, preferences, tmp_path, monkeypatch):
    not_finite = lambda logprobs, *a: (logprobs.sum() * float("nan"), {"policy/approx_kl": torch.zeros(())})  # noqa: E731
    monkeypatch.setattr(train_ppo, "ppo_policy_loss", not_finite)
    with pytest.raises(UserError, match="step 1: the gradient of the policy is not finite"):
        train(base_config(tiny, preferences, tmp_path / "run"))


def test_first_step_starts_at_the_reference(tiny, preferences, tmp_path):
    step = train(base_config(tiny, preferences, tmp_path / "run", ppo_epochs=1, ppo_mini_batch_size=8, total_steps=1))[
        0
    ]
    assert step["objective/kl"] == 0 and step["objective/kl_per_token"] == 0
    assert step["policy/ratio_mean"] == pytest.approx(1, abs=1e-5) and step["policy/approx_kl"] == pytest.approx(
        0, abs=1e-5
    )
    assert step["policy/clip_fraction"] == 0 and step["critic/explained_variance"] == pytest.approx(0, abs=1e-6)
    config = json.loads(json.dumps(__import__("yaml").safe_load((tmp_path / "run" / "config.yaml").read_text())))
    assert config["rollout"]["temperature"] == 1.0 and config["algorithm"]["kl_ctrl"]["method"] == "fixed"
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["seed"] == 0 and record["versions"]["torch"] and record["wall_time_seconds"] > 0


def only_token(token):
    """A tiny Llama that gives one token a logit of 30 and all others 0, whatever stands before."""
    model = tiny_llama(tie_word_embeddings=False)
    model.model.embed_tokens.weight.data.fill_(1.0)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    model.lm_head.weight.data.zero_()
    model.lm_head.weight.data[token] = 30 / 32
    return model


@pytest.mark.parametrize("token, length, empty, truncated", [(2, 1, 1, 0), (50, 8, 0, 1)])
def test_a_policy_that_only_ends_or_never_ends_keeps_the_run_going(
    preferences, tmp_path, token, length, empty, truncated
):
    """All responses are the eos token alone, or none ends: losses are finite, and no eos is forced at the limit."""
    only_token(token).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    steps = train(base_config(str(tmp_path / "model"), preferences, tmp_path / "run", total_steps=2, lr=1e-5))
    for step in steps:
        assert step["rollout/empty_fraction"] == empty and step["rollout/truncated_fraction"] == truncated
        assert step["rollout/response_length_mean"] == length and step["objective/kl_per_token"] < 1e-6
        assert all(value == value and abs(value) < 1e6 for value in step.values())


def test_pad_equal_to_eos_masks_the_padding_only():
    """Prompt `x eos`, reply `a b eos`, padded with eos: the real eos counts in both masks, the padding in none."""
    rows = [
        train_ppo.Rollout(0, [7, 2], [5, 6, 2], "", True),
        train_ppo.Rollout(0, [7, 2], [5, 6, 8, 9, 3, 4], "", False),
    ]
    batch = train_ppo.make_batch(rows, 2, CPU)
    assert batch["input_ids"][0].tolist() == [7, 2, 5, 6, 2, 2, 2, 2]
    assert batch["attention_mask"][0].int().tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert batch["response_mask"][0].int().tolist() == [0, 0, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_constant_large_reward_does_no_harm(tiny, preferences, tmp_path, dtype):
    cfg = base_config(
        tiny,
        preferences,
        tmp_path / "run",
        total_steps=6,
        critic=CriticConfig(warmup_steps=2),
        lr=1e-3,
        reward_model=RewardConfig(style="function", function="test_ppo:constant"),
    )
    steps = train(dataclasses.replace(cfg, model=ModelConfig(tiny, dtype=dtype)))
    assert (
        steps[1]["objective/kl_per_token"] == 0 and steps[2]["objective/kl_per_token"] == 0
    )  # warm-up left the policy alone
    assert steps[-1]["objective/kl_per_token"] < 0.05 and steps[-1]["critic/loss"] < steps[0]["critic/loss"]


TOY = dict(
    lora=None,
    train_batch_size=64,
    ppo_mini_batch_size=32,
    ppo_micro_batch_size_per_gpu=32,
    log_prob_micro_batch_size_per_gpu=64,
    log_every=50,
)


@pytest.mark.parametrize("estimator", ["gae", "rloo", "grpo"])
def test_toy_reward_is_learned(tiny, preferences, tmp_path, estimator):
    """From a share of about 0.1 letters a to m to at least 0.9, the maximum being 1."""
    algorithm = AlgorithmConfig(estimator, kl_coef=0.0)
    more = dict(critic=CriticConfig("shared")) if estimator == "gae" else dict(rollout=RolloutConfig(n=4))
    scores = [
        s["objective/score_mean"]
        for s in train(
            base_config(tiny, preferences, tmp_path, total_steps=40, lr=3e-3, algorithm=algorithm, **more, **TOY)
        )
    ]
    assert scores[0] < 0.3 and sum(scores[-3:]) / 3 >= 0.9, scores[::5]


def test_kl_bounds_what_otherwise_collapses(tiny, preferences, tmp_path):
    """A reward with and without a price on KL: without, replies become alike, KL grows; with it, KL is bounded."""
    last = {}
    for kl_coef in (0.0, 0.2):
        algorithm = AlgorithmConfig(kl_coef=kl_coef)
        cfg = base_config(
            tiny,
            preferences,
            tmp_path / str(kl_coef),
            total_steps=50,
            lr=3e-3,
            critic=CriticConfig("shared"),
            algorithm=algorithm,
            **TOY,
        )
        last[kl_coef] = train(cfg)[-1]
    assert (
        last[0.0]["objective/kl_per_token"] > 2
        and last[0.0]["rollout/distinct_2"] < 0.1
        and last[0.0]["objective/entropy"] < 1
    )
    assert (
        last[0.2]["objective/kl_per_token"] < 0.5
        and last[0.2]["rollout/distinct_2"] > 0.9
        and last[0.2]["objective/entropy"] > 4
    )


@pytest.mark.parametrize("start", [0.02, 1.0])
@pytest.mark.parametrize("method, horizon", [("adaptive", 192), ("moving_average", 256)])
def test_controllers_reach_their_target_and_keep_it(tiny, preferences, tmp_path, method, horizon, start):
    """From a coefficient far too low or high: KL of steps 101 to 120 and of 121 to 140 within 20% of the target."""
    algorithm = AlgorithmConfig(kl_coef=start, kl_ctrl=KLControl(method, target_kl=0.2, horizon=horizon))
    steps = train(
        base_config(
            tiny,
            preferences,
            tmp_path,
            total_steps=140,
            lr=1e-3,
            critic=CriticConfig("shared"),
            algorithm=algorithm,
            **TOY,
        )
    )
    kl = [s["objective/kl_per_token"] for s in steps]
    for first in (100, 120):
        assert 0.16 <= sum(kl[first : first + 20]) / 20 <= 0.24, kl[::10]


# --- the reward stage


def test_reward_update_does_not_depend_on_micro_batch_size(tiny, preferences):
    from utils.models import load_tokenizer

    pairs = encode_pairs(load_rows(preferences, "train", ("preference",))[:10], load_tokenizer(tiny), 256)
    results = []
    for micro, pad_id in ((10, 0), (3, 0), (1, 9)):
        cfg = RewardTrainConfig(
            model=ModelConfig(tiny, dtype="float32"),
            data="",
            output_dir="",
            lora=LoraOptions(r=4),
            micro_batch_size_per_gpu=micro,
            centering_coef=0.1,
        )
        model = build_model(cfg, CPU)
        stir(model, 0.1)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        values = optimizer_step(model, optimizer, micro_batches(pairs, pad_id, micro), cfg, Accelerator(cpu=True))
        results.append((values, [p.detach().clone() for p in model.parameters() if p.requires_grad]))
    for values, weights in results[1:]:
        assert values == pytest.approx(results[0][0], abs=1e-5)
        for a, b in zip(weights, results[0][1]):
            close(a, b)


def test_separable_pairs_are_learned_and_resume_is_bit_equal(tiny, preferences, tmp_path):
    cfg = RewardTrainConfig(
        model=ModelConfig(tiny, dtype="float32"),
        data=preferences,
        output_dir=str(tmp_path / "straight"),
        lora=LoraOptions(r=4),
        lr=5e-3,
        train_batch_size=16,
        epochs=4,
        save_every=7,
        report_to="none",
    )
    result = train_reward_model(cfg)
    assert result["accuracy"] == 1.0 and result["loss"] < 0.1 and result["tie_rate"] == 0
    import shutil

    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "final")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step_000014")
    train_reward_model(dataclasses.replace(cfg, output_dir=str(tmp_path / "resumed"), resume="auto"))
    a, b = weights_of(tmp_path / "straight"), weights_of(tmp_path / "resumed")
    assert a.keys() == b.keys() and all(torch.equal(a[f][n], b[f][n]) for f in a for n in a[f])


def test_a_dead_head_does_not_look_right(tiny, preferences, tmp_path):
    cfg = RewardTrainConfig(
        model=ModelConfig(tiny, dtype="float32"),
        data=preferences,
        output_dir=str(tmp_path / "run"),
        lr=0.0,
        epochs=0.2,
        train_batch_size=16,
        report_to="none",
    )
    from unittest import mock

    with (
        mock.patch("train_reward.score_at_end", lambda head, hidden, mask: hidden.sum((1, 2)) * 0),
        mock.patch("train_reward.contracts.check_saved_reward", lambda *rest: {}),
    ):
        result = train_reward_model(cfg)
    assert result["accuracy"] == 0.5 and result["tie_rate"] == 1.0


# --- several processes


def test_ranks_and_zero3_give_the_update_of_one_process(tiny, tmp_path):
    """LoRA and full, both critic kinds, gradient checkpointing, critic warm-up under Adam, and the reward update."""
    outputs = []
    for config in ("cpu.yaml", "multi_cpu.yaml", "zero3.yaml"):
        launch(config, ROOT / "tests" / "update_worker.py", tiny, tmp_path / config)
        outputs.append(torch.load(tmp_path / config, weights_only=True))
    one, two, zero3 = outputs
    assert (one["world"], two["world"], zero3["world"]) == (1, 2, 2)
    for case, wanted in one["results"].items():
        for other in (two["results"][case], zero3["results"][case]):
            for name, weight in wanted["weights"].items():
                close(other["weights"][name], weight, 2e-6)
            assert other["metrics"] == pytest.approx(wanted["metrics"], rel=1e-4, abs=1e-5), case


@pytest.mark.parametrize("config, ranks", [("cpu.yaml", 1), ("multi_cpu.yaml", 2), ("zero3.yaml", 2)])
def test_stages_run_under_accelerate_launch(tiny, preferences, tmp_path, config, ranks):
    launch(
        config,
        ROOT / "train_reward.py",
        "--model.path",
        tiny,
        "--data",
        preferences,
        "--output_dir",
        tmp_path / "reward",
        "--train_batch_size",
        15,
        "--micro_batch_size_per_gpu",
        4,
        "--lr",
        "5e-3",
        "--epochs",
        2,
        "--save_format",
        "adapter",
    )
    stats = json.loads((tmp_path / "reward" / "final" / "reward_stats.json").read_text())
    assert stats["n"] == len(load_rows(preferences, "test", ("preference",))) > 15 and stats["accuracy"] == 1.0
    out = launch(
        config,
        ROOT / "train_ppo.py",
        "--model.path",
        tiny,
        "--data",
        preferences,
        "--output_dir",
        tmp_path / "ppo",
        "--reward_model.path",
        tmp_path / "reward" / "final",
        "--total_steps",
        2,
        "--train_batch_size",
        8,
        "--ppo_mini_batch_size",
        4,
        "--ppo_micro_batch_size_per_gpu",
        2,
        "--max_response_length",
        8,
        "--save_every",
        1,
        "--eval_every",
        2,
    )
    assert f"x {ranks} rank(s)" in out
    steps = read_metrics(tmp_path / "ppo")
    assert [s["step"] for s in steps] == [1, 2] and steps[0]["objective/kl"] == 0
    assert (tmp_path / "ppo" / "final" / "model.safetensors").exists() and (
        tmp_path / "ppo" / "checkpoints" / "step_000002"
    ).is_dir()
    assert json.loads((tmp_path / "ppo" / "run.json").read_text())["world_size"] == ranks
    assert (tmp_path / "ppo" / "report.html").read_text().count("<svg") == 1
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "ppo" / "tensorboard"))
    board.Reload()
    assert board.Tags()["tensors"] == ["samples/text_summary"] and {
        "objective/kl",
        "critic/explained_variance",
        "eval/score_mean",
    } <= set(board.Tags()["scalars"])


def test_resume_under_zero3_is_bit_equal_and_its_checkpoint_opens_in_one_process(tiny, preferences, tmp_path):
    def run(folder, steps, *more):
        cfg = base_config(
            tiny,
            preferences,
            tmp_path / folder,
            total_steps=steps,
            save_every=2,
            critic=CriticConfig("shared", warmup_steps=1),
        )
        config = tmp_path / f"{folder}.yaml"
        config.write_text(yaml.safe_dump(dataclasses.asdict(cfg)))
        launch("zero3.yaml", ROOT / "train_ppo.py", "--config", config, *more)
        return cfg

    run("straight", 4)
    cfg = run("resumed", 2)
    short = weights_of(tmp_path / "resumed")
    shutil.copytree(tmp_path / "resumed", tmp_path / "moved")
    run("resumed", 4, "--resume", "auto")
    a, b = weights_of(tmp_path / "straight"), weights_of(tmp_path / "resumed")
    assert a.keys() == b.keys() and all(torch.equal(a[f][n], b[f][n]) for f in a for n in a[f])
    assert any(not torch.equal(a[f][n], short[f][n]) for f in a for n in a[f])
    moved = dataclasses.replace(cfg, output_dir=str(tmp_path / "moved"), resume="auto")
    train(moved)  # no step is left
    again = weights_of(tmp_path / "moved")
    assert short.keys() == again.keys() and all(torch.equal(short[f][n], again[f][n]) for f in short for n in short[f])
    assert train(dataclasses.replace(moved, total_steps=3))[0]["step"] == 3


@pytest.mark.parametrize("config", ["multi_cpu.yaml", "zero3.yaml"])
def test_ranks_roll_back_together(tiny, preferences, tmp_path, config):
    """Any move from the reference is too far: back to the start twice, then the end, with its weights on disk."""
    cfg = base_config(
        tiny,
        preferences,
        tmp_path / "run",
        save_every=1,
        guards=GuardConfig(enabled=True, update_kl=None, reward_std=None, reference_kl=1e-9, max_rollbacks=1),
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(dataclasses.asdict(cfg)))
    out = launch(config, ROOT / "train_ppo.py", "--config", tmp_path / "run.yaml", succeeds=False)
    assert (
        "stopped: guards.max_rollbacks 1 is used up at step 2" in out
        and 'Traceback (most recent call last):\n  File "' + str(ROOT) not in out
    )
    found = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [e["guard"] for e in found] == ["reference_kl", "rollback", "reference_kl", "max_rollbacks"]
    assert found[0]["value"] != found[2]["value"]  # other prompts and samples


def test_zero3_in_bfloat16_learns(tiny, preferences, tmp_path):
    """Weights are bfloat16 there, the optimizer's copies float32."""
    launch(
        "zero3.yaml",
        ROOT / "train_reward.py",
        "--model.path",
        tiny,
        "--model.dtype",
        "bfloat16",
        "--data",
        preferences,
        "--output_dir",
        tmp_path,
        "--train_batch_size",
        16,
        "--micro_batch_size_per_gpu",
        4,
        "--lr",
        "5e-3",
        "--epochs",
        4,
    )
    stats = json.loads((tmp_path / "final" / "reward_stats.json").read_text())
    assert stats["accuracy"] == 1.0 and stats["tie_rate"] == 0


def test_ranks_sample_differently(tiny, preferences, tmp_path):
    out = launch("multi_cpu.yaml", ROOT / "tests" / "sampling_worker.py", tiny)
    samples = json.loads([line for line in out.splitlines() if line.startswith("[[")][-1])
    assert len(samples) == 2 and samples[0] != samples[1]

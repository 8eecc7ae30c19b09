"""What a run checks of itself: each check passes on what is right and fails when its fault is put in."""

import dataclasses
import json

import pytest
import torch
from accelerate import Accelerator
from helpers import CPU, base_config, byte_tokenizer, ppo_config, stir, tiny_llama
from safetensors.torch import load_file, save_file

import train_ppo
from train_ppo import CriticConfig, build_roles, save_final
from train_reward import RewardTrainConfig, build_model, encode_pairs, reopen, score_pairs
from train_reward import save_final as save_reward
from train_reward import train as train_reward
from utils import contracts, models
from utils.config import LoraOptions, ModelConfig, UserError
from utils.data import load_rows
from utils.models import load_tokenizer
from utils.rewards import RewardConfig, RewardPart
from utils.rollout import Sampling

IDS = [5, 9, 20, 33, 7, 44, 60, 71, 80, 12]
FEW = Sampling(6, 0.0, [2], 0)
BATCH = contracts.probe_batch(IDS, 0, CPU)


def folder_of(model, path) -> str:
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


def roles_of(path, **changes):
    return build_roles(ppo_config(path, **changes), CPU)


def test_the_probe_is_a_row_and_its_half():
    assert contracts.probe_row([[1], [1, 2, 3], [1, 2]]) == 1
    assert BATCH["attention_mask"].sum(1).tolist() == [10, 5]
    assert BATCH["response_mask"].sum(1).tolist() == [9, 4]
    assert contracts.probe_batch(list(range(100)), 0, CPU)["input_ids"][0].tolist() == list(range(36, 100))
    assert contracts.probe_ids([5]) == [5] * 8 and contracts.probe_ids([5, 6, 7]) == [5, 6, 7, 5, 6, 7, 5, 6]
    assert contracts.probe_ids(IDS) == IDS


def test_a_prompt_of_one_token_can_be_checked(tiny):
    roles, batch = roles_of(tiny), contracts.probe_batch([5], 0, CPU)
    assert contracts.check_start(roles, tiny, batch, FEW)["logprobs"]["value"] < 1e-5
    assert contracts.leave_out_idle(roles, batch) == []


def test_a_right_model_passes(tiny):
    checks = contracts.check_start(roles_of(tiny), tiny, BATCH, FEW)
    assert {name: check["value"] < 1e-5 for name, check in checks.items()} == {"logprobs": True, "sampling": True}


def scaled_head(monkeypatch):
    monkeypatch.setattr(models, "project", lambda model, hidden: model.get_output_embeddings()(hidden))


def shifted_labels(monkeypatch):
    right = models.token_logprobs
    monkeypatch.setattr(models, "token_logprobs", lambda logits, labels: right(logits, (labels + 1) % 259))


def nan_logits(monkeypatch):
    monkeypatch.setattr(models, "project", lambda model, hidden: hidden.new_full((len(hidden), 259), float("nan")))


@pytest.mark.parametrize("fault", [scaled_head, shifted_labels, nan_logits])
def test_other_log_probabilities_than_the_models_own_are_refused(tmp_path, monkeypatch, fault):
    from transformers import CohereConfig, CohereForCausalLM

    config = CohereConfig(
        vocab_size=259, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=2, pad_token_id=0, bos_token_id=1, logit_scale=0.3, initializer_range=0.2,
    )  # fmt: skip
    roles = roles_of(folder_of(CohereForCausalLM(config), tmp_path))
    contracts.check_logprobs(roles, "m", BATCH)
    fault(monkeypatch)
    with pytest.raises(UserError, match="m: log-probabilities differ from those of CohereForCausalLM's own logits"):
        contracts.check_logprobs(roles, "m", BATCH)


def test_a_model_that_reads_ahead_is_refused(tmp_path):
    from transformers import BertConfig, BertLMHeadModel

    config = BertConfig(
        vocab_size=259, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.5, max_position_embeddings=64, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    path = folder_of(BertLMHeadModel(config), tmp_path)
    with pytest.raises(UserError, match="BertLMHeadModel"):
        contracts.check_logprobs(roles_of(path), path, BATCH)


def test_a_forward_that_fails_is_one_line(tiny, monkeypatch):
    roles = roles_of(tiny)

    def broken(*args, **kwargs):
        raise TypeError("unexpected keyword\nmore lines")

    monkeypatch.setattr(models, "last_hidden", broken)
    with pytest.raises(UserError, match="LlamaForCausalLM does not run as a causal language model: unexpected") as e:
        contracts.check_logprobs(roles, tiny, BATCH)
    assert "\n" not in str(e.value)


def test_sampling_that_differs_in_a_padded_batch_is_refused(tmp_path):
    """RWKV's state runs over the padding: right alone, wrong beside a longer prompt."""
    from transformers import RwkvConfig, RwkvForCausalLM

    torch.manual_seed(0)
    config = RwkvConfig(
        vocab_size=259, hidden_size=32, attention_hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        context_length=64, eos_token_id=2, bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = RwkvForCausalLM(config)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    roles = roles_of(folder_of(model, tmp_path), critic=CriticConfig("shared"))
    with pytest.raises(UserError, match="left-padded batch; try rollout.micro_batch_size_per_gpu 1"):
        contracts.check_sampling(roles, BATCH, FEW)
    contracts.check_sampling(roles, BATCH, Sampling(6, 0.0, [2], 0, batch_size=1))


@pytest.mark.parametrize(
    "dtype, difference, ok",
    [
        (torch.float32, 0.0, True),
        (torch.float32, 9e-5, True),
        (torch.float32, 2e-4, False),
        (torch.bfloat16, 0.1, True),
        (torch.bfloat16, 0.2, False),
        (torch.float32, float("nan"), False),
    ],
)
def test_first_ratio_and_reference_by_value(dtype, difference, ok):
    old = torch.tensor([-1.0, -2.0])
    now = old + torch.tensor([0.0, difference])
    for check in (contracts.check_first, contracts.check_reference):
        if ok:
            assert check(now, old, dtype)["value"] == pytest.approx(difference, rel=0.05, abs=1e-6)
        else:
            with pytest.raises(UserError, match="before the first update"):
                check(now, old, dtype)


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 0.01), (torch.bfloat16, 0.3)])
def test_rollout_by_value(dtype, limit):
    assert contracts.check_rollout(limit / 2, dtype) == {"value": limit / 2, "limit": limit}
    with pytest.raises(UserError, match="sampled tokens"):
        contracts.check_rollout(limit * 1.1, dtype)


def test_weights_without_a_part_in_the_loss_stay_as_they_are(tiny):
    roles = roles_of(tiny)
    learning = set(roles.trainable())
    assert contracts.leave_out_idle(roles, BATCH) == [] and set(roles.trainable()) == learning
    extra = torch.nn.Parameter(torch.ones(3))
    roles.value_head.register_parameter("spare", extra)
    assert contracts.leave_out_idle(roles, BATCH) == ["value_head.spare"]
    assert set(roles.trainable()) == learning and all(p.grad is None for p in roles.parameters())


# --- saved folders


def saved_policy(tiny, folder):
    cfg = ppo_config(tiny)
    roles = build_roles(cfg, CPU)
    stir(roles, 0.1)
    save_final(roles, load_tokenizer(tiny), cfg, folder)
    with torch.no_grad():
        return roles(BATCH, ("policy",))["logprobs"][: len(IDS) - 1]


def change_weight(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"] += 0.05
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def drop_weight(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.experts.down"] = weights.pop("model.layers.1.mlp.down_proj.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["rope_parameters"]["rope_theta"] = config["rope_theta"] = 10.0
    file.write_text(json.dumps(config))


def change_template(folder):
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")


@pytest.mark.parametrize(
    "fault, message",
    [
        (change_weight, "is not the one that was trained"),
        (drop_weight, "lacks weights or has some too many"),
        (change_config, "is not the one that was trained"),
        (change_template, "encodes a prompt otherwise"),
    ],
)
def test_a_saved_policy_that_is_another_one_is_found(tiny, tmp_path, monkeypatch, fault, message):
    live = saved_policy(tiny, tmp_path)
    prompt = [{"role": "user", "content": "hello there"}]
    ids = load_tokenizer(tiny).apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    batch = contracts.probe_batch(ids, 0, CPU)
    monkeypatch.setattr("test_contracts.IDS", ids)
    monkeypatch.setattr("test_contracts.BATCH", batch)
    live = saved_policy(tiny, tmp_path)
    check = contracts.check_saved_policy(tmp_path / "final", prompt, ids, live, torch.float32)
    assert check["value"] < 1e-5
    fault(tmp_path / "final")
    with pytest.raises(UserError, match=message):
        contracts.check_saved_policy(tmp_path / "final", prompt, ids, live, torch.float32)


def other_pad(folder):
    """Plain transformers would read the score at another token."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token_id": 2}))


def other_head(folder):
    weights = load_file(folder / "model.safetensors")
    weights["score.weight"] *= 1.2
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("save_format, fault", [("merged", other_pad), ("merged", other_head), ("adapter", None)])
def test_a_saved_reward_model_that_scores_otherwise_is_found(tiny, tmp_path, save_format, fault):
    cfg = RewardTrainConfig(ModelConfig(tiny, dtype="float32"), "", "", LoraOptions(r=4), save_format)
    model = build_model(cfg, CPU)
    stir(model)
    rows = [[5, 6, 7, 2], [9, 9, 8, 7, 6, 5, 4, 2]]
    with torch.no_grad():
        live = torch.cat([model(torch.tensor([r]), torch.ones(1, len(r), dtype=torch.bool)) for r in rows])
    save_reward(model, load_tokenizer(tiny), cfg, tmp_path / "final")
    assert contracts.check_saved_reward(tmp_path / "final", rows, live, torch.float32)["value"] < 1e-5
    if fault is None:
        live = live + 0.1
    else:
        fault(tmp_path / "final")
    with pytest.raises(UserError, match="does not give the scores of the one that was trained"):
        contracts.check_saved_reward(tmp_path / "final", rows, live, torch.float32)


# --- whole runs


def letters(prompts, responses, **columns):
    return [float(response.count("a")) for response in responses]


@pytest.mark.parametrize(
    "dtype, changes",
    [
        ("float32", {}),
        ("bfloat16", {}),
        ("bfloat16", {"lora": None, "critic": CriticConfig("shared")}),
        ("bfloat16", {"checkpointing": True, "critic": CriticConfig("separate")}),
    ],
    ids=["float32", "bfloat16", "full", "checkpointing, separate critic"],
)
def test_a_run_records_its_checks(tiny, preferences, tmp_path, dtype, changes):
    """The first ratio is exactly 1 and the KL exactly 0 in bfloat16 too, whatever changes how a forward runs."""
    model = ModelConfig(tiny, dtype=dtype, gradient_checkpointing=changes.pop("checkpointing", False))
    cfg = base_config(tiny, preferences, tmp_path / "run", total_steps=1, **changes)
    history = train_ppo.train(dataclasses.replace(cfg, model=model))
    checks = json.loads((tmp_path / "run" / "run.json").read_text())["checks"]
    assert set(checks) == {"logprobs", "sampling", "rollout", "reference", "first_ratio", "saved"}
    assert checks["first_ratio"]["value"] == 0.0 and checks["reference"]["value"] == 0.0
    assert history[0]["objective/kl_per_token"] == 0.0
    assert history[0]["rollout/mismatch_std"] < (1e-5 if dtype == "float32" else 0.3)
    card = (tmp_path / "run" / "final" / "README.md").read_text()
    assert "PPO (gae), 1 steps x 8 responses" in card and "score_mean, first and last step" in card


def test_a_run_whose_metrics_are_gone_is_saved_with_its_card(tiny, preferences, tmp_path, monkeypatch):
    monkeypatch.setattr(train_ppo, "read_metrics", lambda folder: [])
    more = [RewardPart("rule", rule="gsm8k", weight=0.5)]
    reward = RewardConfig("function", function="test_contracts:letters", also=more)
    monkeypatch.setattr(train_ppo, "check_ground_truth", lambda rows: None)
    monkeypatch.setattr("utils.rewards.gsm8k_score", lambda *rest: 1.0)
    train_ppo.train(base_config(tiny, preferences, tmp_path / "run", total_steps=1, reward_model=reward))
    card = (tmp_path / "run" / "final" / "README.md").read_text()
    assert "- reward: 1 x test_contracts:letters + 0.5 x gsm8k\n" in card and "first and last step" not in card


def test_a_forward_that_differs_in_the_update_ends_the_run(tiny, preferences, tmp_path, monkeypatch):
    right = train_ppo.RoleModel.forward

    def noisy(self, *args, **kwargs):
        out = right(self, *args, **kwargs)
        if torch.is_grad_enabled() and "logprobs" in out:
            out["logprobs"] = out["logprobs"] + 0.01
        return out

    monkeypatch.setattr(train_ppo.RoleModel, "forward", noisy)
    with pytest.raises(UserError, match="before the first update the ratio is not 1"):
        train_ppo.train(base_config(tiny, preferences, tmp_path / "run", total_steps=1))


def test_sampling_from_another_distribution_ends_the_run(tiny, preferences, tmp_path, monkeypatch):
    right = train_ppo.generate_with_logprobs

    def other(lm, prompts, how, *args, **kwargs):
        responses, logprobs = right(lm, prompts, how, *args, **kwargs)
        return responses, [[0.9 * x for x in row] for row in logprobs]

    monkeypatch.setattr(train_ppo, "generate_with_logprobs", other)
    with pytest.raises(UserError, match="the sampled tokens' log-probabilities are not those of training"):
        train_ppo.train(base_config(tiny, preferences, tmp_path / "run", total_steps=1))


def test_stage_2_describes_the_model_that_it_saved(tiny, preferences, tmp_path):
    """In bfloat16 the merged weights are rounded: the statistics are those of the folder."""
    path = folder_of(tiny_llama().to(torch.bfloat16), tmp_path / "base")
    cfg = RewardTrainConfig(
        ModelConfig(path, dtype="bfloat16"), preferences, str(tmp_path / "run"), LoraOptions(r=4), epochs=1.0,
        train_batch_size=16, lr=1e-2, report_to="none",
    )  # fmt: skip
    result = train_reward(cfg)
    final = tmp_path / "run" / "final"
    check = json.loads((tmp_path / "run" / "run.json").read_text())["checks"]["saved"]
    assert check["value"] <= check["limit"]
    assert {tensor.dtype for tensor in load_file(final / "model.safetensors").values()} == {torch.bfloat16}
    pairs = encode_pairs(load_rows(preferences, "test", ("preference",)), load_tokenizer(str(final)), None)
    chosen, rejected = score_pairs(reopen(cfg, final, CPU), pairs, 0, cfg.micro_batch_size_per_gpu, Accelerator())
    assert torch.cat([chosen, rejected]).mean().item() == pytest.approx(result["score_mean"], abs=1e-6)
    assert "held-out accuracy" in (final / "README.md").read_text()

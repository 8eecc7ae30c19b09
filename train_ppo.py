"""Stage 3: PPO with KL control against a reward model, a rule or a Python function.

    python train_ppo.py --config configs/demo_ppo.yaml
    accelerate launch --config_file configs/accelerate/multi_cpu.yaml train_ppo.py --config configs/hh_ppo.yaml

Writes `final/` (a causal language model that transformers and vLLM open as it is), `adapter/` and `critic/`.

One step, as numbered in `train`: 1 sample responses. 2 score them. 3 log-probabilities of policy and
reference, and values. 4 token rewards: minus kl_coef x KL on each token, plus the score on the last.
5 advantages (GAE), whitened. 6 clipped updates. 7 KL controller, metrics, checkpoint.
"""

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from utils.checkpoint import load_checkpoint, save_checkpoint
from utils.config import LoraOptions, ModelConfig, UserError, check_output_dir, check_same_config, open_output_dir, record_run, run_stage
from utils.data import decode_response, encode_prompts, load_prompts, show
from utils.launch import (
    accumulating, backward, clip_grad_norm, drop_gradients, gather_lists, is_zero3, load_device, prepare, split_for_rank,
    start_accelerator, step_optimizer, unwrap, whole,
)
from utils.models import (
    RoleModel, adapter_base, add_lora, add_reward_adapter, eos_ids, load_causal_lm, load_reward_model, load_tokenizer,
    max_positions, merged_state_dict, model_dtype, read_stats, same_model, save_adapter,
    save_model, template_fingerprint,
)
from utils.rewards import RewardConfig, check_ground_truth, check_reward_config, function_scorer, model_scores, rule_scorer
from utils.rollout import generate
from utils.tensors import masked_mean, masked_whiten, pad_rows
from utils.tracking import Metrics, Timer, peak_memory_gb, progress_bar, remaining

KL_COEF_BOUNDS = (1e-4, 10.0)  # the controller never leaves these


@dataclass(frozen=True)
class CriticConfig:
    """The value function."""

    kind: Literal["adapter", "shared"] = "adapter"
    """adapter: a LoRA adapter of its own on the backbone. shared: a head on the policy's hidden states, which
    halves the update's cost"""
    lr: float | None = None
    """learning rate of the critic; null = that of the policy"""
    loss_coef: float | None = None
    """shared only: weight of the value loss beside the policy loss; null = 0.1"""
    warmup_steps: int = 0
    """first steps in which only the critic learns"""


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling of responses."""

    n: int = 1
    """responses a prompt"""
    temperature: float = 1.0
    """of sampling, and of every log-probability, policy and reference alike"""
    micro_batch_size_per_gpu: int = 64
    """responses generated at a time on one rank"""


@dataclass(frozen=True)
class KLControl:
    """How kl_coef changes during the run."""

    method: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: proportional control towards target_kl (Ziegler et al. 2019, section 2.2)"""
    target_kl: float | None = None
    """adaptive: KL to the reference to hold, in nats a token"""
    horizon: int | None = None
    """adaptive: responses in which the coefficient can change by a factor of about 1.2; null = 10 steps' worth"""


@dataclass(frozen=True)
class AlgorithmConfig:
    """PPO (Schulman et al. 2017)."""

    gamma: float = 1.0
    """discount a token"""
    lam: float = 0.95
    """lambda of GAE (Schulman et al. 2016)"""
    clip_ratio: float = 0.2
    """the policy ratio is clipped to 1 +- this"""
    value_clip: float = 0.2
    """values move at most this far from the old ones in one step"""
    entropy_coef: float = 0.0
    """weight of the entropy bonus, nats a token"""
    kl_coef: float = 0.05
    """reward units a nat of KL to the reference, on each token"""
    kl_ctrl: KLControl = field(default_factory=KLControl)


@dataclass(frozen=True)
class PPOConfig:
    model: ModelConfig
    data: str
    """a folder that prepare_data.py wrote: prompts, or the prompts of preference or trajectory rows"""
    reward_model: RewardConfig
    output_dir: str
    """folder to write"""
    lora: LoraOptions | None = field(default_factory=LoraOptions)
    critic: CriticConfig = field(default_factory=CriticConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    max_prompt_length: int = 512
    """tokens; a longer prompt in the data is an error"""
    max_response_length: int = 256
    """tokens to sample at most"""
    train_batch_size: int = 64
    """responses a step, all ranks together"""
    ppo_mini_batch_size: int = 32
    """responses an optimizer step, all ranks together"""
    ppo_micro_batch_size_per_gpu: int = 8
    """responses a forward and backward pass on one rank; changes memory and speed, never the result"""
    log_prob_micro_batch_size_per_gpu: int = 16
    """responses a forward pass without gradients on one rank"""
    ppo_epochs: int = 2
    """passes over each step's responses"""
    total_steps: int | None = None
    """steps to run; give this or total_epochs"""
    total_epochs: float | None = None
    """passes over the prompts; give this or total_steps"""
    lr: float = 1e-5
    """learning rate of the policy (AdamW, constant)"""
    max_grad_norm: float = 1.0
    """gradients of policy and of critic are each scaled down to this norm"""
    save_every: int = 0
    """steps between checkpoints; 0 = none"""
    keep_last: int = 2
    """checkpoints to keep"""
    eval_every: int = 0
    """steps between greedy answers to held-out prompts, scored and written to samples.jsonl; 0 = none"""
    eval_prompts: int = 16
    """held-out prompts for eval_every"""
    log_every: int = 1
    """steps between lines on the terminal"""
    resume: Literal["auto"] | None = None
    """auto: go on from the newest checkpoint of output_dir, or start"""
    overwrite: bool = False
    """replace the output of an earlier run"""
    report_to: Literal["tensorboard", "none"] = "tensorboard"
    """tracker, beside metrics.jsonl"""
    seed: int = 0
    """of adapters, prompt order, sampling and mini-batches"""


# ------------------------------------------------------------------------------------------------------- math


def kl_shaped_rewards(scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Token rewards (B, T): -kl_coef x (logprob - ref_logprob) on response tokens, plus the score on the last.

    scores (B,); the rest (B, T) with a boolean mask. 0 outside the mask. (Ziegler et al. 2019, eq. 2.)
    """
    rewards = torch.where(mask, -kl_coef * (logprobs - ref_logprobs), 0)
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, -1).amax(1, keepdim=True)  # (B, 1); -1 where the row is empty
    return rewards + torch.where(positions == last, scores[:, None], 0)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns (B, T) by generalised advantage estimation (Schulman et al. 2016, eq. 16).

    The value after a row's last token is 0: a response is an episode that ends there, cut off or not.
    returns = advantages + values. Both are 0 outside the mask.
    """
    rewards, values = torch.where(mask, rewards, 0), torch.where(mask, values, 0)
    advantages = torch.zeros_like(values)
    running = next_value = torch.zeros_like(values[:, 0])  # (B,)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        running = torch.where(mask[:, t], delta + gamma * lam * running, running)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = running
    advantages = torch.where(mask, advantages, 0)
    return advantages, advantages + values


def k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Low-variance estimate of KL(p || other) from samples of p, never negative (Schulman 2020): r - 1 - log r."""
    log_ratio = other_logprobs - logprobs
    return torch.expm1(log_ratio) - log_ratio


def ppo_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_ratio: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate loss (Schulman et al. 2017, eq. 7), mean over the mask. All (B, T)."""
    logprobs, old_logprobs, advantages = (torch.where(mask, x, 0) for x in (logprobs, old_logprobs, advantages))
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
    loss = masked_mean(torch.maximum(-advantages * ratio, -advantages * clipped), mask)
    with torch.no_grad():
        metrics = {
            "policy/approx_kl": masked_mean(ratio - 1 - log_ratio, mask),
            "policy/clip_fraction": masked_mean((-advantages * clipped > -advantages * ratio).float(), mask),
            "policy/ratio_mean": masked_mean(ratio, mask),
        }
    return loss, metrics


def ppo_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, value_clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped value loss: half the larger squared error of the value and of the value kept near the old one.

    Mean over the mask; all (B, T). (The form of OpenAI's baselines, as in Ziegler et al. 2019.)
    """
    values, old_values, returns = (torch.where(mask, x, 0) for x in (values, old_values, returns))
    clipped = torch.maximum(torch.minimum(values, old_values + value_clip), old_values - value_clip)
    error, clipped_error = (values - returns) ** 2, (clipped - returns) ** 2
    loss = 0.5 * masked_mean(torch.maximum(error, clipped_error), mask)
    with torch.no_grad():
        metrics = {"critic/clip_fraction": masked_mean((clipped_error > error).float(), mask)}
    return loss, metrics


def next_kl_coef(kl_coef: float, kl: float, target_kl: float, horizon: int, n: int) -> float:
    """Proportional controller (Ziegler et al. 2019, section 2.2): kl measured over n responses, in target_kl's unit.

    The error is clipped to +-0.2 and the result to KL_COEF_BOUNDS. Raises ValueError unless target and horizon
    are positive.
    """
    if target_kl <= 0 or horizon <= 0:
        raise ValueError(f"target_kl {target_kl} and horizon {horizon} must be positive")
    error = min(max(kl / target_kl - 1, -0.2), 0.2)
    return min(max(kl_coef * (1 + error * n / horizon), KL_COEF_BOUNDS[0]), KL_COEF_BOUNDS[1])


# ------------------------------------------------------------------------------------------- model and rewards


def build_roles(cfg: PPOConfig, device: torch.device, load_on: torch.device | None = None) -> RoleModel:
    """Policy, reference, critic and, for style `model`, reward; with LoRA all on one backbone where possible.

    `device` computes; the weights are built on `load_on` (null = there too).
    """
    dtype = model_dtype(cfg.model.dtype, device)
    device = load_on or device
    shared = cfg.critic.kind == "shared"
    if cfg.lora is not None:
        model = add_lora(load_causal_lm(cfg.model, device, dtype), cfg.lora, "policy", cfg.seed)
        models = {"backbone": model}
        roles = {"policy": ("backbone", "policy"), "reference": ("backbone", None), "critic": ("backbone", "policy")}
        if not shared:
            add_lora(model, cfg.lora, "critic", cfg.seed + 1)
            roles["critic"] = ("backbone", "critic")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".policy." in name or ".critic." in name)
    else:
        models = {
            "policy": load_causal_lm(cfg.model, device, torch.float32).requires_grad_(True),
            "reference": load_causal_lm(cfg.model, device, torch.float32),  # as the policy, so that KL starts at 0
        }
        roles = {"policy": ("policy", None), "reference": ("reference", None), "critic": ("policy", None)}
    score_head = None
    if cfg.reward_model.style == "model":
        base = adapter_base(cfg.reward_model.path)
        if base and cfg.lora is not None and same_model(base, cfg.model.path):
            score_head = add_reward_adapter(models["backbone"], cfg.reward_model.path)
            roles["reward"] = ("backbone", "reward")
        else:
            reward = ModelConfig(cfg.reward_model.path, cfg.model.dtype, cfg.model.attn_implementation)
            models["reward"] = load_reward_model(reward, device)
            roles["reward"] = ("reward", None)
    model = RoleModel(models, roles, dtype)
    model.score_head = score_head
    if cfg.model.gradient_checkpointing:
        model.enable_checkpointing()
    return model.to(device)


def build_scorer(cfg: PPOConfig, model: RoleModel, tokenizer, device: torch.device):
    """The reward as f(prompts, responses, columns) -> scores; a reward model's are shifted and scaled to its stats."""
    if cfg.reward_model.style == "rule":
        return rule_scorer(cfg.reward_model.rule)
    if cfg.reward_model.style == "function":
        return function_scorer(cfg.reward_model.function)
    on_backbone = model.roles["reward"][0] == "backbone"
    own = tokenizer if on_backbone else load_tokenizer(cfg.reward_model.path)
    stats = read_stats(cfg.reward_model.path)
    if stats and stats["template_fingerprint"] != template_fingerprint(own):
        raise UserError(
            f"{cfg.reward_model.path} was trained with another chat template or tokenizer than "
            f"{'the policy has' if on_backbone else 'its folder holds'}, so its scores would mean nothing; train it again"
        )
    mean, std = (stats["score_mean"], max(stats["score_std"], 1e-6)) if stats else (0.0, 1.0)

    def forward(ids: Tensor, mask: Tensor) -> Tensor:
        batch = {"input_ids": ids, "attention_mask": mask, "response_mask": torch.zeros_like(mask)}
        return model(batch, ("reward",))["scores"]

    def scorer(prompts, responses, columns):
        positions = max_positions(model.lm("reward"))
        raw = model_scores(forward, own, prompts, responses, cfg.log_prob_micro_batch_size_per_gpu, device, positions)
        return [(score - mean) / std for score in raw]

    return scorer


# ----------------------------------------------------------------------------------------------- rollout data


@dataclass
class Rollout:
    """One sampled response; per-token lists have one entry a response token."""

    row: int
    prompt_ids: list[int]
    response_ids: list[int]
    text: str
    ended: bool
    score: float = 0.0
    logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None
    entropy: list[float] | None = None
    values: list[float] | None = None


def prompt_order(n_rows: int, position: int, count: int, seed: int) -> list[int]:
    """Row numbers at `position`, ..., `position + count - 1` of an endless stream of seeded epochs."""
    first = position // n_rows
    last = (position + count - 1) // n_rows
    stream = []
    for epoch in range(first, last + 1):
        stream += torch.randperm(n_rows, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()
    return stream[position - first * n_rows :][:count]


def seed_sampling(seed: int, step: int, rank: int) -> None:
    """Set the global generators from (seed, step, rank), so a resumed run draws what the first would have."""
    torch.manual_seed(((seed * 1_000_003 + step) * 4_099 + rank) % 2**63)


def make_batch(rollouts: list[Rollout], pad_id: int, device) -> dict[str, Tensor]:
    """Rollouts -> right-padded `input_ids`, `attention_mask` and `response_mask`, (B, S)."""
    ids, mask = pad_rows([r.prompt_ids + r.response_ids for r in rollouts], pad_id, torch.long)
    starts = torch.tensor([len(r.prompt_ids) for r in rollouts])[:, None]
    response_mask = mask & (torch.arange(ids.shape[1]) >= starts)
    return {
        "input_ids": ids.to(device), "attention_mask": mask.to(device), "response_mask": response_mask.to(device)
    }


def by_length(rollouts: list[Rollout]) -> list[int]:
    """Indices, longest first: micro-batches of like lengths hold little padding."""
    return sorted(range(len(rollouts)), key=lambda i: -len(rollouts[i].prompt_ids) - len(rollouts[i].response_ids))


@torch.no_grad()
def add_logprobs_and_values(rollouts: list[Rollout], model: RoleModel, cfg: PPOConfig, pad_id: int, device) -> None:
    """Fill in per-token log-probabilities, entropy and values by the forward that the update uses too."""
    order, micro = by_length(rollouts), cfg.log_prob_micro_batch_size_per_gpu
    for start in range(0, len(order), micro):
        part = [rollouts[i] for i in order[start : start + micro]]
        batch = make_batch(part, pad_id, device)
        out = model(batch, ("policy", "critic", "reference"), cfg.rollout.temperature, entropy=True)
        lengths = [len(r.response_ids) for r in part]
        for name in ("logprobs", "ref_logprobs", "entropy", "values"):
            for rollout, tokens in zip(part, out[name].cpu().split(lengths)):
                setattr(rollout, name, tokens.tolist())


def experience(rollouts: list[Rollout], cfg: PPOConfig, kl_coef: float) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Token tensors (B, T) for the update, and the metrics of the rollouts. Pure CPU arithmetic."""
    logprobs, mask = pad_rows([r.logprobs for r in rollouts], 0, torch.float32)
    ref_logprobs, _ = pad_rows([r.ref_logprobs for r in rollouts], 0, torch.float32)
    values, _ = pad_rows([r.values for r in rollouts], 0, torch.float32)
    entropy, _ = pad_rows([r.entropy for r in rollouts], 0, torch.float32)
    scores = torch.tensor([r.score for r in rollouts])
    algorithm = cfg.algorithm
    rewards = kl_shaped_rewards(scores, logprobs, ref_logprobs, mask, kl_coef)
    advantages, returns = gae(rewards, values, mask, algorithm.gamma, algorithm.lam)
    tensors = {
        "mask": mask, "logprobs": logprobs, "values": values, "returns": returns, "advantages": masked_whiten(advantages, mask)
    }
    k1 = torch.where(mask, logprobs - ref_logprobs, 0).sum(1)  # (B,)
    total = rewards.sum(1)  # (B,)
    returns_variance = masked_mean((returns - masked_mean(returns, mask)) ** 2, mask)
    residual = returns - values
    residual_variance = masked_mean((residual - masked_mean(residual, mask)) ** 2, mask)
    lengths = mask.sum(1).float()
    bigrams = [pair for r in rollouts for pair in zip(r.response_ids, r.response_ids[1:])]
    metrics = {
        "objective/kl": k1.mean(),
        "objective/kl_per_token": masked_mean(k3(logprobs, ref_logprobs), mask),
        "objective/kl_coef": kl_coef,
        "objective/score_mean": scores.mean(),
        "objective/score_std": scores.std(unbiased=False),
        "objective/reward_mean": total.mean(),
        "objective/reward_std": total.std(unbiased=False),
        "objective/entropy": masked_mean(entropy, mask),
        "objective/return_mean": masked_mean(returns, mask),
        "critic/explained_variance": 1 - residual_variance / returns_variance.clamp(min=1e-8),
        "rollout/response_length_mean": lengths.mean(),
        "rollout/truncated_fraction": sum(not r.ended for r in rollouts) / len(rollouts),
        "rollout/empty_fraction": sum(not r.text.strip() for r in rollouts) / len(rollouts),
        "rollout/distinct_2": len(set(bigrams)) / max(1, len(bigrams)),
    }
    return tensors, {name: float(value) for name, value in metrics.items()}


# ----------------------------------------------------------------------------------------------------- update


def update(
    rollouts: list[Rollout], tensors: dict[str, Tensor], model, optimizer, cfg: PPOConfig, step: int, pad_id: int, accelerator
) -> dict[str, float]:
    """All epochs and mini-batches of one step. Every rank holds all rollouts and takes its share of each mini-batch.

    The loss is a token mean over the whole mini-batch, so gradients depend neither on the micro-batch size nor on
    the number of ranks.
    """
    n_updates = 0
    sums: dict[str, float] = {}
    for epoch in range(cfg.ppo_epochs):
        generator = torch.Generator().manual_seed((cfg.seed * 1_000_003 + step) * 101 + epoch)
        order = torch.randperm(len(rollouts), generator=generator).tolist()
        for start in range(0, len(order), cfg.ppo_mini_batch_size):
            rows = order[start : start + cfg.ppo_mini_batch_size]
            values = mini_batch_step(rows, rollouts, tensors, model, optimizer, cfg, step, pad_id, accelerator)
            n_updates += 1
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + value
    return {name: value / n_updates for name, value in sums.items()}


def mini_batch_step(
    rows: list[int], rollouts, tensors, model, optimizer, cfg: PPOConfig, step: int, pad_id: int, accelerator
) -> dict[str, float]:
    """One optimizer step on `rows`; returns token-weighted metrics of the whole mini-batch."""
    world, micro, device = accelerator.num_processes, cfg.ppo_micro_batch_size_per_gpu, accelerator.device
    total_tokens = int(tensors["mask"][rows].sum())
    rows = [rows[i] for i in by_length([rollouts[r] for r in rows])]
    mine = rows[accelerator.process_index :: world]
    warming_up = step <= cfg.critic.warmup_steps
    value_coef = 1.0 if cfg.critic.kind != "shared" else 0.1 if cfg.critic.loss_coef is None else cfg.critic.loss_coef
    algorithm = cfg.algorithm
    sums: dict[str, Tensor] = {}
    for i in range(0, len(mine), micro):
        part = mine[i : i + micro]
        batch = make_batch([rollouts[r] for r in part], pad_id, device)
        width = int(tensors["mask"][part].sum(1).max())
        old = {name: tensor[part, :width].to(device) for name, tensor in tensors.items()}
        mask = old["mask"]
        tokens = int(mask.sum())
        last = i + micro >= len(mine)
        with accumulating(accelerator, model, last):
            out = model(batch, ("policy", "critic"), cfg.rollout.temperature, entropy=algorithm.entropy_coef > 0)
            logprobs = torch.zeros_like(old["logprobs"]).masked_scatter(mask, out["logprobs"])
            values = torch.zeros_like(old["values"]).masked_scatter(mask, out["values"])
            policy_loss, info = ppo_policy_loss(logprobs, old["logprobs"], old["advantages"], mask, algorithm.clip_ratio)
            value_loss, value_info = ppo_value_loss(values, old["values"], old["returns"], mask, algorithm.value_clip)
            loss = policy_loss
            if algorithm.entropy_coef > 0:
                loss = loss - algorithm.entropy_coef * out["entropy"].mean()
            loss = loss * (0.0 if warming_up else 1.0) + value_coef * value_loss
            backward(accelerator, model, loss * (tokens / total_tokens * world), last)  # ranks' gradients are averaged
        info |= value_info | {"policy/loss": policy_loss.detach(), "critic/loss": value_loss.detach()}
        for name, value in info.items():
            sums[name] = sums.get(name, 0.0) + value * (tokens / total_tokens)
    norms = {}
    for name, parameters in unwrap(model).groups().items():
        norms[f"{name}/grad_norm"] = clip_grad_norm(accelerator, parameters, cfg.max_grad_norm)
        if not math.isfinite(norms[f"{name}/grad_norm"]):
            raise UserError(f"step {step}: the gradient of the {name} is not finite; lower lr, or resume from a checkpoint with a lower one")
        if name == "policy" and warming_up:  # a shared critic's loss reaches the policy too, and Adam counts zero gradients
            drop_gradients(accelerator, parameters)
    step_optimizer(accelerator, model, optimizer)
    names = sorted(sums)
    reduced = accelerator.reduce(torch.stack([sums[name] for name in names]), "sum").tolist()
    return dict(zip(names, reduced)) | norms


# ------------------------------------------------------------------------------------------------------ train


def train(cfg: PPOConfig) -> list[dict]:
    """Run stage 3; returns the metrics of its steps, which also stand in metrics.jsonl."""
    started = time.time()
    check_config(cfg)
    folder = Path(cfg.output_dir)
    check_output_dir(cfg.output_dir, cfg.overwrite, cfg.resume, can_resume=True)
    if cfg.resume:
        check_same_config(folder, cfg)
    accelerator = start_accelerator(folder, cfg.report_to, cfg.seed)
    device, is_main = accelerator.device, accelerator.is_main_process
    rank, world = accelerator.process_index, accelerator.num_processes

    tokenizer = load_tokenizer(cfg.model.path, cfg.model.trust_remote_code)
    rows = load_prompts(cfg.data, "train")
    total_steps = count_steps(cfg, len(rows), world)
    if cfg.reward_model.style == "rule":
        check_ground_truth(rows)
    with accelerator.main_process_first():
        model = build_roles(cfg, device, load_device(accelerator))
    policy = model.lm("policy")
    prompts = encode_prompts(tokenizer, rows, cfg.max_prompt_length, cfg.max_response_length, max_positions(policy))
    stop_ids, pad_id = eos_ids(tokenizer, policy), tokenizer.pad_token_id
    scorer = build_scorer(cfg, model, tokenizer, device)
    held_out = load_prompts(cfg.data, "test")[: cfg.eval_prompts] if cfg.eval_every else []
    encode_prompts(tokenizer, held_out, cfg.max_prompt_length, cfg.max_response_length, max_positions(policy))
    if is_main:
        open_output_dir(cfg.output_dir, cfg.overwrite, cfg.resume)
        record_run(folder, cfg)
    accelerator.wait_for_everyone()
    groups, critic_lr = model.groups(), cfg.lr if cfg.critic.lr is None else cfg.critic.lr
    optimizer = torch.optim.AdamW(
        [{"params": groups["policy"], "lr": cfg.lr}, {"params": groups["critic"], "lr": critic_lr}], weight_decay=0.0
    )
    roles = model  # forwards without gradients need no wrapper
    trained = sum(p.numel() for p in model.trainable().values())
    model, optimizer = prepare(accelerator, model, optimizer, cfg.ppo_micro_batch_size_per_gpu)
    accelerator.init_trackers("tensorboard" if cfg.report_to != "none" else "none")

    state = (load_checkpoint(folder, accelerator, model, optimizer) if cfg.resume else None) or {"step": 0}
    kl_coef = state.get("kl_coef", cfg.algorithm.kl_coef)
    first_step = state["step"]
    metrics = Metrics(folder, accelerator, first_step)
    if is_main:
        describe(cfg, roles, len(rows), total_steps, world, device, trained)
    history, clock = [], time.time()
    bar = progress_bar(label="ppo", unit="step", total=total_steps, initial=first_step)

    for step in range(first_step + 1, total_steps + 1):
        timer = Timer()
        # 1. sample n responses to each prompt; each rank takes its share
        with timer("rollout"):
            n_prompts = cfg.train_batch_size // cfg.rollout.n
            chosen = prompt_order(len(rows), (step - 1) * n_prompts, n_prompts, cfg.seed)
            mine = split_for_rank([row for row in chosen for _ in range(cfg.rollout.n)], rank, world)
            seed_sampling(cfg.seed, step, rank)
            rollouts = sample(roles, [prompts[i] for i in mine], mine, cfg, tokenizer, stop_ids, is_zero3(accelerator))
        # 2. score
        with timer("score"):
            score(rollouts, rows, scorer)
        # 3. log-probabilities of policy and reference, and values; then every rank gets all rollouts
        with timer("logprobs"):
            add_logprobs_and_values(rollouts, roles, cfg, pad_id, device)
            rollouts = gather_lists(rollouts)
        # 4. and 5. token rewards and whitened advantages
        tensors, values = experience(rollouts, cfg, kl_coef)
        # 6. clipped updates
        if is_main and step == first_step + 1:
            print_rollout(rollouts[0], tokenizer)
        with timer("update"):
            values |= update(rollouts, tensors, model, optimizer, cfg, step, pad_id, accelerator)
        # 7. controller, metrics, samples, checkpoint
        control = cfg.algorithm.kl_ctrl
        if control.method == "adaptive":
            horizon = control.horizon or 10 * cfg.train_batch_size
            kl_coef = next_kl_coef(kl_coef, values["objective/kl_per_token"], control.target_kl, horizon, cfg.train_batch_size)
        if cfg.eval_every and step % cfg.eval_every == 0:
            with timer("eval"):
                values |= sample_held_out(held_out, roles, cfg, tokenizer, stop_ids, scorer, step, folder, accelerator)
        seconds = timer.seconds | {"total": sum(timer.seconds.values())}
        tokens = sum(len(r.response_ids) for r in rollouts)
        values |= {f"time/{phase}": s for phase, s in seconds.items()}
        values |= {
            "rollout/tokens_per_second": tokens / seconds["rollout"], "policy/lr": 0.0 if step <= cfg.critic.warmup_steps else cfg.lr,
            "critic/lr": critic_lr, "memory/peak_gb": peak_memory_gb(device),
        }
        metrics.log(step, values)
        history.append({"step": step, **values})
        bar.update(1)
        if is_main and (step % cfg.log_every == 0 or step == total_steps):
            left = remaining(step - first_step, total_steps - first_step, time.time() - clock)
            print(
                f"step {step}/{total_steps}  score {values['objective/score_mean']:+.3f}  KL/token {values['objective/kl_per_token']:.4f}  "
                f"length {values['rollout/response_length_mean']:.1f}  entropy {values['objective/entropy']:.2f}  "
                f"clipped {values['policy/clip_fraction']:.3f}  {seconds['total']:.1f} s  left {left}", flush=True,
            )
        if cfg.save_every and step % cfg.save_every == 0:
            save_checkpoint(folder, step, accelerator, model, optimizer, {"kl_coef": kl_coef}, cfg.keep_last)
    bar.close()

    save_final(roles, tokenizer, cfg, folder, accelerator)
    if is_main:
        record_run(folder, cfg, started)
        print(f"peak memory {peak_memory_gb(device):.2f} GB; wrote {folder / 'final'}", flush=True)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return history


def check_config(cfg: PPOConfig) -> None:
    """Everything that can be refused before a model is loaded."""
    check_reward_config(cfg.reward_model)
    if cfg.rollout.temperature <= 0:
        raise UserError("rollout.temperature must be above 0: PPO needs samples and their probabilities")
    control = cfg.algorithm.kl_ctrl
    if control.method == "adaptive" and (control.target_kl is None or control.target_kl <= 0):
        raise UserError("algorithm.kl_ctrl.method adaptive needs target_kl above 0, in nats a token")
    if control.method == "adaptive" and control.horizon is not None and control.horizon <= 0:
        raise UserError("algorithm.kl_ctrl.horizon must be above 0")
    if control.method == "fixed" and (control.target_kl is not None or control.horizon is not None):
        raise UserError("algorithm.kl_ctrl.target_kl and horizon have no effect with method fixed; set method adaptive")
    if cfg.algorithm.kl_coef < 0:
        raise UserError("algorithm.kl_coef must not be negative")
    if cfg.critic.kind == "adapter" and cfg.lora is None:
        raise UserError("critic.kind adapter needs lora; with lora null set critic.kind shared")
    if cfg.critic.kind == "adapter" and cfg.critic.loss_coef is not None:
        raise UserError("critic.loss_coef has no effect with critic.kind adapter, which learns apart from the policy; remove it")
    if (cfg.total_steps is None) == (cfg.total_epochs is None):
        raise UserError("give total_steps or total_epochs, and not both")
    if (cfg.total_epochs if cfg.total_steps is None else cfg.total_steps) <= 0:
        raise UserError("total_steps and total_epochs must be above 0")
    if cfg.lr <= 0 or (cfg.critic.lr is not None and cfg.critic.lr <= 0):
        raise UserError("lr and critic.lr must be above 0")
    if cfg.seed < 0:
        raise UserError("seed must not be negative")


def count_steps(cfg: PPOConfig, n_rows: int, world: int) -> int:
    """Check the batch sizes against each other and return the number of steps."""
    batch, mini, micro, n = cfg.train_batch_size, cfg.ppo_mini_batch_size, cfg.ppo_micro_batch_size_per_gpu, cfg.rollout.n
    for name, value in (
        ("train_batch_size", batch), ("ppo_mini_batch_size", mini), ("ppo_micro_batch_size_per_gpu", micro),
        ("log_prob_micro_batch_size_per_gpu", cfg.log_prob_micro_batch_size_per_gpu), ("ppo_epochs", cfg.ppo_epochs),
        ("rollout.n", n), ("rollout.micro_batch_size_per_gpu", cfg.rollout.micro_batch_size_per_gpu), ("keep_last", cfg.keep_last),
        ("max_response_length", cfg.max_response_length), ("log_every", cfg.log_every), ("eval_prompts", cfg.eval_prompts),
    ):
        if value < 1:
            raise UserError(f"{name} {value} must be at least 1")
    problems = []
    if batch % n:
        problems.append(f"train_batch_size {batch} is not a multiple of rollout.n {n}")
    if batch % mini:
        problems.append(f"train_batch_size {batch} is not a multiple of ppo_mini_batch_size {mini}")
    if mini % (micro * world):
        problems.append(
            f"ppo_mini_batch_size {mini} is not a multiple of ppo_micro_batch_size_per_gpu {micro} x {world} rank(s) = {micro * world}"
        )
    if problems:
        raise UserError(
            f"{'; '.join(problems)} (train_batch_size = mini-batches x ppo_mini_batch_size; "
            "ppo_mini_batch_size = micro-batches x ppo_micro_batch_size_per_gpu x ranks)"
        )
    prompts_a_step = batch // n
    if cfg.total_steps is not None:
        return cfg.total_steps
    return math.ceil(n_rows * cfg.total_epochs / prompts_a_step)


def describe(cfg: PPOConfig, model: RoleModel, n_rows: int, steps: int, world: int, device, trained: int) -> None:
    batch, mini, micro, n = cfg.train_batch_size, cfg.ppo_mini_batch_size, cfg.ppo_micro_batch_size_per_gpu, cfg.rollout.n
    print(
        f"{n_rows} prompts; {steps} steps of {batch // n} prompts x {n} = {batch} responses; "
        f"{cfg.ppo_epochs} epoch(s) x {batch // mini} mini-batch(es) of {mini} = {mini // (micro * world)} micro-batch(es) of {micro} "
        f"x {world} rank(s)"
    )
    places = ", ".join(f"{role} = {name}" + (f"[{adapter}]" if adapter else "") for role, (name, adapter) in model.roles.items())
    print(f"roles: {places}; {trained:,} trained weights; {str(model.dtype).removeprefix('torch.')} on {device}", flush=True)


def sample(
    model: RoleModel, prompts: list[list[int]], rows: list[int], cfg: PPOConfig, tokenizer, stop_ids, synced: bool
) -> list[Rollout]:
    with model.use("policy") as lm:
        responses = generate(
            lm, prompts, cfg.max_response_length, cfg.rollout.temperature, stop_ids, tokenizer.pad_token_id,
            cfg.rollout.micro_batch_size_per_gpu, synced=synced,
        )
    return [
        Rollout(row, prompt, ids, decode_response(tokenizer, ids), ended=ids[-1] in stop_ids)
        for row, prompt, ids in zip(rows, prompts, responses)
    ]


def score(rollouts: list[Rollout], rows: list[dict], scorer) -> None:
    texts = [r.text for r in rollouts]
    columns = {name: [rows[r.row].get(name) for r in rollouts] for name in ("id", "ground_truth", "reference", "metadata")}
    for rollout, value in zip(rollouts, scorer([rows[r.row]["prompt"] for r in rollouts], texts, columns)):
        rollout.score = value


def sample_held_out(
    rows: list[dict], model, cfg: PPOConfig, tokenizer, stop_ids, scorer, step: int, folder: Path, accelerator
) -> dict[str, float]:
    """Greedy answers to the first held-out prompts, on the first rank: their mean score, two printed, all in samples.jsonl.

    Under ZeRO-3 the other ranks go along, since none has the whole model.
    """
    if not accelerator.is_main_process and not is_zero3(accelerator):
        return {}
    prompts = encode_prompts(tokenizer, rows, cfg.max_prompt_length, cfg.max_response_length, None)
    with model.use("policy") as lm:
        responses = generate(lm, prompts, cfg.max_response_length, 0.0, stop_ids, tokenizer.pad_token_id, synced=is_zero3(accelerator))
    rollouts = [
        Rollout(i, p, ids, decode_response(tokenizer, ids), ids[-1] in stop_ids) for i, (p, ids) in enumerate(zip(prompts, responses))
    ]
    score(rollouts, rows, scorer)
    if not accelerator.is_main_process:
        return {}
    with open(folder / "samples.jsonl", "a", encoding="utf-8") as file:
        for r in rollouts:
            line = {"step": step, "prompt": rows[r.row]["prompt"][-1]["content"], "response": r.text, "score": round(r.score, 4)}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    for r in rollouts[:2]:
        print(show(f"  {rows[r.row]['prompt'][-1]['content'][-100:]!r} -> {r.text[:300]!r} ({r.score:+.2f})"), flush=True)
    return {"eval/score_mean": sum(r.score for r in rollouts) / len(rollouts)}


def print_rollout(rollout: Rollout, tokenizer) -> None:
    """One rollout as the update sees it; ‹...› marks the tokens in the loss."""
    print("--- one rollout, decoded; the part in ‹...› is in the loss" if show("‹") == "‹" else "--- one rollout, decoded")
    print(show(f"{tokenizer.decode(rollout.prompt_ids)}‹{tokenizer.decode(rollout.response_ids)}›"))
    print(f"--- score {rollout.score:+.3f}, {len(rollout.response_ids)} tokens, {'ended' if rollout.ended else 'cut off'}", flush=True)


def save_final(model: RoleModel, tokenizer, cfg: PPOConfig, folder: Path, accelerator) -> None:
    """`final/`: the policy as a plain model; with LoRA also `adapter/`, and the critic's weights in `critic/`."""
    from safetensors.torch import save_file

    is_main = accelerator.is_main_process
    name, adapter = model.roles["policy"]
    weights = merged_state_dict(model.models[name], adapter, keep=is_main)
    with whole(model.trainable().values() if adapter is not None else model.value_head.parameters()):
        if not is_main:
            return
        save_model(model.models[name], weights, tokenizer, folder / "final")
        plain_base = adapter_base(cfg.model.path) is None
        if adapter is not None and not plain_base:
            print("adapter/ is left out: the run started from a LoRA folder merged in memory, which the new adapter would need")
        if adapter is not None and plain_base:
            save_adapter(model.models[name], adapter, folder / "adapter")
        if model.roles["critic"][1] == "critic" and plain_base:
            save_adapter(model.models[name], "critic", folder / "critic")
        (folder / "critic").mkdir(exist_ok=True)
        save_file({n: p.detach().cpu() for n, p in model.value_head.named_parameters()}, folder / "critic" / "value_head.safetensors")


if __name__ == "__main__":
    run_stage(train, PPOConfig)

"""Stage 3: PPO with KL control against a reward model, a rule or a Python function.

    python train_ppo.py --config configs/demo_ppo.yaml
    accelerate launch --config_file configs/accelerate/multi_cpu.yaml train_ppo.py --config configs/hh_ppo.yaml

Writes `final/` (a causal language model that transformers and vLLM open as it is), `adapter/` and `critic/`.

One step, as numbered in `train`: 1 sample responses. 2 score them. 3 log-probabilities of policy and
reference, and values. 4 token rewards: minus kl_coef x KL on each token, plus the score on the last.
5 advantages. 6 clipped updates. 7 KL controller, metrics, checkpoint.
"""

import dataclasses
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor

from utils.checkpoint import load_checkpoint, rewrite_state, save_checkpoint, step_name
from utils.config import (
    LoraOptions,
    ModelConfig,
    RunStopped,
    UserError,
    check_output_dir,
    check_same_config,
    open_output_dir,
    record_run,
    run_stage,
    write_text,
)
from utils.data import decode_response, encode_prompts, load_prompts, show
from utils.guards import GuardConfig, Guards, RollBack, SkipRest
from utils.launch import (
    accumulating,
    backward,
    clip_grad_norm,
    discard_gradients,
    drop_gradients,
    gather_lists,
    is_zero3,
    load_device,
    prepare,
    split_for_rank,
    start_accelerator,
    step_optimizer,
    unwrap,
    whole,
)
from utils.models import (
    RoleModel,
    adapter_base,
    add_lora,
    add_reward_adapter,
    eos_ids,
    load_causal_lm,
    load_reward_model,
    load_tokenizer,
    max_positions,
    merged_state_dict,
    model_dtype,
    new_reward_model,
    read_stats,
    replacing,
    same_model,
    save_adapter,
    save_model,
    save_tensors,
    template_fingerprint,
)
from utils.report import curves_svg, page
from utils.rewards import (
    RewardConfig,
    check_ground_truth,
    check_reward_config,
    function_scorer,
    model_scores,
    rule_scorer,
)
from utils.rollout import generate
from utils.tensors import masked_mean, masked_whiten, pad_rows
from utils.tracking import (
    Metrics,
    Timer,
    log_samples,
    peak_memory_gb,
    progress_bar,
    read_metrics,
    remaining,
    start_trackers,
)

KL_COEF_BOUNDS = (1e-4, 10.0)  # the controller never leaves these
PLOTS = [  # panels of report.html
    ("objective/score_mean",),
    ("objective/reward_mean",),
    ("objective/kl_per_token",),
    ("objective/kl_coef",),
    ("rollout/response_length_mean",),
    ("objective/entropy",),
    ("rollout/truncated_fraction", "rollout/distinct_2"),
    ("eval/score_mean",),
    ("policy/loss", "policy/kl_loss"),
    ("critic/loss",),
    ("policy/approx_kl", "policy/clip_fraction"),
    ("critic/explained_variance",),
    ("policy/grad_norm", "critic/grad_norm"),
]
NO_SCORES = {"count": 0, "mean": 0.0, "m2": 0.0}  # moments of the run's scores before the first


@dataclass(frozen=True)
class CriticConfig:
    """The value function of adv_estimator gae."""

    kind: Literal["adapter", "shared", "separate"] = "adapter"
    """adapter: a LoRA adapter of its own on the backbone. shared: a head on the policy's hidden states, which
    halves the update's cost. separate: a model of its own"""
    path: str | None = None
    """adapter, separate: reward model to start from; null = the policy's weights and values of 0"""
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
class ScoreConfig:
    """What is done to a response's score before it becomes a reward, in this order."""

    normalize: bool = False
    """shift and scale by the mean and deviation of all scores of the run so far"""
    clip: float | None = None
    """keep within +- this"""
    missing_eos_penalty: float = 0.0
    """taken off where the response was cut off"""
    length_penalty: float = 0.0
    """taken off for each response token"""


@dataclass(frozen=True)
class KLControl:
    """How kl_coef changes during the run."""

    method: Literal["fixed", "adaptive", "moving_average"] = "fixed"
    """adaptive: proportional control towards target_kl (Ziegler et al. 2019, section 2.2). moving_average: the
    same, driven by an exponential average of the measured KL"""
    target_kl: float | None = None
    """KL to the reference to hold, in nats a token"""
    horizon: int | None = None
    """responses in which the coefficient can change by a factor of about 1.2; null = 10 steps' worth"""
    decay: float | None = None
    """moving_average: share of the old average that each step keeps; null = 0.5"""


@dataclass(frozen=True)
class AlgorithmConfig:
    """PPO (Schulman et al. 2017)."""

    adv_estimator: Literal["gae", "rloo", "grpo"] = "gae"
    """gae: with a critic (Schulman et al. 2016). rloo: reward minus the mean of the prompt's other responses (Ahmadian et
    al. 2024). grpo: reward whitened among the prompt's responses (Shao et al. 2024). The last two need rollout.n > 1"""
    gamma: float = 1.0
    """gae: discount a token"""
    lam: float = 0.95
    """gae: its lambda"""
    whiten_rewards: bool = False
    """gae: divide token rewards by their deviation over the step"""
    whiten_advantages: bool | None = None
    """shift and scale to mean 0 and deviation 1 over the step's tokens; null = with gae only"""
    clip_ratio: float = 0.2
    """the policy ratio is clipped to 1 +- this"""
    clip_ratio_c: float | None = None
    """dual clip: the loss of a token with a negative advantage is at most this times minus the advantage (Ye et al. 2020); 3 is common"""
    value_clip: float = 0.2
    """gae: values move at most this far from the old ones in one step"""
    entropy_coef: float = 0.0
    """weight of the entropy bonus, nats a token"""
    kl_coef: float = 0.05
    """reward units (or loss units) a nat of KL to the reference, on each token"""
    kl_in: Literal["reward", "loss"] = "reward"
    """where KL to the reference is paid"""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """of log r = log ref - log policy (Schulman 2020): k1 -log r, k2 (log r)^2 / 2, k3 r - 1 - log r; null = k1 in the reward, k3 in the loss"""
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
    score: ScoreConfig = field(default_factory=ScoreConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    guards: GuardConfig = field(default_factory=GuardConfig)
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
    lr: float | None = None
    """learning rate of the policy (AdamW, constant); null = 1e-4 with lora, 1e-5 without"""
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
    resume: Literal["auto", "partial"] | None = None
    """auto: go on from the newest checkpoint of output_dir, or start. partial: the same, where the checkpoint lacks something"""
    overwrite: bool = False
    """replace the output of an earlier run"""
    report_to: Literal["tensorboard", "wandb", "trackio", "none"] = "tensorboard"
    """tracker, beside metrics.jsonl; wandb and trackio must be installed"""
    seed: int = 0
    """of adapters, prompt order, sampling and mini-batches"""


# ------------------------------------------------------------------------------------------------------- math


def kl_shaped_rewards(
    scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kl_coef: float, estimator: str = "k1"
) -> Tensor:
    """Token rewards (B, T): -kl_coef x KL to the reference on response tokens, plus the score on the last.

    scores (B,); the rest (B, T) with a boolean mask. 0 outside the mask. (Ziegler et al. 2019, eq. 2.)
    """
    rewards = torch.where(mask, -kl_coef * KL_ESTIMATORS[estimator](logprobs, ref_logprobs), 0)
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


def rloo_advantages(rewards: Tensor, n: int) -> Tensor:
    """Reward minus the mean of the n - 1 other responses to the prompt: (B,) in groups of n -> (B,)."""
    groups = rewards.view(-1, n)
    return (groups - (groups.sum(1, keepdim=True) - groups) / (n - 1)).view(-1)


def grpo_advantages(rewards: Tensor, n: int) -> Tensor:
    """Rewards shifted and scaled to mean 0 and deviation 1 (population) in each group of n: (B,) -> (B,); equal ones give 0."""
    groups = rewards.view(-1, n)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred * torch.rsqrt((centred**2).mean(1, keepdim=True) + 1e-8)).view(-1)


def k1(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Plain estimate of KL(p || other) from samples of p, unbiased, negative by chance (Schulman 2020)."""
    return logprobs - other_logprobs


def k2(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Half the squared log ratio: biased, never negative; as a loss its gradient is that of the KL (Schulman 2020)."""
    return 0.5 * (logprobs - other_logprobs) ** 2


def k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Low-variance estimate of KL(p || other) from samples of p, never negative (Schulman 2020): r - 1 - log r."""
    log_ratio = other_logprobs - logprobs
    return torch.expm1(log_ratio) - log_ratio


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def ppo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_ratio: float,
    clip_ratio_c: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate loss (Schulman et al. 2017, eq. 7), mean over the mask. All (B, T).

    clip_ratio_c bounds the loss of tokens with negative advantages at -clip_ratio_c x advantage (Ye et al. 2020, eq. 5).
    """
    logprobs, old_logprobs, advantages = (torch.where(mask, x, 0) for x in (logprobs, old_logprobs, advantages))
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    losses = torch.maximum(plain, -advantages * ratio.clamp(1 - clip_ratio, 1 + clip_ratio))
    if clip_ratio_c is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * clip_ratio_c), losses)
    loss = masked_mean(losses, mask)
    with torch.no_grad():
        metrics = {
            "policy/approx_kl": masked_mean(ratio - 1 - log_ratio, mask),
            "policy/clip_fraction": masked_mean((losses != plain).float(), mask),
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


def shape_scores(
    scores: Tensor, lengths: Tensor, ended: Tensor, cfg: ScoreConfig, moments: dict[str, float]
) -> Tensor:
    """Scores (B,) as rewards. moments {count, mean, m2} of the earlier scores are brought up to date in place (Chan et al. 1979)."""
    count, batch = moments["count"], len(scores)
    mean = scores.double().mean().item()
    m2 = ((scores.double() - mean) ** 2).sum().item()
    shift, total = mean - moments["mean"], count + batch
    moments["m2"] += m2 + shift**2 * count * batch / total
    moments["mean"] += shift * batch / total
    moments["count"] = total
    if cfg.normalize:
        scores = (scores - moments["mean"]) / max((moments["m2"] / total) ** 0.5, 1e-6)
    if cfg.clip is not None:
        scores = scores.clamp(-cfg.clip, cfg.clip)
    return scores - cfg.missing_eos_penalty * (~ended) - cfg.length_penalty * lengths


# ------------------------------------------------------------------------------------------- model and rewards


def build_roles(cfg: PPOConfig, device: torch.device, load_on: torch.device | None = None) -> RoleModel:
    """Policy, reference, critic and, for style `model`, reward; with LoRA all on one backbone where possible.

    `device` computes; the weights are built on `load_on` (null = there too).
    """
    dtype = model_dtype(cfg.model.dtype, device)
    device = load_on or device
    if cfg.lora is not None:
        backbone = add_lora(load_causal_lm(cfg.model, device, dtype), cfg.lora, "policy", cfg.seed)
        models, roles = {"backbone": backbone}, {"policy": ("backbone", "policy"), "reference": ("backbone", None)}
    else:
        models = {
            "policy": load_causal_lm(cfg.model, device, torch.float32).requires_grad_(True),
            "reference": load_causal_lm(cfg.model, device, torch.float32),  # as the policy, so that KL starts at 0
        }
        roles = {"policy": ("policy", None), "reference": ("reference", None)}

    start_head = None  # of the reward model that the critic starts from
    if cfg.algorithm.adv_estimator == "gae" and cfg.critic.kind == "shared":
        roles["critic"] = roles["policy"]
    elif cfg.algorithm.adv_estimator == "gae" and cfg.critic.kind == "adapter":
        if cfg.critic.path is None:
            add_lora(backbone, cfg.lora, "critic", cfg.seed + 1)
        elif adapter_base(cfg.critic.path) is None or not same_model(adapter_base(cfg.critic.path), cfg.model.path):
            raise UserError(
                f"critic.path {cfg.critic.path} is not a LoRA of {cfg.model.path}; critic.kind separate takes any reward model"
            )
        else:
            start_head = add_reward_adapter(backbone, cfg.critic.path, "critic")
        roles["critic"] = ("backbone", "critic")
    elif cfg.algorithm.adv_estimator == "gae":
        source = dataclasses.replace(cfg.model, path=cfg.critic.path or cfg.model.path)
        if (
            cfg.critic.path
            and load_tokenizer(cfg.critic.path).get_vocab() != load_tokenizer(cfg.model.path).get_vocab()
        ):
            raise UserError(
                f"critic.path {cfg.critic.path} has another vocabulary than the policy, so it cannot read the policy's tokens"
            )
        trunk_dtype = dtype if cfg.lora else torch.float32
        if cfg.critic.path:
            critic = load_reward_model(source, device, trunk_dtype)
            start_head = critic.score
        else:
            critic = new_reward_model(source, device, cfg.seed, trunk_dtype)
        critic.score = torch.nn.Identity()  # the value head of RoleModel takes its place
        models["critic"] = (
            add_lora(critic, cfg.lora, "critic", cfg.seed + 1, task=None) if cfg.lora else critic.requires_grad_(True)
        )
        roles["critic"] = ("critic", "critic" if cfg.lora else None)

    score_head = None
    if cfg.reward_model.style == "model":
        base = adapter_base(cfg.reward_model.path)
        if base and cfg.lora is not None and same_model(base, cfg.model.path):
            score_head = add_reward_adapter(backbone, cfg.reward_model.path, "reward")
            roles["reward"] = ("backbone", "reward")
        else:
            reward = ModelConfig(cfg.reward_model.path, cfg.model.dtype, cfg.model.attn_implementation)
            models["reward"] = load_reward_model(reward, device)
            roles["reward"] = ("reward", None)
    if cfg.lora is not None:
        for model in models.values():
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(".policy." in name or ".critic." in name)
    model = RoleModel(models, roles, dtype)
    model.score_head = score_head
    if start_head is not None:  # values in the unit of the normalised scores
        mean, std = score_scale(cfg.critic.path)
        model.value_head.weight.data.copy_(start_head.weight / std)
        model.value_head.bias.data.fill_(((0.0 if start_head.bias is None else start_head.bias.item()) - mean) / std)
    if cfg.model.gradient_checkpointing:
        model.enable_checkpointing()
    return model.to(device)


def score_scale(path: str) -> tuple[float, float]:
    """Mean and deviation of a reward model's scores on its held-out data; (0, 1) if nobody measured them."""
    stats = read_stats(path)
    return (stats["score_mean"], max(stats["score_std"], 1e-6)) if stats else (0.0, 1.0)


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
    mean, std = score_scale(cfg.reward_model.path)

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
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), "response_mask": response_mask.to(device)}


def by_length(rollouts: list[Rollout]) -> list[int]:
    """Indices, longest first: micro-batches of like lengths hold little padding."""
    return sorted(range(len(rollouts)), key=lambda i: -len(rollouts[i].prompt_ids) - len(rollouts[i].response_ids))


@torch.no_grad()
def add_logprobs_and_values(rollouts: list[Rollout], model: RoleModel, cfg: PPOConfig, pad_id: int, device) -> None:
    """Fill in per-token log-probabilities, entropy and values by the forward that the update uses too."""
    order, micro = by_length(rollouts), cfg.log_prob_micro_batch_size_per_gpu
    roles = tuple(role for role in ("policy", "critic", "reference") if role in model.roles)
    for start in range(0, len(order), micro):
        part = [rollouts[i] for i in order[start : start + micro]]
        batch = make_batch(part, pad_id, device)
        out = model(batch, roles, cfg.rollout.temperature, entropy=True)
        lengths = [len(r.response_ids) for r in part]
        for name, values in out.items():
            for rollout, tokens in zip(part, values.cpu().split(lengths)):
                setattr(rollout, name, tokens.tolist())


def experience(
    rollouts: list[Rollout], cfg: PPOConfig, kl_coef: float, moments: dict[str, float] | None = None
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Token tensors (B, T) for the update, and the metrics of the rollouts. Pure CPU arithmetic.

    The n responses to a prompt stand together. moments: of the run's scores so far, see shape_scores.
    """
    algorithm = cfg.algorithm
    logprobs, mask = pad_rows([r.logprobs for r in rollouts], 0, torch.float32)
    ref_logprobs, _ = pad_rows([r.ref_logprobs for r in rollouts], 0, torch.float32)
    entropy, _ = pad_rows([r.entropy for r in rollouts], 0, torch.float32)
    scores = torch.tensor([r.score for r in rollouts])
    lengths, ended = mask.sum(1).float(), torch.tensor([r.ended for r in rollouts])
    shaped = shape_scores(scores, lengths, ended, cfg.score, dict(NO_SCORES) if moments is None else moments)
    in_reward = kl_coef if algorithm.kl_in == "reward" else 0.0
    rewards = kl_shaped_rewards(shaped, logprobs, ref_logprobs, mask, in_reward, kl_estimator(algorithm))
    totals = rewards.sum(1)  # (B,)
    tensors = {"mask": mask, "logprobs": logprobs, "ref_logprobs": ref_logprobs}
    critic_metrics = {}
    if algorithm.adv_estimator == "gae":
        values, _ = pad_rows([r.values for r in rollouts], 0, torch.float32)
        if algorithm.whiten_rewards:
            rewards = rewards * torch.rsqrt(masked_mean((rewards - masked_mean(rewards, mask)) ** 2, mask) + 1e-8)
        advantages, returns = gae(rewards, values, mask, algorithm.gamma, algorithm.lam)
        tensors |= {"values": values, "returns": returns}
        returns_variance = masked_mean((returns - masked_mean(returns, mask)) ** 2, mask)
        residual = returns - values
        residual_variance = masked_mean((residual - masked_mean(residual, mask)) ** 2, mask)
        critic_metrics = {
            "objective/return_mean": masked_mean(returns, mask),
            "critic/explained_variance": 1 - residual_variance / returns_variance.clamp(min=1e-8),
        }
    else:
        estimate = rloo_advantages if algorithm.adv_estimator == "rloo" else grpo_advantages
        advantages = torch.where(mask, estimate(totals, cfg.rollout.n)[:, None], 0)
        critic_metrics = {"objective/return_mean": masked_mean(totals[:, None].expand_as(mask), mask)}
    whiten = algorithm.adv_estimator == "gae" if algorithm.whiten_advantages is None else algorithm.whiten_advantages
    tensors["advantages"] = masked_whiten(advantages, mask) if whiten else advantages
    bigrams = [pair for r in rollouts for pair in zip(r.response_ids, r.response_ids[1:])]
    metrics = {
        "objective/kl": torch.where(mask, logprobs - ref_logprobs, 0).sum(1).mean(),
        "objective/kl_per_token": masked_mean(k3(logprobs, ref_logprobs), mask),
        "objective/kl_coef": kl_coef,
        "objective/score_mean": scores.mean(),
        "objective/score_std": scores.std(unbiased=False),
        "objective/reward_mean": totals.mean(),
        "objective/reward_std": totals.std(unbiased=False),
        "objective/entropy": masked_mean(entropy, mask),
        **critic_metrics,
        "rollout/response_length_mean": lengths.mean(),
        "rollout/truncated_fraction": sum(not r.ended for r in rollouts) / len(rollouts),
        "rollout/empty_fraction": sum(not r.text.strip() for r in rollouts) / len(rollouts),
        "rollout/distinct_2": len(set(bigrams)) / max(1, len(bigrams)),
    }
    return tensors, {name: float(value) for name, value in metrics.items()}


def kl_estimator(algorithm: AlgorithmConfig) -> str:
    return algorithm.kl_estimator or ("k1" if algorithm.kl_in == "reward" else "k3")


# ----------------------------------------------------------------------------------------------------- update


def update(
    rollouts: list[Rollout],
    tensors: dict[str, Tensor],
    model,
    optimizer,
    cfg: PPOConfig,
    step: int,
    pad_id: int,
    accelerator,
    kl_coef: float,
    guards: Guards | None = None,
    draw: int | None = None,
) -> dict[str, float]:
    """All epochs and mini-batches of one step. Every rank holds all rollouts and takes its share of each mini-batch.

    The loss is a token mean over the whole mini-batch, so gradients depend neither on the micro-batch size nor on
    the number of ranks. draw: seeds the order (null = step). Raises RollBack where the guards say so.
    """
    seen: list[dict[str, float]] = []  # metrics of each mini-batch
    draw = step if draw is None else draw
    try:
        for epoch in range(cfg.ppo_epochs):
            generator = torch.Generator().manual_seed((cfg.seed * 1_000_003 + draw) * 101 + epoch)
            order = torch.randperm(len(rollouts), generator=generator).tolist()
            for start in range(0, len(order), cfg.ppo_mini_batch_size):
                rows = order[start : start + cfg.ppo_mini_batch_size]
                seen.append(
                    mini_batch_step(
                        rows,
                        rollouts,
                        tensors,
                        model,
                        optimizer,
                        cfg,
                        step,
                        pad_id,
                        accelerator,
                        kl_coef,
                        guards,
                        first=not seen,
                    )
                )
        if (
            guards is not None and guards.cfg.enabled and guards.cfg.update_kl is not None
        ):  # nothing above has seen the last update's effect
            guards.check_update(step, update_kl(rows, rollouts, tensors, model, cfg, pad_id, accelerator), last=True)
    except SkipRest as skipped:
        seen.append(skipped.metrics)
    return {name: fmean(values[name] for values in seen if name in values) for name in seen[0]}


def micro_batches(rows: list[int], rollouts, tensors, cfg: PPOConfig, pad_id: int, accelerator):
    """This rank's share of a mini-batch: (batch for the model, token tensors (b, t), whether it is the last), longest first."""
    rows = [rows[i] for i in by_length([rollouts[r] for r in rows])]
    mine, micro = rows[accelerator.process_index :: accelerator.num_processes], cfg.ppo_micro_batch_size_per_gpu
    for i in range(0, len(mine), micro):
        part = mine[i : i + micro]
        width = int(tensors["mask"][part].sum(1).max())
        old = {name: tensor[part, :width].to(accelerator.device) for name, tensor in tensors.items()}
        yield make_batch([rollouts[r] for r in part], pad_id, accelerator.device), old, i + micro >= len(mine)


def mini_batch_step(
    rows: list[int],
    rollouts,
    tensors,
    model,
    optimizer,
    cfg: PPOConfig,
    step: int,
    pad_id: int,
    accelerator,
    kl_coef: float,
    guards: Guards | None,
    first: bool = False,
) -> dict[str, float]:
    """One optimizer step on `rows`; returns token-weighted metrics of the whole mini-batch. first: of the step."""
    world, algorithm = accelerator.num_processes, cfg.algorithm
    total_tokens = int(tensors["mask"][rows].sum())
    warming_up = step <= cfg.critic.warmup_steps
    value_coef = 1.0 if cfg.critic.kind != "shared" else 0.1 if cfg.critic.loss_coef is None else cfg.critic.loss_coef
    roles = ("policy", "critic") if algorithm.adv_estimator == "gae" else ("policy",)
    sums: dict[str, Tensor] = {}
    for batch, old, last in micro_batches(rows, rollouts, tensors, cfg, pad_id, accelerator):
        mask = old["mask"]
        share = int(mask.sum()) / total_tokens
        with accumulating(accelerator, model, last):
            out = model(batch, roles, cfg.rollout.temperature, entropy=algorithm.entropy_coef > 0)
            logprobs = torch.zeros_like(old["logprobs"]).masked_scatter(mask, out["logprobs"])
            loss, info = ppo_policy_loss(
                logprobs, old["logprobs"], old["advantages"], mask, algorithm.clip_ratio, algorithm.clip_ratio_c
            )
            info["policy/loss"] = loss.detach()
            if algorithm.entropy_coef > 0:
                loss = loss - algorithm.entropy_coef * out["entropy"].mean()
            if algorithm.kl_in == "loss":
                kl = masked_mean(KL_ESTIMATORS[kl_estimator(algorithm)](logprobs, old["ref_logprobs"]), mask)
                loss, info["policy/kl_loss"] = loss + kl_coef * kl, kl.detach()
            if "critic" in roles:
                values = torch.zeros_like(old["values"]).masked_scatter(mask, out["values"])
                value_loss, value_info = ppo_value_loss(
                    values, old["values"], old["returns"], mask, algorithm.value_clip
                )
                loss = loss * (0.0 if warming_up else 1.0) + value_coef * value_loss
                info |= value_info | {"critic/loss": value_loss.detach()}
            backward(accelerator, model, loss * (share * world), last)  # ranks' gradients are averaged
        for name, value in info.items():
            sums[name] = sums.get(name, 0.0) + value * share
    names = sorted(sums)
    metrics = dict(zip(names, accelerator.reduce(torch.stack([sums[name] for name in names]), "sum").tolist()))

    try:
        if guards is not None:
            if first:
                guards.check_first(step, metrics["policy/approx_kl"])
            guards.check_update(step, metrics["policy/approx_kl"])
        norms = {}
        for name, parameters in unwrap(model).groups().items():
            norms[name] = metrics[f"{name}/grad_norm"] = clip_grad_norm(accelerator, parameters, cfg.max_grad_norm)
            if (
                name == "policy" and warming_up
            ):  # a shared critic's loss reaches the policy too, and Adam counts zero gradients
                drop_gradients(accelerator, parameters)
                del norms[name]
        bad = [name for name, norm in norms.items() if not math.isfinite(norm)]
        if bad and (guards is None or not guards.cfg.enabled):
            raise UserError(
                f"step {step}: the gradient of the {' and '.join(bad)} is not finite; lower lr or set guards.enabled"
            )
        good = guards is None or guards.gradients_are_good(step, norms)
    except (SkipRest, RollBack) as problem:
        problem.metrics = metrics
        discard_gradients(accelerator, model, optimizer)
        raise
    (step_optimizer if good else discard_gradients)(accelerator, model, optimizer)
    return metrics


@torch.no_grad()
def update_kl(rows: list[int], rollouts, tensors, model, cfg: PPOConfig, pad_id: int, accelerator) -> float:
    """KL of the policy that sampled `rows` to the policy now, nats a token (k3), over all ranks."""
    total = torch.zeros((), device=accelerator.device)
    for batch, old, _ in micro_batches(rows, rollouts, tensors, cfg, pad_id, accelerator):
        logprobs = unwrap(model)(batch, ("policy",), cfg.rollout.temperature)["logprobs"]
        total += k3(old["logprobs"][old["mask"]], logprobs).sum()
    return accelerator.reduce(total, "sum").item() / int(tensors["mask"][rows].sum())


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
    lr = (1e-5 if cfg.lora is None else 1e-4) if cfg.lr is None else cfg.lr
    base_lr = {"policy": lr, "critic": lr if cfg.critic.lr is None else cfg.critic.lr}
    optimizer = torch.optim.AdamW(
        [{"params": parameters, "lr": base_lr[name]} for name, parameters in model.groups().items()], weight_decay=0.0
    )
    group_names = list(model.groups())
    roles = model  # forwards without gradients need no wrapper
    trained = sum(p.numel() for p in model.trainable().values())
    model, optimizer = prepare(accelerator, model, optimizer, cfg.ppo_micro_batch_size_per_gpu)
    start_trackers(accelerator, cfg)

    state = new_state(cfg)
    restored = (
        load_checkpoint(folder, accelerator, model, optimizer, set(state), cfg.resume == "partial")
        if cfg.resume
        else None
    )
    state |= restored or {}
    guards = Guards(cfg.guards, folder, state, is_main)
    metrics = Metrics(folder, accelerator, state["step"])
    if cfg.guards.enabled and restored is None:  # there must always be something to go back to
        save_checkpoint(folder, accelerator, model, optimizer, state, cfg.keep_last)
    if is_main:
        describe(cfg, roles, len(rows), total_steps, world, device, trained)
    history, clock, steps_run = [], time.time(), 0
    bar = progress_bar(label="ppo", unit="step", total=total_steps, initial=state["step"])

    while state["step"] < total_steps:
        step, timer = state["step"] + 1, Timer()
        state["draw"] += 1  # counts on when the run is rolled back, so that it goes on with other prompts and samples
        draw, kl_coef = state["draw"], state["kl_coef"]
        for name, group in zip(group_names, optimizer.param_groups):
            group["lr"] = base_lr[name] * state["lr_scale"]
        # 1. sample n responses to each prompt; each rank takes its share
        with timer("rollout"):
            n_prompts = cfg.train_batch_size // cfg.rollout.n
            chosen = prompt_order(len(rows), (draw - 1) * n_prompts, n_prompts, cfg.seed)
            mine = split_for_rank([row for row in chosen for _ in range(cfg.rollout.n)], rank, world)
            seed_sampling(cfg.seed, draw, rank)
            rollouts = sample(roles, [prompts[i] for i in mine], mine, cfg, tokenizer, stop_ids, is_zero3(accelerator))
        # 2. score
        with timer("score"):
            score(rollouts, rows, scorer)
        # 3. log-probabilities of policy and reference, and values; then every rank gets all rollouts
        with timer("logprobs"):
            add_logprobs_and_values(rollouts, roles, cfg, pad_id, device)
            rollouts = gather_lists(rollouts)
        # 4. and 5. token rewards and whitened advantages
        tensors, values = experience(rollouts, cfg, kl_coef, state["scores"])
        if is_main and steps_run == 0:
            print_rollout(rollouts[0], tokenizer)
        # 6. clipped updates
        try:
            guards.check_rollouts(step, values, rollouts, rows, cfg.data)
            with timer("update"):
                values |= update(
                    rollouts, tensors, model, optimizer, cfg, step, pad_id, accelerator, kl_coef, guards, draw
                )
        except RollBack as problem:
            state |= roll_back(problem, guards, state, metrics, folder, accelerator, model, optimizer, cfg)
            history = [values for values in history if values["step"] <= state["step"]]
            bar.update(state["step"] - bar.n)
            continue
        # 7. controller, metrics, samples, checkpoint
        state["step"] = step
        control_kl(cfg, state, values["objective/kl_per_token"])
        if cfg.eval_every and step % cfg.eval_every == 0:
            with timer("eval"):
                values |= sample_held_out(held_out, roles, cfg, tokenizer, stop_ids, scorer, step, folder, accelerator)
        seconds = timer.seconds | {"total": sum(timer.seconds.values())}
        tokens = sum(len(r.response_ids) for r in rollouts)
        values |= {f"time/{phase}": s for phase, s in seconds.items()}
        values |= {
            f"{name}/lr": 0.0
            if name == "policy" and step <= cfg.critic.warmup_steps
            else base_lr[name] * state["lr_scale"]
            for name in group_names
        }
        values |= {"rollout/tokens_per_second": tokens / seconds["rollout"], "memory/peak_gb": peak_memory_gb(device)}
        metrics.log(step, values)
        history.append({"step": step, **values})
        bar.update(1)
        steps_run += 1
        if is_main and (step % cfg.log_every == 0 or step == total_steps):
            left = remaining(steps_run, steps_run + total_steps - step, time.time() - clock)
            print(
                f"step {step}/{total_steps}  score {values['objective/score_mean']:+.3f}  KL/token {values['objective/kl_per_token']:.4f}  "
                f"length {values['rollout/response_length_mean']:.1f}  entropy {values['objective/entropy']:.2f}  "
                f"clipped {values.get('policy/clip_fraction', 0.0):.3f}  {seconds['total']:.1f} s  left {left}",
                flush=True,
            )
        if cfg.save_every and step % cfg.save_every == 0:
            save_checkpoint(folder, accelerator, model, optimizer, state, cfg.keep_last)
    bar.close()

    save_final(roles, tokenizer, cfg, folder, is_main)
    write_report(folder, is_main)
    if is_main:
        record_run(folder, cfg, started)
        print(f"peak memory {peak_memory_gb(device):.2f} GB; wrote {folder / 'final'}", flush=True)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return history


def new_state(cfg: PPOConfig) -> dict:
    """All that a run remembers between steps besides weights and optimizer; checkpoints keep it."""
    return {
        "step": 0,  # steps done
        "draw": 0,  # batches of prompts drawn: more than steps after a roll-back
        "kl_coef": cfg.algorithm.kl_coef,
        "kl_average": None,  # of kl_ctrl.method moving_average
        "scores": dict(NO_SCORES),
        "lr_scale": 1.0,
        "rollbacks": 0,
        "skips": 0,
        "warned": [],
        "kl_history": [],  # of the guards
    }


def control_kl(cfg: PPOConfig, state: dict, kl: float) -> None:
    """Move state["kl_coef"] after a step whose rollouts showed `kl` nats a token to the reference."""
    control, n = cfg.algorithm.kl_ctrl, cfg.train_batch_size
    if control.method == "fixed":
        return
    if control.method == "moving_average":
        decay = 0.5 if control.decay is None else control.decay
        kl = state["kl_average"] = (
            kl if state["kl_average"] is None else decay * state["kl_average"] + (1 - decay) * kl
        )
    state["kl_coef"] = next_kl_coef(state["kl_coef"], kl, control.target_kl, control.horizon or 10 * n, n)


def roll_back(
    problem: RollBack,
    guards: Guards,
    state: dict,
    metrics: Metrics,
    folder: Path,
    accelerator,
    model,
    optimizer,
    cfg: PPOConfig,
) -> dict:
    """Restore the newest checkpoint up to `problem.before` and return its state with what the guard changed.

    The change is written back to the checkpoint, so that a run killed after it does not try the same again.
    """
    rollbacks, step = state["rollbacks"] + 1, state["step"] + 1
    restored = new_state(cfg) | load_checkpoint(folder, accelerator, model, optimizer, set(), before=problem.before)
    metrics.keep(restored["step"])
    if rollbacks > cfg.guards.max_rollbacks:
        guards.event(
            step, "max_rollbacks", rollbacks, cfg.guards.max_rollbacks, "stopping", f"{problem} was crossed again"
        )
        place = folder / "checkpoints" / step_name(restored["step"])
        word = "good " if restored["step"] <= problem.before else ""
        length = f"--total_steps {restored['step']}" + (" --total_epochs null" if cfg.total_epochs is not None else "")
        more = f" (--resume auto {length} writes it to final/)" if restored["step"] else ", the start"
        write_report(folder, guards.is_main)
        accelerator.wait_for_everyone()
        raise RunStopped(
            f"guards.max_rollbacks {cfg.guards.max_rollbacks} is used up at step {step}; the last {word}checkpoint is {place}{more}"
        )
    if problem.kl_factor != 1:  # on top of what earlier roll-backs raised
        kl_coef = max(restored["kl_coef"], state["kl_coef"])
        restored["kl_coef"] = max(kl_coef, min(max(kl_coef, KL_COEF_BOUNDS[0]) * problem.kl_factor, KL_COEF_BOUNDS[1]))
    restored |= {
        "rollbacks": rollbacks,
        "draw": state["draw"],
        "skips": 0,
        "lr_scale": state["lr_scale"] * problem.lr_factor,
    }
    rewrite_state(folder, restored, accelerator)
    changed = f"kl_coef {restored['kl_coef']:.4g}, learning rates x {restored['lr_scale']:g}, other prompts"
    guards.event(
        step, "rollback", rollbacks, cfg.guards.max_rollbacks, f"going on from step {restored['step']}", changed
    )
    return restored


def check_config(cfg: PPOConfig) -> None:
    """Everything that can be refused before a model is loaded."""
    check_reward_config(cfg.reward_model)
    if cfg.rollout.temperature <= 0:
        raise UserError("rollout.temperature must be above 0: PPO needs samples and their probabilities")
    algorithm, control = cfg.algorithm, cfg.algorithm.kl_ctrl
    if control.method == "fixed" and control != KLControl():
        raise UserError(
            "algorithm.kl_ctrl.target_kl, horizon and decay have no effect with method fixed; set method adaptive or moving_average"
        )
    if control.method != "fixed" and (control.target_kl is None or control.target_kl <= 0):
        raise UserError(f"algorithm.kl_ctrl.method {control.method} needs target_kl above 0, in nats a token")
    if control.horizon is not None and control.horizon <= 0:
        raise UserError("algorithm.kl_ctrl.horizon must be above 0")
    if control.decay is not None and (control.method != "moving_average" or not 0 <= control.decay < 1):
        raise UserError("algorithm.kl_ctrl.decay is for method moving_average, and at least 0 and below 1")
    if algorithm.kl_coef < 0:
        raise UserError("algorithm.kl_coef must not be negative")
    if algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        raise UserError(
            "algorithm.kl_estimator k1 has a gradient of 0 on average as a loss; use k2 or k3 with kl_in loss"
        )
    if algorithm.clip_ratio_c is not None and algorithm.clip_ratio_c <= 1 + algorithm.clip_ratio:
        raise UserError("algorithm.clip_ratio_c must be above 1 + clip_ratio")
    if cfg.score.clip is not None and cfg.score.clip <= 0:
        raise UserError("score.clip must be above 0")
    if algorithm.adv_estimator != "gae":
        default = AlgorithmConfig()
        idle = [
            f"algorithm.{key}"
            for key in ("gamma", "lam", "whiten_rewards", "value_clip")
            if getattr(algorithm, key) != getattr(default, key)
        ]
        idle += [
            f"critic.{f.name}"
            for f in dataclasses.fields(CriticConfig)
            if f.name != "kind"
            and getattr(cfg.critic, f.name) != getattr(CriticConfig(), f.name)  # recipes set the kind
        ]
        if idle:
            raise UserError(
                f"{', '.join(idle)} has no effect with algorithm.adv_estimator {algorithm.adv_estimator}, which has no critic; leave it at its default"
            )
        if cfg.rollout.n < 2:
            raise UserError(
                f"algorithm.adv_estimator {algorithm.adv_estimator} compares the responses to a prompt: set rollout.n to 2 or more"
            )
    if cfg.critic.kind == "adapter" and cfg.lora is None and algorithm.adv_estimator == "gae":
        raise UserError("critic.kind adapter needs lora; with lora null set critic.kind shared or separate")
    if cfg.critic.kind != "shared" and cfg.critic.loss_coef is not None:
        raise UserError(
            f"critic.loss_coef has no effect with critic.kind {cfg.critic.kind}, which learns apart from the policy; remove it"
        )
    if cfg.critic.kind == "shared" and cfg.critic.path is not None:
        raise UserError(
            "critic.path has no effect with critic.kind shared, whose trunk is the policy's; use kind adapter or separate"
        )
    guards = cfg.guards
    for name, value, low, high in (
        ("algorithm.clip_ratio", algorithm.clip_ratio, 0, 1),
        ("algorithm.value_clip", algorithm.value_clip, 0, math.inf),
        ("algorithm.gamma", algorithm.gamma, 0, 1),
        ("algorithm.lam", algorithm.lam, 0, 1),
        ("max_grad_norm", cfg.max_grad_norm, 0, math.inf),
        ("guards.update_kl", guards.update_kl, 0, math.inf),
        ("guards.reference_kl", guards.reference_kl, 0, math.inf),
        ("guards.grad_norm", guards.grad_norm, 0, math.inf),
        ("guards.reward_std", guards.reward_std, 0, math.inf),
        ("guards.max_skips", guards.max_skips, 1, math.inf),
        ("guards.max_rollbacks", guards.max_rollbacks, 0, math.inf),
        ("guards.rollback_lr_factor", guards.rollback_lr_factor, 0, 1),
        ("guards.rollback_kl_factor", guards.rollback_kl_factor, 1, math.inf),
        ("critic.warmup_steps", cfg.critic.warmup_steps, 0, math.inf),
        ("save_every", cfg.save_every, 0, math.inf),
        ("eval_every", cfg.eval_every, 0, math.inf),
    ):
        if value is not None and not low <= value <= high:
            raise UserError(
                f"{name} {value} must be {'at least ' + str(low) if high == math.inf else f'between {low} and {high}'}"
            )
    for name, switch in (("eval_prompts", "eval_every"), ("keep_last", "save_every")):
        default = next(f.default for f in dataclasses.fields(PPOConfig) if f.name == name)
        if not getattr(cfg, switch) and getattr(cfg, name) != default:
            raise UserError(f"{name} has no effect without {switch}")
    if cfg.guards.enabled and (cfg.save_every < 1 or cfg.keep_last < 2):
        raise UserError("guards.enabled needs checkpoints to go back to: set save_every, and keep_last to 2 or more")
    if not cfg.guards.enabled and cfg.guards != GuardConfig():
        raise UserError("guards.* has no effect without guards.enabled true")
    if (cfg.total_steps is None) == (cfg.total_epochs is None):
        raise UserError("give total_steps or total_epochs, and not both")
    if (cfg.total_epochs if cfg.total_steps is None else cfg.total_steps) <= 0:
        raise UserError("total_steps and total_epochs must be above 0")
    if any(lr is not None and lr <= 0 for lr in (cfg.lr, cfg.critic.lr)):
        raise UserError("lr and critic.lr must be above 0")
    if cfg.seed < 0:
        raise UserError("seed must not be negative")


def count_steps(cfg: PPOConfig, n_rows: int, world: int) -> int:
    """Check the batch sizes against each other and return the number of steps."""
    batch, mini, micro, n = (
        cfg.train_batch_size,
        cfg.ppo_mini_batch_size,
        cfg.ppo_micro_batch_size_per_gpu,
        cfg.rollout.n,
    )
    for name, value in (
        ("train_batch_size", batch),
        ("ppo_mini_batch_size", mini),
        ("ppo_micro_batch_size_per_gpu", micro),
        ("log_prob_micro_batch_size_per_gpu", cfg.log_prob_micro_batch_size_per_gpu),
        ("ppo_epochs", cfg.ppo_epochs),
        ("rollout.n", n),
        ("rollout.micro_batch_size_per_gpu", cfg.rollout.micro_batch_size_per_gpu),
        ("keep_last", cfg.keep_last),
        ("max_response_length", cfg.max_response_length),
        ("log_every", cfg.log_every),
        ("eval_prompts", cfg.eval_prompts),
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
    batch, mini, micro, n = (
        cfg.train_batch_size,
        cfg.ppo_mini_batch_size,
        cfg.ppo_micro_batch_size_per_gpu,
        cfg.rollout.n,
    )
    print(
        f"{n_rows} prompts; {steps} steps of {batch // n} prompts x {n} = {batch} responses; "
        f"{cfg.ppo_epochs} epoch(s) x {batch // mini} mini-batch(es) of {mini} = {mini // (micro * world)} micro-batch(es) of {micro} "
        f"x {world} rank(s)"
    )
    if adapter_base(cfg.model.path):
        print(f"policy and reference start from the adapter {cfg.model.path}, merged into its base")
    places = ", ".join(
        f"{role} = {name}" + (f"[{adapter}]" if adapter else "") for role, (name, adapter) in model.roles.items()
    )
    print(
        f"roles: {places}; {trained:,} trained weights; {str(model.dtype).removeprefix('torch.')} on {device}",
        flush=True,
    )


def sample(
    model: RoleModel, prompts: list[list[int]], rows: list[int], cfg: PPOConfig, tokenizer, stop_ids, synced: bool
) -> list[Rollout]:
    with model.use("policy") as lm:
        responses = generate(
            lm,
            prompts,
            cfg.max_response_length,
            cfg.rollout.temperature,
            stop_ids,
            tokenizer.pad_token_id,
            cfg.rollout.micro_batch_size_per_gpu,
            synced=synced,
        )
    return [
        Rollout(row, prompt, ids, decode_response(tokenizer, ids), ended=ids[-1] in stop_ids)
        for row, prompt, ids in zip(rows, prompts, responses)
    ]


def score(rollouts: list[Rollout], rows: list[dict], scorer) -> None:
    texts = [r.text for r in rollouts]
    columns = {
        name: [rows[r.row].get(name) for r in rollouts] for name in ("id", "ground_truth", "reference", "metadata")
    }
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
        responses = generate(
            lm, prompts, cfg.max_response_length, 0.0, stop_ids, tokenizer.pad_token_id, synced=is_zero3(accelerator)
        )
    rollouts = [
        Rollout(i, p, ids, decode_response(tokenizer, ids), ids[-1] in stop_ids)
        for i, (p, ids) in enumerate(zip(prompts, responses))
    ]
    score(rollouts, rows, scorer)
    if not accelerator.is_main_process:
        return {}
    samples = [
        {"step": step, "prompt": rows[r.row]["prompt"][-1]["content"], "response": r.text, "score": round(r.score, 4)}
        for r in rollouts
    ]
    with open(folder / "samples.jsonl", "a", encoding="utf-8") as file:
        file.writelines(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
    log_samples(accelerator, step, samples)
    for r in rollouts[:2]:
        print(
            show(f"  {rows[r.row]['prompt'][-1]['content'][-100:]!r} -> {r.text[:300]!r} ({r.score:+.2f})"), flush=True
        )
    return {"eval/score_mean": sum(r.score for r in rollouts) / len(rollouts)}


def print_rollout(rollout: Rollout, tokenizer) -> None:
    """One rollout as the update sees it; ‹...› marks the tokens in the loss."""
    print(
        "--- one rollout, decoded; the part in ‹...› is in the loss"
        if show("‹") == "‹"
        else "--- one rollout, decoded"
    )
    print(show(f"{tokenizer.decode(rollout.prompt_ids)}‹{tokenizer.decode(rollout.response_ids)}›"))
    print(
        f"--- score {rollout.score:+.3f}, {len(rollout.response_ids)} tokens, {'ended' if rollout.ended else 'cut off'}",
        flush=True,
    )


def write_report(folder: Path, is_main: bool) -> None:
    """`report.html`: the curves of the run so far."""
    if is_main:
        write_text(folder / "report.html", page("PPO run", curves_svg(read_metrics(folder), PLOTS)))


def save_final(model: RoleModel, tokenizer, cfg: PPOConfig, folder: Path, is_main: bool = True) -> None:
    """`final/`: the policy as a plain model; with LoRA also `adapter/`, and the critic's weights in `critic/`.

    All ranks call it, the first one writes.
    """
    name, adapter = model.roles["policy"]
    weights = merged_state_dict(model.models[name], adapter, keep=is_main)
    critic, critic_adapter = model.roles.get("critic", (None, None))
    own_critic = (
        merged_state_dict(model.models["critic"], critic_adapter, keep=is_main) if critic == "critic" else None
    )
    with whole(
        model.trainable().values() if adapter is not None else (model.value_head.parameters() if critic else ())
    ):
        if not is_main:
            return
        save_model(model.models[name], weights, tokenizer, folder / "final")
        plain_base = adapter_base(cfg.model.path) is None
        if adapter is not None and not plain_base:
            print(
                "adapter/ is left out: the run started from a LoRA folder merged in memory, which the new adapter would need"
            )
        if adapter is not None and plain_base:
            save_adapter(model.models[name], adapter, folder / "adapter")
        if critic is None:
            return
        head = {"value_head.safetensors": {n: p.detach().cpu() for n, p in model.value_head.named_parameters()}}
        if own_critic is not None:
            save_model(model.models["critic"], own_critic, tokenizer, folder / "critic", head)
        elif critic_adapter == "critic" and plain_base:
            save_adapter(model.models[name], "critic", folder / "critic", more=head)
        else:
            with replacing(folder / "critic") as temporary:
                save_tensors(temporary, head)


if __name__ == "__main__":
    run_stage(train, PPOConfig)

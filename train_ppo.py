"""Stage 3: PPO with KL control against a reward model, a rule or a Python function.

    python train_ppo.py --config configs/demo_ppo.yaml
    accelerate launch --config_file configs/accelerate/multi_cpu.yaml train_ppo.py --config configs/hh_ppo.yaml

Writes `final/` (a causal language model that transformers and vLLM open as it is), `adapter/` and `critic/`.

One step, as numbered in `train`: 1 sample responses. 2 score them. 3 log-probabilities of policy and
reference, and values. 4 token rewards: minus kl_coef x KL on each token, plus the score on the last.
5 advantages. 6 clipped updates. 7 KL controller, metrics, checkpoint. The file has the same order.
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))  # this utils, not that of another folder

from utils import contracts, launch, models, saving, tracking
from utils.checkpoint import (
    check_same_inputs,
    clean_checkpoints,
    fingerprints,
    load_checkpoint,
    rewrite_state,
    save_checkpoint,
    step_name,
)
from utils.config import (
    AtLeast0,
    Count,
    LoraOptions,
    ModelConfig,
    Positive,
    RunStopped,
    Share,
    UserError,
    WholeNumber,
    changed_keys,
    check_ranges,
)
from utils.data import decode_response, encode_prompts, load_prompts, show
from utils.files import replacing, write_text
from utils.guards import GO_ON, GuardConfig, Guards, Verdict
from utils.models import RoleModel
from utils.report import curves_svg, first_and_last, folded, page, table
from utils.rewards import (
    SCORED_BY,
    BadScore,
    RewardConfig,
    Scorer,
    check_ground_truth,
    check_reward_config,
    open_reward_model,
    open_scorers,
    unpayable,
    weighted_scores,
)
from utils.rollout import Sampling, generate_with_logprobs
from utils.run import alone, check_same_config, open_output_dir, record_run, run_stage
from utils.tensors import ROUNDING, centred, longest_first, masked_mean, masked_variance, masked_whiten, pad_rows
from utils.tracking import Metrics, Timer, peak_memory_gb, progress_bar, read_metrics, say

KL_COEF_BOUNDS = (1e-4, 10.0)  # the controller never leaves these
MAX_TOKEN_KL = 10.0  # nats of k3 that one token adds to the measured KL: its exponential would outweigh a whole step
NO_SCORES = {"count": 0, "mean": 0.0, "m2": 0.0}  # moments of the run's scores before the first


@dataclass(frozen=True)
class CriticConfig:
    """The value function of adv_estimator gae."""

    kind: Literal["adapter", "shared", "separate"] = "adapter"
    """adapter: a LoRA adapter of its own on the backbone. shared: a head on the policy's hidden states, which
    halves the update's cost. separate: a model of its own"""
    path: str | None = None
    """adapter, separate: reward model to start from; null = the policy's weights and values of 0"""
    lr: Positive | None = None
    """learning rate of the critic; null = that of the policy"""
    loss_coef: float | None = None
    """shared only: weight of the value loss beside the policy loss; null = 0.1"""
    warmup_steps: WholeNumber = 0
    """first steps in which only the critic learns"""


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling of responses."""

    n: Count = 1
    """responses a prompt"""
    temperature: Positive = 1.0
    """of sampling, and of every log-probability, policy and reference alike"""
    micro_batch_size_per_gpu: Count = 64
    """responses generated at a time on one rank"""


@dataclass(frozen=True)
class ScoreConfig:
    """What is done to a response's score before it becomes a reward, in this order."""

    normalize: bool = False
    """shift and scale by the mean and deviation of all scores of the run so far"""
    clip: Positive | None = None
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
    horizon: Count | None = None
    """responses in which the coefficient can change by a factor of about 1.2; null = 10 steps' worth"""
    decay: float | None = None
    """moving_average: share of the old average that each step keeps; null = 0.5"""


@dataclass(frozen=True)
class AlgorithmConfig:
    """PPO (Schulman et al. 2017)."""

    adv_estimator: Literal["gae", "rloo", "grpo"] = "gae"
    """gae: with a critic (Schulman et al. 2016). rloo: reward minus the mean of the prompt's other responses
    (Ahmadian et al. 2024). grpo: score whitened among the prompt's responses (Shao et al. 2024). The last two need
    rollout.n > 1"""
    gamma: Share = 1.0
    """gae: discount a token"""
    lam: Share = 0.95
    """gae: its lambda"""
    whiten_rewards: bool = False
    """gae: divide token rewards by their deviation over the step"""
    whiten_advantages: bool | None = None
    """shift and scale to mean 0 and deviation 1 over the step's tokens; null = with gae only"""
    clip_ratio: Share = 0.2
    """the policy ratio is clipped to 1 +- this"""
    clip_ratio_c: float | None = None
    """dual clip: the loss of a token with a negative advantage is at most this times minus the advantage (Ye et al.
    2020); 3 is common"""
    value_clip: AtLeast0 = 0.2
    """gae: values move at most this far from the old ones in one step"""
    entropy_coef: float = 0.0
    """weight of the entropy bonus, nats a token"""
    kl_coef: AtLeast0 = 0.05
    """reward units (or loss units) a nat of KL to the reference, on each token"""
    kl_in: Literal["reward", "loss"] = "reward"
    """where KL to the reference is paid. reward with grpo, which whitens the scores alone: taken off each token's
    advantage after that"""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """of log r = log ref - log policy (Schulman 2020): k1 -log r, k2 (log r)^2 / 2, k3 r - 1 - log r; null = k1 in
    the reward, k3 in the loss"""
    kl_ctrl: KLControl = field(default_factory=KLControl)


@dataclass(frozen=True)
class PPOConfig:
    """All of a PPO run."""

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
    max_prompt_length: Count = 512
    """tokens; a longer prompt in the data is an error"""
    max_response_length: Count = 256
    """tokens to sample at most"""
    train_batch_size: Count = 64
    """responses a step, all ranks together"""
    ppo_mini_batch_size: Count = 32
    """responses an optimizer step, all ranks together"""
    ppo_micro_batch_size_per_gpu: Count = 8
    """responses a forward and backward pass on one rank; changes memory and speed, never the result"""
    log_prob_micro_batch_size_per_gpu: Count = 16
    """responses a forward pass without gradients on one rank"""
    ppo_epochs: Count = 2
    """passes over each step's responses"""
    total_steps: Count | None = None
    """steps to run; give this or total_epochs"""
    total_epochs: Positive | None = None
    """passes over the prompts; give this or total_steps"""
    lr: Positive | None = None
    """learning rate of the policy (AdamW, constant); null = 1e-4 with lora, 1e-5 without"""
    max_grad_norm: AtLeast0 = 1.0
    """gradients of policy and of critic are each scaled down to this norm"""
    save_every: WholeNumber = 20
    """steps between checkpoints, which --resume auto goes on from; 0 = none"""
    keep_last: Count = 2
    """checkpoints to keep"""
    eval_every: WholeNumber = 0
    """steps between greedy answers to held-out prompts, scored and written to samples.jsonl; 0 = none"""
    eval_prompts: Count = 16
    """held-out prompts for eval_every"""
    log_every: Count = 1
    """steps between lines on the terminal"""
    resume: Literal["auto", "partial"] | None = None
    """auto: go on from the newest checkpoint of output_dir, or start. partial: the same, where the checkpoint lacks
    something"""
    overwrite: bool = False
    """replace the output of an earlier run"""
    report_to: Literal["tensorboard", "wandb", "trackio", "none"] = "tensorboard"
    """tracker, beside metrics.jsonl; wandb and trackio must be installed"""
    seed: WholeNumber = 0
    """of adapters, prompt order, sampling and mini-batches"""


def check_config(cfg: PPOConfig) -> None:
    """Everything that can be refused before a model is loaded."""
    check_ranges(cfg)
    check_reward_config(cfg.reward_model)
    check_kl_control(cfg.algorithm.kl_ctrl)
    check_critic(cfg)
    algorithm, estimator = cfg.algorithm, cfg.algorithm.adv_estimator
    if algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        raise UserError("algorithm.kl_estimator k1 has a gradient of 0 on average as a loss; use k2 or k3")
    if algorithm.clip_ratio_c is not None and algorithm.clip_ratio_c <= 1 + algorithm.clip_ratio:
        raise UserError("algorithm.clip_ratio_c must be above 1 + clip_ratio")
    if estimator != "gae" and cfg.rollout.n < 2:
        raise UserError(
            f"algorithm.adv_estimator {estimator} compares a prompt's responses: set rollout.n to 2 or more"
        )
    for name, switch in (("eval_prompts", "eval_every"), ("keep_last", "save_every")):
        if not getattr(cfg, switch) and name in changed_keys(cfg):
            raise UserError(f"{name} has no effect without {switch}")
    if cfg.guards.enabled and (cfg.save_every < 1 or cfg.keep_last < 2):
        raise UserError("guards.enabled needs checkpoints to go back to: set save_every, and keep_last to 2 or more")
    if not cfg.guards.enabled and changed_keys(cfg.guards):
        raise UserError("guards.* has no effect without guards.enabled true")
    if (cfg.total_steps is None) == (cfg.total_epochs is None):
        raise UserError("give total_steps or total_epochs, and not both")


def check_kl_control(control: KLControl) -> None:
    if control.method == "fixed" and changed_keys(control):
        raise UserError("algorithm.kl_ctrl.target_kl, horizon and decay have no effect with method fixed; set method")
    if control.method != "fixed" and (control.target_kl is None or not control.target_kl > 0):
        raise UserError(f"algorithm.kl_ctrl.method {control.method} needs target_kl above 0, in nats a token")
    if control.decay is not None and (control.method != "moving_average" or not 0 <= control.decay < 1):
        raise UserError("algorithm.kl_ctrl.decay is for method moving_average, and at least 0 and below 1")


def check_critic(cfg: PPOConfig) -> None:
    """The critic's options fit its kind, and an estimator without a critic has none."""
    kind, estimator = cfg.critic.kind, cfg.algorithm.adv_estimator
    if estimator != "gae":
        gae_only = {"gamma", "lam", "whiten_rewards", "value_clip"}
        idle = [f"algorithm.{name}" for name in changed_keys(cfg.algorithm) if name in gae_only]
        idle += [f"critic.{name}" for name in changed_keys(cfg.critic) if name != "kind"]  # recipes set the kind
        if idle:
            raise UserError(
                f"{', '.join(idle)} has no effect with adv_estimator {estimator}, which has no critic; remove it"
            )
    elif kind == "adapter" and cfg.lora is None:
        raise UserError("critic.kind adapter needs lora; with lora null set critic.kind shared or separate")
    if kind != "shared" and cfg.critic.loss_coef is not None:
        raise UserError(f"critic.loss_coef has no effect with critic.kind {kind}; it is for kind shared")
    if kind == "shared" and cfg.critic.path is not None:
        raise UserError("critic.path has no effect with critic.kind shared; use kind adapter or separate")


def count_steps(cfg: PPOConfig, n_rows: int, world: int) -> int:
    """Check the batch sizes against each other and return the number of steps."""
    batch, mini, n, problems = cfg.train_batch_size, cfg.ppo_mini_batch_size, cfg.rollout.n, []
    if batch % n:
        problems.append(f"train_batch_size {batch} is not a multiple of rollout.n {n}")
    if batch % mini:
        problems.append(f"train_batch_size {batch} is not a multiple of ppo_mini_batch_size {mini}")
    if batch < world:
        problems.append(f"train_batch_size {batch} is below the {world} processes: launch fewer")
    if problems:
        raise UserError("; ".join(problems))
    if cfg.total_steps is not None:
        return cfg.total_steps
    return math.ceil(n_rows * cfg.total_epochs / (batch // n))


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
    groups = centred_groups(rewards, n)
    return (groups * (n / (n - 1))).view(-1).to(rewards.dtype)


def grpo_advantages(rewards: Tensor, n: int) -> Tensor:
    """Rewards with mean 0 and deviation 1 (population) in each group of n: (B,) -> (B,); equal ones give 0."""
    groups = centred_groups(rewards, n)
    return (groups * torch.rsqrt((groups**2).mean(1, keepdim=True) + 1e-8)).view(-1).to(rewards.dtype)


def centred_groups(rewards: Tensor, n: int) -> Tensor:
    """(B,) in groups of n -> (B / n, n) in float64, minus the group's mean; exactly 0 where all are equal."""
    return centred(rewards.view(-1, n), torch.ones(len(rewards) // n, n, dtype=torch.bool, device=rewards.device))


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

    clip_ratio_c bounds the loss of tokens with negative advantages at -clip_ratio_c x advantage (Ye et al. 2020,
    eq. 5).
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
    """Scores (B,) as rewards. moments {count, mean, m2} of earlier scores are updated in place (Chan et al. 1979)."""
    count, batch = moments["count"], len(scores)
    mean = scores.double().mean().item()
    m2 = ((scores.double() - mean) ** 2).sum().item()
    shift, total = mean - moments["mean"], count + batch
    moments["m2"] += m2 + shift**2 * count * batch / total
    moments["mean"] += shift * batch / total
    moments["count"] = total
    if cfg.normalize:
        smallest = max(1e-6, ROUNDING * abs(moments["mean"]))
        scores = (scores.double() - moments["mean"]).float() / max((moments["m2"] / total) ** 0.5, smallest)
    if cfg.clip is not None:
        scores = scores.clamp(-cfg.clip, cfg.clip)
    return scores - cfg.missing_eos_penalty * (~ended) - cfg.length_penalty * lengths


# ------------------------------------------------------------------------------------------------------ roles


def build_roles(cfg: PPOConfig, device: torch.device, load_on: torch.device | None = None) -> RoleModel:
    """Policy, reference, critic and, for style `model`, reward; with LoRA all on one backbone where possible.

    `device` computes; the weights are built on `load_on` (null = there too).
    """
    dtype = models.model_dtype(cfg.model.dtype, device)
    device = load_on or device
    if cfg.lora is None:
        policy = models.train_all(models.load_causal_lm(cfg.model, device, torch.float32))
        reference = models.load_causal_lm(cfg.model, device, torch.float32)  # as the policy, so that KL starts at 0
        loaded, roles = {"policy": policy, "reference": reference}, {}
        roles |= {name: (name, None) for name in loaded}
    else:
        backbone = models.add_lora(models.load_causal_lm(cfg.model, device, dtype), cfg.lora, "policy", cfg.seed)
        loaded, roles = {"backbone": backbone}, {"policy": ("backbone", "policy"), "reference": ("backbone", None)}
    value_head = add_critic(cfg, loaded, roles, device, dtype) if cfg.algorithm.adv_estimator == "gae" else None
    score_head = add_reward(cfg, loaded, roles, device) if cfg.reward_model.style == "model" else None
    if cfg.lora is not None:
        for model in loaded.values():
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(".policy." in name or ".critic." in name)
    model = RoleModel(loaded, roles, dtype)
    model.score_head = score_head
    if value_head is not None:  # of a reward model: values in the unit of the normalised scores
        own = models.load_tokenizer(cfg.model.path, cfg.model.trust_remote_code)
        mean, std = models.score_scale(cfg.critic.path, own)
        model.value_head.weight.data.copy_(value_head.weight / std)
        bias = 0.0 if value_head.bias is None else value_head.bias.item()
        model.value_head.bias.data.fill_((bias - mean) / std)
    if cfg.model.gradient_checkpointing:
        model.enable_checkpointing()
    return model.to(device)


def add_critic(cfg: PPOConfig, loaded: dict, roles: dict, device: torch.device, dtype: torch.dtype):
    """Enter the critic in `loaded` and `roles`; returns the score head of the reward model it starts from, if any."""
    path, head = cfg.critic.path, None
    if cfg.critic.kind == "shared":
        roles["critic"] = roles["policy"]
    elif cfg.critic.kind == "adapter":
        roles["critic"] = ("backbone", "critic")
        if path is None:
            models.add_lora(loaded["backbone"], cfg.lora, "critic", cfg.seed + 1)
        elif models.adapter_base(path) is None or not models.same_model(models.adapter_base(path), cfg.model.path):
            raise UserError(
                f"critic.path {path} is not a LoRA of {cfg.model.path}; critic.kind separate takes any reward model"
            )
        else:
            head = models.add_reward_adapter(loaded["backbone"], path, "critic")
    else:
        dtype = dtype if cfg.lora else torch.float32
        source = dataclasses.replace(cfg.model, path=path or cfg.model.path)
        if path is None:
            critic = models.new_reward_model(source, device, cfg.seed, dtype)
        elif models.load_tokenizer(path).get_vocab() == models.load_tokenizer(cfg.model.path).get_vocab():
            critic = models.load_reward_model(source, device, dtype, merge=True)
            head = critic.score
        else:
            raise UserError(f"critic.path {path} has another vocabulary, so it cannot read the policy's tokens")
        width, critic.score = critic.score.in_features, nn.Identity()  # the value head of RoleModel takes its place
        critic.score.in_features = width
        if cfg.lora is None:
            loaded["critic"], roles["critic"] = models.train_all(critic), ("critic", None)
        else:
            critic = models.add_lora(critic, cfg.lora, "critic", cfg.seed + 1, task=None)
            loaded["critic"], roles["critic"] = critic, ("critic", "critic")
    return head


def add_reward(cfg: PPOConfig, loaded: dict, roles: dict, device: torch.device):
    """Enter the reward model in `loaded` and `roles`; returns its score head where it is on the backbone."""
    path = cfg.reward_model.path
    base = models.adapter_base(path)
    if base and cfg.lora is not None and models.same_model(base, cfg.model.path):
        roles["reward"] = ("backbone", "reward")
        return models.add_reward_adapter(loaded["backbone"], path, "reward")
    source = ModelConfig(path, cfg.model.dtype, cfg.model.attn_implementation)
    loaded["reward"] = models.load_reward_model(source, device)
    roles["reward"] = ("reward", "default" if base else None)
    return None


# --------------------------------------------------------------------------------------------------- one run


@dataclass
class Rollout:
    """One response to a prompt; per-token lists have one entry a response token."""

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
    sampled_logprobs: list[float] | None = None  # as the engine drew the tokens; the rest is of the training forward
    parts: dict[str, float] = field(default_factory=dict)  # of the score, by the names of reward_model's parts


@dataclass
class Run:
    """What the steps of a run share; `start` makes one."""

    cfg: PPOConfig
    accelerator: object
    roles: RoleModel  # for forwards without gradients
    model: nn.Module  # the same as Accelerate wrapped it, for forwards with gradients
    optimizer: object
    guards: Guards
    state: dict  # see new_state
    pad_id: int
    stop_ids: list[int] = field(default_factory=list)  # tokens that end a response
    tokenizer: object = None
    scorers: dict[str, tuple[float, Scorer]] = field(default_factory=dict)  # weight and scorer of each part
    rows: list[dict] = field(default_factory=list)  # train prompts, as stage 1 wrote them
    prompts: list[list[int]] = field(default_factory=list)  # their ids
    held_out: list[dict] = field(default_factory=list)  # test prompts of eval_every
    metrics: Metrics | None = None
    total_steps: int = 0
    base_lr: dict[str, float] = field(default_factory=dict)  # of the optimizer's groups, before roll-backs
    checks: dict | None = None  # what the run has found out about itself, see utils.contracts; None = it does not look
    rollouts: list[Rollout] = field(default_factory=list)  # of the last step, all ranks'
    reported: float = 0.0  # when report.html was written last

    @property
    def folder(self) -> Path:
        return Path(self.cfg.output_dir)

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def step(self) -> int:
        """The step that is being made, from 1."""
        return self.state["step"] + 1

    @property
    def warming_up(self) -> bool:
        """Whether only the critic learns."""
        return self.step <= self.cfg.critic.warmup_steps


def new_state(cfg: PPOConfig) -> dict:
    """All that a run remembers between steps besides weights and optimizer; checkpoints keep it."""
    return {
        "step": 0,  # steps done
        "draw": 0,  # batches of prompts drawn: more than steps after a roll-back
        "kl_coef": cfg.algorithm.kl_coef,
        "kl_average": None,  # of kl_ctrl.method moving_average
        "scores": dict(NO_SCORES),
        "lr_scale": 1.0,
        # of the guards
        "rollbacks": 0,
        "skips": 0,
        "warned": [],
        "kl_history": [],
    }


def start(cfg: PPOConfig) -> Run:
    """Check everything, load models and data, open output_dir, and restore the newest checkpoint when resuming."""
    check_config(cfg)
    folder = Path(cfg.output_dir)
    if cfg.resume:
        check_same_config(folder, cfg)
    accelerator = launch.start_accelerator(folder, cfg.report_to, cfg.seed)
    tokenizer = models.load_tokenizer(cfg.model.path, cfg.model.trust_remote_code)
    rows = load_prompts(cfg.data, "train")
    total_steps = count_steps(cfg, len(rows), accelerator.num_processes)
    by_rule = any(part.style == "rule" for part in cfg.reward_model.parts)
    if by_rule:
        check_ground_truth(rows)
    with accelerator.main_process_first():
        roles = build_roles(cfg, accelerator.device, launch.load_device(accelerator))
    policy, limits = roles.lm("policy"), (cfg.max_prompt_length, cfg.max_response_length)
    prompts = encode_prompts(tokenizer, rows, *limits, models.max_positions(policy))
    scorers = build_scorers(cfg, roles, tokenizer, accelerator)
    held_out = load_prompts(cfg.data, "test")[: cfg.eval_prompts] if cfg.eval_every else []
    if by_rule:
        check_ground_truth(held_out)
    encode_prompts(tokenizer, held_out, *limits, models.max_positions(policy))
    probe = contracts.probe_batch(prompts[contracts.probe_row(prompts)], tokenizer.pad_token_id, accelerator.device)
    zero3 = launch.is_zero3(accelerator)
    stop_ids, idle = models.eos_ids(tokenizer, policy), []
    few = Sampling(min(8, limits[1]), 0.0, stop_ids, tokenizer.pad_token_id, cfg.rollout.micro_batch_size_per_gpu)
    if not zero3:  # before anything is written; there the model is on its device only after `prepare`
        checks = contracts.check_start(roles, cfg.model.path, probe, few)
        idle = contracts.leave_out_idle(roles, probe)
    if accelerator.is_main_process:
        open_output_dir(cfg.output_dir, cfg.overwrite, cfg.resume)
        record_run(folder, cfg)
    accelerator.wait_for_everyone()

    lr = (1e-5 if cfg.lora is None else 1e-4) if cfg.lr is None else cfg.lr
    groups, base_lr = roles.groups(), {"policy": lr, "critic": lr if cfg.critic.lr is None else cfg.critic.lr}
    base_lr = {name: base_lr[name] for name in groups}
    optimizer = torch.optim.AdamW(
        [{"params": parameters, "lr": base_lr[name]} for name, parameters in groups.items()], weight_decay=0.0
    )
    trained = sum(p.numel() for p in roles.trainable().values())
    model, optimizer = launch.prepare(accelerator, roles, optimizer, cfg.ppo_micro_batch_size_per_gpu)
    if zero3:
        checks = contracts.check_start(roles, cfg.model.path, probe, few)
    tracking.start_trackers(accelerator, cfg)
    paths = {"model.path": cfg.model.path, "reward_model.path": cfg.reward_model.path, "critic.path": cfg.critic.path}
    state = new_state(cfg) | {"base_lr": base_lr, "inputs": fingerprints({"data": cfg.data, **paths})}
    guards = Guards(cfg.guards, folder, state, accelerator.is_main_process)
    run = Run(cfg, accelerator, roles, model, optimizer, guards, state, tokenizer.pad_token_id)
    run.tokenizer, run.stop_ids = tokenizer, stop_ids
    run.scorers, run.rows, run.prompts, run.held_out = scorers, rows, prompts, held_out
    run.total_steps, run.base_lr, run.checks = total_steps, base_lr, checks
    partial = cfg.resume == "partial"
    restored = load_checkpoint(folder, accelerator, model, optimizer, set(state), partial) if cfg.resume else None
    if restored:
        check_same_inputs(restored, state, folder)
        if restored["step"] > total_steps:
            raise UserError(
                f"{folder} is at step {restored['step']}, beyond {total_steps}; set total_steps to {restored['step']} "
                "or more, or choose another output_dir"
            )
        state |= restored
        if state["base_lr"] != base_lr:  # what roll-backs left of another lr does not count
            state |= {"base_lr": base_lr, "lr_scale": 1.0}
        guards.forget_later()
        clean_checkpoints(folder, accelerator, state["step"], cfg.keep_last)
    run.metrics = Metrics(folder, accelerator, state["step"])
    if cfg.guards.enabled and restored is None:  # there must always be something to go back to
        save_checkpoint(folder, accelerator, model, optimizer, state, cfg.keep_last)
    if accelerator.is_main_process:
        describe(run, trained)
        if idle:
            say(f"{len(idle)} weights have no part in the loss and stay as they are: {', '.join(idle[:3])} ...")
    return run


def describe(run: Run, trained: int) -> None:
    cfg, world = run.cfg, run.accelerator.num_processes
    batch, mini, micro, n = (
        cfg.train_batch_size, cfg.ppo_mini_batch_size, cfg.ppo_micro_batch_size_per_gpu, cfg.rollout.n
    )  # fmt: skip
    say(
        f"{len(run.rows)} prompts; {run.total_steps} steps of {batch // n} prompts x {n} = {batch} responses; "
        f"{cfg.ppo_epochs} epoch(s) x {batch // mini} mini-batch(es) of {mini} = {math.ceil(mini / world / micro)} "
        f"micro-batch(es) of at most {micro} x {world} rank(s)"
    )
    if models.adapter_base(cfg.model.path):
        say(f"policy and reference start from the adapter {cfg.model.path}, merged into its base")
    places = [
        f"{role} = {name}" + (f"[{adapter}]" if adapter else "") for role, (name, adapter) in run.roles.roles.items()
    ]
    dtype = str(run.roles.dtype).removeprefix("torch.")
    say(f"roles: {', '.join(places)}; {trained:,} trained weights; {dtype} on {run.device}")


# -------------------------------------------------------------------------------------------------- 1 sample


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


def sample(run: Run) -> list[Rollout]:
    """This rank's share of the step's responses, n to each prompt.

    All ranks sample equally many, since ZeRO-3 needs equally many forwards: the last ones may answer the first prompts
    once more. Gathered in rank order, the first `train_batch_size` responses are the step's.
    """
    cfg, draw, rank = run.cfg, run.state["draw"], run.accelerator.process_index
    n_prompts = cfg.train_batch_size // cfg.rollout.n
    chosen = prompt_order(len(run.rows), (draw - 1) * n_prompts, n_prompts, cfg.seed)
    rows = [row for row in chosen for _ in range(cfg.rollout.n)]
    share = math.ceil(len(rows) / run.accelerator.num_processes)
    mine = (rows * 2)[rank * share : (rank + 1) * share]
    seed_sampling(cfg.seed, draw, rank)
    return respond(run, mine, [run.prompts[i] for i in mine], cfg.rollout.temperature)


def respond(run: Run, rows: list[int], prompts: list[list[int]], temperature: float) -> list[Rollout]:
    """The policy's responses; temperature 0 is greedy. rows: numbers that the rollouts keep."""
    cfg, synced = run.cfg, launch.is_zero3(run.accelerator)
    batch_size = cfg.rollout.micro_batch_size_per_gpu
    how = Sampling(cfg.max_response_length, temperature, run.stop_ids, run.pad_id, batch_size)
    try:
        with run.roles.use("policy") as lm:
            responses, logprobs = generate_with_logprobs(lm, prompts, how, synced=synced)
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
        raise UserError(
            f"step {run.step}: the policy's logits are not finite, so nothing can be sampled; lower lr and go on from "
            "the newest checkpoint with --resume auto, or use model.dtype float32"
        ) from None
    return [
        Rollout(row, prompt, ids, decode_response(run.tokenizer, ids), ids[-1] in run.stop_ids, sampled_logprobs=seen)
        for row, prompt, ids, seen in zip(rows, prompts, responses, logprobs)
    ]


# --------------------------------------------------------------------------------------------------- 2 score


def build_scorers(cfg: PPOConfig, roles: RoleModel, tokenizer, accelerator) -> dict[str, tuple[float, Scorer]]:
    """Weight and scorer of each part of the reward; a reward model's scores are shifted and scaled to its stats."""
    reward, device = None, accelerator.device
    if cfg.reward_model.style == "model":

        def forward(ids: Tensor, mask: Tensor) -> Tensor:
            batch = {"input_ids": ids, "attention_mask": mask, "response_mask": torch.zeros_like(mask)}
            return roles(batch, ("reward",))["scores"]

        own = tokenizer if roles.roles["reward"][0] == "backbone" else None
        positions = models.max_positions(roles.lm("reward"))
        reward = open_reward_model(cfg.reward_model.path, device, forward=forward, positions=positions, tokenizer=own)
        reward = dataclasses.replace(reward, synced=launch.is_zero3(accelerator))
    micro = cfg.log_prob_micro_batch_size_per_gpu
    return open_scorers(cfg.reward_model, micro, device, cfg.model.dtype, reward=reward, scaled=True)


def score(rollouts: list[Rollout], rows: list[dict], scorers: dict[str, tuple[float, Scorer]]) -> None:
    """Fill in the scores. rows: of which each rollout names one."""
    mine = [rows[r.row] for r in rollouts]
    columns = {name: [row.get(name) for row in mine] for name in SCORED_BY}
    columns["ended"] = [r.ended for r in rollouts]
    try:
        scores, parts = weighted_scores(scorers, [row["prompt"] for row in mine], [r.text for r in rollouts], columns)
    except BadScore as error:
        scores, parts = error.scores, {}  # the guards decide, when every rank knows of it
    for i, rollout in enumerate(rollouts):
        rollout.score, rollout.parts = scores[i], {name: values[i] for name, values in parts.items()}


def print_rollout(rollout: Rollout, tokenizer) -> None:
    """One rollout as the update sees it; ‹...› marks the tokens in the loss."""
    marked = "; the part in ‹...› is in the loss" if show("‹") == "‹" else ""
    say(f"--- one rollout, decoded{marked}")
    say(f"{tokenizer.decode(rollout.prompt_ids)}‹{tokenizer.decode(rollout.response_ids)}›")
    end = "ended" if rollout.ended else "cut off"
    say(f"--- score {rollout.score:+.3f}, {len(rollout.response_ids)} tokens, {end}")


# -------------------------------------------------------------------------------------- 3 log-probabilities


def make_batch(rollouts: list[Rollout], pad_id: int, device) -> dict[str, Tensor]:
    """Rollouts -> right-padded `input_ids`, `attention_mask` and `response_mask`, (B, S)."""
    ids, mask = pad_rows([r.prompt_ids + r.response_ids for r in rollouts], pad_id, torch.long)
    starts = torch.tensor([len(r.prompt_ids) for r in rollouts])[:, None]
    response_mask = mask & (torch.arange(ids.shape[1]) >= starts)
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), "response_mask": response_mask.to(device)}


def run_training_forward(run: Run, rollouts: list[Rollout]) -> list[Rollout]:
    """All ranks' rollouts, which every rank holds, with what `add_logprobs_and_values` adds.

    Each rank runs the micro-batches that will be its own in the first epoch. In bfloat16 a log-probability depends on
    what else is in the batch; in equal groups the first ratio is exactly 1.
    """
    groups = [
        group for rows in mini_batches(run, 0, len(rollouts)) for group in own_micro_batches(run, rows, rollouts)
    ]
    add_logprobs_and_values(rollouts, run.roles, run.cfg, run.pad_id, run.device, [rows for rows, _ in groups])
    done = launch.gather_lists([(i, rollouts[i]) for rows, counts in groups if counts for i in rows])
    return [rollout for _, rollout in sorted(done, key=lambda pair: pair[0])]


@torch.no_grad()
def add_logprobs_and_values(
    rollouts: list[Rollout],
    model: RoleModel,
    cfg: PPOConfig,
    pad_id: int,
    device,
    groups: list[list[int]] | None = None,
) -> None:
    """Fill in per-token log-probabilities, entropy and values by the forward that the update uses too.

    groups: numbers of the rollouts that are run together; null = all, the longest first.
    """
    roles = tuple(role for role in ("policy", "critic", "reference") if role in model.roles)
    if groups is None:
        groups = longest_first([tokens_of(r) for r in rollouts], cfg.log_prob_micro_batch_size_per_gpu)
    for rows in groups:
        part = [rollouts[i] for i in rows]
        out = model(make_batch(part, pad_id, device), roles, cfg.rollout.temperature, entropy=True)
        lengths = [len(r.response_ids) for r in part]
        for name, values in out.items():
            for rollout, tokens in zip(part, values.cpu().split(lengths)):
                setattr(rollout, name, tokens.tolist())


def check_rollouts(run: Run, rollouts: list[Rollout]) -> dict[str, float]:
    """Sampling against the training forward, in nats a token, as metrics; in the first step also as contracts."""
    sampled = torch.tensor([x for r in rollouts for x in r.sampled_logprobs])
    logprobs = torch.tensor([x for r in rollouts for x in r.logprobs])
    difference = logprobs - sampled
    mean, std = difference.mean().item(), difference.std(unbiased=False).item()
    if run.checks is not None and "rollout" not in run.checks:
        run.checks["rollout"] = contracts.check_rollout((mean**2 + std**2) ** 0.5, run.roles.dtype)
        if run.state["draw"] == 1:
            reference = torch.tensor([x for r in rollouts for x in r.ref_logprobs])
            run.checks["reference"] = contracts.check_reference(logprobs, reference, run.roles.dtype)
    return {"rollout/mismatch_mean": mean, "rollout/mismatch_std": std}


def tokens_of(rollout: Rollout) -> int:
    return len(rollout.prompt_ids) + len(rollout.response_ids)


# ---------------------------------------------------------------------- 4 and 5 token rewards and advantages


def experience(
    rollouts: list[Rollout], cfg: PPOConfig, kl_coef: float, moments: dict[str, float] | None = None
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Token tensors (B, T) for the update, and the metrics of the rollouts. Pure CPU arithmetic.

    The n responses to a prompt stand together. moments: of the run's scores so far, see shape_scores.
    """
    algorithm = cfg.algorithm
    logprobs, mask = pad_rows([r.logprobs for r in rollouts], 0, torch.float32)
    ref_logprobs, _ = pad_rows([r.ref_logprobs for r in rollouts], 0, torch.float32)
    scores = torch.tensor([r.score for r in rollouts])
    lengths, ended = mask.sum(1).float(), torch.tensor([r.ended for r in rollouts])
    shaped = shape_scores(scores, lengths, ended, cfg.score, dict(NO_SCORES) if moments is None else moments)
    in_reward = kl_coef if algorithm.kl_in == "reward" else 0.0
    estimator = kl_estimator(algorithm)
    rewards = kl_shaped_rewards(shaped, logprobs, ref_logprobs, mask, in_reward, estimator)
    totals = rewards.sum(1)  # (B,)
    tensors = {"mask": mask, "logprobs": logprobs, "ref_logprobs": ref_logprobs}
    if algorithm.adv_estimator == "gae":
        values, _ = pad_rows([r.values for r in rollouts], 0, torch.float32)
        if algorithm.whiten_rewards:
            rewards = rewards * torch.rsqrt(masked_variance(rewards, mask) + 1e-8)
        advantages, returns = gae(rewards, values, mask, algorithm.gamma, algorithm.lam)
        tensors |= {"values": values, "returns": returns}
        unexplained = masked_variance(returns - values, mask) / masked_variance(returns, mask).clamp(min=1e-8)
        more = {"critic/explained_variance": 1 - unexplained}
    else:
        if algorithm.adv_estimator == "rloo":
            advantages = torch.where(mask, rloo_advantages(totals, cfg.rollout.n)[:, None], 0)
        else:  # whitened with the scores, a tiny KL of equal ones would become as large as a score
            penalty = kl_shaped_rewards(torch.zeros_like(shaped), logprobs, ref_logprobs, mask, in_reward, estimator)
            advantages = torch.where(mask, grpo_advantages(shaped, cfg.rollout.n)[:, None], 0) + penalty
        returns, more = totals[:, None].expand_as(mask), {}
    whiten = algorithm.adv_estimator == "gae" if algorithm.whiten_advantages is None else algorithm.whiten_advantages
    tensors["advantages"] = masked_whiten(advantages, mask) if whiten else advantages
    parts = rollouts[0].parts if len(rollouts[0].parts) > 1 else ()
    metrics = {
        "objective/kl": torch.where(mask, logprobs - ref_logprobs, 0).sum(1).mean(),
        "objective/kl_per_token": masked_mean(k3(logprobs, ref_logprobs).clamp(max=MAX_TOKEN_KL), mask),
        "objective/kl_coef": kl_coef,
        "objective/score_mean": scores.mean(),
        "objective/score_std": scores.std(unbiased=False),
        "objective/reward_mean": totals.mean(),
        "objective/reward_std": totals.std(unbiased=False),
        "objective/return_mean": masked_mean(returns, mask),
        **{f"objective/score_{name}_mean": fmean(r.parts[name] for r in rollouts) for name in parts},
        **more,
    }
    return tensors, {name: float(value) for name, value in metrics.items()} | text_metrics(rollouts)


def text_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """What the responses look like."""
    entropy, mask = pad_rows([r.entropy for r in rollouts], 0, torch.float32)
    bigrams = [pair for r in rollouts for pair in zip(r.response_ids, r.response_ids[1:])]
    return {
        "objective/entropy": masked_mean(entropy, mask).item(),
        "rollout/response_length_mean": sum(len(r.response_ids) for r in rollouts) / len(rollouts),
        "rollout/truncated_fraction": sum(not r.ended for r in rollouts) / len(rollouts),
        "rollout/empty_fraction": sum(not r.text.strip() for r in rollouts) / len(rollouts),
        "rollout/distinct_2": len(set(bigrams)) / max(1, len(bigrams)),
    }


def kl_estimator(algorithm: AlgorithmConfig) -> str:
    return algorithm.kl_estimator or ("k1" if algorithm.kl_in == "reward" else "k3")


# -------------------------------------------------------------------------------------------------- 6 update


def update(run: Run, rollouts: list[Rollout], tensors: dict[str, Tensor]) -> tuple[dict[str, float], Verdict]:
    """All epochs and mini-batches of one step, while the guards say go on: their mean metrics, and the last verdict.

    Every rank holds all rollouts and takes its share of each mini-batch. The loss is a token mean over the whole
    mini-batch, so gradients depend neither on the micro-batch size nor on the number of ranks.
    """
    cfg, seen = run.cfg, []  # tokens and metrics of each mini-batch
    verdict = GO_ON
    for epoch in range(cfg.ppo_epochs):
        for rows in mini_batches(run, epoch, len(rollouts)):
            metrics, verdict = mini_batch_step(run, rows, rollouts, tensors, first=not seen)
            seen.append((int(tensors["mask"][rows].sum()), metrics))
            if verdict.action in ("skip rest", "roll back"):
                return mean_metrics(seen), verdict
    if run.guards.cfg.enabled and run.guards.cfg.update_kl is not None:  # nothing above has seen the last one's effect
        verdict = run.guards.check_update(run.step, update_kl(run, rows, rollouts, tensors), last=True)
    if verdict.action != "roll back":
        outputs = run.guards.check_outputs(run.step, finite_outputs(run, rollouts[0]))
        verdict = verdict if outputs.action == "go on" else outputs
    return mean_metrics(seen), verdict


def mean_metrics(seen: list[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Means over (tokens, metrics) of mini-batches, of which each token counts alike."""
    means = {}
    for name in seen[0][1]:
        weights, values = zip(*((tokens, metrics[name]) for tokens, metrics in seen if name in metrics))
        means[name] = fmean(values, weights)
    return means


def mini_batches(run: Run, epoch: int, n: int) -> list[list[int]]:
    """The step's n rollouts in the order of an epoch, cut into mini-batches: the same on all ranks."""
    generator = torch.Generator().manual_seed((run.cfg.seed * 1_000_003 + run.state["draw"]) * 101 + epoch)
    order = torch.randperm(n, generator=generator).tolist()
    return [order[i : i + run.cfg.ppo_mini_batch_size] for i in range(0, n, run.cfg.ppo_mini_batch_size)]


def own_micro_batches(run: Run, rows: list[int], rollouts: list[Rollout]) -> list[tuple[list[int], bool]]:
    """This rank's share of a mini-batch, the longest rollouts first, and whether they count.

    All ranks get equally many; one without rows left gets the shortest once more, which does not count.
    """
    rows = [rows[i] for i in longest_first([tokens_of(rollouts[r]) for r in rows], len(rows))[0]]
    micro, world = run.cfg.ppo_micro_batch_size_per_gpu, run.accelerator.num_processes
    mine, most = rows[run.accelerator.process_index :: world], math.ceil(len(rows) / world)
    return [(mine[i : i + micro] or rows[-1:], i < len(mine)) for i in range(0, most, micro)]


def micro_batches(run: Run, rows: list[int], rollouts, tensors) -> Iterator[tuple[dict, dict, float, bool]]:
    """This rank's micro-batches: (batch for the model, token tensors (b, t), share of tokens, whether last)."""
    parts, total = own_micro_batches(run, rows, rollouts), int(tensors["mask"][rows].sum())
    for i, (part, counts) in enumerate(parts):
        width = int(tensors["mask"][part].sum(1).max())
        old = {name: tensor[part, :width].to(run.device) for name, tensor in tensors.items()}
        share = int(old["mask"].sum()) / total if counts else 0.0
        yield make_batch([rollouts[r] for r in part], run.pad_id, run.device), old, share, i == len(parts) - 1


def micro_batch_loss(run: Run, batch: dict[str, Tensor], old: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch, a token mean, and its metrics."""
    cfg, algorithm, mask = run.cfg, run.cfg.algorithm, old["mask"]
    roles = ("policy", "critic") if algorithm.adv_estimator == "gae" else ("policy",)
    out = run.model(batch, roles, cfg.rollout.temperature, entropy=algorithm.entropy_coef > 0)
    logprobs = torch.zeros_like(old["logprobs"]).masked_scatter(mask, out["logprobs"])
    if run.checks is not None and "first_ratio" not in run.checks:
        run.checks["first_ratio"] = contracts.check_first(
            out["logprobs"].detach(), old["logprobs"][mask], run.roles.dtype
        )
    loss, metrics = ppo_policy_loss(
        logprobs, old["logprobs"], old["advantages"], mask, algorithm.clip_ratio, algorithm.clip_ratio_c
    )
    metrics["policy/loss"] = loss.detach()
    if algorithm.entropy_coef > 0:
        loss = loss - algorithm.entropy_coef * out["entropy"].mean()
    if algorithm.kl_in == "loss":
        kl = masked_mean(KL_ESTIMATORS[kl_estimator(algorithm)](logprobs, old["ref_logprobs"]), mask)
        loss, metrics["policy/kl_loss"] = loss + run.state["kl_coef"] * kl, kl.detach()
    if "critic" in roles:
        values = torch.zeros_like(old["values"]).masked_scatter(mask, out["values"])
        value_loss, value_metrics = ppo_value_loss(values, old["values"], old["returns"], mask, algorithm.value_clip)
        metrics |= value_metrics | {"critic/loss": value_loss.detach()}
        coef = 1.0 if cfg.critic.kind != "shared" else 0.1 if cfg.critic.loss_coef is None else cfg.critic.loss_coef
        loss = loss * (0.0 if run.warming_up else 1.0) + coef * value_loss
    return loss, metrics


def mini_batch_step(
    run: Run, rows: list[int], rollouts: list[Rollout], tensors: dict[str, Tensor], first: bool = False
) -> tuple[dict[str, float], Verdict]:
    """One optimizer step on `rows` (first: of the step): token-weighted metrics of the mini-batch, and the verdict."""
    accelerator = run.accelerator
    sums: dict[str, Tensor] = {}
    for batch, old, share, last in micro_batches(run, rows, rollouts, tensors):
        with launch.accumulating(accelerator, run.model, last):
            loss, more = micro_batch_loss(run, batch, old)
            # ranks' gradients are averaged
            launch.backward(accelerator, run.model, loss * (share * accelerator.num_processes), last)
        for name, value in more.items():
            sums[name] = sums.get(name, 0.0) + value * share
    names = sorted(sums)
    metrics = dict(zip(names, accelerator.reduce(torch.stack([sums[name] for name in names]), "sum").tolist()))
    if first:
        run.guards.check_first(run.step, metrics["policy/approx_kl"])
    verdict = run.guards.check_update(run.step, metrics["policy/approx_kl"])
    if verdict.action == "go on":
        norms = clip_gradients(run)
        metrics |= {f"{name}/grad_norm": norm for name, norm in norms.items()}
        learning = {name: norm for name, norm in norms.items() if name != "policy" or not run.warming_up}
        bad = " and ".join(name for name, norm in learning.items() if not math.isfinite(norm))
        if bad and not run.guards.cfg.enabled:
            raise UserError(
                f"step {run.step}: the gradient of the {bad} is not finite; lower lr or set guards.enabled"
            )
        verdict = run.guards.check_gradients(run.step, learning)
    finish = launch.step_optimizer if verdict.action == "go on" else launch.discard_gradients
    finish(accelerator, run.model, run.optimizer)
    return metrics, verdict


def clip_gradients(run: Run) -> dict[str, float]:
    """Scale the gradients of policy and critic down to max_grad_norm each; returns their norms before it."""
    norms = {}
    for name, parameters in run.roles.groups().items():
        norms[name] = launch.clip_grad_norm(run.accelerator, parameters, run.cfg.max_grad_norm)
        if name == "policy" and run.warming_up:  # a shared critic's loss reaches it, and Adam counts zero gradients
            launch.drop_gradients(run.accelerator, parameters)
    return norms


@torch.no_grad()
def update_kl(run: Run, rows: list[int], rollouts: list[Rollout], tensors: dict[str, Tensor]) -> float:
    """KL of the policy that sampled `rows` to the policy now, nats a token (k3), over all ranks."""
    total = torch.zeros((), device=run.device)
    for batch, old, share, _ in micro_batches(run, rows, rollouts, tensors):
        logprobs = run.roles(batch, ("policy",), run.cfg.rollout.temperature)["logprobs"]
        total += k3(old["logprobs"][old["mask"]], logprobs).mean() * share
    return run.accelerator.reduce(total, "sum").item()


@torch.no_grad()
def finite_outputs(run: Run, rollout: Rollout) -> bool:
    """Whether policy and critic give numbers for a rollout; it is the same one on all ranks."""
    roles = tuple(role for role in ("policy", "critic") if role in run.roles.roles)
    out = run.roles(make_batch([rollout], run.pad_id, run.device), roles, run.cfg.rollout.temperature)
    return all(bool(values.isfinite().all()) for values in out.values())


# ----------------------------------------------------------------------------------- 7 control and roll-back


def control_kl(cfg: PPOConfig, state: dict, kl: float) -> None:
    """Move state["kl_coef"] after a step whose rollouts showed `kl` nats a token to the reference.

    Into the moving average `kl` enters with at most 3 times the target, so that one step does not rule the next ones.
    """
    control, n = cfg.algorithm.kl_ctrl, cfg.train_batch_size
    if control.method == "fixed":
        return
    if control.method == "moving_average":
        decay = 0.5 if control.decay is None else control.decay
        average, kl = state["kl_average"], min(kl, 3 * control.target_kl)  # beyond, the step's change is the same
        kl = state["kl_average"] = kl if average is None else decay * average + (1 - decay) * kl
    state["kl_coef"] = next_kl_coef(state["kl_coef"], kl, control.target_kl, control.horizon or 10 * n, n)


def roll_back(run: Run, verdict: Verdict) -> None:
    """Restore the newest checkpoint up to `verdict.before`, with what the guard changes in the run's state.

    The change is written back to the checkpoint, so that a run killed after it does not try the same again. Raises
    RunStopped when the roll-backs are used up.
    """
    cfg, state, folder, limit = run.cfg, run.state, run.folder, run.cfg.guards.max_rollbacks
    rollbacks, step = state["rollbacks"] + 1, run.step
    restored = load_checkpoint(folder, run.accelerator, run.model, run.optimizer, set(), before=verdict.before)
    restored = new_state(cfg) | restored
    run.metrics.keep(restored["step"])
    restored |= {"draw": state["draw"], "base_lr": run.base_lr}
    if rollbacks > limit:
        run.guards.event(step, "max_rollbacks", rollbacks, limit, "stopping", f"{verdict.guard} was crossed again")
        place = folder / "checkpoints" / step_name(restored["step"])
        word = "good " if restored["step"] <= verdict.before else ""
        length = f"--total_steps {restored['step']}" + (" --total_epochs null" if cfg.total_epochs is not None else "")
        more = f" (--resume auto {length} writes it to final/)" if restored["step"] else ", the start"
        rewrite_state(folder, restored, run.accelerator)  # one who resumes goes on with other prompts
        run.accelerator.wait_for_everyone()
        raise RunStopped(
            f"guards.max_rollbacks {limit} is used up at step {step}; the last {word}checkpoint is {place}{more}"
        )
    if verdict.kl_factor != 1:  # on top of what earlier roll-backs raised
        kl_coef = max(restored["kl_coef"], state["kl_coef"])
        raised = min(max(kl_coef, KL_COEF_BOUNDS[0]) * verdict.kl_factor, KL_COEF_BOUNDS[1])
        restored["kl_coef"] = max(kl_coef, raised)
    restored |= {"rollbacks": rollbacks, "skips": 0, "lr_scale": state["lr_scale"] * verdict.lr_factor}
    changed = f"kl_coef {restored['kl_coef']:.4g}, learning rates x {restored['lr_scale']:g}, other prompts"
    run.guards.event(step, "rollback", rollbacks, limit, f"going on from step {restored['step']}", changed)
    rewrite_state(folder, restored, run.accelerator)  # after the event, which a resume keeps only with it
    state |= restored


def set_learning_rates(run: Run) -> dict[str, float]:
    """Those in force in this step, by name."""
    rates = {name: lr * run.state["lr_scale"] for name, lr in run.base_lr.items()}
    for rate, group in zip(rates.values(), run.optimizer.param_groups):
        group["lr"] = rate
    return {f"{name}/lr": 0.0 if name == "policy" and run.warming_up else rate for name, rate in rates.items()}


# ---------------------------------------------------------------------------------------------------- output


def answer_held_out(run: Run) -> dict[str, float]:
    """Greedy answers to the held-out prompts, on the first rank: their mean score, two printed, all in samples.jsonl.

    Under ZeRO-3 the other ranks go along, since none has the whole model.
    """
    if not run.is_main and not launch.is_zero3(run.accelerator):
        return {}
    cfg, rows = run.cfg, run.held_out
    prompts = encode_prompts(run.tokenizer, rows, cfg.max_prompt_length, cfg.max_response_length, None)
    rollouts = respond(run, list(range(len(rows))), prompts, 0.0)
    score(rollouts, rows, run.scorers)
    if not run.is_main:
        return {}
    questions = [row["prompt"][-1]["content"] for row in rows]
    samples = [
        {"step": run.state["step"], "prompt": question, "response": r.text, "score": round(r.score, 4)}
        for question, r in zip(questions, rollouts)
    ]
    with open(run.folder / "samples.jsonl", "a", encoding="utf-8") as file:
        file.writelines(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
    tracking.log_samples(run.accelerator, run.state["step"], samples)
    for question, r in zip(questions[:2], rollouts):
        say(f"  {question[-100:]!r} -> {r.text[:300]!r} ({r.score:+.2f})")
    return {"eval/score_mean": fmean(r.score for r in rollouts)}


PLOTS = """\
objective/score_mean; objective/reward_mean; objective/kl_per_token; objective/kl_coef
rollout/response_length_mean; objective/entropy; rollout/truncated_fraction rollout/distinct_2; eval/score_mean
policy/loss policy/kl_loss; critic/loss; policy/approx_kl policy/clip_fraction; critic/explained_variance
policy/grad_norm critic/grad_norm"""  # the panels of report.html, four a line
SHOWN = 8  # rollouts in it


def write_report(run: Run, pause: float = 0.0) -> None:
    """`report.html`: curves, samples, numbers and configuration, whole or not at all.

    pause: seconds that must lie between two pages, since a page takes one or two.
    """
    if not run.is_main or time.time() - run.reported < pause:
        return
    run.reported = time.time()
    metrics, samples = read_metrics(run.folder), run.folder / "samples.jsonl"
    panels = [tuple(panel.split()) for line in PLOTS.splitlines() for panel in line.split(";")]
    body = f"<p>Step {run.state['step']} of {run.total_steps}</p>{curves_svg(metrics, panels)}"
    answers = [(run.rows[r.row]["prompt"][-1]["content"], r.text, r.score) for r in run.rollouts[:SHOWN]]
    body += "<h2>Rollouts of the last step</h2>" + answers_table(answers)
    if lines := tracking.read_lines(samples) if samples.is_file() else []:
        newest = [(s["prompt"], s["response"], s["score"]) for s in lines if s["step"] == lines[-1]["step"]]
        body += f"<h2>Held-out prompts, step {lines[-1]['step']}</h2>" + answers_table(newest)
    body += "<h2>Numbers</h2>" + first_and_last(metrics)
    body += folded("Configuration", (run.folder / "config.yaml").read_text(encoding="utf-8"))
    write_text(run.folder / "report.html", page("PPO run", body))


def answers_table(answers: list[tuple[str, str, float]]) -> str:
    return table(["prompt", "response, score"], [[p, f"{r}\n({score:+.2f})"] for p, r, score in answers], texts=True)


def save_final(model: RoleModel, tokenizer, cfg: PPOConfig, folder: Path, is_main: bool = True) -> None:
    """With LoRA `adapter/`; `final/`, the policy as a plain model; and the critic's weights in `critic/`.

    All ranks call it, the first one writes: the small folder first, so that a full disk loses nothing.
    """
    name, adapter = model.roles["policy"]
    backbone, (critic, critic_adapter) = model.models[name], model.roles.get("critic", (None, None))
    plain_base = models.adapter_base(cfg.model.path) is None
    heads = model.value_head.parameters() if critic else ()
    with launch.whole(model.trainable().values() if adapter is not None else heads):
        head = {}
        if critic is not None and is_main:
            head = {"value_head.safetensors": {n: p.detach().cpu() for n, p in model.value_head.named_parameters()}}
        if adapter is not None and is_main and plain_base:
            saving.save_adapter(backbone, adapter, folder / "adapter", tokenizer)
        elif adapter is not None and is_main:
            say("adapter/ is left out: it would need the LoRA folder that the run started from, merged in memory")
        if critic_adapter == "critic" and critic == name and plain_base and is_main:
            saving.save_adapter(backbone, "critic", folder / "critic", tokenizer, more=head)
        elif critic is not None and critic != "critic" and is_main:
            with replacing(folder / "critic") as temporary:
                saving.save_tensors(temporary, head)
    # full fine-tuning trains float32 copies, and gives them back in the type that the model came in
    dtype = models.stored_dtype(cfg.model) if cfg.lora is None else None
    if critic == "critic":
        weights = saving.merged_state_dict(model.models["critic"], critic_adapter, is_main, dtype)
        if is_main:
            saving.save_model(model.models["critic"], weights, tokenizer, folder / "critic", head)
    weights = saving.merged_state_dict(backbone, adapter, is_main, dtype)
    if is_main:
        saving.save_model(backbone, weights, tokenizer, folder / "final")


def finish(run: Run) -> None:
    """Save the policy, open what was saved, compare it with the live model, and write its model card."""
    row = contracts.probe_row(run.prompts)
    batch = contracts.probe_batch(run.prompts[row], run.pad_id, run.device)
    with torch.no_grad():
        live = run.roles(batch, ("policy",))["logprobs"]
    save_final(run.roles, run.tokenizer, run.cfg, run.folder, run.is_main)
    if not run.is_main:
        return
    ids = batch["input_ids"][0].tolist()
    run.checks["saved"] = contracts.check_saved_policy(
        run.folder / "final", run.rows[row]["prompt"], ids, live[: len(ids) - 1], run.roles.dtype,
        run.cfg.model.trust_remote_code,
    )  # fmt: skip
    cfg, metrics, parts = run.cfg, read_metrics(run.folder), run.cfg.reward_model.parts
    names = ("score_mean", "kl_per_token") if metrics else ()
    change = {name: [metrics[i][f"objective/{name}"] for i in (0, -1)] for name in names}
    facts = {
        "training": f"PPO ({cfg.algorithm.adv_estimator}), {run.total_steps} steps x {cfg.train_batch_size} responses",
        "prompts": cfg.data,
        "reward": " + ".join(f"{part.weight:g} x {part.path or part.rule or part.function}" for part in parts),
        **{f"{name}, first and last step": f"{a:.4f} -> {b:.4f}" for name, (a, b) in change.items()},
    }
    card = saving.model_card("Policy trained by PPO", models.adapter_base(cfg.model.path) or cfg.model.path, facts)
    for folder in (run.folder / "final", run.folder / "adapter"):
        if folder.is_dir():
            write_text(folder / "README.md", card)


# ----------------------------------------------------------------------------------------------------- train


def take_steps(run: Run) -> list[dict]:
    """All steps that are left; returns their metrics."""
    cfg, state, accelerator = run.cfg, run.state, run.accelerator
    history, clock, steps_run = [], time.time(), 0
    bar = progress_bar(label="ppo", unit="step", total=run.total_steps, initial=state["step"])

    while state["step"] < run.total_steps:
        timer = Timer()
        state["draw"] += 1  # counts on when the run is rolled back, so that it goes on with other prompts and samples
        rates = set_learning_rates(run)
        # 1. sample n responses to each prompt; each rank takes its share
        with timer("rollout"):
            rollouts = sample(run)
        # 2. score
        with timer("score"):
            score(rollouts, run.rows, run.scorers)
        # 3. every rank gets all rollouts, with log-probabilities of policy and reference, and values
        with timer("logprobs"):
            rollouts = run_training_forward(run, launch.gather_lists(rollouts)[: cfg.train_batch_size])
            mismatch = check_rollouts(run, rollouts)
        if not run.guards.check_scores(run.step, rollouts, run.rows):
            continue
        # 4. and 5. token rewards and whitened advantages
        tensors, metrics = experience(rollouts, cfg, state["kl_coef"], state["scores"])
        metrics |= mismatch
        if run.is_main and steps_run == 0:
            print_rollout(rollouts[0], run.tokenizer)
            if problem := unpayable(cfg.reward_model, [r.text for r in rollouts], [r.ended for r in rollouts]):
                say(f"warning: {problem}")
        # 6. clipped updates
        verdict = run.guards.check_rollouts(run.step, metrics, rollouts, run.rows, cfg.data)
        if verdict.action == "go on":
            with timer("update"):
                more, verdict = update(run, rollouts, tensors)
            metrics |= more
        # 7. roll back, or controller, metrics, samples, checkpoint
        if verdict.action == "roll back":
            roll_back(run, verdict)
            history = [metrics for metrics in history if metrics["step"] <= state["step"]]
            bar.update(state["step"] - bar.n)
            continue
        state["step"] = step = run.step
        control_kl(cfg, state, metrics["objective/kl_per_token"])
        if cfg.eval_every and step % cfg.eval_every == 0:
            with timer("eval"):
                metrics |= answer_held_out(run)
        seconds = timer.seconds | {"total": sum(timer.seconds.values())}
        metrics |= {f"time/{phase}": s for phase, s in seconds.items()} | rates
        metrics["rollout/tokens_per_second"] = sum(len(r.response_ids) for r in rollouts) / seconds["rollout"]
        metrics["memory/peak_gb"] = peak_memory_gb(run.device)
        run.metrics.log(step, metrics)
        history.append({"step": step, **metrics})
        run.rollouts = rollouts
        write_report(run, pause=60)
        bar.update(1)
        steps_run += 1
        if run.is_main and (step % cfg.log_every == 0 or step == run.total_steps):
            left = tracking.remaining(steps_run, steps_run + run.total_steps - step, time.time() - clock)
            say(
                f"step {step}/{run.total_steps}  score {metrics['objective/score_mean']:+.3f}  "
                f"KL/token {metrics['objective/kl_per_token']:.4f}  "
                f"length {metrics['rollout/response_length_mean']:.1f}  "
                f"entropy {metrics['objective/entropy']:.2f}  clipped {metrics.get('policy/clip_fraction', 0.0):.3f}  "
                f"{seconds['total']:.1f} s  left {left}"
            )
        if cfg.save_every and step % cfg.save_every == 0:
            save_checkpoint(run.folder, accelerator, run.model, run.optimizer, state, cfg.keep_last)
    bar.close()
    return history


@alone
def train(cfg: PPOConfig) -> list[dict]:
    """Run stage 3; returns the metrics of its steps, which also stand in metrics.jsonl."""
    started = time.time()
    run = start(cfg)
    try:
        history = take_steps(run)
    finally:  # of a run that is cut off, too
        write_report(run)
    finish(run)
    if run.is_main:
        record_run(run.folder, cfg, started, run.checks)
        say(f"peak memory {peak_memory_gb(run.device):.2f} GB; wrote {run.folder / 'final'}")
    run.accelerator.wait_for_everyone()
    run.accelerator.end_training()
    return history


if __name__ == "__main__":
    run_stage(train, PPOConfig)

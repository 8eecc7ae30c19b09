"""Stage 2: a Bradley-Terry reward model from preference pairs.

    python train_reward.py --config configs/demo_reward.yaml
    accelerate launch --config_file configs/accelerate/multi_cpu.yaml train_reward.py --config configs/hh_reward.yaml

Writes `final/`, a one-output AutoModelForSequenceClassification folder (or a LoRA adapter with its head), and
`final/reward_stats.json`, which says what its scores mean.
"""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.checkpoint import load_checkpoint, save_checkpoint
from utils.config import LoraOptions, ModelConfig, UserError, check_output_dir, check_same_config, open_output_dir, record_run, run_stage, write_json
from utils.data import encode_prompt, encode_response, load_rows, show
from utils.launch import (
    accumulating, backward, clip_grad_norm, gather_lists, load_device, prepare, split_for_rank, start_accelerator, step_optimizer, unwrap, whole,
)
from utils.models import (
    adapter_base, add_lora, arithmetic, last_hidden, load_tokenizer, max_positions, merged_state_dict, model_dtype, new_reward_model,
    save_adapter, save_model, score_at_end, start_checkpointing, template_fingerprint, write_stats,
)
from utils.tensors import pad_rows
from utils.tracking import Metrics, peak_memory_gb, progress_bar, remaining, start_trackers


@dataclass(frozen=True)
class RewardTrainConfig:
    model: ModelConfig
    data: str
    """a preference folder that prepare_data.py wrote"""
    output_dir: str
    """folder to write"""
    lora: LoraOptions | None = field(default_factory=LoraOptions)
    save_format: Literal["merged", "adapter"] | None = None
    """merged (default): a whole model. adapter: the LoRA weights and the head, which PPO can put on the
    backbone it already holds"""
    train_batch_size: int = 32
    """pairs an optimizer step, all ranks together"""
    micro_batch_size_per_gpu: int = 8
    """pairs a forward pass on one rank; changes memory and speed, never the result"""
    epochs: float = 1.0
    """passes over the training pairs"""
    max_pairs: int | None = None
    """use only the first so many training pairs"""
    lr: float = 1e-4
    """peak learning rate: linear warm-up over the first tenth of the steps, then linear to 0"""
    weight_decay: float = 0.0
    """of AdamW"""
    max_grad_norm: float = 1.0
    """gradients are scaled down to this norm"""
    centering_coef: float = 0.0
    """weight of (chosen + rejected)^2, which keeps scores near 0 (Eisenstein et al. 2023)"""
    eval_every: int = 0
    """steps between evaluations on the test split; 0 = only at the end"""
    save_every: int = 0
    """steps between checkpoints; 0 = none"""
    log_every: int = 5
    """steps between lines on the terminal"""
    resume: Literal["auto"] | None = None
    """auto: go on from the newest checkpoint of output_dir, or start"""
    overwrite: bool = False
    """replace the output of an earlier run"""
    report_to: Literal["tensorboard", "wandb", "trackio", "none"] = "tensorboard"
    """tracker, beside metrics.jsonl; wandb and trackio must be installed"""
    seed: int = 0
    """of the new weights and the data order"""


# ------------------------------------------------------------------------------------------------------- math


def bradley_terry_loss(
    chosen_scores: Tensor, rejected_scores: Tensor, margin: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """-log sigmoid(chosen - rejected - margin), mean over pairs, in fp32. All (B,).

    Bradley and Terry 1952; the margin is that of Llama 2 (Touvron et al. 2023, eq. 2).
    """
    difference = chosen_scores.float() - rejected_scores.float()
    if margin is not None:
        difference = difference - margin
    return -F.logsigmoid(difference).mean(), {
        "accuracy": preference_accuracy(chosen_scores, rejected_scores),
        "margin": difference.detach().mean(),
    }


def preference_accuracy(chosen_scores: Tensor, rejected_scores: Tensor) -> Tensor:
    """Share of pairs whose chosen response scores higher; a tie counts one half, as a coin would."""
    difference = chosen_scores.detach().float() - rejected_scores.detach().float()
    return (0.5 * (torch.sign(difference) + 1)).mean()


def wilson_interval(share: float, n: int) -> list[float]:
    """95% interval of a share of n trials (Wilson 1927)."""
    z = 1.959964
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return [round(middle - half, 4), round(middle + half, 4)]


def fit_temperature(differences: list[float]) -> float:
    """The T that makes sigmoid(difference / T) the most likely probabilities (Guo et al. 2017), by grid search."""
    d = torch.tensor(differences)
    grid = torch.logspace(-2, 2, 401)
    losses = torch.stack([-F.logsigmoid(d / t).mean() for t in grid])
    return round(float(grid[losses.argmin()]), 4)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first tenth, then linear to 0. `step` counts from 0."""
    warmup = max(1, steps // 10)
    return peak * min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))


# ------------------------------------------------------------------------------------------------------- data


def encode_pairs(rows: list[dict], tokenizer, positions: int | None) -> list[dict]:
    """Rows -> {id, chosen, rejected, margin} with ids of prompt + response + eos; equal pairs are left out."""
    pairs, equal = [], 0
    for row in progress_bar(rows, "encoding", unit="pairs"):
        prompt = encode_prompt(tokenizer, row["prompt"])
        pair = {"id": row["id"], "margin": row["margin"]}
        for name in ("chosen", "rejected"):
            pair[name] = prompt + encode_response(tokenizer, row[name])
            if positions is not None and len(pair[name]) > positions:
                raise UserError(
                    f"row {row['id']}: {name} with its prompt has {len(pair[name])} tokens, the model has {positions} "
                    "positions; prepare the data with lower max_prompt_length or max_response_length"
                )
        if pair["chosen"] == pair["rejected"]:
            equal += 1
        else:
            pairs.append(pair)
    if equal:
        print(f"left out {equal} pairs whose tokens are equal", flush=True)
    if not pairs:
        raise UserError("no pairs are left to train on")
    return pairs


def batch_pairs(pairs: list[dict], pad_id: int, device) -> dict[str, Tensor]:
    """Pairs -> (2B, S) ids and mask, chosen rows first, and margins (B,)."""
    ids, mask = pad_rows([p["chosen"] for p in pairs] + [p["rejected"] for p in pairs], pad_id, torch.long)
    margin = torch.tensor([p["margin"] or 0.0 for p in pairs])
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), "margin": margin.to(device)}


def step_pairs(pairs: list[dict], step: int, batch_size: int, seed: int) -> list[dict]:
    """The pairs of one optimizer step: each epoch is a new seeded order, and its last batch may be smaller."""
    per_epoch = math.ceil(len(pairs) / batch_size)
    epoch, position = divmod(step, per_epoch)
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
    return [pairs[i] for i in order[position * batch_size : (position + 1) * batch_size].tolist()]


# ------------------------------------------------------------------------------------------------------ model


class ScoreModel(nn.Module):
    """A classification model whose score is read at the last real token; trained weights are float32."""

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.model = model
        self.dtype = dtype
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()

    @property
    def base(self) -> nn.Module:
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    def head(self) -> nn.Module:
        score = self.base.score
        return score.modules_to_save["default"] if hasattr(score, "modules_to_save") else score

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, S) ids and mask, right-padded -> scores (B,), fp32."""
        with arithmetic([self.model], self.dtype):
            hidden = last_hidden(self.base, input_ids, attention_mask)
        return score_at_end(self.head(), hidden, attention_mask)


def build_model(cfg: RewardTrainConfig, device, load_on=None) -> ScoreModel:
    """`device` computes; the weights are built on `load_on` (null = there too)."""
    dtype = model_dtype(cfg.model.dtype, device)
    model = new_reward_model(cfg.model, load_on or device, cfg.seed, torch.float32 if cfg.lora is None else dtype)
    if cfg.lora is None:
        model.requires_grad_(True)
    else:
        model = add_lora(model, cfg.lora, "default", cfg.seed, task="SEQ_CLS")
    if cfg.model.gradient_checkpointing:
        start_checkpointing(model)
    return ScoreModel(model, dtype)


@torch.no_grad()
def score_pairs(model, pairs: list[dict], pad_id: int, micro_batch_size: int, accelerator) -> tuple[Tensor, Tensor]:
    """Scores of all pairs, on every rank: (N,), (N,). Each rank runs its share, longest first.

    All ranks run equally many forwards, which ZeRO-3 needs; one without pairs left runs the first pair again.
    """
    world = accelerator.num_processes
    mine = split_for_rank(list(enumerate(pairs)), accelerator.process_index, world)
    mine.sort(key=lambda item: -max(len(item[1]["chosen"]), len(item[1]["rejected"])))
    model = unwrap(model)
    results = []
    with progress_bar(label="evaluating", unit="pairs", total=len(mine)) as bar:
        for start in range(0, math.ceil(len(pairs) / world), micro_batch_size):
            part = mine[start : start + micro_batch_size]
            batch = batch_pairs([pair for _, pair in part] or pairs[:1], pad_id, accelerator.device)
            scores = model(batch["input_ids"], batch["attention_mask"]).cpu()
            results += [(i, scores[k].item(), scores[k + len(part)].item()) for k, (i, _) in enumerate(part)]
            bar.update(len(part))
    results = sorted(gather_lists(results))
    return torch.tensor([r[1] for r in results]), torch.tensor([r[2] for r in results])


def evaluate_pairs(model, pairs: list[dict], pad_id: int, micro_batch_size: int, accelerator) -> dict[str, float]:
    """Held-out accuracy with its 95% interval, loss, and what the scores look like."""
    chosen, rejected = score_pairs(model, pairs, pad_id, micro_batch_size, accelerator)
    both = torch.cat([chosen, rejected])
    accuracy = preference_accuracy(chosen, rejected).item()
    return {
        "accuracy": accuracy,
        "accuracy_ci95": wilson_interval(accuracy, len(pairs)),
        "tie_rate": (chosen == rejected).float().mean().item(),
        "loss": bradley_terry_loss(chosen, rejected)[0].item(),
        "score_mean": both.mean().item(),
        "score_std": both.std(unbiased=False).item(),
        "temperature": fit_temperature((chosen - rejected).tolist()),
        "n": len(pairs),
    }


# ------------------------------------------------------------------------------------------------------ train


def train(cfg: RewardTrainConfig) -> dict:
    """Run stage 2; returns the held-out evaluation that is also written to final/reward_stats.json."""
    started = time.time()
    check_config(cfg)
    folder = Path(cfg.output_dir)
    check_output_dir(cfg.output_dir, cfg.overwrite, cfg.resume, can_resume=True)
    if cfg.resume:
        check_same_config(folder, cfg)
    accelerator = start_accelerator(folder, cfg.report_to, cfg.seed)
    device, world, is_main = accelerator.device, accelerator.num_processes, accelerator.is_main_process

    # 1. data and model
    tokenizer = load_tokenizer(cfg.model.path, cfg.model.trust_remote_code)
    train_rows, test_rows = (load_rows(cfg.data, split, ("preference",)) for split in ("train", "test"))
    with accelerator.main_process_first():
        model = build_model(cfg, device, load_device(accelerator))
    positions = max_positions(model.base)
    pairs = encode_pairs(train_rows[: cfg.max_pairs], tokenizer, positions)
    test_pairs = encode_pairs(test_rows, tokenizer, positions)
    if is_main:
        open_output_dir(cfg.output_dir, cfg.overwrite, cfg.resume)
        record_run(folder, cfg)
    accelerator.wait_for_everyone()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=cfg.lr, weight_decay=cfg.weight_decay)
    trained = sum(p.numel() for p in parameters)
    model, optimizer = prepare(accelerator, model, optimizer, cfg.micro_batch_size_per_gpu)
    start_trackers(accelerator, cfg)

    # 2. resume
    state = load_checkpoint(folder, accelerator, model, optimizer, {"step"}) if cfg.resume else None
    first_step = state["step"] if state else 0
    steps = math.ceil(cfg.epochs * math.ceil(len(pairs) / cfg.train_batch_size))
    metrics = Metrics(folder, accelerator, first_step)
    if is_main:
        print(
            f"{len(pairs)} train pairs, {len(test_pairs)} test pairs; {steps} steps of {cfg.train_batch_size} pairs on {world} "
            f"rank(s); {trained:,} trained weights; {str(unwrap(model).dtype).removeprefix('torch.')} on {device}"
        )
        print(show(f"first pair, chosen:   {tokenizer.decode(pairs[0]['chosen'])}"))
        print(show(f"first pair, rejected: {tokenizer.decode(pairs[0]['rejected'])}"), flush=True)

    # 3. train
    bar = progress_bar(label="reward", unit="step", total=steps, initial=first_step)
    clock = time.time()
    for step in range(first_step, steps):
        batch = step_pairs(pairs, step, cfg.train_batch_size, cfg.seed)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, cfg.lr)
        values = optimizer_step(model, optimizer, batch, tokenizer.pad_token_id, cfg, accelerator)
        values |= {"lr": learning_rate(step, steps, cfg.lr), "memory/peak_gb": peak_memory_gb(device)}
        done = step + 1
        if cfg.eval_every and done % cfg.eval_every == 0 and done < steps:
            result = evaluate_pairs(model, test_pairs, tokenizer.pad_token_id, cfg.micro_batch_size_per_gpu, accelerator)
            values |= {f"eval/{k}": v for k, v in result.items() if k != "accuracy_ci95"}
        metrics.log(done, values)
        bar.update(1)
        if is_main and (done % cfg.log_every == 0 or done == steps):
            eta = remaining(done - first_step, steps - first_step, time.time() - clock)
            print(
                f"step {done}/{steps}  loss {values['loss']:.4f}  accuracy {values['accuracy']:.3f}  "
                f"margin {values['margin']:+.3f}  grad norm {values['grad_norm']:.2f}  left {eta}", flush=True,
            )
        if cfg.save_every and (done % cfg.save_every == 0):
            save_checkpoint(folder, accelerator, model, optimizer, {"step": done}, keep_last=2)
    bar.close()

    # 4. evaluate and save
    result = evaluate_pairs(model, test_pairs, tokenizer.pad_token_id, cfg.micro_batch_size_per_gpu, accelerator)
    save_final(unwrap(model), tokenizer, cfg, folder / "final", is_main)
    if is_main:
        result["template_fingerprint"] = template_fingerprint(tokenizer)
        write_stats(folder / "final", result)
        write_json(folder / "report.json", result)
        record_run(folder, cfg, started)
        low, high = result["accuracy_ci95"]
        print(
            f"held-out accuracy {result['accuracy']:.3f} (95% interval {low:.3f} to {high:.3f}, {result['n']} pairs); "
            f"scores {result['score_mean']:+.2f} ± {result['score_std']:.2f}; peak memory {peak_memory_gb(device):.2f} GB"
        )
        print(f"wrote {folder / 'final'}", flush=True)
    accelerator.end_training()
    return result


def check_config(cfg: RewardTrainConfig) -> None:
    for name in ("train_batch_size", "micro_batch_size_per_gpu", "log_every"):
        if getattr(cfg, name) < 1:
            raise UserError(f"{name} must be at least 1")
    if cfg.epochs <= 0 or cfg.lr < 0 or cfg.seed < 0:
        raise UserError("epochs must be above 0, lr and seed not negative")
    if cfg.save_format == "adapter" and adapter_base(cfg.model.path):
        raise UserError("save_format adapter needs a plain model.path: a LoRA folder is merged first, and no saved model would fit the adapter")
    if cfg.save_format == "adapter" and cfg.lora is None:
        raise UserError("save_format adapter needs lora; with lora null the whole model is trained and saved")


def optimizer_step(model, optimizer, batch: list[dict], pad_id: int, cfg: RewardTrainConfig, accelerator) -> dict[str, float]:
    """One update from the pairs of all ranks; the gradient is that of the mean loss over all of them.

    Each rank takes its share in micro-batches. Ranks with fewer repeat a pair at weight 0, so that all run the
    same number of forwards.
    """
    world, micro = accelerator.num_processes, cfg.micro_batch_size_per_gpu
    ordered = sorted(batch, key=lambda p: -max(len(p["chosen"]), len(p["rejected"])))
    mine = ordered[accelerator.process_index :: world]
    rounds = math.ceil(math.ceil(len(batch) / world) / micro)
    sums = torch.zeros(3, device=accelerator.device)
    for i in range(rounds):
        part = mine[i * micro : (i + 1) * micro]
        weight = len(part) / len(batch) * world  # ranks' gradients are averaged
        inputs = batch_pairs(part or ordered[:1], pad_id, accelerator.device)
        last = i == rounds - 1
        with accumulating(accelerator, model, last):
            scores = model(inputs["input_ids"], inputs["attention_mask"])
            chosen, rejected = scores.chunk(2)
            loss, info = bradley_terry_loss(chosen, rejected, inputs["margin"])
            if cfg.centering_coef:
                loss = loss + cfg.centering_coef * ((chosen + rejected) ** 2).mean()
            if not torch.isfinite(loss):
                ids = ", ".join(pair["id"] for pair in part)
                raise UserError(f"the loss is {loss.item()}; rows {ids}; lower lr or use model.dtype float32")
            backward(accelerator, model, loss * weight, last)
        sums += torch.stack([loss.detach(), info["accuracy"], info["margin"]]) * len(part)
    grad_norm = clip_grad_norm(accelerator, [p for p in model.parameters() if p.requires_grad], cfg.max_grad_norm)
    step_optimizer(accelerator, model, optimizer)
    loss, accuracy, margin = (accelerator.reduce(sums, "sum") / len(batch)).tolist()
    return {"loss": loss, "accuracy": accuracy, "margin": margin, "grad_norm": grad_norm}


def save_final(model: ScoreModel, tokenizer, cfg: RewardTrainConfig, folder: Path, is_main: bool = True) -> None:
    """All ranks call it, the first one writes."""
    state = {} if cfg.save_format == "adapter" else merged_state_dict(model.model, "default" if cfg.lora else None, keep=is_main)
    with whole(p for p in model.parameters() if p.requires_grad) if cfg.lora else whole(model.head().parameters()):
        if not is_main:
            return
        model.base.config.pad_token_id = tokenizer.pad_token_id
        model.base.config.num_labels = 1
        if cfg.save_format == "adapter":
            save_adapter(model.model, "default", folder, head=model.head().weight)
        else:
            state["score.weight"] = model.head().weight.detach().cpu().to(state[next(iter(state))].dtype)
            save_model(model.model, state, tokenizer, folder)
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    run_stage(train, RewardTrainConfig)

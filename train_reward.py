"""Stage 2: a Bradley-Terry reward model from preference pairs.

    python train_reward.py --config configs/demo_reward.yaml
    accelerate launch --config_file configs/accelerate/multi_cpu.yaml train_reward.py --config configs/hh_reward.yaml

Writes `final/`, a one-output AutoModelForSequenceClassification folder (or a LoRA adapter with its head), and
`final/reward_stats.json`, which says what its scores mean, beside `report.html`.
"""

import copy
import dataclasses
import math
import sys
import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))  # this utils, not that of another folder

from utils import contracts, launch, saving
from utils.checkpoint import check_same_inputs, clean_checkpoints, fingerprints, load_checkpoint, save_checkpoint
from utils.config import AtLeast0, Count, LoraOptions, ModelConfig, Positive, UserError, WholeNumber, check_ranges
from utils.data import encode_dialogues, encode_responses, load_rows, split_files
from utils.files import write_json, write_text
from utils.loader import Batches
from utils.models import (
    adapter_base,
    add_lora,
    arithmetic,
    last_hidden,
    load_reward_model,
    load_tokenizer,
    max_positions,
    model_dtype,
    new_reward_model,
    pad_apart_from_eos,
    score_at_end,
    start_checkpointing,
    stored_dtype,
    template_fingerprint,
    train_all,
    write_stats,
)
from utils.report import curves_svg, first_and_last, folded, page, table
from utils.run import alone, check_same_config, open_output_dir, record_run, run_stage
from utils.tensors import longest_first, pad_rows, round_randomly
from utils.tracking import Metrics, peak_memory_gb, progress_bar, read_metrics, remaining, say, start_trackers

LOWER_LR = "lower lr, with --resume auto where there is a checkpoint, or use model.dtype float32"
KEEP_LAST = 2  # checkpoints
LARGEST_MARGIN = 3.0  # nats; that of Llama 2's wider scale (Touvron et al. 2023, table 27)


@dataclass(frozen=True)
class RewardTrainConfig:
    """All of a reward model's training."""

    model: ModelConfig
    data: str
    """a preference folder that prepare_data.py wrote"""
    output_dir: str
    """folder to write"""
    lora: LoraOptions | None = field(default_factory=LoraOptions)
    save_format: Literal["merged", "adapter"] | None = None
    """merged (default): a whole model. adapter: the LoRA weights and the head, which PPO can put on the
    backbone it already holds"""
    train_batch_size: Count = 32
    """pairs an optimizer step, all ranks together"""
    micro_batch_size_per_gpu: Count = 8
    """pairs a forward pass on one rank; changes memory and speed, never the result"""
    epochs: Positive = 1.0
    """passes over the training pairs"""
    max_pairs: Count | None = None
    """use only the first so many training pairs"""
    lr: AtLeast0 = 1e-4
    """peak learning rate: linear warm-up over the first tenth of the steps, then linear to 0"""
    weight_decay: float = 0.0
    """of AdamW"""
    max_grad_norm: AtLeast0 = 1.0
    """gradients are scaled down to this norm"""
    margin_scale: AtLeast0 | None = None
    """margins of the data count times this; 0 = not at all; null = 1, or less, so that the largest counts 3"""
    centering_coef: float = 0.0
    """weight of (chosen + rejected)^2, which keeps scores near 0 (Eisenstein et al. 2023)"""
    eval_every: WholeNumber = 0
    """steps between evaluations on the test split; 0 = only at the end"""
    save_every: WholeNumber = 100
    """steps between checkpoints, which --resume auto goes on from; 0 = none"""
    log_every: Count = 5
    """steps between lines on the terminal"""
    resume: Literal["auto"] | None = None
    """auto: go on from the newest checkpoint of output_dir, or start"""
    overwrite: bool = False
    """replace the output of an earlier run"""
    report_to: Literal["tensorboard", "wandb", "trackio", "none"] = "tensorboard"
    """tracker, beside metrics.jsonl; wandb and trackio must be installed"""
    seed: WholeNumber = 0
    """of the new weights and the data order"""


def check_config(cfg: RewardTrainConfig) -> None:
    """Everything that can be refused before a model is loaded."""
    check_ranges(cfg)
    if cfg.save_format == "adapter" and adapter_base(cfg.model.path):
        raise UserError(
            "save_format adapter needs a plain model.path: a LoRA folder is merged first, "
            "and no saved model would fit the adapter"
        )
    if cfg.save_format == "adapter" and cfg.lora is None:
        raise UserError("save_format adapter needs lora; with lora null the whole model is trained and saved")


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
        "margin": (chosen_scores.detach().float() - rejected_scores.detach().float()).mean(),
    }


def preference_accuracy(chosen_scores: Tensor, rejected_scores: Tensor) -> Tensor:
    """Share of pairs whose chosen response scores higher; a tie counts one half, as a coin would."""
    difference = chosen_scores.detach().float() - rejected_scores.detach().float()
    return (0.5 * (torch.sign(difference) + 1)).mean()


def effective_n(right: Tensor, groups: list) -> float:
    """How many independent trials the (N,) outcomes are worth whose `groups` (such as prompts) may go together.

    N over the design effect (Kish 1965): the variance of the mean by groups, over that of N independent trials. At
    most N; where all outcomes are equal, which shows no variance, the number of groups.
    """
    off = right.double() - right.double().mean()
    sums: dict = {}
    for group, value in zip(groups, off.tolist()):
        sums[group] = sums.get(group, 0.0) + value
    by_groups, alone = sum(value**2 for value in sums.values()), (off**2).sum().item()
    if alone < 1e-12:
        return float(len(sums))
    return len(off) * alone / max(alone, by_groups)


def wilson_interval(share: float, n: float) -> list[float]:
    """95% interval of a share of n trials (Wilson 1927)."""
    z = 1.959964
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return [round(middle - half, 4), round(middle + half, 4)]


def fit_temperature(differences: list[float]) -> float:
    """The T that makes sigmoid(difference / T) the most likely probabilities (Guo et al. 2017).

    One more pair, of mean size and as often wrong as right, counts half: without it the T of pairs without a mistake
    would be 0. T lies between 1/100 and 100 of the mean size; it is 1 where all differences are 0.
    """
    d = torch.tensor(differences, dtype=torch.float64)
    size = d.abs().mean().item()
    if size == 0:
        return 1.0
    d, low, high = d / size, 0.01, 100.0
    for _ in range(60):  # the likelihood is concave in 1 / T
        inverse = (low + high) / 2
        rises = (d * torch.sigmoid(-inverse * d)).sum() > 0.25 * math.tanh(inverse / 2)
        low, high = (inverse, high) if rises else (low, inverse)
    return float(f"{size / low:.6g}")


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first tenth, then linear to 0. `step` counts from 0."""
    warmup = max(1, steps // 10)
    return peak * min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))


# ------------------------------------------------------------------------------------------------------- data


def margin_factor(cfg: RewardTrainConfig) -> float:
    """What the margins of the train split are multiplied by: those of ratings up to 100 would saturate the loss."""
    import pyarrow.compute
    import pyarrow.parquet

    if cfg.margin_scale is not None:
        return cfg.margin_scale
    files = split_files(cfg.data, "train", ("preference",))
    columns = (pyarrow.parquet.read_table(file, columns=["margin"])["margin"].cast("double") for file in files)
    largest = max(pyarrow.compute.max(pyarrow.compute.abs(column)).as_py() or 0.0 for column in columns)
    return min(1.0, LARGEST_MARGIN / largest) if largest else 1.0


def encode_pairs(rows: list[dict], tokenizer, positions: int | None, margin_scale: float = 1.0) -> list[dict]:
    """Rows -> {id, prompt, chosen, rejected, margin}; chosen and rejected as ids of prompt + response + eos.

    Pairs whose ids are equal are left out.
    """
    if not rows:
        return []
    prompts = encode_dialogues(tokenizer, [row["prompt"] for row in rows])
    sides = [encode_responses(tokenizer, [row[name] for row in rows]) for name in ("chosen", "rejected")]
    pairs = []
    for row, prompt, chosen, rejected in zip(rows, prompts, *sides):
        pair = {"id": row["id"], "prompt": tuple(prompt), "margin": (row["margin"] or 0.0) * margin_scale}
        pair |= {"chosen": prompt + chosen, "rejected": prompt + rejected}
        for name in ("chosen", "rejected"):
            if positions is not None and len(pair[name]) > positions:
                raise UserError(
                    f"row {row['id']}: {name} with its prompt has {len(pair[name])} tokens, the model has {positions} "
                    "positions; prepare the data with lower max_prompt_length or max_response_length"
                )
        if chosen != rejected:
            pairs.append(pair)
    return pairs


def batch_pairs(pairs: list[dict], pad_id: int) -> dict:
    """B pairs -> their ids, input_ids and attention_mask (2B, S), chosen rows first, and margins (B,)."""
    ids, mask = pad_rows([p["chosen"] for p in pairs] + [p["rejected"] for p in pairs], pad_id, torch.long)
    margin = torch.tensor([p["margin"] or 0.0 for p in pairs])
    return {"ids": [p["id"] for p in pairs], "input_ids": ids, "attention_mask": mask, "margin": margin}


def micro_batches(pairs: list[dict], pad_id: int, size: int) -> list[dict]:
    """Pairs, longest first, in batches of at most `size`: equal lengths together leave little padding."""
    return [batch_pairs([pairs[i] for i in rows], pad_id) for rows in longest_first(lengths_of(pairs), size)]


def lengths_of(pairs: list[dict]) -> list[int]:
    """Tokens of each pair's longer side."""
    return [max(len(p["chosen"]), len(p["rejected"])) for p in pairs]


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
        train_all(model)
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
    mine = launch.split_for_rank(list(enumerate(pairs)), accelerator.process_index, world)
    batches = longest_first(lengths_of([pair for _, pair in mine]), micro_batch_size)
    rounds = math.ceil(math.ceil(len(pairs) / world) / micro_batch_size)
    model, device, results = launch.unwrap(model), accelerator.device, []
    with progress_bar(label="evaluating", unit="pairs", total=len(mine)) as bar:
        for rows in batches + [[]] * (rounds - len(batches)):
            part = [mine[i] for i in rows]
            batch = batch_pairs([pair for _, pair in part] or pairs[:1], pad_id)
            scores = model(batch["input_ids"].to(device), batch["attention_mask"].to(device)).cpu()
            results += [(i, scores[k].item(), scores[k + len(part)].item()) for k, (i, _) in enumerate(part)]
            bar.update(len(part))
    results = sorted(launch.gather_lists(results))
    return torch.tensor([r[1] for r in results]), torch.tensor([r[2] for r in results])


def evaluate_pairs(model, pairs: list[dict], pad_id: int, micro_batch_size: int, accelerator) -> dict[str, float]:
    """Held-out accuracy with its 95% interval, loss, and what the scores look like.

    Raises UserError where a score is not finite.
    """
    chosen, rejected = score_pairs(model, pairs, pad_id, micro_batch_size, accelerator)
    for pair, *scores in zip(pairs, chosen.tolist(), rejected.tolist()):
        if not all(map(math.isfinite, scores)):
            raise UserError(
                f"test row {pair['id']}: the trained model scores it {scores[0]} and {scores[1]}, so it is not saved; "
                f"{LOWER_LR}"
            )
    return pair_metrics(chosen, rejected, [pair["prompt"] for pair in pairs])


def pair_metrics(chosen: Tensor, rejected: Tensor, prompts: list) -> dict[str, float]:
    """Of scores (N,), (N,); pairs of one of the N prompts are not independent."""
    both = torch.cat([chosen, rejected])
    accuracy = preference_accuracy(chosen, rejected).item()
    right = 0.5 * (torch.sign(chosen - rejected) + 1)
    return {
        "accuracy": accuracy,
        "accuracy_ci95": wilson_interval(accuracy, effective_n(right, prompts)),
        "tie_rate": (chosen == rejected).float().mean().item(),
        "loss": bradley_terry_loss(chosen, rejected)[0].item(),
        "score_mean": both.mean().item(),
        "score_std": both.std(unbiased=False).item(),
        "temperature": fit_temperature((chosen - rejected).tolist()),
        "n": len(chosen),
    }


# ----------------------------------------------------------------------------------------------------- update


def optimizer_step(model, optimizer, batches: list[dict], cfg: RewardTrainConfig, accelerator) -> dict[str, float]:
    """One update, by the mean loss over all pairs: this rank's micro-batches (perhaps none) and those of the others.

    Ranks with fewer micro-batches run a pair of one token at weight 0, so that all run the same number of forwards.
    Without a pair on any rank nothing is updated, and `pairs` of the result is 0. Raises UserError, on all ranks and
    before the update, at a loss or gradient that is not finite.
    """
    device = accelerator.device
    mine = torch.tensor([[sum(len(batch["ids"]) for batch in batches), len(batches)]], device=device)
    counts = accelerator.gather(mine)  # (W, 2)
    pairs, rounds = counts[:, 0].sum().item(), counts[:, 1].max().item()
    if not pairs:
        return {"pairs": 0}
    nothing = batch_pairs([{"id": "", "margin": None, "chosen": [0], "rejected": [0]}], 0) | {"ids": []}
    sums, broken = torch.zeros(3, device=device), []
    for i in range(rounds):
        batch = batches[i] if i < len(batches) else nothing
        input_ids, mask, margin = (
            batch[name].to(device, non_blocking=True) for name in ("input_ids", "attention_mask", "margin")
        )
        weight = len(batch["ids"]) / pairs * accelerator.num_processes  # ranks' gradients are averaged
        last = i == rounds - 1
        with launch.accumulating(accelerator, model, last):
            chosen, rejected = model(input_ids, mask).chunk(2)
            loss, info = bradley_terry_loss(chosen, rejected, margin)
            if cfg.centering_coef:
                loss = loss + cfg.centering_coef * ((chosen + rejected) ** 2).mean()
            launch.backward(accelerator, model, loss * weight, last)
        broken += [row for row, score in zip(batch["ids"], (chosen + rejected).tolist()) if not math.isfinite(score)]
        sums += torch.stack([loss.detach(), info["accuracy"], info["margin"]]) * len(batch["ids"])
    grad_norm = launch.clip_grad_norm(
        accelerator, [p for p in model.parameters() if p.requires_grad], cfg.max_grad_norm
    )
    loss, accuracy, margin = (accelerator.reduce(sums, "sum") / pairs).tolist()
    if not math.isfinite(loss) or not math.isfinite(grad_norm):
        rows = launch.gather_lists(broken) or launch.gather_lists([row for batch in batches for row in batch["ids"]])
        what = f"the loss is {loss}" if not math.isfinite(loss) else "the gradient is not finite"
        more = f" and {len(rows) - 40} more" if len(rows) > 40 else ""
        raise UserError(f"{what}; rows {', '.join(rows[:40])}{more}; {LOWER_LR}")
    launch.step_optimizer(accelerator, model, optimizer)
    return {"loss": loss, "accuracy": accuracy, "margin": margin, "grad_norm": grad_norm, "pairs": pairs}


def save_final(model: ScoreModel, tokenizer, cfg: RewardTrainConfig, folder: Path, is_main: bool = True) -> None:
    """All ranks call it, the first one writes."""
    state, dtype = {}, stored_dtype(cfg.model) if cfg.lora is None else None
    if cfg.save_format != "adapter":
        state = saving.merged_state_dict(model.model, "default" if cfg.lora else None, is_main, dtype)
    with launch.whole([p for p in model.parameters() if p.requires_grad] if cfg.lora else model.head().parameters()):
        if not is_main:
            return
        head = model.head().weight.detach().cpu()
        model.base.config.num_labels = 1
        if cfg.save_format == "adapter":
            saving.save_adapter(model.model, "default", folder, tokenizer, head=head)
        else:
            generator = torch.Generator().manual_seed(1)
            state["score.weight"] = round_randomly(head, saving.saved_dtype(state), generator)
            saving.save_model(model.model, state, tokenizer, folder)


def card(cfg: RewardTrainConfig, result: dict) -> str:
    """The model card."""
    low, high = result["accuracy_ci95"]
    facts = {
        "training": "Bradley-Terry on preference pairs" + (f", LoRA of rank {cfg.lora.r}" if cfg.lora else ""),
        "data": cfg.data,
        "held-out accuracy": f"{result['accuracy']:.3f} [{low:.3f}, {high:.3f}], {result['n']} pairs",
        "scores on held-out data": f"{result['score_mean']:.3f} +- {result['score_std']:.3f}",
    }
    return saving.model_card("Reward model", adapter_base(cfg.model.path) or cfg.model.path, facts)


def reopen(cfg: RewardTrainConfig, folder: Path, device: torch.device) -> ScoreModel:
    """The model as it was saved, for the numbers that describe it."""
    dtype = model_dtype(cfg.model.dtype, device)
    return ScoreModel(load_reward_model(dataclasses.replace(cfg.model, path=str(folder)), device, dtype), dtype)


PLOTS = [("loss", "eval/loss"), ("accuracy", "eval/accuracy"), ("margin",), ("grad_norm",), ("lr",)]
SHOWN = 10  # pairs in report.html


def write_report(folder: Path, result: dict, rows: list[dict], scores: tuple[Tensor, Tensor]) -> None:
    """`report.html`: the held-out evaluation, curves, the pairs that the model has most wrong, and configuration.

    rows: the N held-out pairs; scores: of their chosen and rejected responses, (N,), (N,).
    """
    low, high = result["accuracy_ci95"]
    body = f"<p>Held-out accuracy {result['accuracy']:.3f} (95% interval {low:.3f} to {high:.3f}, {result['n']} pairs)"
    body += f", loss {result['loss']:.3f}, scores {result['score_mean']:+.2f} ± {result['score_std']:.2f}</p>"
    metrics = read_metrics(folder)
    body += curves_svg(metrics, PLOTS)
    pairs = sorted(zip(*(side.tolist() for side in scores), rows), key=lambda pair: pair[0] - pair[1])
    cells = [
        [row["prompt"][-1]["content"], f"{row['chosen']}\n({c:+.2f})", f"{row['rejected']}\n({r:+.2f})"]
        for c, r, row in pairs[:SHOWN]
        if c <= r
    ]
    if cells:
        body += "<h2>Most wrong pairs</h2>" + table(["prompt", "chosen, score", "rejected, score"], cells, texts=True)
    body += "<h2>Numbers</h2>" + first_and_last(metrics)
    body += folded("Configuration", (folder / "config.yaml").read_text(encoding="utf-8"))
    write_text(folder / "report.html", page("Reward model", body))


# ------------------------------------------------------------------------------------------------------ train


@alone
def train(cfg: RewardTrainConfig) -> dict:
    """Run stage 2; returns the held-out evaluation that is also written to final/reward_stats.json."""
    started = time.time()
    check_config(cfg)
    folder = Path(cfg.output_dir)
    if cfg.resume:
        check_same_config(folder, cfg)
    accelerator = launch.start_accelerator(folder, cfg.report_to, cfg.seed)
    device, world, is_main = accelerator.device, accelerator.num_processes, accelerator.is_main_process

    # 1. data and model
    tokenizer = pad_apart_from_eos(load_tokenizer(cfg.model.path, cfg.model.trust_remote_code))
    test_rows = load_rows(cfg.data, "test", ("preference",))
    with accelerator.main_process_first():
        model = build_model(cfg, device, launch.load_device(accelerator))
    positions, pad_id, micro = max_positions(model.base), tokenizer.pad_token_id, cfg.micro_batch_size_per_gpu
    test_pairs = encode_pairs(test_rows, tokenizer, positions)
    if not test_pairs:
        raise UserError(f"the tokens of all {len(test_rows)} test pairs are equal, so none is left to evaluate on")
    own, scale = copy.deepcopy(tokenizer), margin_factor(cfg)  # the loader's thread must not share a tokenizer
    loader = Batches(
        cfg.data,
        "train",
        ("preference",),
        cfg.train_batch_size,
        lambda rows: micro_batches(encode_pairs(rows, own, positions, scale), pad_id, micro),
        seed=cfg.seed,
        rank=accelerator.process_index,
        world=world,
        limit=cfg.max_pairs,
    )
    left = any(islice(loader.batches(0), loader.per_epoch))  # seldom more than the first batch is looked at
    if not any(launch.gather_lists([left])):
        raise UserError(f"the tokens of all {loader.rows} training pairs are equal, so none is left to train on")
    if is_main:
        open_output_dir(cfg.output_dir, cfg.overwrite, cfg.resume)
        record_run(folder, cfg)
    accelerator.wait_for_everyone()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=cfg.lr, weight_decay=cfg.weight_decay)
    trained = sum(p.numel() for p in parameters)
    model, optimizer = launch.prepare(accelerator, model, optimizer, cfg.micro_batch_size_per_gpu)
    start_trackers(accelerator, cfg)

    # 2. resume
    state = {"step": 0, "inputs": fingerprints({"data": cfg.data, "model.path": cfg.model.path})}
    restored = load_checkpoint(folder, accelerator, model, optimizer, set(state)) if cfg.resume else None
    if restored:
        check_same_inputs(restored, state, folder)
        clean_checkpoints(folder, accelerator, restored["step"], KEEP_LAST)
    first_step = restored["step"] if restored else 0
    steps = math.ceil(cfg.epochs * loader.per_epoch)
    metrics = Metrics(folder, accelerator, first_step)
    if is_main:
        say(
            f"{loader.rows} train pairs, {len(test_pairs)} test pairs; {steps} steps of {cfg.train_batch_size} pairs "
            f"on {world} rank(s); {trained:,} trained weights; "
            f"{str(launch.unwrap(model).dtype).removeprefix('torch.')} on {device}"
        )

    if is_main and scale != 1:
        say(f"the margins of the data count times {scale:.4g} (margin_scale)")

    # 3. train
    bar = progress_bar(label="reward", unit="step", total=steps, initial=first_step)
    clock, seen, used = time.time(), 0, 0
    batches = loader.start(first_step)
    for step, batch in zip(range(first_step, steps), batches):
        if is_main and step == first_step and batch:
            ids, mask = batch[0]["input_ids"], batch[0]["attention_mask"]
            for name, row in (("chosen:  ", 0), ("rejected:", len(ids) // 2)):
                say(f"first pair, {name} {tokenizer.decode(ids[row][mask[row]])}")
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, cfg.lr)
        values = optimizer_step(model, optimizer, batch, cfg, accelerator)
        values |= {"lr": learning_rate(step, steps, cfg.lr), "memory/peak_gb": peak_memory_gb(device)}
        done = step + 1
        seen += min(cfg.train_batch_size, loader.rows - step % loader.per_epoch * cfg.train_batch_size)
        used += values["pairs"]
        if cfg.eval_every and done % cfg.eval_every == 0 and done < steps:
            result = evaluate_pairs(model, test_pairs, pad_id, micro, accelerator)
            values |= {f"eval/{k}": v for k, v in result.items() if k != "accuracy_ci95"}
        metrics.log(done, values)
        bar.update(1)
        if is_main and (done % cfg.log_every == 0 or done == steps):
            eta = remaining(done - first_step, steps - first_step, time.time() - clock)
            numbers = (
                "loss {loss:.4f}  accuracy {accuracy:.3f}  margin {margin:+.3f}  grad norm {grad_norm:.2f}"
                if values["pairs"]
                else "no pairs"
            )
            say(f"step {done}/{steps}  {numbers.format(**values)}  left {eta}")
        if cfg.save_every and (done % cfg.save_every == 0):
            evaluate_pairs(model, test_pairs[:1], pad_id, micro, accelerator)  # raises where no score is a number
            save_checkpoint(folder, accelerator, model, optimizer, state | {"step": done}, KEEP_LAST)
    bar.close()
    batches.close()
    if seen and not used:  # with less than one epoch
        raise UserError(f"the tokens of all {seen} training pairs are equal, so none was left to train on")
    if is_main and used < seen:
        say(f"left out {seen - used} of {seen} pairs, whose tokens are equal")

    # 4. save, compare what was saved with the live model, and evaluate it
    model, final = launch.unwrap(model), folder / "final"
    probe = [pair[side] for pair in test_pairs[:2] for side in ("chosen", "rejected")]
    ids, mask = (x.to(device) for x in pad_rows(probe, pad_id, torch.long))
    with torch.no_grad():
        live = model(ids, mask)
    evaluate_pairs(model, test_pairs[:1], pad_id, micro, accelerator)  # raises where no score is a number
    save_final(model, tokenizer, cfg, final, is_main)
    checks, trust = {}, cfg.model.trust_remote_code
    if is_main:
        checks["saved"] = contracts.check_saved_reward(final, probe, live, model.dtype, trust)
    accelerator.wait_for_everyone()
    if not launch.is_zero3(accelerator):  # which has no room for a whole model
        model = reopen(cfg, final, device)
    scores = score_pairs(model, test_pairs, pad_id, micro, accelerator)
    result = pair_metrics(*scores, [pair["prompt"] for pair in test_pairs])
    if is_main:
        result["template_fingerprint"] = template_fingerprint(tokenizer)
        write_stats(final, result)
        write_text(final / "README.md", card(cfg, result))
        write_json(folder / "report.json", result)
        rows = {row["id"]: row for row in test_rows}
        write_report(folder, result, [rows[pair["id"]] for pair in test_pairs], scores)
        record_run(folder, cfg, started, checks)
        low, high = result["accuracy_ci95"]
        say(
            f"held-out accuracy {result['accuracy']:.3f} (95% interval {low:.3f} to {high:.3f}, {result['n']} pairs); "
            f"scores {result['score_mean']:+.2f} ± {result['score_std']:.2f}; "
            f"peak memory {peak_memory_gb(device):.2f} GB"
        )
        say(f"wrote {folder / 'final'}")
    accelerator.end_training()
    return result


if __name__ == "__main__":
    run_stage(train, RewardTrainConfig)

"""What a run checks of itself, so that its numbers are those of the model, the text and the distribution it names.

Each check returns {"value": what was measured, "limit": what is allowed}, which stands in run.json under `checks`, or
raises a UserError. Differences are in nats a token, or in units of the score.
"""

from pathlib import Path

import torch
from torch import Tensor

from utils.config import UserError, first_line
from utils.data import encode_prompt
from utils.models import RoleModel, adapter_base, arithmetic, freeze, loading_quietly
from utils.rollout import Sampling, generate_with_logprobs
from utils.tensors import pad_rows, token_logprobs

PROBE_TOKENS, PROBE_LEAST = 64, 8  # of a prompt, on which the checks run
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}  # mean difference that arithmetic explains
SAMPLING = {torch.float32: 0.01, torch.bfloat16: 0.3, torch.float16: 0.1}  # deviation between two ways of running


def verdict(value: float, limit: float, message: str) -> dict[str, float]:
    """The record of a check; UserError(message) where the value is above the limit, or not a number."""
    if not value <= limit:
        raise UserError(f"{message} (measured {value:.3g}, limit {limit:g})")
    return {"value": float(f"{value:.3g}"), "limit": limit}


def probe_row(rows: list[list[int]]) -> int:
    """Number of the row that the checks run on: the longest of the first few."""
    return max(range(min(16, len(rows))), key=lambda i: len(rows[i]))


def probe_ids(prompt: list[int]) -> list[int]:
    """The end of a prompt's ids; those of a very short one several times, so that there is something to compare."""
    return (prompt * PROBE_LEAST)[: max(len(prompt), PROBE_LEAST)][-PROBE_TOKENS:]


def probe_batch(prompt: list[int], pad_id: int, device: torch.device) -> dict[str, Tensor]:
    """A row and its first half, padded to one width: every token but the first counts as a response."""
    ids = probe_ids(prompt)
    rows, mask = pad_rows([ids, ids[: len(ids) // 2]], pad_id, torch.long)
    response = mask.clone()
    response[:, 0] = False
    return {"input_ids": rows.to(device), "attention_mask": mask.to(device), "response_mask": response.to(device)}


def leave_out_idle(model: RoleModel, batch: dict[str, Tensor]) -> list[str]:
    """Freeze the weights that never get a gradient; returns their names.

    Layers that text passes by, or whose weight is read in another way than by calling them: adapters there learn
    nothing, and several ranks would wait for their gradients. Experts are kept: this row may not have met them all.
    """
    roles = tuple(role for role in ("policy", "critic") if role in model.roles)
    out = model(batch, roles)
    sum(values.sum() for values in out.values()).backward()
    idle = [name for name, p in model.trainable().items() if p.grad is None and ".experts." not in name]
    for name, parameter in model.trainable().items():
        parameter.grad = None
        if name in idle:
            parameter.requires_grad_(False)
    return idle


def check_sampling(model: RoleModel, batch: dict[str, Tensor], how: Sampling) -> dict[str, float]:
    """A few greedy tokens after a row and after its half, sampled together, against the training forward."""
    whole, half = (ids[mask].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"]))
    with model.use("policy") as lm:
        responses, sampled = generate_with_logprobs(lm, [whole, half], how)
    differences = []
    for prompt, response, seen in zip((whole, half), responses, sampled):
        ids = torch.tensor([prompt + response], device=batch["input_ids"].device)
        mask = torch.ones_like(ids, dtype=torch.bool)
        drawn = torch.arange(ids.shape[1], device=ids.device)[None] >= len(prompt)
        row = {"input_ids": ids, "attention_mask": mask, "response_mask": drawn}
        with torch.no_grad():
            differences.append(model(row, ("policy",))["logprobs"].cpu() - torch.tensor(seen))
    return check_rollout(torch.cat(differences).square().mean().sqrt().item(), model.dtype)


@torch.no_grad()
def check_logprobs(model: RoleModel, path: str, batch: dict[str, Tensor]) -> dict[str, float]:
    """Log-probabilities of policy and reference are those of the model's own logits, padded or not, whole or half.

    A row's first half must have in a batch what it has within the row: a model that reads ahead is no policy.
    """
    row, half = batch["input_ids"][0], int(batch["attention_mask"][1].sum())
    worst = 0.0
    for role, output in (("policy", "logprobs"), ("reference", "ref_logprobs")):
        try:
            ours = model(batch, (role,))[output]
            with arithmetic(model.models.values(), model.dtype), model.use(role) as lm:
                own = token_logprobs(lm(input_ids=row[None]).logits[0, :-1], row[1:])
        except UserError:
            raise
        except Exception as error:
            name = type(model.lm(role)).__name__
            raise UserError(f"{path}: {name} does not run as a causal language model: {first_line(error)}") from error
        if not torch.isfinite(own).all():
            raise UserError(
                f"{path}: the {role}'s logits are not finite; its weights are damaged, or too large for it"
            )
        both = torch.cat([own, own[: half - 1]])
        worst = max(worst, (ours - both).abs().mean().item()) if torch.isfinite(ours).all() else float("nan")
    name = type(model.lm("policy")).__name__
    message = f"{path}: log-probabilities differ from those of {name}'s own logits, so this family cannot be trained"
    return verdict(worst, ROUNDING[model.dtype], message)


def check_start(model: RoleModel, path: str, batch: dict[str, Tensor], how: Sampling) -> dict[str, dict]:
    """What can be known of a model before the first step."""
    return {"logprobs": check_logprobs(model, path, batch), "sampling": check_sampling(model, batch, how)}


def check_first(logprobs: Tensor, old_logprobs: Tensor, dtype: torch.dtype) -> dict[str, float]:
    """Before the first optimizer step the policy is the one that sampled: ratio 1, on the first micro-batch."""
    value = (logprobs - old_logprobs).abs().max().item()
    message = "before the first update the ratio is not 1: log-probabilities depend on how the forward runs"
    return verdict(value, 1e-4 if dtype == torch.float32 else ROUNDING[dtype], f"{message}; try model.dtype float32")


def check_reference(logprobs: Tensor, ref_logprobs: Tensor, dtype: torch.dtype) -> dict[str, float]:
    """Before the first optimizer step the policy is the reference: KL 0 on every token."""
    value = (logprobs - ref_logprobs).abs().max().item()
    message = "before the first update policy and reference differ, although nothing was trained"
    return verdict(value, 1e-4 if dtype == torch.float32 else ROUNDING[dtype], message)


def check_rollout(std: float, dtype: torch.dtype) -> dict[str, float]:
    """Tokens are sampled, under cached decoding in a padded batch, with the log-probabilities of training."""
    message = "the sampled tokens' log-probabilities are not those of training: this model answers otherwise in a "
    message += "left-padded batch; try rollout.micro_batch_size_per_gpu 1"
    return verdict(std, SAMPLING[dtype], message)


@torch.no_grad()
def check_saved_policy(
    folder: Path, prompt: list[dict], ids: list[int], live: Tensor, dtype: torch.dtype, trust_remote_code: bool = False
) -> dict[str, float]:
    """`folder`, opened by plain transformers, encodes the prompt to the same ids and has the live log-probabilities.

    live: of ids[1:], from the model in memory, which computes in `dtype`.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = _reopen(AutoModelForCausalLM, folder, trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if probe_ids(encode_prompt(tokenizer, prompt)) != ids:
        raise UserError(f"the tokenizer in {folder} encodes a prompt otherwise than the one in memory")
    row = torch.tensor(ids)
    own = token_logprobs(model(input_ids=row[None]).logits[0, :-1], row[1:])
    limit = max(ROUNDING[dtype], ROUNDING[model.dtype])
    message = (
        f"the policy in {folder} is not the one that was trained; adapter/ beside it is, and so is the checkpoint"
    )
    return verdict((own - live.cpu()).abs().mean().item(), limit, message)


@torch.no_grad()
def check_saved_reward(
    folder: Path, rows: list[list[int]], live: Tensor, dtype: torch.dtype, trust_remote_code: bool = False
) -> dict[str, float]:
    """`folder`, opened by plain transformers, gives the live scores of rows of ids in a batch that it pads itself."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    base = adapter_base(str(folder))
    if base:
        from peft import PeftModel

        with loading_quietly():
            plain = AutoModelForSequenceClassification.from_pretrained(
                base, num_labels=1, dtype=dtype, trust_remote_code=trust_remote_code
            )
        plain.config.pad_token_id = plain.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        model = freeze(PeftModel.from_pretrained(plain, folder))
    else:
        model = _reopen(AutoModelForSequenceClassification, folder, trust_remote_code)
    batch = tokenizer.pad({"input_ids": rows}, padding_side="right", return_tensors="pt")
    own = model(**batch).logits[:, 0].float()
    spread = max(1.0, live.std(unbiased=False).item())
    limit = max(ROUNDING[dtype], ROUNDING[model.dtype]) * spread
    message = f"the reward model in {folder} does not give the scores of the one that was trained"
    return verdict((own - live.cpu()).abs().mean().item(), limit, message)


def _reopen(auto_class, folder: Path, trust_remote_code: bool):
    try:
        with loading_quietly():
            model, info = auto_class.from_pretrained(
                folder, output_loading_info=True, dtype="auto", trust_remote_code=trust_remote_code
            )
    except Exception as error:
        raise UserError(f"{folder}, just written, cannot be opened again: {first_line(error)}") from error
    wrong = sorted(info["missing_keys"]) + sorted(info["unexpected_keys"])
    if wrong:
        raise UserError(f"{folder} lacks weights or has some too many: {', '.join(map(str, wrong[:3]))}")
    return freeze(model)

"""Limits on a PPO run, and what is done when one is crossed, so that a run can be left alone.

Every event is one line on the terminal and one object in `events.jsonl`. All values are those of all ranks together,
so the ranks always decide alike. What is remembered between steps stands in the run's `state`, which checkpoints keep.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance
from typing import Literal

from utils.config import AtLeast0, AtLeast1, Count, RunStopped, Share, UserError, WholeNumber
from utils.tracking import keep_lines, say


@dataclass(frozen=True)
class GuardConfig:
    """Limits on the run; a limit of null is off. KL is in nats a token."""

    enabled: bool = False
    """check the limits; needs checkpoints (save_every), which rolling back goes to"""
    update_kl: AtLeast0 | None = 0.02
    """KL of the policy before a step to that within it: beyond, the rest of the step is skipped; beyond twice this,
    rolled back"""
    reference_kl: AtLeast0 | None = None
    """KL to the reference: beyond, rolled back, with a higher kl_coef"""
    grad_norm: AtLeast0 | None = 10.0
    """gradient norm before clipping: beyond, or not finite, the optimizer step is skipped"""
    max_skips: Count = 3
    """so many optimizer steps skipped in a row are rolled back; so many steps in a row whose scores cannot be used
    end the run"""
    reward_std: AtLeast0 | None = 2.0
    """deviation of a step's scores: beyond, the outliers are written to suspicious.jsonl and the run goes on. A reward
    model's scores scatter by 1 on its held-out data"""
    max_empty: float | None = None
    """share of responses without text: beyond, a warning"""
    max_truncated: float | None = None
    """share of responses cut off: beyond, a warning"""
    min_distinct_2: float | None = None
    """share of different bigrams over a step: below, a warning"""
    min_entropy: float | None = None
    """entropy in nats: below, a warning"""
    max_rollbacks: WholeNumber = 3
    """one more ends the run with exit code 3"""
    rollback_kl_factor: AtLeast1 = 2.0
    """kl_coef is multiplied by this when reference_kl is crossed"""
    rollback_lr_factor: Share = 0.1
    """learning rates are multiplied by this when update_kl or grad_norm is crossed"""


@dataclass(frozen=True)
class Verdict:
    """What a check decides."""

    action: Literal["go on", "skip step", "skip rest", "roll back"] = "go on"
    """skip step: leave out this optimizer step. skip rest: and the step's other updates. roll back: to a checkpoint"""
    guard: str = ""
    """what was crossed"""
    before: int = 0
    """roll back: the newest step whose checkpoint is known to be good"""
    lr_factor: float = 1.0
    kl_factor: float = 1.0
    """roll back: what learning rates and kl_coef are multiplied by"""


GO_ON = Verdict()
NEGATIVE_KL_STEPS, NEGATIVE_KL = 5, -0.05  # mean k1 over so many steps, in nats a response
NEGATIVE_KL_ERRORS = 4.0  # standard errors of that mean: a KL so far below 0 is no chance
MAX_SCORE = 1e15  # a larger score overflows float32 where the update squares it
FIRST_KL = 0.01  # nats a token before the first optimizer step: more than rounding in bfloat16 explains
WARNINGS = {  # metric -> limit, sign of the comparison, likely causes
    "rollout/empty_fraction": (
        "max_empty", 1,
        "the model ends at once: check the chat template and the prompts' ends, or kl_coef is too low",
    ),
    "rollout/truncated_fraction": (
        "max_truncated", 1,
        "responses do not end: raise max_response_length or set score.missing_eos_penalty",
    ),
    "rollout/distinct_2": (
        "min_distinct_2", -1,
        "responses have become alike or repeat themselves: raise kl_coef, or the reward pays for repetition",
    ),
    "objective/entropy": (
        "min_entropy", -1,
        "the policy has collapsed to few answers: raise kl_coef or entropy_coef, or lower lr",
    ),
}  # fmt: skip


def squared_error(rollouts: list) -> float:
    """Of the mean over responses of the summed log ratio to the reference."""
    sums = [sum(r.logprobs) - sum(r.ref_logprobs) for r in rollouts if r.logprobs]
    return variance(sums) / len(sums) if len(sums) > 1 else 0.0


class Guards:
    """state: that of the run, of which {rollbacks, skips, warned, kl_history} are changed in place."""

    def __init__(self, cfg: GuardConfig, folder: Path, state: dict, is_main: bool):
        self.cfg, self.folder, self.state, self.is_main = cfg, folder, state, is_main
        self.bad_scores = 0  # steps in a row

    def forget_later(self) -> None:
        """Drop the lines of draws that the state has not seen, which are made again after a kill, and half a line."""
        for name in ("events.jsonl", "suspicious.jsonl"):
            if self.is_main and (self.folder / name).exists():
                keep_lines(self.folder / name, "draw", self.state["draw"])

    def event(self, step: int, guard: str, value: float, limit: float | None, action: str, message: str) -> None:
        if self.is_main:
            record = {"step": step, "draw": self.state.get("draw", 0), "guard": guard, "value": value, "limit": limit}
            with open(self.folder / "events.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(record | {"action": action, "message": message}) + "\n")
            against = "" if limit is None else f" (limit {limit:g})"
            say(f"guard at step {step}: {guard} {value:.4g}{against}: {message}; {action}")

    def check_scores(self, step: int, rollouts: list, rows: list[dict]) -> bool:
        """Whether the update can use the scores. One that it cannot: UserError; with guards, other prompts instead."""
        bad = next((r for r in rollouts if not abs(r.score) < MAX_SCORE), None)
        if bad is None:
            self.bad_scores = 0
            return True
        self.bad_scores += 1
        what = f"the score of row {rows[bad.row]['id']} is {bad.score:g}, for the response {bad.text[:80]!r}"
        if not self.cfg.enabled:
            raise UserError(
                f"step {step}: {what}; mend the reward, leave the row out, or go on with --resume auto and "
                "guards.enabled true, which takes other prompts then"
            )
        stop = self.bad_scores >= self.cfg.max_skips
        self.event(step, "score", bad.score, MAX_SCORE, "stopping" if stop else "going on with other prompts", what)
        if stop:
            raise RunStopped(
                f"step {step}: {what}, and it was so in guards.max_skips {self.cfg.max_skips} steps in a row; mend "
                "the reward and go on with --resume auto"
            )
        return False

    def check_rollouts(
        self, step: int, metrics: dict[str, float], rollouts: list, rows: list[dict], data: str
    ) -> Verdict:
        """Before the update."""
        cfg = self.cfg
        measured = [metrics["objective/kl"], squared_error(rollouts)]
        history = self.state["kl_history"] = [*self.state["kl_history"], measured][-NEGATIVE_KL_STEPS:]
        mean, error = fmean(kl for kl, _ in history), math.sqrt(sum(e for _, e in history)) / len(history)
        crossed = len(history) == NEGATIVE_KL_STEPS and mean < min(NEGATIVE_KL, -NEGATIVE_KL_ERRORS * error)
        cause = (
            "objective/kl is negative over several steps: responses are not drawn from the policy's full distribution"
        )
        cause += " (generation settings, padding, eos handling)"
        self._warn(step, "negative_kl", crossed, mean, NEGATIVE_KL, cause)
        if not cfg.enabled:
            return GO_ON
        kl, limit = metrics["objective/kl_per_token"], cfg.reference_kl
        if limit is not None and not kl <= limit:  # so that NaN crosses it too
            self.event(
                step, "reference_kl", kl, limit, "rolling back", "the policy has moved too far from the reference"
            )
            return Verdict("roll back", "reference_kl", before=max(step - 2, 0), kl_factor=cfg.rollback_kl_factor)
        for metric, (name, sign, cause) in WARNINGS.items():
            limit = getattr(cfg, name)
            if limit is not None:
                self._warn(step, name, sign * metrics[metric] > sign * limit, metrics[metric], limit, cause)
        std = metrics["objective/score_std"]
        if cfg.reward_std is not None:
            file = self.folder / "suspicious.jsonl"
            if std > cfg.reward_std:
                self._write_suspicious(step, metrics, rollouts, rows)
            cause = "the scores scatter; the outliers stand in suspicious.jsonl, to leave their prompts out: "
            cause += f"python prepare_data.py --config {data}/config.yaml --exclude+ {file} --output_dir NEW"
            self._warn(step, "reward_std", std > cfg.reward_std, std, cfg.reward_std, cause)
        return GO_ON

    def _warn(self, step: int, guard: str, crossed: bool, value: float, limit: float, message: str) -> None:
        """One event when a limit is crossed, and no more until it was kept again."""
        warned = set(self.state["warned"])
        if crossed and guard not in warned:
            self.event(step, guard, value, limit, "going on", message)
        self.state["warned"] = sorted(warned | {guard} if crossed else warned - {guard})

    def _write_suspicious(self, step: int, metrics: dict[str, float], rollouts: list, rows: list[dict]) -> None:
        """Samples more than two deviations from the mean; at least the farthest one."""
        if not self.is_main:
            return
        mean = metrics["objective/score_mean"]
        bound = min(2 * metrics["objective/score_std"], max(abs(r.score - mean) for r in rollouts))
        with open(self.folder / "suspicious.jsonl", "a", encoding="utf-8") as file:
            for r in rollouts:
                if abs(r.score - mean) >= bound:
                    record = {"step": step, "draw": self.state.get("draw", 0), "id": rows[r.row]["id"]}
                    record |= {"score": r.score, "prompt": rows[r.row]["prompt"], "response": r.text}
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def check_first(self, step: int, approx_kl: float) -> None:
        """Before a step's first update the policy is the one that sampled, so the ratio is 1 and this is 0."""
        cause = "before any update the ratio is not 1: log-probabilities of rollout and update differ"
        cause += " (dropout, temperature, another forward)"
        self._warn(step, "first_ratio", approx_kl > FIRST_KL, approx_kl, FIRST_KL, cause)

    def check_update(self, step: int, approx_kl: float, last: bool = False) -> Verdict:
        """After each mini-batch's forward; `last`: after the step's last update, when nothing is left to skip."""
        limit = self.cfg.update_kl
        if not self.cfg.enabled or limit is None or approx_kl <= limit:
            return GO_ON
        if approx_kl > 2 * limit or not math.isfinite(approx_kl):
            message = "one step moved the policy by more than twice the limit"
            self.event(step, "update_kl", approx_kl, limit, "rolling back", message)
            return Verdict("roll back", "update_kl", before=step - 1, lr_factor=self.cfg.rollback_lr_factor)
        if last:
            return GO_ON
        message = "the policy has moved far enough"
        self.event(step, "update_kl", approx_kl, limit, "skipping the rest of the step", message)
        return Verdict("skip rest", "update_kl")

    def check_outputs(self, step: int, finite: bool) -> Verdict:
        """After the step's last update: nothing can be sampled from outputs that are not finite, nor gone on from."""
        if finite:
            return GO_ON
        message = "after the update the outputs of policy or critic are not finite"
        if not self.cfg.enabled:
            raise UserError(
                f"step {step}: {message}, so nothing was saved; lower lr and go on from the newest checkpoint "
                "with --resume auto, or set guards.enabled"
            )
        self.event(step, "outputs", math.nan, None, "rolling back", message)
        return Verdict("roll back", "outputs", before=step - 1, lr_factor=self.cfg.rollback_lr_factor)

    def check_gradients(self, step: int, norms: dict[str, float]) -> Verdict:
        """Before the optimizer steps, by the norms of policy and critic; max_skips bad ones in a row: roll back."""
        limit = self.cfg.grad_norm
        bad = {n: norm for n, norm in norms.items() if not math.isfinite(norm) or (limit is not None and norm > limit)}
        if not self.cfg.enabled or not bad:
            self.state["skips"] = 0
            return GO_ON
        self.state["skips"] += 1
        name, norm = next(iter(bad.items()))
        if self.state["skips"] >= self.cfg.max_skips:
            message = f"{self.state['skips']} optimizer steps in a row were bad ({name})"
            self.event(step, "grad_norm", norm, limit, "rolling back", message)
            return Verdict("roll back", "grad_norm", before=step - 1, lr_factor=self.cfg.rollback_lr_factor)
        message = f"the gradient of the {name} is too large or not finite"
        self.event(step, "grad_norm", norm, limit, "skipping the optimizer step", message)
        return Verdict("skip step", "grad_norm")

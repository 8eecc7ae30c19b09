"""Sampling responses with transformers' generate."""

from dataclasses import dataclass

import torch

from utils.tensors import longest_first, pad_rows, token_logprobs


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn."""

    max_new_tokens: int
    temperature: float
    """0 is greedy"""
    eos_ids: list[int]
    """tokens that end a response"""
    pad_id: int
    batch_size: int = 64
    """prompts at a time, the longest first"""


def generate(lm, prompts: list[list[int]], how: Sampling, progress=None, synced: bool = False) -> list[list[int]]:
    """Response ids for each prompt; see `generate_with_logprobs`."""
    return generate_with_logprobs(lm, prompts, how, progress, synced)[0]


@torch.no_grad()
def generate_with_logprobs(
    lm, prompts: list[list[int]], how: Sampling, progress=None, synced: bool = False
) -> tuple[list[list[int]], list[list[float]]]:
    """Response ids for each prompt, up to and including the first eos, and the log-probability of each token.

    Without an eos the response was cut off. Sampling is from the model's full distribution at the temperature (greedy
    tokens have their log-probabilities at temperature 1): the model's own generation defaults (top-p, repetition
    penalty, ...) are switched off, because training uses the full distribution too. synced: go on until the batches of
    all ranks have ended, as ZeRO-3 needs; the ranks then need equally many batches.
    """
    from transformers import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=how.max_new_tokens, eos_token_id=how.eos_ids, pad_token_id=how.pad_id, use_cache=True,
        **({"do_sample": True, "temperature": how.temperature, "top_k": 0, "top_p": 1.0} if how.temperature else {}),
    )  # fmt: skip
    device = next(lm.parameters()).device
    responses: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    own_config, lm.generation_config = lm.generation_config, config  # nothing of the model's own config leaks in
    try:
        for rows in longest_first([len(prompt) for prompt in prompts], how.batch_size):
            reversed_ids, reversed_mask = pad_rows([prompts[i][::-1] for i in rows], how.pad_id, torch.long)
            ids, mask = reversed_ids.flip(1).to(device), reversed_mask.flip(1).long().to(device)  # left-padded (B, P)
            watch = _Watch(how.temperature or 1.0)
            output = lm.generate(
                input_ids=ids, attention_mask=mask, generation_config=config, synced_gpus=synced,
                logits_processor=[watch.see_logits], stopping_criteria=[watch.see_tokens],
            )  # fmt: skip
            tokens_of_rows = output[:, ids.shape[1] :].tolist()
            for row, tokens, seen in zip(rows, tokens_of_rows, torch.stack(watch.logprobs, 1).tolist()):
                end = next((i + 1 for i, token in enumerate(tokens) if token in how.eos_ids), len(tokens))
                responses[row], logprobs[row] = tokens[:end], seen[:end]
            if progress is not None:
                progress.update(len(rows))
    finally:
        lm.generation_config = own_config
    return responses, logprobs


class _Watch:
    """Notes the log-probability of each token as it is drawn; `logprobs`: one (B,) a token."""

    def __init__(self, temperature: float):
        self.temperature, self.logits, self.logprobs = temperature, None, []

    def see_logits(self, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        self.logits = logits
        return logits

    def see_tokens(self, input_ids: torch.Tensor, scores, **more) -> torch.Tensor:
        self.logprobs.append(token_logprobs(self.logits / self.temperature, input_ids[:, -1]))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)  # ends nothing

"""Masked reductions and token log-probabilities: the arithmetic that stages share."""

import torch
import torch.nn.functional as F
from torch import Tensor

ROUNDING = 4 * torch.finfo(torch.float32).eps  # values of one size that differ by less are equal


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of `x` where the boolean `mask` (same shape) is true; 0 with zero gradient if nothing is.

    Values outside the mask are selected away, not multiplied by 0, so NaN or inf there has no effect.
    """
    return torch.where(mask, x, 0).sum() / mask.sum().clamp(min=1)


def centred(x: Tensor, mask: Tensor) -> Tensor:
    """`x` (..., N) in float64 minus its mean over the mask of each row; 0 outside the mask.

    Exactly 0 in rows that differ by no more than float32 rounding, which whitening would blow up to 1.
    """
    x = torch.where(mask, x, 0).double()
    first = x.gather(-1, mask.int().argmax(-1, keepdim=True))  # equal values minus one of them are 0 without rounding
    shifted = torch.where(mask, x - first, 0)
    count = mask.sum(-1, keepdim=True).clamp(min=1)
    shifted = torch.where(mask, shifted - shifted.sum(-1, keepdim=True) / count, 0)
    spread = (shifted.square().sum(-1, keepdim=True) / count).sqrt()
    return torch.where(spread <= ROUNDING * x.abs().amax(-1, keepdim=True), 0, shifted)


def masked_variance(x: Tensor, mask: Tensor) -> Tensor:
    """Population variance of `x` over the mask; 0 where the values differ by rounding alone."""
    flat = mask.flatten()
    return masked_mean(centred(x.flatten(), flat) ** 2, flat).to(x.dtype)


def masked_whiten(x: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Shift and scale `x` to mean 0 and variance 1 over the mask; 0 outside the mask.

    Uses the population variance, so one valid element, or all equal ones, give 0 and not NaN.
    """
    out = centred(x.flatten(), mask.flatten()).view(x.shape)
    return (out * torch.rsqrt(masked_mean(out**2, mask) + eps)).to(x.dtype)


def token_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    """log softmax(logits)[labels] in nats, fp32: logits (..., V), labels (...) -> (...).

    Never builds the (..., V) log-softmax; the caller bounds the memory by passing a chunk of positions.
    """
    logits = logits.float()
    return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def token_entropy(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits) in nats, fp32: (..., V) -> (...)."""
    logits = logits.float()
    return logits.logsumexp(-1) - (F.softmax(logits, -1) * logits).sum(-1)


def pad_rows(rows: list, value, dtype: torch.dtype, width: int = 0) -> tuple[Tensor, Tensor]:
    """Lists of different lengths -> right-padded (B, T) tensor and its boolean mask; T is at least `width`."""
    width = max(width, *(len(row) for row in rows), 0)
    padded = torch.full((len(rows), width), value, dtype=dtype)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.as_tensor(row, dtype=dtype)
        mask[i, : len(row)] = True
    return padded, mask


def longest_first(lengths: list[int], size: int) -> list[list[int]]:
    """Indices in batches of at most `size`, the longest first: rows of like lengths leave little padding."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return [order[i : i + size] for i in range(0, len(order), size)]


def round_randomly(x: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """`x` in `dtype`; from float32 to a 16-bit type up or down at random, so that the mean stays what it was.

    Training moves most weights by less than half a step of bfloat16. Rounding to the nearest undoes that; this keeps
    it on average (stochastic rounding, Gupta et al. 2015). A value that `dtype` can hold stays as it is.
    """
    bits = {torch.bfloat16: 16, torch.float16: 13}.get(dtype)  # of float32's mantissa, that `dtype` lacks
    if x.dtype != torch.float32 or bits is None:
        return x.to(dtype)
    noise = torch.randint(0, 2**bits, x.shape, generator=generator, dtype=torch.int32).to(x.device)
    rounded = ((x.view(torch.int32) + noise) >> bits << bits).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(dtype)

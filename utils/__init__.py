"""What two or more stages need. No losses and no algorithms live here."""

from utils.tensors import masked_mean, masked_whiten, token_logprobs

__all__ = ["masked_mean", "masked_whiten", "token_logprobs"]

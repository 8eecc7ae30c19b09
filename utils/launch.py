"""Starting under Accelerate. The accelerate config alone chooses the hardware; its quirks live here."""

import os
from pathlib import Path

import torch


def start_accelerator(output_dir: Path, report_to: str, seed: int):
    """An Accelerator for one process or several, with the same seed on all ranks."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import set_seed

    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not torch.cuda.is_available():
        PartialState(cpu=True)  # accelerate does not connect several processes on a CPU by itself
    log_with = None if report_to == "none" else report_to
    accelerator = Accelerator(log_with=log_with, project_dir=output_dir)
    set_seed(seed)
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    return accelerator


def keep_freed_memory() -> None:
    """Let glibc reuse freed blocks instead of returning them: PyTorch on a CPU allocates every activation anew.

    Without it, each large tensor costs fresh pages from the kernel, about a fifth of a forward pass.
    """
    import ctypes

    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD: the largest value that glibc accepts
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):
        pass  # not glibc


def unwrap(model):
    """The module inside DDP's or DeepSpeed's wrapper. (accelerate's own function imports DeepSpeed, which takes seconds.)"""
    return getattr(model, "module", model)


def gather_lists(values: list) -> list:
    """Concatenate the ranks' lists in rank order, on every rank."""
    from accelerate.utils import gather_object

    return gather_object(values) if int(os.environ.get("WORLD_SIZE", 1)) > 1 else values


def split_for_rank(items: list, rank: int, world: int) -> list:
    """This rank's contiguous share; the shares differ in length by at most one."""
    return items[len(items) * rank // world : len(items) * (rank + 1) // world]

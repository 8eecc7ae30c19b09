"""Running under Accelerate. The accelerate config alone chooses the hardware; the quirks of each kind live here.

Under DeepSpeed ZeRO-3 (Rajbhandari et al. 2020) each rank holds a slice of every weight. A weight is whole only while
its module runs, or inside `whole(...)`, and all ranks must run the same modules in the same order.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from utils.config import UserError
from utils.tracking import say


def start_accelerator(output_dir: Path, report_to: str, seed: int):
    """An Accelerator for one process or several, with the same seed on all ranks."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it had to guess
    from accelerate import Accelerator, PartialState
    from accelerate.utils import set_seed

    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        wait_for_compiler()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not torch.cuda.is_available():
        PartialState(cpu=True)  # accelerate does not connect several processes on a CPU by itself
    if report_to != "none" and report_to not in available_trackers():
        raise UserError(f"report_to {report_to} needs a package that is not installed: pip install {report_to}")
    log_with = None if report_to == "none" else report_to
    accelerator = Accelerator(log_with=log_with, project_dir=output_dir)
    if is_zero3(accelerator):
        from transformers.integrations import unset_hf_deepspeed_config

        stage = accelerator.state.deepspeed_plugin.zero_stage
        if stage != 3:
            raise UserError(
                f"DeepSpeed stage {stage} is not supported; launch with configs/accelerate/zero3.yaml "
                "where a model outgrows a device, else with plain data parallelism"
            )
        unset_hf_deepspeed_config()  # transformers loads whole models; `prepare` cuts them up
    set_seed(seed)
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    return accelerator


def wait_for_compiler(patience: float = 60.0) -> None:
    """DeepSpeed compiles what it needs, once. It waits for another compiler's lock without a word and without an end.

    Raises UserError where a process that was killed left a lock: no process here holds it after `patience` seconds.
    """
    from torch.utils.cpp_extension import get_default_build_root

    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    tell = say if not int(os.environ.get("RANK", 0)) else lambda text: None
    if not any(folder.rglob("*.so")):
        tell(f"DeepSpeed compiles into {folder}, once; it can take 3 minutes")
    for lock in folder.rglob("lock"):
        tell(f"waiting for a process that compiles, by its lock {lock}")
        while lock.exists():
            if time.time() - lock.stat().st_mtime > patience and str(lock) not in open_files():
                raise UserError(f"{lock} was left by a start of DeepSpeed that was killed; delete it, and start again")
            time.sleep(1)


def open_files() -> Iterator[str]:
    """Paths that processes of this user hold open on this machine (Linux)."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            yield os.readlink(link)


def available_trackers() -> list[str]:
    from accelerate.tracking import get_available_trackers

    return [str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers()]


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


def is_zero3(accelerator) -> bool:
    return accelerator.state.deepspeed_plugin is not None


def load_device(accelerator) -> torch.device:
    """Where to build a model before `prepare`: the rank's own device, but main memory under ZeRO-3."""
    return torch.device("cpu") if is_zero3(accelerator) else accelerator.device


def prepare(accelerator, model, optimizer, micro_batch_size: int):
    """`accelerator.prepare(model, optimizer)`; `model.dtype` is the arithmetic's. ZeRO-3 cuts up the weights here.

    There bfloat16 holds for all weights, trained ones too, and the optimizer keeps float32 copies of those.
    """
    if not is_zero3(accelerator):
        return accelerator.prepare(model, optimizer)
    import logging

    import deepspeed

    if model.dtype == torch.float16:
        raise UserError("model.dtype float16 is not supported under DeepSpeed, use bfloat16 or float32")
    deepspeed.utils.logger.setLevel(logging.WARNING)
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    config |= {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "train_batch_size": micro_batch_size * accelerator.num_processes,
        "gradient_accumulation_steps": 1,  # no scaling: the losses are weighted already
        "gradient_clipping": 0.0,  # clip_grad_norm does it
        "bf16": {"enabled": model.dtype == torch.bfloat16},
        "fp16": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
    }
    for tensor in [*model.parameters(), *model.buffers()]:
        place = "cpu" if isinstance(tensor, torch.nn.Parameter) else accelerator.device
        tensor.data = tensor.data.to(place, model.dtype if isinstance(tensor, torch.nn.Parameter) else None)
    deepspeed.init_distributed()
    deepspeed.zero.Init(
        module=model, config_dict_or_path=config
    )  # one weight at a time; the engine would move all at once
    return accelerator.prepare(model, optimizer)


def unwrap(model):
    """The module inside DDP's or DeepSpeed's wrapper. (Accelerate's own function imports DeepSpeed: seconds.)"""
    return getattr(model, "module", model)


def whole(parameters):
    """Inside, these parameters are whole on every rank. All ranks enter; reading only."""
    parameters = [p for p in parameters if hasattr(p, "ds_id")]
    if not parameters:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)


def accumulating(accelerator, model, last: bool):
    """Around a micro-batch's forward and `backward`: gradients are exchanged between ranks in the last one only."""
    return contextlib.nullcontext() if last or is_zero3(accelerator) else accelerator.no_sync(model)


def backward(accelerator, model, loss, last: bool) -> None:
    """Add the loss's gradients; over a mini-batch they end up averaged over the ranks."""
    if is_zero3(accelerator):  # accelerate's own call would take the optimizer step too
        model.set_gradient_accumulation_boundary(last)
        model.backward(loss)
    else:
        accelerator.backward(loss)


def clip_grad_norm(accelerator, parameters: list, max_norm: float) -> float:
    """Scale the gradients down to `max_norm` together; returns their norm before."""
    if not is_zero3(accelerator):
        return float(accelerator.clip_grad_norm_(parameters, max_norm))
    from deepspeed.utils import safe_get_local_grad, safe_set_local_grad

    slices = [safe_get_local_grad(p) for p in parameters]
    norm = float(accelerator.reduce(sum(g.square().sum() for g in slices), "sum").sqrt())
    for parameter, gradient in zip(parameters, slices):
        safe_set_local_grad(parameter, gradient * min(1.0, max_norm / (norm + 1e-6)))
    return norm


def drop_gradients(accelerator, parameters: list) -> None:
    """Make the next optimizer step leave these parameters alone, which were never stepped."""
    for parameter in parameters:
        if is_zero3(accelerator):
            from deepspeed.utils import safe_get_local_grad, safe_set_local_grad

            safe_set_local_grad(parameter, torch.zeros_like(safe_get_local_grad(parameter)))
            parameter.was_dropped = True
        else:
            parameter.grad = None


def discard_gradients(accelerator, model, optimizer) -> None:
    """Forget the gradients of this mini-batch, so that no optimizer step is due."""
    (model.optimizer if is_zero3(accelerator) else optimizer).zero_grad()
    for parameter in model.parameters():
        parameter.was_dropped = False


def step_optimizer(accelerator, model, optimizer) -> None:
    """Update the weights and clear the gradients."""
    if not is_zero3(accelerator):
        optimizer.step()
        optimizer.zero_grad()
        return
    model.step()
    for parameter in model.parameters():
        if getattr(parameter, "was_dropped", False):  # its zero gradient was no step
            zero3_state(parameter)["step"].zero_()
            parameter.was_dropped = False


def zero3_slice(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The flat float32 tensor of this rank, which the optimizer steps, that holds the parameter's slice."""
    zero = parameter._z3_optimizer
    return zero.fp32_partitioned_groups_flat[zero.grad_position[zero.get_param_id(parameter)][0]]


def zero3_state(parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Adam's state of `zero3_slice`."""
    return parameter._z3_optimizer.optimizer.state[zero3_slice(parameter)]


def gather_lists(values: list) -> list:
    """Concatenate the ranks' lists in rank order, on every rank."""
    from accelerate.utils import gather_object

    return gather_object(values) if int(os.environ.get("WORLD_SIZE", 1)) > 1 else values


def split_for_rank(items: list, rank: int, world: int) -> list:
    """This rank's contiguous share; the shares differ in length by at most one."""
    return items[len(items) * rank // world : len(items) * (rank + 1) // world]

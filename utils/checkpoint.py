"""Checkpoints that appear whole or not at all, and what is needed to go on from one.

One layout for one process, several, and ZeRO-3: whole float32 weights and Adam moments by name, in safetensors.
A run can go on with another number of ranks.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import torch
from torch import Tensor

from utils.config import UserError
from utils.files import replacing, write_text
from utils.launch import unwrap, zero3_slice, zero3_state
from utils.tracking import say

MOMENTS = ("exp_avg", "exp_avg_sq")
INPUTS = {".parquet", ".safetensors", ".bin", ".gguf", ".jinja", ".model"}  # files whose change changes a run
PART, PARTS = 1 << 16, 16  # bytes of a file that its fingerprint reads at a time, and how often
WEIGHTS, OPTIMIZER, STATE = "trained.safetensors", "optimizer.safetensors", "state.json"


def save_checkpoint(output_dir: Path, accelerator, model, optimizer, state: dict, keep_last: int) -> None:
    """Write `checkpoints/step_NNNNNN`: trained weights, optimizer and `state` (JSON values, with `step`).

    All ranks call it.
    """
    folder = Path(output_dir, "checkpoints", step_name(state["step"]))
    weights, moments = {}, {}
    for name, parameter in trained_parameters(model).items():
        tensors = training_state(parameter, optimizer)
        if accelerator.is_main_process:
            weights[name] = tensors.pop("weight").cpu().contiguous()
            moments |= {f"{name}.{key}": tensor.cpu().contiguous() for key, tensor in tensors.items()}
    if accelerator.is_main_process:
        from safetensors.torch import save_file

        with replacing(folder) as temporary:
            save_file(weights, temporary / WEIGHTS)
            save_file(moments, temporary / OPTIMIZER)
            write_text(temporary / STATE, state_text(state, weight_hashes(temporary)))
        for later in checkpoints(output_dir):  # damaged, or of a course that was left
            if step_of(later) > state["step"]:
                remove(later)
    clean_checkpoints(output_dir, accelerator, state["step"], keep_last)


def clean_checkpoints(output_dir: Path, accelerator, step: int, keep_last: int) -> None:
    """Delete all but the last `keep_last` checkpoints up to `step`, and what a killed process left of others."""
    if accelerator.is_main_process:
        for old in [f for f in checkpoints(output_dir) if step_of(f) <= step][:-keep_last]:
            remove(old)
        for left in Path(output_dir, "checkpoints").glob(".step_*"):
            shutil.rmtree(left, ignore_errors=True)
    accelerator.wait_for_everyone()


def remove(folder: Path) -> None:
    """Delete a checkpoint, which is none any more when its first file goes."""
    gone = folder.with_name(f".{folder.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    os.replace(folder, gone)
    shutil.rmtree(gone)


def weight_hashes(folder: Path) -> dict[str, str]:
    return {name: file_hash(folder / name) for name in (WEIGHTS, OPTIMIZER)}


def state_text(state: dict, hashes: dict[str, str]) -> str:
    """state.json, whose every character depends on the state and on the hashes of the weights."""
    own = hashlib.sha256(json.dumps(state).encode()).hexdigest()
    return json.dumps({"state": state, "sha256": hashes | {"state": own}}, indent=2) + "\n"


def step_name(step: int) -> str:
    return f"step_{step:06d}"


def file_hash(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def rewrite_state(output_dir: Path, state: dict, accelerator) -> None:
    """Replace the state of the checkpoint of state["step"]."""
    if accelerator.is_main_process:
        folder = Path(output_dir, "checkpoints", step_name(state["step"]))
        write_text(folder / STATE, state_text(state, weight_hashes(folder)))
    accelerator.wait_for_everyone()


def trained_parameters(model) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in unwrap(model).named_parameters() if p.requires_grad}


def training_state(parameter: torch.nn.Parameter, optimizer) -> dict[str, Tensor]:
    """`weight` (float32) and, once it was stepped, Adam's `exp_avg`, `exp_avg_sq` and `step`. All ranks call it."""
    if not hasattr(parameter, "ds_id"):
        return {"weight": parameter.detach(), **optimizer.optimizer.state.get(parameter, {})}
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    tensors = {"weight": safe_get_full_fp32_param(parameter)}
    adam = zero3_state(parameter)
    if adam:
        tensors |= {key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS} | {
            "step": adam["step"].clone()
        }
    return tensors


def restore_training_state(parameter: torch.nn.Parameter, optimizer, tensors: dict[str, Tensor]) -> None:
    """The inverse of `training_state`, in place; every rank has the whole tensors."""
    weight = tensors.pop("weight")
    if not hasattr(parameter, "ds_id"):
        parameter.data.copy_(weight)
        optimizer.optimizer.state.pop(parameter, None)
        if tensors:
            optimizer.optimizer.state[parameter] = {
                k: t.to(parameter.device if k in MOMENTS else "cpu") for k, t in tensors.items()
            }
        return
    import deepspeed
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    def mine(tensor: Tensor) -> Tensor:
        size, rank = parameter.ds_tensor.numel(), torch.distributed.get_rank()
        flat = torch.zeros(size * torch.distributed.get_world_size())
        flat[: tensor.numel()] = tensor.flatten()
        return flat[rank * size : (rank + 1) * size].to(parameter.device)

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        parameter.data.copy_(weight)
    safe_set_local_fp32_param(parameter, mine(weight))
    adam, flat = zero3_state(parameter), zero3_slice(parameter)
    if tensors and not adam:
        adam.update(step=torch.zeros(()), **{key: torch.zeros_like(flat) for key in MOMENTS})
    if adam:
        adam["step"].copy_(tensors.get("step", torch.zeros(())))
        for key in MOMENTS:
            safe_set_local_optimizer_state(parameter, mine(tensors.get(key, torch.zeros(weight.shape))), key)


def checkpoints(output_dir: Path) -> list[Path]:
    """Checkpoint folders, oldest first."""
    folders = Path(output_dir, "checkpoints").glob("step_*")
    return sorted((f for f in folders if re.fullmatch(r"step_\d+", f.name)), key=step_of)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def read_checkpoint(folder: Path) -> dict | None:
    """The state of a checkpoint, or None if it is damaged."""
    try:
        text = (folder / STATE).read_text(encoding="utf-8")
        state = json.loads(text)["state"]
        if state["step"] == step_of(folder) and text == state_text(state, weight_hashes(folder)):
            return state
    except (OSError, ValueError, KeyError, TypeError):
        pass
    say(f"{folder} is damaged and is left out")
    return None


def load_checkpoint(
    output_dir: Path, accelerator, model, optimizer, wanted: set[str], partial: bool = False, before: int | None = None
) -> dict | None:
    """Restore the newest whole checkpoint in place and return its state; None if there is none.

    wanted: keys that the state must have, unless `partial`. before: the newest step to take, or else the oldest that
    can be read; later checkpoints are deleted then. All ranks call it. Raises UserError where there are only damaged
    ones, or none with `before`.
    """
    from accelerate.utils import broadcast_object_list
    from safetensors import safe_open

    found: list = [None, None, False]
    if accelerator.is_main_process:
        folders = checkpoints(output_dir)
        good = [f for f in folders if before is None or step_of(f) <= before]
        order = [*reversed(good), *folders[len(good) :]]
        read = ((folder, read_checkpoint(folder)) for folder in order)
        found = [*next((pair for pair in read if pair[1] is not None), (None, None)), bool(folders)]
    folder, state, some = broadcast_object_list(found)
    if folder is None and (some or before is not None):
        raise UserError(
            f"no checkpoint under {Path(output_dir, 'checkpoints')} can be read; "
            "choose another output_dir, or --overwrite true"
        )
    if folder is None:
        return None
    parameters = trained_parameters(model)
    with safe_open(folder / WEIGHTS, "pt") as weights, safe_open(folder / OPTIMIZER, "pt") as moments:
        shapes = {name: list(getattr(p, "ds_shape", p.shape)) for name, p in parameters.items()}
        different = sorted(set(weights.keys()) ^ set(shapes))
        different = different or sorted(name for name in shapes if weights.get_slice(name).get_shape() != shapes[name])
        if different:
            raise UserError(
                f"{folder} does not fit this configuration ({len(different)} weights differ, such as {different[0]}); "
                "resume with the config of the run, or choose another output_dir"
            )
        missing = sorted(wanted - set(state))
        if missing and not partial:
            raise UserError(
                f"{folder} lacks {', '.join(missing)}; --resume partial goes on with what a new run has in their place"
            )
        saved = set(moments.keys())
        for name, parameter in parameters.items():
            tensors = {
                key: moments.get_tensor(f"{name}.{key}") for key in (*MOMENTS, "step") if f"{name}.{key}" in saved
            }
            restore_training_state(parameter, optimizer, {"weight": weights.get_tensor(name), **tensors})
    if before is None:
        accelerator.print(f"resumed from {folder}" + (f" without {', '.join(missing)}" if missing else ""))
    elif accelerator.is_main_process:
        for later in checkpoints(output_dir):
            if step_of(later) > step_of(folder):
                remove(later)
    accelerator.wait_for_everyone()
    return state


# ------------------------------------------------------------------------------------------------------- inputs


def fingerprints(paths: dict[str, str | None]) -> dict[str, str]:
    """A cheap hash of each data or model folder by its option's name: of the files' names, sizes and parts of them.

    A LoRA folder's base counts too. A hub name stands for itself.
    """
    from utils.models import adapter_base

    out = {}
    for option, path in paths.items():
        while path is not None:
            out[option] = fingerprint(path)
            option, path = f"base of {option}", adapter_base(path)
    return out


def fingerprint(path: str) -> str:
    files = [Path(path)] if Path(path).is_file() else [f for f in sorted(Path(path).glob("*")) if f.suffix in INPUTS]
    digest = hashlib.sha256(b"" if files else path.encode())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with open(file, "rb") as opened:
            for part in range(PARTS):  # the first and the last bytes, where Parquet and safetensors keep their index
                opened.seek(max(0, size - PART) * part // (PARTS - 1))
                digest.update(opened.read(PART))
    return digest.hexdigest()[:16]


def check_same_inputs(before: dict, now: dict, output_dir: Path) -> None:
    """The states of a checkpoint and of the run that goes on from it were made from the same files."""
    for option, value in now["inputs"].items():
        if before.get("inputs", {}).get(option, value) != value:
            raise UserError(
                f"{output_dir}: the files of {option} are not those that the run was started with; "
                "put these back, or choose another output_dir"
            )

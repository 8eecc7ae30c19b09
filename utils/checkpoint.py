"""Checkpoints that appear whole or not at all, and what is needed to go on from one."""

import json
import re
import shutil
from pathlib import Path

import torch

from utils.config import UserError
from utils.launch import unwrap
from utils.models import replacing


def save_checkpoint(output_dir: Path, step: int, accelerator, model, optimizer, state: dict, keep_last: int) -> None:
    """Write `checkpoints/step_NNNNNN`: trained weights, optimizer and `state` (JSON values). All ranks call it."""
    folder = output_dir / "checkpoints" / f"step_{step:06d}"
    if accelerator.is_main_process:
        from safetensors.torch import save_file

        with replacing(folder) as temporary:
            trained = {n: p.detach().cpu().contiguous() for n, p in trained_parameters(model).items()}
            save_file(trained, temporary / "trained.safetensors")
            torch.save(optimizer.state_dict(), temporary / "optimizer.pt")
            (temporary / "state.json").write_text(json.dumps({"step": step, **state}))
        for old in checkpoints(output_dir)[:-keep_last]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def trained_parameters(model) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in unwrap(model).named_parameters() if p.requires_grad}


def checkpoints(output_dir: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    folders = Path(output_dir, "checkpoints").glob("step_*")
    return sorted(f for f in folders if re.fullmatch(r"step_\d+", f.name) and (f / "state.json").is_file())


def load_checkpoint(output_dir: Path, accelerator, model, optimizer) -> dict | None:
    """Restore the newest checkpoint in place and return its `state` with `step`; None if there is none."""
    from safetensors.torch import load_file

    found = checkpoints(output_dir)
    if not found:
        return None
    folder = found[-1]
    saved = load_file(folder / "trained.safetensors")
    parameters = trained_parameters(model)
    different = sorted(set(saved) ^ set(parameters)) or sorted(n for n in saved if saved[n].shape != parameters[n].shape)
    if different:
        raise UserError(
            f"{folder} does not fit this configuration ({len(different)} weights differ, such as {different[0]}); "
            "resume with the config of the run, or choose another output_dir"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True))
    state = json.loads((folder / "state.json").read_text())
    accelerator.print(f"resumed from {folder}")
    return state

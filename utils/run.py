"""What every run does: it parses, opens its folder, records itself, and ends with one line and an exit code."""

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import yaml

from utils.config import RunStopped, UserError, flatten, parse_config
from utils.files import write_json, write_text


def run_stage(stage, config_class) -> None:
    """The entry point of every stage file: parse, run, and turn bad input into one line and exit code 2."""
    code = 0
    try:
        stage(parse_config(config_class))
    except (UserError, RunStopped) as error:
        stopped = isinstance(error, RunStopped)
        print(f"{'stopped' if stopped else 'error'}: {error}", file=sys.stderr, flush=True)
        code = 3 if stopped else 2
    leave(code)


def leave(code: int) -> None:
    """End the process; at once where several run, for others may wait in a collective, and the native threads of the
    collectives now and then abort a process that has done its work."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def check_output_dir(output_dir: str, overwrite: bool, resume: str | None = None, can_resume: bool = False) -> None:
    """Refuse a folder with another run's files unless told what to do with it; changes nothing."""
    folder = Path(output_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output_dir {folder} is a file; choose a folder")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if resume:
        if (folder / "final").exists() and not any(folder.glob("checkpoints/step_*")):
            raise UserError(
                f"output_dir {folder} holds a finished run without checkpoints, so it cannot go on; choose another one"
            )
        return
    if not overwrite:
        ways = "choose another one, " + ("continue it with --resume auto, " if can_resume else "")
        raise UserError(f"output_dir {folder} is not empty; {ways}or replace it with --overwrite true")
    if not (folder / "run.json").exists():
        raise UserError(
            f"output_dir {folder} holds files that no run wrote, so it is not replaced; choose another one"
        )


def open_output_dir(output_dir: str, overwrite: bool, resume: str | None = None, can_resume: bool = False) -> Path:
    """Create the run's folder, in place of an earlier run's where asked. Call it when nothing else can be refused."""
    check_output_dir(output_dir, overwrite, resume, can_resume)
    folder = Path(output_dir)
    if folder.exists() and not resume:
        shutil.rmtree(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output_dir {folder} cannot be created ({error.strerror}); choose another one") from None
    return folder


MAY_CHANGE = {"output_dir", "total_steps", "total_epochs", "resume", "overwrite", "report_to"}
MAY_CHANGE |= {"log_every", "save_every", "eval_every", "eval_prompts", "keep_last", "lr", "critic.lr"}
MAY_CHANGE |= {"micro_batch_size_per_gpu", "ppo_micro_batch_size_per_gpu", "log_prob_micro_batch_size_per_gpu"}
MAY_CHANGE |= {"rollout.micro_batch_size_per_gpu", "model.gradient_checkpointing"}  # of memory and speed alone


def check_same_config(folder: Path, config) -> None:
    """A resumed run goes on with the configuration that it was started with.

    Its length, its output, sizes of memory, learning rates and guards may change.
    """
    file = folder / "config.yaml"
    if not file.is_file():
        return

    before, now = flatten(yaml.safe_load(file.read_text(encoding="utf-8"))), flatten(dataclasses.asdict(config))
    for key in sorted(set(before) | set(now)):
        if key not in MAY_CHANGE and not key.startswith("guards.") and before.get(key) != now.get(key):
            raise UserError(
                f"{file}: the run was started with {key} {before.get(key)}, not {now.get(key)}; "
                "resume with the same value, or choose another output_dir"
            )


def record_run(folder: Path, config, started: float | None = None, checks: dict | None = None) -> None:
    """Write `config.yaml` (resolved) and `run.json` (command, commit, versions, seed, wall time in seconds).

    Call it at the start, and again at the end with the start time and what the run has checked of itself.
    """
    write_text(folder / "config.yaml", yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True))
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None
    versions = {"python": sys.version.split()[0]}
    for name in ("torch", "transformers", "accelerate", "peft", "datasets", "pyarrow", "deepspeed"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    write_json(
        folder / "run.json",
        {
            "command": " ".join(sys.argv),
            "git_commit": commit,
            "versions": versions,
            "seed": getattr(config, "seed", None),
            "world_size": int(os.environ.get("WORLD_SIZE", 1)),
            "wall_time_seconds": round(time.time() - started, 1) if started else None,
            "checks": checks,
        },
    )

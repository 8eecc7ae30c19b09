"""What every run does: it parses, opens its folder, records itself, and ends with one line and an exit code."""

import contextlib
import ctypes
import dataclasses
import errno
import fnmatch
import functools
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import yaml

from utils.config import RunStopped, UserError, flatten, parse_config
from utils.data import show
from utils.files import locked, write_json, write_text
from utils.tracking import say

LAUNCHERS = {"accelerate", "accelerate.commands.launch", "torchrun", "torch.distributed.run"}
OF_THE_DISK = {
    getattr(errno, name)
    for name in "ENOSPC EDQUOT EFBIG EIO EROFS EACCES EPERM ENOENT ENOTDIR EISDIR ELOOP ENAMETOOLONG EMFILE".split()
}
WRITTEN = """config.yaml run.json metrics.jsonl samples.jsonl events.jsonl suspicious.jsonl report.json report.html
checkpoints final adapter critic tensorboard wandb trackio .*.tmp .*.old""".split()  # by stages 2 to 4
LOCK = ".lock"  # in output_dir, while a stage runs


# ------------------------------------------------------------------------------------------------- begin and end


def run_stage(stage, config_class) -> None:
    """The entry point of every stage file: parse and run. What the user can mend, and a signal, is one line.

    Exit codes: 2 bad input or disk, 3 a run that stopped itself, 128 + a signal's number, 1 an error with traceback.
    """
    started, signals, config, code, line = time.time(), catch_signals(), None, 0, ""
    end_with_launcher()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed
            setattr(sys, name, open(os.devnull, "w"))
        elif hasattr(getattr(sys, name), "reconfigure"):
            getattr(sys, name).reconfigure(errors="backslashreplace")  # any console shows any text
    try:
        config = parse_config(config_class)
        words = [word for argument in sys.argv for word in re.split("(?<=^--config)=", argument)]
        check_inputs(config, {"config": [file for word, file in zip(words, words[1:]) if word == "--config"]})
        stage(config)
    except SystemExit as error:  # --help
        code = error.code
    except BaseException as error:
        code, line = ending(error, signals, config, started)
    leave(code, line)


def catch_signals() -> list[int]:
    """Ctrl-C and SIGTERM become KeyboardInterrupt; the list then holds the signal's number.

    What is raised in a library's callback can be lost there, so it is raised again every 10 seconds.
    """
    received, process = [], os.getpid()

    def interrupt(number, frame):
        if os.getpid() != process:  # a forked worker
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not received or number == signal.SIGALRM:
            received.append(number)
            signal.signal(signal.SIGALRM, interrupt)
            signal.alarm(10)
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        if threading.current_thread() is threading.main_thread() and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)
    return received


def end_with_launcher() -> None:
    """Ask the kernel (Linux) for a SIGTERM when the launcher dies, or its ranks would train on without it."""
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        words = os.fsdecode(Path(f"/proc/{parent}/cmdline").read_bytes()).split("\0")
        if LAUNCHERS & {Path(word).name for word in words}:
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)


def ending(error: BaseException, signals: list[int], config, started: float) -> tuple[int, str]:
    """Exit code and last line of a run that ends by an error. What the user cannot mend is shown with its place."""
    if signals or isinstance(error, KeyboardInterrupt):
        signal.alarm(0)
        number = signals[0] if signals else signal.SIGINT
        word = "interrupted" if number == signal.SIGINT else "terminated"
        return 128 + number, f"{word}; {way_on(config, started)}"
    if isinstance(error, UserError):
        return 2, f"error: {error}"
    if isinstance(error, RunStopped):
        return 3, f"stopped: {error}"
    if isinstance(error, BrokenPipeError) and not is_read():
        return 128 + signal.SIGPIPE, f"stopped: nobody reads the output any more; {way_on(config, started)}"
    number, damaged = getattr(error, "errno", None), type(error).__name__ == "SafetensorError"
    if damaged:
        number = int((re.search(r"os error (\d+)", str(error)) or ["", 0])[1])
    if (isinstance(error, OSError) or damaged) and number in OF_THE_DISK:
        place = getattr(error, "filename", None) or f"output_dir {getattr(config, 'output_dir', '')}"
        return 2, f"error: {place}: {os.strerror(number)}; {way_on(config, started)}"
    traceback.print_exception(error)
    return 1, " ".join(traceback.format_exception_only(error)[-1].split())


def is_read() -> bool:
    """Whether the other end of standard output, such as that of a pipe, is still open."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return not any(event & select.POLLERR for _, event in poll.poll(0))


def way_on(config, started: float) -> str:
    """How a run that was cut off goes on: from its newest checkpoint, or anew."""
    if not hasattr(config, "resume"):
        return "run the same command again"
    from utils.checkpoint import checkpoints

    record = Path(config.output_dir, "run.json")
    if not config.resume and not (record.is_file() and record.stat().st_mtime >= started - 1):
        return "nothing was written yet"
    found = checkpoints(config.output_dir)
    newest = f"the newest checkpoint is {found[-1]}" if found else "there is no checkpoint yet"
    return f"{newest}; the same command with --resume auto {'goes on from it' if found else 'starts again'}"


def leave(code: int, line: str = "") -> None:
    """Say the last line and end the process; at once where several run, for others may wait in a collective, and the
    native threads of the collectives now and then abort a process that has done its work.

    A launcher ends with the line of its file, so that other ranks than the first need not say theirs.
    """
    file, rank = os.environ.get("TORCHELASTIC_ERROR_FILE"), int(os.environ.get("RANK", 0))
    with contextlib.suppress(OSError):
        if file and line:
            message = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
            Path(file).write_text(json.dumps({"message": message}))
        if line and code != 1 and not (file and rank):
            print(show(line), file=sys.stderr, flush=True)
    try:
        sys.stdout.flush()
    except OSError:  # Python would try again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        os._exit(code)
    sys.exit(code)


# ------------------------------------------------------------------------------------------------ the run's folder


def alone(stage):
    """The stage with its output_dir locked, so that a second run there is refused while the first one lives.

    The first rank does it for all. A folder in which nothing was written goes again.
    """

    @functools.wraps(stage)
    def locked_stage(config):
        if int(os.environ.get("RANK", 0)):
            return stage(config)
        folder = Path(config.output_dir)
        new = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / LOCK).touch()
        except OSError as error:
            reason = "it is a file" if folder.is_file() else error.strerror
            raise UserError(f"output_dir {folder} cannot be written ({reason}); choose another one") from None
        busy = f"another run is writing output_dir {folder}; wait for it, or choose another one"
        try:
            with locked(folder / LOCK, busy):
                try:
                    resume = getattr(config, "resume", None)
                    check_output_dir(config.output_dir, config.overwrite, resume, hasattr(config, "resume"))
                    check_inputs(config)
                    return stage(config)
                finally:
                    (folder / LOCK).unlink(missing_ok=True)
        finally:
            with contextlib.suppress(OSError):
                for path in new:
                    path.rmdir()

    return locked_stage


def check_inputs(config, more: dict | None = None) -> None:
    """What a run reads, and what another stage wrote, must not be replaced. more: other inputs by name."""
    if not getattr(config, "overwrite", False):
        return
    output = Path(config.output_dir).resolve()
    for key, value in (flatten(dataclasses.asdict(config)) | (more or {})).items():
        for path in value if isinstance(value, list) else [value]:
            if key == "output_dir" or not isinstance(path, str) or not path or not os.path.exists(path):
                continue
            if Path(path).resolve().is_relative_to(output):
                raise UserError(
                    f"{key} {path} lies in output_dir {config.output_dir}, which overwrite would replace; "
                    "choose another output_dir"
                )
    with contextlib.suppress(OSError, ValueError):
        stage = json.loads((output / "run.json").read_text(encoding="utf-8")).get("stage", stage_name(config))
        if stage != stage_name(config):
            raise UserError(
                f"output_dir {output} holds the output of {stage}, so it is not replaced; choose another one"
            )


def stage_name(config) -> str:
    """`PPOConfig` -> `PPO`"""
    return type(config).__name__.removesuffix("Config")


def check_output_dir(output_dir: str, overwrite: bool, resume: str | None = None, can_resume: bool = False) -> None:
    """Refuse a folder with another run's files unless told what to do with it; changes nothing."""
    folder = Path(output_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output_dir {folder} is a file; choose a folder")
    if not folder.exists() or all(file.name == LOCK for file in folder.iterdir()):
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
    """Create the run's folder, and delete what an earlier run wrote. Call it when nothing else can be refused."""
    check_output_dir(output_dir, overwrite, resume, can_resume)
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    left = []
    for entry in [] if resume else sorted(folder.iterdir()):
        if not any(fnmatch.fnmatchcase(entry.name, name) for name in WRITTEN):
            left.append(entry.name)
        elif entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    if set(left) - {LOCK}:
        say(f"left in {folder}, since no run wrote it: {', '.join(sorted(set(left) - {LOCK}))}")
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
            "command": shlex.join(sys.argv),
            "stage": stage_name(config),
            "git_commit": commit,
            "versions": versions,
            "seed": getattr(config, "seed", None),
            "world_size": int(os.environ.get("WORLD_SIZE", 1)),
            "wall_time_seconds": round(time.time() - started, 1) if started else None,
            "checks": checks,
        },
    )

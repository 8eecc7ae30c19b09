"""What a run shows and writes while it goes: progress bars, metrics.jsonl, TensorBoard."""

import dataclasses
import functools
import json
import os
import resource
import sys
import time
from pathlib import Path

from utils.config import flatten
from utils.data import show
from utils.files import write_text


def say(text: str = "") -> None:
    """Print lines; on a terminal they push the living progress bars down."""
    from tqdm import tqdm

    with tqdm.external_write_mode(file=sys.stdout):
        print(show(text), flush=True)


@functools.cache
def say_once(text: str) -> None:
    """A line on the terminal, by the first rank, once a process."""
    if int(os.environ.get("RANK", 0)) == 0:
        say(text)


def progress_bar(iterable=None, label: str = "", unit: str = "it", total: int | None = None, initial: int = 0):
    """A bar with rate and ETA on a terminal, nothing in a log file, and only on the first rank."""
    from tqdm import tqdm

    quiet = int(os.environ.get("RANK", 0)) != 0 or not (sys.stderr and sys.stderr.isatty())
    return tqdm(iterable, desc=label, unit=unit, total=total, initial=initial, disable=quiet, dynamic_ncols=True)


def peak_memory_gb(device=None) -> float:
    """Largest memory so far in GB: of the GPU if there is one, else resident memory of this process."""
    import torch

    if device is not None and device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform != "darwin" else 1) / 1e9


class Metrics:
    """metrics.jsonl (one object a step) and accelerate's trackers, written by the first rank only."""

    def __init__(self, folder: Path, accelerator, resume_step: int = 0):
        self.file = folder / "metrics.jsonl"
        self.accelerator = accelerator
        self.is_main = accelerator.is_main_process
        self.keep(resume_step)

    def keep(self, last_step: int) -> None:
        """Drop what was written for steps after `last_step`, which are run again."""
        for file in (self.file, self.file.with_name("samples.jsonl")):
            if self.is_main and file.exists():
                keep_lines(file, "step", last_step)

    def log(self, step: int, values: dict[str, float]) -> None:
        self.accelerator.log(values, step=step)
        if self.is_main:
            rounded = {k: float(f"{v:.6g}") for k, v in values.items()}
            with open(self.file, "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **rounded}) + "\n")


def read_lines(file: Path) -> list[dict]:
    """The objects of a .jsonl, without lines that a killed process left half-written."""
    rows = []
    for line in file.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
        except ValueError:  # a cut may go through a character too
            continue
        rows += [row] if isinstance(row, dict) else []
    return rows


def keep_lines(file: Path, key: str, last: int) -> None:
    """Drop the lines whose `key` is after `last`, which are made again, and those that are half-written."""
    kept = [row for row in read_lines(file) if row.get(key, 0) <= last]
    write_text(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))


def start_trackers(accelerator, cfg) -> None:
    """Begin the run in the tracker of `report_to`, with its configuration where the tracker has a place for it."""
    if cfg.report_to == "tensorboard":
        accelerator.init_trackers("tensorboard")  # the name of its folder
    elif cfg.report_to != "none":
        folder = Path(cfg.output_dir).resolve()
        options = {
            "wandb": {"wandb": {"name": folder.name, "dir": str(folder)}},
            "trackio": {"trackio": {"name": folder.name}},
        }
        config = flatten(dataclasses.asdict(cfg))
        accelerator.init_trackers("flatrlhf", config=config, init_kwargs=options[cfg.report_to])


def log_samples(accelerator, step: int, samples: list[dict]) -> None:
    """A table of texts: a table in W&B, Markdown text elsewhere."""
    columns = list(samples[0])
    cells = [[str(sample[name]) for name in columns] for sample in samples]
    lines = [
        columns,
        ["---"] * len(columns),
        *([c.replace("|", "\\|").replace("\n", "<br>") for c in row] for row in cells),
    ]
    for tracker in accelerator.trackers:
        if tracker.name == "wandb":
            tracker.log_table("samples", columns=columns, data=cells, step=step)
        else:
            tracker.log({"samples": "\n".join("| " + " | ".join(line) + " |" for line in lines)}, step=step)


def read_metrics(folder: Path) -> list[dict]:
    file = Path(folder) / "metrics.jsonl"
    if not file.is_file():
        return []
    return read_lines(file)


class Timer:
    """Seconds by phase: `with timer("rollout"): ...`; read `timer.seconds`."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    def __call__(self, phase: str):
        self.phase, self.start = phase, time.perf_counter()
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + time.perf_counter() - self.start


def remaining(done: int, total: int, seconds: float) -> str:
    """Time left as m:ss, from the mean pace so far."""
    left = int(seconds / max(done, 1) * (total - done))
    return f"{left // 60}:{left % 60:02d}"

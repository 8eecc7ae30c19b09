"""Typed configuration, one-line errors, and what every run records about itself.

A stage declares nested frozen dataclasses; each field has a docstring below it, which becomes `--help`.
Values come from `--config FILE.yaml` (as often as wanted) and from `--key.subkey value`; the last one wins.
"""

import contextlib
import dataclasses
import difflib
import json
import os
import subprocess
import sys
import time
import types
import typing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import yaml


class UserError(Exception):
    """Bad input that the user can mend. The message is one line: what is wrong, where, and the way out."""


@dataclass(frozen=True)
class ModelConfig:
    """The language model to start from."""

    path: str
    """a folder, a .gguf file or a hub name"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """of the frozen weights and of the arithmetic; auto = bfloat16 where the hardware computes in it, else
    float32. Trained weights are float32 in any case, except under ZeRO-3"""
    attn_implementation: str | None = None
    """sdpa, eager, flash_attention_2, ...; null = the transformers default"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, about a third more time"""
    trust_remote_code: bool = False
    """run Python code that comes with the model"""


@dataclass(frozen=True)
class LoraOptions:
    """Low-rank adapters (Hu et al. 2021); `lora: null` trains all weights instead."""

    r: int = 16
    """rank"""
    lora_alpha: int = 16
    """the update is scaled by lora_alpha / r"""
    target_modules: str | list[str] = "all-linear"
    """names of the layers that get an adapter"""
    last_layers: int | None = None
    """put adapters on the last so many transformer layers only, and end the backward pass there; null = on all"""


# ---------------------------------------------------------------------------------------------------- parsing


def known_keys(config_class, prefix: str = "") -> list[str]:
    """All dotted keys of a nested dataclass, branches included: ['model', 'model.path', ...]."""
    keys = []
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        keys.append(prefix + field.name)
        branch = _dataclass_in(hints[field.name])
        if branch:
            keys += known_keys(branch, f"{prefix}{field.name}.")
    return keys


def _dataclass_in(hint):
    """The dataclass in a type hint such as `ModelConfig` or `LoraOptions | None`, or None."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next((option for option in options if dataclasses.is_dataclass(option)), None)


def parse_config(config_class, argv: list[str] | None = None):
    """Command line -> an instance of `config_class`. Raises UserError, except for --help, which exits with 0."""
    from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

    argv = sys.argv[1:] if argv is None else list(argv)
    _check_keys(config_class, argv)
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        exit_on_error=False,
        description=(sys.modules[config_class.__module__].__doc__ or "").replace("%", "%%"),
        formatter_class=_HelpFormatter,
    )
    parser.add_argument("--config", action="config", help="a YAML file; can be given more than once, the last wins")
    parser.add_class_arguments(config_class)
    optional = _optional_branches(config_class)
    if optional:
        parser.epilog = optional
    try:
        namespace = parser.parse_args(argv)
        values = parser.instantiate(namespace)
    except TypeError as error:  # `critic: null`, where a branch is not optional
        raise UserError(f"a branch of the configuration has the wrong type ({' '.join(str(error).split())})") from None
    except ArgumentError as error:
        message = str(error)
        if "Parser key" in message:
            key = message.split('"')[1]
            detail = [
                line.strip(" -") for line in message.splitlines()[1:] if "Expected" in line or "Given value:" in line
            ]
            message = f"{key}: " + "; ".join(detail or message.splitlines()[1:])
        elif "arguments are required" in message:
            message += f"; give --{message.split(': ')[-1].split(',')[0]} VALUE or set it in --config"
        raise UserError(" ".join(message.split())) from None
    values = dict(vars(values))
    values.pop("config", None)
    return config_class(**values)


def _HelpFormatter(prog):
    from jsonargparse import DefaultHelpFormatter

    class Formatter(DefaultHelpFormatter):
        def _fill_text(self, text, width, indent):
            return "\n".join(indent + line for line in text.splitlines())

    return Formatter(prog, width=110, max_help_position=44)


def _optional_branches(config_class, prefix: str = "", inside: bool = False) -> str:
    """Help for branches that may be null or something else, which the parser itself shows as one value."""
    lines = []
    hints, documents = typing.get_type_hints(config_class), _field_docs(config_class)
    for field in dataclasses.fields(config_class):
        name, branch = f"{prefix}{field.name}", _dataclass_in(hints[field.name])
        if branch and isinstance(hints[field.name], types.UnionType):
            lines += [branch.__doc__] if not inside else []
            lines.append(_optional_branches(branch, f"{name}.", inside=True))
        elif inside:
            default = "" if field.default is dataclasses.MISSING else f" (default: {field.default})"
            lines.append(f"  --{name}  {documents.get(field.name, '')}{default}")
    return "\n".join(lines)


def _field_docs(config_class) -> dict[str, str]:
    from docstring_parser import parse_from_object

    return {p.arg_name: " ".join(p.description.split()) for p in parse_from_object(config_class).params}


def _check_keys(config_class, argv: list[str]) -> None:
    """An unknown key, in a file or on the command line, is an error that names the nearest known key."""
    keys = known_keys(config_class)
    extra = {"config", "help", "print_config"}
    for position, argument in enumerate(argv):
        if not argument.startswith("--"):
            continue
        name, _, value = argument[2:].partition("=")
        if name == "config":
            path = value or (argv[position + 1] if position + 1 < len(argv) else "")
            for key in flatten(_read_yaml(path)):
                if key not in keys:
                    raise UserError(f"{path}: unknown key {key!r}{_nearest(key, keys)}")
        elif name.removesuffix("+") not in keys and name not in extra and not name.endswith(".help"):
            raise UserError(f"unknown option --{name}{_nearest(name, keys)}")


def _nearest(key: str, keys: list[str]) -> str:
    last = key.split(".")[-1]
    same_leaf = [k for k in keys if k.split(".")[-1] == last]  # a right name at the wrong level
    near = same_leaf or difflib.get_close_matches(key, keys, 1, 0.5)
    near = near or [k for k in keys if difflib.get_close_matches(last, [k.split(".")[-1]], 1, 0.7)]
    return f"; did you mean {near[0]!r}?" if near else "; --help lists all keys"


def _read_yaml(path: str) -> dict:
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read ({error.strerror}); configs/ has examples") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected `key: value` lines, found a {type(values).__name__}")
    return values


def flatten(values: dict, prefix: str = "") -> dict:
    """{'a': {'b': 1}} -> {'a.b': 1}"""
    flat = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


# ---------------------------------------------------------------------------------------------------- running


class RunStopped(Exception):
    """A run that ended itself before its end; the message says where it can go on from. Exit code 3."""


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
    import shutil

    check_output_dir(output_dir, overwrite, resume, can_resume)
    folder = Path(output_dir)
    if folder.exists() and not resume:
        shutil.rmtree(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output_dir {folder} cannot be created ({error.strerror}); choose another one") from None
    return folder


def to_dict(config) -> dict:
    return dataclasses.asdict(config)


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, value) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


MAY_CHANGE = {"output_dir", "total_steps", "total_epochs", "resume", "overwrite", "report_to"}
MAY_CHANGE |= {"log_every", "save_every", "eval_every", "eval_prompts", "keep_last"}


def check_same_config(folder: Path, config) -> None:
    """A resumed run goes on with the configuration that it was started with, besides its length and its output."""
    file = folder / "config.yaml"
    if not file.is_file():
        return

    before, now = flatten(yaml.safe_load(file.read_text(encoding="utf-8"))), flatten(to_dict(config))
    for key in sorted(set(before) | set(now)):
        if key not in MAY_CHANGE and before.get(key) != now.get(key):
            raise UserError(
                f"{file}: the run was started with {key} {before.get(key)}, not {now.get(key)}; "
                "resume with the same value, or choose another output_dir"
            )


def record_run(folder: Path, config, started: float | None = None) -> None:
    """Write `config.yaml` (resolved) and `run.json` (command, commit, versions, seed, wall time in seconds).

    Call it at the start, and again at the end with the start time.
    """
    write_text(folder / "config.yaml", yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True))
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
        },
    )

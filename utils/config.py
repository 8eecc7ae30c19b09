"""Typed configuration and one-line errors.

A stage declares nested frozen dataclasses; each field has a docstring below it, which becomes `--help`.
Values come from `--config FILE.yaml` (as often as wanted) and from `--key.subkey value`; the last one wins.
"""

import dataclasses
import difflib
import math
import sys
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import yaml


class UserError(Exception):
    """Bad input that the user can mend. The message is one line: what is wrong, where, and the way out."""


class RunStopped(Exception):
    """A run that ended itself before its end; the message says where it can go on from. Exit code 3."""


@dataclass(frozen=True)
class Range:
    """Bounds of a number, in the `Annotated` type of an option. Both are allowed, but the lower one not if `above`."""

    low: float
    high: float = math.inf
    above: bool = False

    def __repr__(self) -> str:  # as --help and errors show it
        if self.high < math.inf:
            return f"between {self.low} and {self.high}"
        return f"above {self.low}" if self.above else f"at least {self.low}"

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.above and value == self.low)


Count = Annotated[int, Range(1)]
WholeNumber = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0, above=True)]
AtLeast0 = Annotated[float, Range(0)]
AtLeast1 = Annotated[float, Range(1)]
Share = Annotated[float, Range(0, 1)]


def check_ranges(config, prefix: str = "") -> None:
    """Every number of a configuration lies within the range that its type states. Raises UserError."""
    hints = typing.get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            check_ranges(value, f"{name}.")
        elif value is not None:
            for part in (hints[field.name], *typing.get_args(hints[field.name])):
                for bounds in getattr(part, "__metadata__", ()):
                    if not bounds.holds(value):
                        raise UserError(f"{name} {value} must be {bounds}")


def changed_keys(config) -> list[str]:
    """Names of the options that differ from their defaults, required ones and branches aside."""
    return [
        field.name
        for field in dataclasses.fields(config)
        if field.default is not dataclasses.MISSING and getattr(config, field.name) != field.default
    ]


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

    r: Count = 16
    """rank"""
    lora_alpha: int = 16
    """the update is scaled by lora_alpha / r"""
    target_modules: str | list[str] = "all-linear"
    """names of the layers that get an adapter"""
    last_layers: Count | None = None
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

    classes = [c for c in reversed(config_class.__mro__) if dataclasses.is_dataclass(c)]
    return {p.arg_name: " ".join(p.description.split()) for c in classes for p in parse_from_object(c).params}


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

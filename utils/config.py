"""Typed configuration and one-line errors.

A stage declares nested frozen dataclasses; each field has a docstring below it, which becomes `--help`.
Values come from `--config FILE.yaml` (as often as wanted) and from `--key.subkey value`; the last one wins.
"""

import dataclasses
import difflib
import math
import re
import sys
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import yaml


class UserError(Exception):
    """Bad input that the user can mend. The message is one line: what is wrong, where, and the way out."""


def first_line(error: Exception) -> str:
    """What an error of a library says, for a message of one line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


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
    """Every number of a configuration is finite and within the range that its type states. Raises UserError."""
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
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"{name} {value} must be a finite number")


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


def known_keys(config_class) -> list[str]:
    """All dotted keys of a nested dataclass, branches included: ['model', 'model.path', ...]."""
    return list(_key_types(config_class))


def _key_types(config_class, prefix: str = "") -> dict:
    """Dotted key -> its type hint."""
    types = {}
    hints = typing.get_type_hints(config_class, include_extras=True)
    for field in dataclasses.fields(config_class):
        hint = types[prefix + field.name] = hints[field.name]
        branch = _dataclass_in(hint)
        if branch:
            types |= _key_types(branch, f"{prefix}{field.name}.")
    return types


def _dataclass_in(hint):
    """The dataclass in a type hint such as `ModelConfig` or `LoraOptions | None`, or None."""
    options = () if typing.get_origin(hint) is list else (hint, *typing.get_args(hint))
    return next((option for option in options if isinstance(option, type) and dataclasses.is_dataclass(option)), None)


def _type_name(hint) -> str:
    """A type as a message shows it: 'a number above 0 or null'."""
    parts = typing.get_args(hint)
    if hasattr(hint, "__metadata__"):
        return f"{_type_name(parts[0])} {hint.__metadata__[0]}"
    if typing.get_origin(hint) is list or dataclasses.is_dataclass(hint):
        return "a list" if parts else "a group of options"
    if parts:
        names = [str(part) if typing.get_origin(hint) is Literal else _type_name(part) for part in parts]
        *most, last = " or ".join(names).split(" or ")
        return f"{', '.join(most)} or {last}" if most else last
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def parse_config(config_class, argv: list[str] | None = None):
    """Command line -> an instance of `config_class`. Raises UserError, except for --help, which exits with 0."""
    from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

    argv = _check_keys(_key_types(config_class), sys.argv[1:] if argv is None else list(argv))
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        exit_on_error=False,
        usage="%(prog)s [--config FILE.yaml ...] [--key.subkey value ...]",
        description=(sys.modules[config_class.__module__].__doc__ or "").replace("%", "%%"),
        formatter_class=_HelpFormatter,
    )
    parser.add_argument("--config", action="config", help="a YAML file; can be given more than once, the last wins")
    parser.add_class_arguments(config_class)
    optional = _optional_branches(config_class)
    if optional:
        parser.epilog = optional
    try:
        values = dict(vars(parser.instantiate(parser.parse_args(argv))))
    except ArgumentError as error:
        raise UserError(_one_line(str(error), _key_types(config_class))) from None
    values.pop("config", None)
    config = config_class(**values)
    check_ranges(config)
    return config


def _one_line(message: str, types: dict) -> str:
    """The parser's error, by the key and what its type allows."""
    if "arguments are required" in message:
        message += f"; give --{message.split(': ')[-1].split(',')[0]} VALUE or set it in --config"
    elif "Parser key" in message:
        key, value = message.split('"')[1], message.rsplit("Given value:", 1)[-1].strip()
        nested = re.search(r"NestedArg\(key='(.*?)', val=(.*)\)", value, re.DOTALL)
        key, value = (f"{key}.{nested[1]}", nested[2].strip("'")) if nested else (key, value)
        if key in types and "Given value:" not in message and "Got value:" in message:
            value = message.rsplit("Got value:", 1)[-1].strip()
        if key in types and len(value) < 200:
            message = f"{key} must be {_type_name(types[key])}, not {value or 'empty'}"
        else:
            message = f"{key}: " + "; ".join(message.splitlines()[1:])
    return " ".join(message.split())


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
        if branch and branch is not hints[field.name]:
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


def _check_keys(types: dict, argv: list[str]) -> list[str]:
    """Refuse unknown keys, in a file or on the command line, with the nearest known one, and groups without a name.

    Returns the arguments with `true` after a switch without a value, and without empty files.
    """
    clean, rest = [], list(argv)
    while rest:
        given = [rest.pop(0)]
        name, equals, value = given[0].removeprefix("--").partition("=")
        if given[0].startswith("--") and not equals and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
            given.append(value)
        bare = len(given) == 1 and not equals
        if not given[0].startswith("--") or name in ("help", "print_config") or name.endswith(".help"):
            pass
        elif name == "config":
            if not value:
                raise UserError("--config needs a YAML file; configs/ has examples")
            values = _read_yaml(value)
            _check_tree(values, types, value)
            # by its content: the parser would read the file in the encoding of the console
            given = [f"--config={yaml.safe_dump(values)}"] if values else []
        elif name.removesuffix("+") not in types:
            raise UserError(f"unknown option --{name}{_nearest(name, list(types))}")
        elif bare and bool in (types[name], *typing.get_args(types[name])):
            given.append("true")
        elif not bare and name in types and not Path(value).is_file():
            _check_group(name, None if value == "null" else value, types, "")
        clean += given
    return clean


def _check_tree(values: dict, types: dict, file: str, prefix: str = "") -> None:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name not in types:
            raise UserError(f"{file}: unknown key {name!r}{_nearest(name, list(types))}")
        if isinstance(value, dict):
            _check_tree(value, types, file, f"{name}.")
        else:
            _check_group(name, value, types, f"{file}: ")


def _check_group(name: str, value, types: dict, place: str) -> None:
    """A group of options has no value of its own, what may be null is not `none`, and groups in a list have keys."""
    hint, null = types[name], type(None) in typing.get_args(types[name])
    if str(value).lower() == "none" and value is not None and null:
        raise UserError(f"{place}{name}: write null, not {value}")
    items = typing.get_args(hint)[0] if typing.get_origin(hint) is list else None
    if dataclasses.is_dataclass(items):
        for i, item in enumerate(yaml.safe_load(value) if isinstance(value, str) else value or []):
            if isinstance(item, dict):
                _check_tree(item, _key_types(items), f"{place}{name}[{i}]")
    group = {hint, *typing.get_args(hint)} - {type(None)}
    if not (len(group) == 1 and dataclasses.is_dataclass(*group)) or (null and value is None):
        return
    if isinstance(value, str) and value.lstrip().startswith("{"):  # a whole group, as JSON
        return
    first = next(key for key in types if key.startswith(f"{name}."))
    example = value if isinstance(value, str) and types[first] is str else "VALUE"
    raise UserError(f"{place}{name} is a group of options and has no value of its own; write --{first} {example}")


def _nearest(key: str, keys: list[str]) -> str:
    """The known key with this name at the likeliest level, else the most similar one."""

    def likeness(known: str) -> tuple[float, int]:
        ratio = difflib.SequenceMatcher(None, key.rpartition(".")[0], known.rpartition(".")[0]).ratio()
        return ratio if ratio > 0.6 else 0.0, -known.count(".")

    last = key.split(".")[-1]
    near = sorted((k for k in keys if k.split(".")[-1] == last), key=likeness, reverse=True)
    near = near or difflib.get_close_matches(key, keys, 1, 0.5)
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

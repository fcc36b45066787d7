"""Typed configurations: a dataclass is the whole truth, a YAML file and flags override its defaults.

A field is declared by `option(default, "what it means, with its unit")`; the command line, its help, the check of a YAML file
and the copy in the run folder all follow from that.
"""

import argparse
import dataclasses
import math
import os
from pathlib import Path
from typing import Any, TypeVar

import yaml
from files import write_whole

C = TypeVar("C")


class ConfigurationError(ValueError):
    """A wrong entry; the message names it, what was expected and what came."""


def option(
    default: Any,
    help: str,
    choices: tuple[Any, ...] | None = None,
    minimum: float | None = None,
    below: float | None = None,
    even: bool = False,
) -> Any:
    """Declare a field of a configuration: its default, its meaning and unit, and what is allowed (at least, less than)."""
    allowed = {"choices": choices, "minimum": minimum, "below": below, "even": even}
    return dataclasses.field(default=default, metadata={"help": help, **allowed})


def add_flags(parser: argparse.ArgumentParser, configuration: type, without: tuple[str, ...] = ()) -> None:
    """Add a flag for every field but some; a flag that is not given leaves the field as it is."""
    for f in (f for f in dataclasses.fields(configuration) if f.name not in without):
        parser.add_argument(
            "--" + f.name.replace("_", "-"),
            type=_flag_type(f),
            choices=f.metadata["choices"],
            default=argparse.SUPPRESS,
            metavar=None if f.metadata["choices"] else f.type.__name__.upper(),
            help=f"{f.metadata['help']} [{f.default}]",
        )


def make(configuration: type[C], *overrides: dict[str, Any]) -> C:
    """Make a configuration from its defaults and overrides, of which later ones win.

    Raises:
        ConfigurationError: an unknown name, a wrong type or a value out of range.
    """
    fields = {f.name: f for f in dataclasses.fields(configuration)}
    values = {}
    for override in overrides:
        for name, value in override.items():
            if name not in fields:
                raise ConfigurationError(f"{name}: no such option; expected one of {sorted(fields)}")
            values[name] = _checked(fields[name], value)
    return configuration(**values)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read the overrides that a YAML file holds."""
    path = Path(path)
    if not path.is_file():
        raise ConfigurationError(f"configuration: expected a YAML file, got {path}, which is not there")
    try:
        values = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, ValueError) as error:  # not UTF-8, or a date that is none
        raise ConfigurationError(f"configuration: {path} is not YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigurationError(f"configuration: expected {path} to hold `option: value` lines, got {type(values).__name__}")
    return values


def write_yaml(path: str | Path, configuration: Any) -> None:
    """Write every field, so that the file alone repeats the run."""
    write_whole(path, yaml.safe_dump(dataclasses.asdict(configuration), sort_keys=False))


def refuse_another(configuration: Any, folder: Path) -> None:
    """Raise ConfigurationError where the folder of a run cannot be, or holds another configuration of this type."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigurationError(f"output: expected a folder that can be written, got {folder}")
    file = folder / "configuration.yaml"
    if file.exists():
        before = make(type(configuration), read_yaml(file))
        names = [f.name for f in dataclasses.fields(configuration)]
        changed = [name for name in names if getattr(configuration, name) != getattr(before, name)]
        if changed:
            raise ConfigurationError(
                f"output: {folder} holds a run with another {', '.join(changed)}; "
                "expected the same configuration, or another --output"
            )


def _flag_type(field):
    def convert(text):
        try:
            return _checked(field, yaml.safe_load(text) if field.type is not str else text)
        except ConfigurationError as error:
            raise argparse.ArgumentTypeError(str(error).split(": ", 1)[1]) from None
        except (yaml.YAMLError, ValueError):
            raise argparse.ArgumentTypeError(f"expected {field.type.__name__}, got {text!r}") from None

    return convert


def _checked(field, value):
    if field.type is float:
        value = _as_float(value)
    if field.type is str and isinstance(value, bool):  # what YAML makes of the words true and false
        value = str(value).lower()
    right = isinstance(value, field.type) and not (isinstance(value, bool) and field.type is not bool)
    if not right:
        raise ConfigurationError(f"{field.name}: expected {field.type.__name__}, got {value!r}")
    choices, minimum, below = (field.metadata[key] for key in ("choices", "minimum", "below"))
    if choices and value not in choices:
        raise ConfigurationError(f"{field.name}: expected one of {list(choices)}, got {value!r}")
    if minimum is not None and not value >= minimum:
        raise ConfigurationError(f"{field.name}: expected at least {minimum}, got {value}")
    if below is not None and not value < below:
        raise ConfigurationError(f"{field.name}: expected less than {below}, got {value}")
    if field.type is float and not math.isfinite(value):
        raise ConfigurationError(f"{field.name}: expected a finite number, got {value}")
    if field.metadata["even"] and value % 2:
        raise ConfigurationError(f"{field.name}: expected an even number, got {value}")
    return value


def _as_float(value):
    """YAML reads 1e-3 as text; take it for the number that it is."""
    try:
        return float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else value
    except (ValueError, OverflowError):
        return value

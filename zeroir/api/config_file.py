"""Options from a configuration file: DeepSpeed's JSON, or a TOML file with zeroir's own options.

Options on the command line or in arguments override the file.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from zeroir.artifact import ConfigRecord
from zeroir.config import CompileOptions, default_world_size, make_given_options, make_options
from zeroir.errors import UserError

if TYPE_CHECKING:
    from zeroir.frontend.source.source import ModelSource

Config = str | Path | Mapping[str, object]
"""A file, or DeepSpeed's configuration itself."""

DEFAULT_FILE: Final = "zeroir.toml"
"""The file that the command line uses without ``--config`` if it is in the current folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedOptions:
    """All options, and a record of their origin; None without a configuration."""

    options: CompileOptions
    record: ConfigRecord | None = None


def resolve_options(
    config: Config | None,
    given: Mapping[str, object],
    source: Callable[[], ModelSource],
    *,
    giver: str,
) -> ResolvedOptions:
    """Return the options of a configuration, overridden by those in ``given``.

    ``giver`` names the origin of the latter: "command line" or "argument". ``source`` returns the model; it is called
    for a DeepSpeed configuration, whose batch sizes depend on the example batch.

    Raises:
        UserError: if the file cannot be read, or on the first wrong key or value; the sentence begins with the file.
    """
    if config is None:
        return ResolvedOptions(options=make_options(given))
    if not isinstance(config, str | Path | Mapping):
        raise UserError(
            f"config= is {type(config).__name__}, but should be the path of a file or DeepSpeed's configuration as a "
            "dict."
        )
    name = "The configuration" if isinstance(config, Mapping) else str(config)
    try:
        if not isinstance(config, Mapping) and Path(config).suffix == ".toml":
            values = _toml_options(Path(config))
            origins = dict.fromkeys(values, name)
            notes: tuple[str, ...] = ()
        else:
            values, origins, notes = _deepspeed_options(config, given, source)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    options = make_options({**values, **given})
    origins = {**origins, **dict.fromkeys(given, giver)}
    record = ConfigRecord(
        name=name.lower() if isinstance(config, Mapping) else name,
        origins=tuple((key, origins[key]) for key in CompileOptions.rows() if key in origins),
        notes=notes,
    )
    return ResolvedOptions(options=options, record=record)


def _toml_options(path: Path) -> dict[str, object]:
    """Return the options of a TOML file; their names may have hyphens, as on the command line."""
    try:
        table = tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"the file is no TOML: {error}.") from None
    except (RecursionError, ValueError) as error:
        raise UserError(f"{_unreadable(error)}.") from None
    values: dict[str, object] = {}
    for key, value in table.items():
        option = key.replace("-", "_")
        if option in values:
            raise UserError(f"{option} is given twice.")
        values[option] = value
    return make_given_options(values)


def _deepspeed_options(
    config: Config, given: Mapping[str, object], source: Callable[[], ModelSource]
) -> tuple[dict[str, object], dict[str, str], tuple[str, ...]]:
    """Return options, their origins, and notes."""
    from zeroir.deepspeed import translate

    given = make_given_options(given)
    data = config if isinstance(config, Mapping) else _json(Path(config))
    world_size = given.get("world_size")
    if not isinstance(world_size, int):
        world_size = default_world_size(dict(given))
    model = source()
    example = _example_batch_size(model)
    translation = translate(data, given=given, world_size=world_size, example_batch_size=example)
    if translation.micro_batch_size != example:
        raise UserError(
            f"a micro-batch has {translation.micro_batch_size} samples, but {model.names.batch} has {example} "
            "(the first dimension of its first tensor): make them equal."
        )
    make_given_options(translation.options)
    values = {"world_size": world_size, **translation.options}
    return values, dict(translation.origins), translation.notes


def _example_batch_size(source: ModelSource) -> int:
    from zeroir.torch_ops.batches import flatten

    for tensor in flatten(source.batch(), source.names.batch).tensors.values():
        if tensor.dim():
            return int(tensor.shape[0])
    raise UserError(f"{source.names.batch} has no tensor with a dimension for samples.")


def _json(path: Path) -> Mapping[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise UserError(f"the key {key} is given twice.")
        return dict(pairs)

    try:
        data: object = json.loads(_text(path), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise UserError(
            f"the file is no JSON: {error.msg} in line {error.lineno}, column {error.colno}."
        ) from None
    except (RecursionError, ValueError) as error:
        raise UserError(f"{_unreadable(error)}.") from None
    if not isinstance(data, dict):
        raise UserError("the file should hold a JSON object.")
    return data


def _unreadable(error: RecursionError | ValueError) -> str:
    if isinstance(error, RecursionError):
        return "the values of the file nest too deep"
    return "the file has a number of too many digits"  # Python's limit is 4300


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"the file cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError("the file is no text in UTF-8.") from None

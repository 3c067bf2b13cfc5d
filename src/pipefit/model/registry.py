"""Known models by name, directory or file, and their layers and graphs. No torch at import.

A source is a built-in name (`builtin_names`), a directory with a Hugging Face config.json, such a file, a saved model
(JSON of `Model`), or `FILE.py:FUNCTION`, a user's function that returns a list of `nn.Module` layers. A model type
without a family is the class of `transformers`, if it has one (`any_class.py`).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipefit import codec
from pipefit.errors import CaptureWarning, FormatError, ModelError, UnsupportedModelError, suggest_name
from pipefit.extras import is_installed
from pipefit.model.adapters.adapt import count_elements, tune_model
from pipefit.model.adapters.options import is_tuned, tuning_of
from pipefit.model.any_class import library_fields
from pipefit.model.capture_cache import cache_folder, cache_key, load_captured, store_captured
from pipefit.model.families import FAMILIES, family_of_type, read_family_config, without_tuning
from pipefit.model.families.build import USER, build_layers, has_written_graphs, typed_config, write_family
from pipefit.model.graph import Model
from pipefit.plugins import missing_plugin_advice

__all__ = [
    "USER",
    "ModelDescription",
    "build_layers",
    "builtin_names",
    "describe_config",
    "open_family",
    "open_model",
    "parameter_count",
    "resolve_model",
    "save_model",
    "typed_config",
]

NO_TUNING: Mapping[str, Any] = MappingProxyType({})
"""The tuning of a model that is trained as it is: no adapters, nothing frozen."""

_BUILTIN_DIRECTORY = Path(__file__).parent / "builtin"


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The family and configuration of a model: enough to build its layers."""

    name: str
    family: str
    config: Mapping[str, Any]
    "Field names of a Hugging Face config.json, in pipefit's canonical spelling."


def builtin_names() -> tuple[str, ...]:
    """The names of the built-in models, sorted."""
    return tuple(sorted(path.stem for path in _BUILTIN_DIRECTORY.glob("*.json")))


def resolve_model(source: str, tokens: int | None = None) -> ModelDescription:
    """Return the description of the model named by `source`. `tokens` is the length of a row, for classes of
    `transformers`. Raises ModelError (unknown name or model type, bad fields) or FormatError (invalid JSON)."""
    path = Path(source)
    if source in builtin_names():
        return describe_config(
            read_json(_BUILTIN_DIRECTORY / f"{source}.json"), source, where=f"built-in model {source}"
        )
    if _is_function(source):
        return ModelDescription(source, USER, {"source": source})
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError("The directory has no config.json.", where=str(path), next_step="give a model's directory")
        config = _load_parts(read_json(path / "config.json"), path)
        return _describe_file(config, source, str(path / "config.json"), tokens)
    if path.is_file():
        data = read_json(path)
        if "graphs" in data and "modules" in data:
            return ModelDescription(source, str(data.get("family", USER)), data.get("config", {}))
        return _describe_file(_load_parts(data, path.parent), source, source, tokens)
    raise ModelError(
        "The model is not known.",
        where="--model",
        seen=source,
        allowed=f"a directory or file, FILE.py:FUNCTION, or one of {', '.join(builtin_names())}",
        next_step=suggest_name(source, builtin_names()),
    )


def describe_config(config: Mapping[str, Any], name: str, where: str, tokens: int | None = None) -> ModelDescription:
    """Return the `ModelDescription` of a config.json's data: the family by model type, the configuration in canonical
    spelling. Without a family it describes the class of `transformers`."""
    model_type = config.get("model_type")
    family = family_of_type(model_type)
    if family is not None:
        return ModelDescription(name, family.name, read_family_config(family, config, where).to_config())
    fields = library_fields(config, name, tokens or 0) if model_type else None
    if fields is not None:
        return ModelDescription(name, USER, fields)
    known = ", ".join(kind for family in FAMILIES.values() for kind in family.model_types)
    raise ModelError(
        "The model type is not known." if model_type else "The configuration lacks the field 'model_type'.",
        where=where,
        seen=repr(model_type),
        allowed=f"{known}, and every causal language model of `transformers`",
        next_step=f"{f'{missing_plugin_advice()}; or ' if model_type else ''}"
        "write the layers as nn.Modules and give FILE.py:FUNCTION",
    )


def _describe_file(config: Mapping[str, Any], name: str, where: str, tokens: int | None) -> ModelDescription:
    """Return the description of a user's config.json: of the class of `transformers`, with a warning, if the family
    does not compute a value of it and `transformers` is installed."""
    try:
        return describe_config(config, name, where, tokens)
    except UnsupportedModelError as refusal:
        fields = library_fields(config, name, tokens or 0) if is_installed("transformers") else None
        if fields is None:
            raise
        reason = f"{refusal.what.rstrip('.')} ({refusal.where}: {refusal.seen})"
        warnings.warn(f"{reason}: the model is captured from the class of `transformers`", stacklevel=3)
        return ModelDescription(name, USER, fields)


def open_model(source: str, tokens: int | None = None, tuning: Mapping[str, Any] = NO_TUNING) -> Model:
    """Return the model named by `source` as operator graphs: a saved model is read, and the graphs of a built-in
    language model are written, both without torch. Any other source is captured, or read from the cache of captured
    models. A class of `transformers` is captured for rows of `tokens`.

    `tuning` is a configuration with the adapters and frozen parameters to add (`tuned_config`).
    """
    path = Path(source)
    if path.is_file() and path.suffix == ".json":
        data = read_json(path)
        if "graphs" in data and "modules" in data:
            return _tune_saved(codec.from_data(Model, data, source), tuning, source)
    described = resolve_model(source, tokens)
    return open_family(described.family, {**described.config, **tuning_of(tuning)})


def _tune_saved(model: Model, tuning: Mapping[str, Any], source: str) -> Model:
    """Return a saved model with adapters and frozen parameters. Raises ModelError if it was saved with its own."""
    if not is_tuned(tuning) or tuning_of(model.config) == tuning_of(tuning):
        return model
    if is_tuned(model.config):
        raise ModelError(
            "The saved model has adapters or frozen parameters of its own.",
            where=source,
            seen=str(tuning_of(model.config)),
            next_step="leave --lora and --freeze out, or save the base model",
        )
    return tune_model(model, tuning)


def open_family(family: str, config: Mapping[str, Any]) -> Model:
    """Return the model of a family and configuration: written, from the cache, or captured and stored. Adapters and
    frozen parameters of the configuration are added to the base model.

    Raises ModelError for bad fields or an unknown family, and for one that needs torch where it is not installed.
    """
    return tune_model(_open_base(family, without_tuning(config)), config)


def _open_base(family: str, config: Mapping[str, Any]) -> Model:
    if has_written_graphs(family):
        return write_family(family, config)
    key = cache_key(family, config) if cache_folder() is not None else None
    model = None if key is None else load_captured(key)
    if model is not None:
        return model
    if not is_installed("torch"):
        return write_family(family, config)
    from pipefit.model.capture.layers import capture_family

    if key is None:
        return capture_family(family, config)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always", CaptureWarning)
        model = capture_family(family, config)
    for entry in raised:
        warnings.warn_explicit(entry.message, entry.category, entry.filename, entry.lineno)
    store_captured(key, model, [str(entry.message) for entry in raised if issubclass(entry.category, CaptureWarning)])
    return model


def save_model(model: Model, path: Path) -> None:
    """Write a captured model as JSON; `open_model` reads back an equal model."""
    path.write_text(codec.dump_text(model), encoding="utf-8")


def parameter_count(model: Model) -> int:
    """The number of elements in all parameters; tied parameters count once."""
    return count_elements(model)[1]


def _load_parts(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Replace the directories that a configuration names for its parts, such as encoder and language model, by the
    contents of their config.json, and add the fields of other files that the family reads. Paths are relative to the
    folder of the configuration."""
    family = family_of_type(config.get("model_type"))
    parts = () if family is None else family.parts
    named = {part: folder / config[part] for part in parts if isinstance(config.get(part), str)}
    for part, path in named.items():
        if not (path / "config.json").is_file():
            raise ModelError(
                "The directory of a model part has no config.json.",
                where=f"{part!r} of the configuration",
                seen=str(path),
                next_step="give the directory of a Hugging Face model, relative to the folder of this configuration",
            )
    loaded = {**config, **{part: read_json(path / "config.json") for part, path in named.items()}}
    return loaded if family is None or family.complete_config is None else family.complete_config(loaded, folder, named)


def _is_function(source: str) -> bool:
    file, _, function = source.rpartition(":")
    return file.endswith(".py") and function.isidentifier()


def read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError("The file cannot be read.", where=str(path), seen=error) from None
    except json.JSONDecodeError as error:
        raise FormatError(
            "The file is not valid JSON.", where=f"{path}, line {error.lineno}, column {error.colno}", seen=error.msg
        ) from None
    if not isinstance(data, dict):
        raise FormatError("The file is not a configuration.", where=str(path), allowed="a JSON object")
    return data

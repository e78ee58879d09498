"""Typed configuration: defaults live in code, YAML files and `a.b=c` overrides hold differences, mistakes are errors.

A config is a tree of `ConfigModel`s. Where a field is a union of models, each member has a field
`type: Literal["name"]` that tells it apart; a layer that changes `type` starts again from the new member's defaults.
Precedence: defaults < files from left to right < overrides. `vla_rl/config_text.py` prints configs and their help.
"""

from __future__ import annotations

import difflib
import json
import re
import types
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticUndefined

_PRESET_FOLDERS = (Path("configs"), Path(__file__).resolve().parents[1] / "configs")


class ConfigError(ValueError):
    """A mistake in a config file or an override; the message names the key, where it came from and what to write."""


class ConfigModel(BaseModel):
    """Base of every config: frozen, unknown keys are errors, the line under a field is its documentation."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, ser_json_inf_nan="constants"
    )


ConfigT = TypeVar("ConfigT", bound=ConfigModel)


def load_config(cls: type[ConfigT], files: Sequence[Path], overrides: Sequence[str] = ()) -> ConfigT:
    """Build a config from its defaults, then YAML files from left to right, then overrides.

    Args:
        cls: The config's class.
        files: YAML files; each holds a nested mapping of differences.
        overrides: Strings "a.b=value"; the value is read as YAML (numbers, booleans, lists, `null`).

    Raises:
        ConfigError: Unreadable file, bad YAML, unknown key, missing or wrong value; lists every problem found.
    """
    merger = _Merger()
    data: Any = defaults_of(cls)
    for path in files:
        data = merger.merge(cls, data, _read_yaml(path), (), str(path))
    for override in overrides:
        data = merger.merge(cls, data, _parse_override(override), (), f"override '{override}'")
    if merger.problems:
        raise ConfigError("\n".join(merger.problems))
    try:
        # JSON mode is strict (no "8" for 8, no true for 1) but takes lists for tuples and strings for paths.
        return cls.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise ConfigError("\n".join(merger.explain(data, dict(item)) for item in error.errors())) from error


# --- The shape of a config class -------------------------------------------------------------------------------------


def member_models(annotation: Any) -> tuple[type[ConfigModel], ...]:
    """The config classes that a field may hold: none, one, or the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        return (annotation,)
    if get_origin(annotation) is Annotated:
        return member_models(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(model for arg in get_args(annotation) for model in member_models(arg))
    return ()


def type_tag(model: type[ConfigModel]) -> str | None:
    """The value of the model's `type` field; None if it has none."""
    if "type" not in model.model_fields:
        return None
    (tag,) = get_args(model.model_fields["type"].annotation)
    return str(tag)


def defaults_of(model: type[ConfigModel]) -> dict[str, Any]:
    """Plain data of the model's defaults; required fields are absent, required blocks hold their own defaults."""
    data: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        default = info.get_default(call_default_factory=True, validated_data={})
        members = member_models(info.annotation)
        if default is not PydanticUndefined:
            data[name] = _plain(default)
        elif len(members) == 1:
            data[name] = defaults_of(members[0])
    return data


def _plain(value: Any) -> Any:
    """Data without models, paths or tuples, as YAML and JSON know it."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value


def dotted_names(model: type[ConfigModel], prefix: str = "") -> Iterator[str]:
    """Every name that an override may use, e.g. "algo.surrogate.clip_high"."""
    for name, info in model.model_fields.items():
        yield f"{prefix}{name}"
        for member in member_models(info.annotation):
            yield from dotted_names(member, f"{prefix}{name}.")


# --- Merging layers --------------------------------------------------------------------------------------------------

_Path = tuple[str | int, ...]


def _dotted(path: _Path) -> str:
    return ".".join(str(part) for part in path)


@dataclass
class _Merger:
    """Lays one layer over another along the config's classes; remembers where each value came from."""

    origins: dict[_Path, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    root: type[ConfigModel] | None = None

    def merge(self, annotation: Any, base: Any, layer: Any, path: _Path, source: str) -> Any:
        """The data of `layer` over `base`."""
        if path:
            self.origins[path] = source
        else:
            self.root = annotation
        members = member_models(annotation)
        if members and isinstance(layer, Mapping):
            return self._merge_block(members, base, layer, path, source)
        if isinstance(layer, list) and get_origin(annotation) in (list, tuple):
            item = get_args(annotation)[0]
            return [self.merge(item, None, value, (*path, index), source) for index, value in enumerate(layer)]
        if isinstance(layer, Mapping) and isinstance(base, Mapping):
            return {**base, **{key: self.merge(Any, base.get(key), layer[key], (*path, key), source) for key in layer}}
        return layer

    def _merge_block(
        self, members: tuple[type[ConfigModel], ...], base: Any, layer: Mapping[str, Any], path: _Path, source: str
    ) -> Any:
        current = base if isinstance(base, Mapping) else {}
        model = self._select(members, current, layer, path, source)
        if model is None:
            return base
        if not current or current.get("type") != type_tag(model):
            current = defaults_of(model)
        merged = dict(current)
        for key, value in layer.items():
            if key not in model.model_fields:
                self.problems.append(self._unknown_key(model, key, path, source))
                continue
            merged[key] = self.merge(
                model.model_fields[key].annotation, current.get(key), value, (*path, str(key)), source
            )
        return merged

    def _select(
        self,
        members: tuple[type[ConfigModel], ...],
        base: Mapping[str, Any],
        layer: Mapping[str, Any],
        path: _Path,
        source: str,
    ) -> type[ConfigModel] | None:
        if len(members) == 1:
            return members[0]
        by_tag = {type_tag(member): member for member in members}
        tag = layer.get("type", base.get("type"))
        if tag in by_tag:
            return by_tag[tag]
        names = [str(name) for name in by_tag]
        what = f"'{_dotted((*path, 'type'))}' is {'missing' if tag is None else repr(tag)}"
        self.problems.append(f"{source}: {what}; choose one of {', '.join(names)}.{_did_you_mean(tag, names)}")
        return None

    def _unknown_key(self, model: type[ConfigModel], key: object, path: _Path, source: str) -> str:
        siblings = list(model.model_fields)
        block = f"'{_dotted(path)}'" if path else "the top level"
        name = _dotted((*path, str(key)))
        # The right name in the wrong section is the commonest accident.
        elsewhere = dict.fromkeys(dotted_names(self.root)) if self.root else {}
        near = [other for other in elsewhere if other.split(".")[-1] == key and other != name][:3]
        near = near or [_dotted((*path, other)) for other in difflib.get_close_matches(str(key), siblings, n=3)]
        hint = f" Did you mean {' or '.join(repr(other) for other in near)}?" if near else ""
        return f"{source}: unknown key '{name}'.{hint} Keys of {block}: {', '.join(sorted(siblings))}."

    def explain(self, data: Any, error: Mapping[str, Any]) -> str:
        """One sentence for one of pydantic's errors."""
        path, value = _locate(data, error["loc"])
        message = re.sub(r"^(Value|Assertion) error, ", "", error["msg"])
        name = f"'{_dotted(path)}'" if path else "the config"
        if error["type"] == "missing":
            return f"{name} is required and was not given."
        source = self._origin(path)
        where = f"{source}: " if source else ""
        if error["type"] in ("value_error", "assertion_error"):
            return f"{where}{name}: {message}"
        choices = re.findall(r"'([^']*)'", message) if error["type"] == "literal_error" else []
        return f"{where}{name} is {value!r} ({type(value).__name__}): {message}.{_did_you_mean(value, choices)}"

    def _origin(self, path: _Path) -> str | None:
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return None


def _locate(data: Any, loc: Sequence[str | int]) -> tuple[_Path, Any]:
    """Pydantic's location without the tags of unions, and the value there."""
    path: list[str | int] = []
    for part in loc:
        if isinstance(data, Mapping) and part in data:
            data = data[part]
        elif isinstance(data, list) and isinstance(part, int):
            data = data[part] if part < len(data) else None
        elif isinstance(data, Mapping) and data.get("type") == part:
            continue
        else:
            data = None
        path.append(part)
    return tuple(path), data


def _did_you_mean(given: object, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(given), names, n=1)
    return f" Did you mean '{near[0]}'?" if near else ""


# --- Reading ---------------------------------------------------------------------------------------------------------


class YamlLoader(yaml.SafeLoader):
    """YAML 1.2 scalars (5e-6 is a number, `off` a string) and no duplicate keys, unlike PyYAML's default."""


class YamlDumper(yaml.SafeDumper):
    """Writes what `YamlLoader` reads back."""


_SCALARS = {
    "null": (r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    "bool": (r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    "int": (r"^[-+]?(?:0|[1-9][0-9_]*)$", list("-+0123456789")),
    "float": (
        r"^(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+0123456789."),
    ),
}

for _class in (YamlLoader, YamlDumper):
    _class.yaml_implicit_resolvers = {}
    for _name, (_pattern, _first) in _SCALARS.items():
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(_pattern), _first)


def _construct_mapping(loader: YamlLoader, node: yaml.MappingNode) -> dict[Hashable, Any]:
    result: dict[Hashable, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in result:
            raise yaml.constructor.ConstructorError(None, None, f"the key '{key}' appears twice", key_node.start_mark)
        result[key] = loader.construct_object(value_node, deep=True)
    return result


YamlLoader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(_missing_file(path)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read config file '{path}': {error}") from error
    data = _parse_yaml(text, str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected 'key: value' lines at the top level, got {type(data).__name__}.")
    return data


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=YamlLoader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{source}{line}: not valid YAML: {error.problem}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}.") from error


def _missing_file(path: Path) -> str:
    folder = next((folder for folder in _PRESET_FOLDERS if folder.is_dir()), None)
    presets = sorted(str(preset) for preset in folder.rglob("*.yaml")) if folder else []
    near = difflib.get_close_matches(path.stem, [Path(preset).stem for preset in presets], n=1)
    hint = next((f" Did you mean '{preset}'?" for preset in presets if near and Path(preset).stem == near[0]), "")
    listing = f" Presets: {', '.join(presets)}." if presets else ""
    return f"config file '{path}' does not exist.{hint}{listing}"


def _parse_override(text: str) -> dict[str, Any]:
    name, equals, value = text.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override '{text}': expected 'name=value', e.g. 'algo.group_size=8'.")
    layer: Any = _parse_yaml(value, f"override '{text}'")
    for part in reversed(parts):
        layer = {part: layer}
    return dict(layer)

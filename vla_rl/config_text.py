"""Configs as text: YAML that explains itself (`--print-config`), and the table of fields (`--help`)."""

from __future__ import annotations

import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import yaml

from vla_rl.config import ConfigModel, YamlDumper, defaults_of, member_models, type_tag


class FieldRow(NamedTuple):
    """One field of a config.

    Attributes:
        name: Dotted name, as an override uses it.
        type: E.g. "float", "grpo | rloo" for a union, "a | b" for a choice.
        default: As YAML; "" for required fields and for blocks.
        doc: The field's documentation.
        condition: E.g. "algo.advantage.type=grpo" if the field exists only then, else "".
    """

    name: str
    type: str
    default: str
    doc: str
    condition: str = ""


def describe_fields(cls: type[ConfigModel]) -> list[FieldRow]:
    """Every field of a config and its blocks, in order; the members of a union one after the other."""
    return list(_rows(cls, defaults_of(cls), "", ""))


def _rows(model: type[ConfigModel], defaults: dict[str, Any], prefix: str, condition: str) -> Iterator[FieldRow]:
    for name, info in model.model_fields.items():
        if prefix and name == "type":
            continue  # the row of the block itself lists its types
        dotted = f"{prefix}{name}"
        members = member_models(info.annotation)
        default = defaults.get(name)
        block = default if isinstance(default, dict) and members else None
        text = "" if name not in defaults else scalar_yaml(default) if block is None else str(block.get("type", ""))
        doc = " ".join((info.description or "").split())
        if len(members) > 1:
            yield FieldRow(f"{dotted}.type", type_name(info.annotation), text, doc, condition)
        elif members:
            yield FieldRow(dotted, "block", "null" if name in defaults and default is None else "", doc, condition)
        else:
            yield FieldRow(dotted, type_name(info.annotation), text, doc, condition)
        for member in members:
            tag = type_tag(member)
            inner = block if block is not None and block.get("type") == tag else defaults_of(member)
            yield from _rows(member, inner, f"{dotted}.", f"{dotted}.type={tag}" if len(members) > 1 else condition)


def type_name(annotation: Any) -> str:
    """A field's type in words."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(args[0])
    if origin is Literal:
        return " | ".join(str(arg) for arg in args)
    if origin in (Union, types.UnionType):
        return " | ".join(type_name(arg) for arg in args)
    if origin is not None:
        inner = ", ".join("..." if arg is Ellipsis else type_name(arg) for arg in args)
        return f"{origin.__name__}[{inner}]"
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        return type_tag(annotation) or "block"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " | ".join(str(member.value) for member in annotation)
    return "path" if annotation is Path else str(getattr(annotation, "__name__", annotation))


def config_to_yaml(config: ConfigModel, *, comments: bool = False) -> str:
    """The config as YAML that `load_config` reads back to an equal one.

    Args:
        config: Any config.
        comments: Write each field's documentation above it.
    """
    return "\n".join(_lines(config, config.model_dump(mode="json"), "", comments)) + "\n"


def _lines(config: ConfigModel, data: dict[str, Any], indent: str, comments: bool) -> Iterator[str]:
    for name, info in type(config).model_fields.items():
        value, field_value = data[name], getattr(config, name)
        doc = info.description if comments else None
        yield from (f"{indent}# {line.strip()}".rstrip() for line in (doc or "").splitlines())
        if not isinstance(field_value, ConfigModel):
            yield f"{indent}{name}: {scalar_yaml(value)}"
            continue
        lines = list(_lines(field_value, value, f"{indent}  ", comments))
        yield f"{indent}{name}:" if lines else f"{indent}{name}: {{}}"
        yield from lines


def scalar_yaml(value: Any) -> str:
    """A value on one line of YAML."""
    text = yaml.dump(value, Dumper=YamlDumper, default_flow_style=True, width=float("inf"), sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")

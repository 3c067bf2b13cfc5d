"""Build the options of a command from frozen dataclasses: a field is an option, the string below it the help text.

A dataclass of a component, such as the configuration of a run, thereby is also the command line of that component.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, wraps
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

Command = Callable[..., None]


def takes_options(
    *kinds: type,
    arguments: Sequence[str] = (),
    flags: Mapping[str, Sequence[str]] | None = None,
    metavars: Mapping[str, str] | None = None,
    hidden: Collection[str] = (),
) -> Callable[[Command], Command]:
    """Turn a function of dataclasses into a command with one option per field. Nested dataclasses are expanded.

    `arguments` names the fields given by position, `flags` the option strings that do not follow from the field's name
    (see `flag_names`), `metavars` the words for a value, and `hidden` the fields without an option. A field name that
    occurs twice is one option. A function whose first parameter is `context` also receives typer's context.
    """

    def make_command(run: Command) -> Command:
        by_context = next(iter(inspect.signature(run).parameters)) == "context"
        parameters = [_context_parameter()] if by_context else []
        for kind, field, hint in option_fields(kinds, hidden):
            metavar = (metavars or {}).get(field.name)
            text = field_texts(kind).get(field.name)
            assert text, f"{kind.__name__}.{field.name} has no string below it"
            if field.name in arguments:
                info: Any = typer.Argument(metavar=metavar, help=text)
            else:
                names = (flags or {}).get(field.name) or flag_names(field.name, hint)
                info = typer.Option(*names, metavar=metavar, help=text)
            parameters.append(_option_parameter(field, hint, info))

        @wraps(run)
        def run_command(**values: Any) -> None:
            first = (values.pop("context"),) if by_context else ()
            unknown = set(values) - {parameter.name for parameter in parameters}
            assert not unknown, f"{run.__module__} has no option {', '.join(sorted(unknown))}"
            run(*first, *(build_options(kind, values) for kind in kinds))

        run_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run_command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run_command

    return make_command


def flag_names(name: str, hint: Any) -> tuple[str, ...]:
    """Return the option strings of a field: `save_every` is --save-every, `as_json` --json, `timeout_s` --timeout. A
    flag that may be unset gets a negative as well."""
    flag = "--" + name.removeprefix("as_").removesuffix("_s").replace("_", "-")
    return (f"{flag}/--no-{flag[2:]}",) if hint == bool | None else (flag,)


def option_fields(kinds: Sequence[type], hidden: Collection[str] = ()) -> Iterator[tuple[type, Any, Any]]:
    """Yield (dataclass, field, type) for every option of the dataclasses, in their order."""
    seen = set(hidden)
    for kind in kinds:
        hints = typing.get_type_hints(kind)
        direct = {field.name for field in dataclasses.fields(kind) if not dataclasses.is_dataclass(hints[field.name])}
        for field in dataclasses.fields(kind):
            hint = hints[field.name]
            if dataclasses.is_dataclass(hint):
                yield from option_fields((typing.cast(type, hint),), seen | direct)
            elif field.name not in seen:
                seen.add(field.name)
                yield kind, field, hint


def build_options(kind: type, values: Mapping[str, Any]) -> Any:
    """Build a dataclass, with its nested dataclasses, from the values of options; absent fields get their default."""
    hints = typing.get_type_hints(kind)
    chosen: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            chosen[field.name] = build_options(typing.cast(type, hint), values)
        elif field.name in values:
            value = values[field.name]
            chosen[field.name] = tuple(value or ()) if typing.get_origin(hint) is tuple else value
    return kind(**chosen)


@cache
def field_texts(kind: type) -> dict[str, str]:
    """Return the string below each field of a dataclass and of its bases, on one line."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            texts |= _class_texts(str(sys.modules[base.__module__].__file__)).get(base.__name__, {})
    return texts


@cache
def _class_texts(path: str) -> dict[str, dict[str, str]]:
    """Return class -> field -> the string below it, of a source file."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    return {node.name: dict(_strings_below(node.body)) for node in tree.body if isinstance(node, ast.ClassDef)}


def _strings_below(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, text in pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            yield field.target.id, " ".join(str(text.value.value).split())


def _context_parameter() -> inspect.Parameter:
    return inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)


def _option_parameter(field: Any, hint: Any, info: Any) -> inspect.Parameter:
    default = field.default
    if default is dataclasses.MISSING:
        default = inspect.Parameter.empty
    elif isinstance(default, tuple):
        default = list(default)
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[_typer_type(hint), info], default=default
    )


def _typer_type(hint: Any) -> Any:
    """Return the type that typer parses. Choices are parsed as text, because the component that owns the field checks
    them and explains a wrong one."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return list[_typer_type(inner[0])]  # type: ignore[misc]
    if origin is typing.Literal:
        return str
    if origin in (types.UnionType, typing.Union):
        return typing.Union[tuple(_typer_type(argument) for argument in inner)]  # noqa: UP007
    return hint

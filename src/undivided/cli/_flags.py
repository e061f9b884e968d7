"""Flags that several commands share (declared in a dataclass, added by a decorator), and flags that exclude others."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from undivided.errors import InputError

PANELS = ("Shapes", "Mask", "Attention", "Machine")
"""The panels of --help that come first, in this order."""


def flag_name(field: str) -> str:
    """The flag of a field, as typer names it.

    >>> flag_name("kv_heads")
    '--kv-heads'
    """
    return f"--{field.replace('_', '-')}"


def flags(**groups: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that adds the fields of dataclasses to a command as flags; each named parameter gets an instance.

    The fields are annotated as typer expects: ``Annotated[type, typer.Option(...)]`` with a default.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        own = [p for name, p in inspect.signature(command).parameters.items() if name not in groups]
        parameters = [p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        for group in groups.values():
            parameters += _parameters(group)
        parameters.sort(key=_place_in_help)

        @functools.wraps(command)
        def with_flags(**values: Any) -> None:
            instances = {
                name: group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
                for name, group in groups.items()
            }
            command(**instances, **values)

        with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_flags.__annotations__ = {p.name: p.annotation for p in parameters}
        del with_flags.__wrapped__
        return with_flags

    return decorate


def _place_in_help(parameter: inspect.Parameter) -> int:
    panel = getattr(parameter.annotation.__metadata__[0], "rich_help_panel", None)
    return PANELS.index(panel) if panel in PANELS else len(PANELS)


def _parameters(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(group)
    ]


def refuse_together(flag: str, others: Mapping[str, object]) -> None:
    """Refuse flags that have no meaning together with another flag.

    Args:
        flag: that other flag.
        others: the refused flags and their values; an empty value means that the flag was not given.

    Raises:
        InputError: one of the others was given.
    """
    present = [name for name, value in others.items() if value not in (None, False, "", [], ())]
    if present:
        raise InputError(flag, f"be given without {', '.join(others)}", ", ".join(present))

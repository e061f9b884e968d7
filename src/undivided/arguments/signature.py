"""Errors of calls that do not fit a signature: an argument is missing, misspelt, or one too many.

Python raises a TypeError with little in it. `checked_call` replaces it by an `InputError`, which is also a TypeError,
at 0.1 to 0.3 us per call; `missing_as_required` does so for missing arguments of functions with checks, at no cost.
"""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import FunctionType, MappingProxyType
from typing import Any, Literal, Never, NoReturn, TypeVar

import torch

from undivided.arguments.checks import REQUIRED, listed
from undivided.errors import InputError, did_you_mean

T = TypeVar("T", bound=Callable[..., Any])
C = TypeVar("C", bound=type)


def checked_call(target: T, other_names: Mapping[str, Sequence[str]] = MappingProxyType({})) -> T:
    """The function or class; a call that does not fit its signature raises InputError.

    The hint is what the docstring says about the argument, or the name that was probably meant.

    Args:
        target: the function or class.
        other_names: hints for keywords of other libraries; the first one that begins with an argument of the function
            (``argument=``), or with none, applies.

    >>> @checked_call
    ... def window(left, right):
    ...     pass
    >>> window(left=3, ritgh=0)
    Traceback (most recent call last):
    undivided.errors.InputError: window must be called with its own arguments, got 'ritgh'
      HINT: did you mean 'right'?
      arguments: left, right
    """
    if isinstance(target, type):
        return checked_methods("__init__", other_names=other_names)(target)
    other_names = dict(other_names)  # torch.compile of PyTorch 2.10 cannot trace a MappingProxyType

    @functools.wraps(target)
    def call(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # it has an error of its own
            return target(*arguments, **options)
        try:
            return target(*arguments, **options)
        except TypeError as error:
            if (wrong := wrong_call(error, target, arguments, options, other_names)) is None:
                raise
        raise wrong

    return call  # type: ignore[return-value]


def checked_methods(*names: str, other_names: Mapping[str, Sequence[str]] = MappingProxyType({})) -> Callable[[C], C]:
    """A decorator of classes: `checked_call` for these methods."""

    def decorate(owner: C) -> C:
        for name in names:
            setattr(owner, name, checked_call(getattr(owner, name), other_names))
        return owner

    return decorate


def missing_as_required(function: T) -> T:
    """The function; arguments that are missing reach it as `REQUIRED`, which its own checks refuse.

    The signature for type checkers stays as it is; ``help`` and `inspect` leave out parameters of type `Never`.
    """
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    by_position = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
    by_keyword = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert isinstance(function, FunctionType)
    function.__defaults__ = tuple(_default(p) for p in by_position)
    function.__kwdefaults__ = {p.name: _default(p) for p in by_keyword}
    shown = [p for p in parameters if p.annotation not in (Never, "Never")]
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return function


def _default(parameter: inspect.Parameter) -> object:
    return REQUIRED if parameter.default is parameter.empty else parameter.default


def wrong_call(
    error: TypeError,
    function: Callable[..., Any],
    arguments: tuple[object, ...],
    options: Mapping[str, object],
    other_names: Mapping[str, Sequence[str]],
) -> InputError | None:
    """What is wrong with the arguments of a call, as an error that is also a TypeError.

    Args:
        error: caught in the frame that called the function.
        function: the function.
        arguments, options: what it was given by position and by keyword, the object of a method included.
        other_names: as in `checked_call`.

    Returns:
        The error; None if the function was entered, so that `error` has another cause.
    """
    if error.__traceback__ is None or error.__traceback__.tb_next is not None:
        return None
    parameters = inspect.signature(function).parameters.values()
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    text, documented = function.__name__, function
    if by_position and by_position[0].name == "self":
        owner, arguments = type(arguments[0]), arguments[1:]
        text = owner.__name__ if text == "__init__" else f"{owner.__name__}.{text}"
        documented = owner if function.__name__ == "__init__" else function
        named.pop(by_position.pop(0).name)
    if unknown := sorted(options.keys() - named.keys()):
        hint = _hint_of_other_names(unknown, named, other_names)
        hint = hint or did_you_mean(unknown[0], named) or _form(text, parameters)
        return unknown_arguments(text, unknown, named, hint).as_also(TypeError)
    if len(arguments) > len(by_position):
        must = f"be given at most {len(by_position)} arguments by position"
        return InputError(text, must, len(arguments), _form(text, parameters)).as_also(TypeError)
    positional = {p.name for p in by_position[: len(arguments)]}
    if repeated := sorted(positional & options.keys()):
        return InputError(repeated[0], "be given once", "a position and a keyword").as_also(TypeError)
    missing = [name for name, p in named.items() if p.default is p.empty and name not in {*positional, *options}]
    if not missing:
        return None
    meaning = _meaning(documented, missing[0])
    hint = _form(text, parameters) + (f"\n        {missing[0]}: {meaning}" if meaning else "")
    must = f"be given to {text}{_choices(function, missing[0])}"
    return InputError(missing[0], must, REQUIRED, hint).as_also(TypeError)


def _hint_of_other_names(
    unknown: Sequence[str], named: Container[str], other_names: Mapping[str, Sequence[str]]
) -> str | None:
    """The hints for these keywords; None if there is none."""
    hints = {
        name: hint
        for name in unknown
        for hint in reversed(other_names.get(name, ()))  # the first one remains
        if (argument := re.match(r"(\w+)=", hint)) is None or argument[1] in named
    }
    if len(hints) > 1:
        return "; ".join(f"{name}: {hint}" for name, hint in hints.items())
    return next(iter(hints.values()), None)


def takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with this many arguments by position, as far as Python knows its signature."""
    try:
        inspect.signature(function).bind(*range(count))
    except ValueError:  # a function of C without a signature
        return True
    except TypeError:
        return False
    return True


def raise_as_type_error(make_error: Callable[..., InputError], *arguments: object) -> NoReturn:
    """Raise what `make_error` returns for these arguments, as an error that is also a TypeError.

    torch.compile leaves its graph for it: it cannot create a class, and with PyTorch 2.11 it fails on an error that
    exists already.
    """
    if torch.compiler.is_dynamo_compiling():  # not in torch.export(strict=False), which runs Python as it is
        from undivided.arguments import _graph_break

        _graph_break.call(raise_as_type_error, (make_error, *arguments), {})
    raise make_error(*arguments).as_also(TypeError)


def unknown_arguments(function: str, unknown: Iterable[str], known: Iterable[str], hint: str | None) -> InputError:
    """The error for keywords that a function does not have.

    Args:
        function: its name.
        unknown: the keywords.
        known: the arguments that it has.
        hint: what may have been meant.
    """
    got = ", ".join(map(repr, sorted(unknown)))
    arguments = f"arguments: {listed(list(known), 18) or 'none by keyword'}"
    hint = arguments if hint is None else f"{hint}\n  {arguments}"
    return InputError(function, "be called with its own arguments", got, hint)


def _form(name: str, parameters: Iterable[inspect.Parameter]) -> str:
    """``window(left, right, ...)``: how the function is called, with all that it requires."""
    required, more = [], False
    for p in parameters:
        if p.name == "self":
            continue
        if p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            more = True
        else:
            required.append(f"{p.name}=..." if p.kind is p.KEYWORD_ONLY else p.name)
    return f"{name}({', '.join([*required, '...'] if more else required)})"


def _choices(function: Callable[..., Any], argument: str) -> str:
    """``, one of 'a', 'b'`` if the argument's type is a Literal, otherwise nothing."""
    try:
        kind = typing.get_type_hints(function).get(argument)
    except NameError:  # a name that is imported for type checkers only
        return ""
    if typing.get_origin(kind) is not Literal:
        return ""
    return f", one of {', '.join(map(repr, typing.get_args(kind)))}"


def _meaning(documented: object, argument: str) -> str:
    """What a docstring says about an argument, on one line; empty if it says nothing."""
    lines = (inspect.getdoc(documented) or "").splitlines()
    for number, line in enumerate(lines):
        entry = re.match(r"    ([\w, ]+): (.*)", line)
        if entry and argument in entry[1].split(", "):
            rest = []
            for following in lines[number + 1 :]:
                if not following.startswith("        "):
                    break
                rest.append(following.strip())
            return textwrap.shorten(" ".join([entry[2], *rest]), 200, placeholder=" ...")
    return ""

"""Masks as text, such as ``causal() & window(256, 0)``: calls of `undivided.masks` and nothing else."""

from __future__ import annotations

import ast
from typing import Any

from undivided import masks
from undivided.errors import InputError

CALLS = ("causal", "window", "lengths", "documents", "document_ids", "prefix", "sinks", "chunks")


def parse(text: str) -> masks.Mask:
    """The mask that the text describes. Names, numbers, lists, ``None``, calls, ``&`` and ``|`` are parsed, never
    executed.

    >>> parse("window(3, 0, align='bottom_right') | prefix(2)")
    window(3, 0, align='bottom_right') | prefix(2)
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise _wrong(text) from None
    return _mask(tree, text)


def _mask(node: ast.expr, text: str) -> masks.Mask:
    match node:
        case ast.BinOp(left, ast.BitAnd(), right):
            return _mask(left, text) & _mask(right, text)
        case ast.BinOp(left, ast.BitOr(), right):
            return _mask(left, text) | _mask(right, text)
        case ast.Name(name) if name in CALLS:
            return _call(name, [], {}, text)
        case ast.Call(ast.Name(name), arguments, keywords) if name in CALLS:
            named = {str(keyword.arg): _value(keyword.value, text) for keyword in keywords}
            return _call(name, [_value(argument, text) for argument in arguments], named, text)
    raise _wrong(text)


def _call(name: str, arguments: list[Any], named: dict[str, Any], text: str) -> masks.Mask:
    try:
        mask: masks.Mask = getattr(masks, name)(*arguments, **named)
    except TypeError as error:
        raise InputError("mask", f"call {name} with its own arguments ({error})", repr(text)) from None
    return mask


def _value(node: ast.expr, text: str) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise _wrong(text) from None


def _wrong(text: str) -> InputError:
    return InputError(
        "mask",
        f"be made of {', '.join(CALLS)} with & and |",
        repr(text),
        hint="for example 'causal() & documents([0, 3, 10])' or 'window(256, 0) | sinks(4)'",
    )

"""Masks as text, such as ``causal() & window(256, 0)``: calls of `undivided.masks` and nothing else."""

from __future__ import annotations

import ast
import warnings
from typing import Any

import torch

from undivided import masks
from undivided.cli._index_words import index_function
from undivided.errors import InputError, did_you_mean

CALLS = (
    "causal", "window", "lengths", "documents", "document_ids", "prefix", "sinks", "chunks", "dense", "predicate",
    "tree", "blocks", "pages",
)  # fmt: skip


def parse(text: str) -> masks.Mask:
    """The mask that the text describes. Names, numbers, lists, ``None``, calls, ``&`` and ``|`` are parsed, never
    executed. ``dense`` takes rows of True and False, and ``predicate`` a lambda that compares numbers.

    >>> parse("window(3, 0, align='bottom_right') | prefix(2)")
    window(3, 0, align='bottom_right') | prefix(2)
    >>> parse("predicate(lambda b, h, q, k: (q + k) % 2 == 0)").intervals(2, 4).tolist()
    [[[0, 3], [1, 4]]]
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # such as an invalid escape in a string
            tree = ast.parse(text.strip(), mode="eval").body
        return _mask(tree, text)
    except (SyntaxError, UnicodeError, RecursionError, MemoryError):  # the last two: too deeply nested
        raise _wrong(text) from None


def _mask(node: ast.expr, text: str) -> masks.Mask:
    match node:
        case ast.BinOp(left, ast.BitAnd(), right):
            return _mask(left, text) & _mask(right, text)
        case ast.BinOp(left, ast.BitOr(), right):
            return _mask(left, text) | _mask(right, text)
        case ast.Name(name) if name in CALLS:
            return _call(name, [], {}, text)
        case ast.Call(ast.Name(name), arguments, keywords) if name in CALLS:
            names = [str(keyword.arg) for keyword in keywords]
            if len(set(names)) < len(names):
                raise InputError("mask", f"name each argument of {name} once", repr(text))
            named = {str(keyword.arg): _value(keyword.value, text) for keyword in keywords}
            return _call(name, [_value(argument, text) for argument in arguments], named, text)
        case ast.Name(name) | ast.Call(ast.Name(name)):
            raise _wrong(text, did_you_mean(name, CALLS))
    raise _wrong(text)


def _call(name: str, arguments: list[Any], named: dict[str, Any], text: str) -> masks.Mask:
    if name == "dense":
        arguments = [_matrix(value) for value in arguments]
        named = {argument: _matrix(value) for argument, value in named.items()}
    try:
        mask: masks.Mask = getattr(masks, name)(*arguments, **named)
    except TypeError as error:
        problem, _, hint = str(error).partition("\n  HINT: ")
        must = f"call {name} with its own arguments ({problem})"
        raise InputError("mask", must, repr(text), hint or None) from None
    return mask


def _matrix(value: Any) -> torch.Tensor:
    """The bool tensor [q, kv] of nested lists."""
    is_matrix = isinstance(value, list | tuple) and all(isinstance(row, list | tuple) and row for row in value)
    if not is_matrix or len({len(row) for row in value}) != 1 or not all(one in (0, 1) for row in value for one in row):
        raise InputError("tensor", "be rows of equal length of True and False (or 1 and 0)", repr(value))
    return torch.tensor([[bool(one) for one in row] for row in value])


def _value(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Lambda):
        return index_function(node)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise _wrong(text) from None


def _wrong(text: str, hint: str | None = None) -> InputError:
    example = "for example 'causal() & documents([0, 3, 10])' or 'window(256, 0) | sinks(4)'"
    return InputError("mask", f"be made of {', '.join(CALLS)} with & and |", repr(text), hint or example)

"""Functions of indices as text, such as ``lambda b, h, q, k: (q + k) % 2 == 0``: parsed, never executed as code."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from undivided.errors import InputError

ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
LOGIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
LARGEST = 2**31 - 1

Function = Callable[..., Any]


def index_function(node: ast.Lambda) -> Function:
    """The function of four indices that a lambda describes by comparisons and arithmetic of whole numbers.

    Raises:
        InputError: the lambda has other parameters, uses anything else, or does not return a bool.

    >>> tree = ast.parse("lambda b, h, q, k: (q >= k) & ~(k % 3 == 1)", mode="eval").body
    >>> function = index_function(tree)
    >>> [function(0, 0, 4, key) for key in range(4)]
    [True, False, True, True]
    """
    names = [argument.arg for argument in node.args.args]
    signature = ast.unparse(node.args)
    if len(names) != 4 or signature != ", ".join(names):
        raise InputError("fn", "take the four indices b, h, q, k", repr(signature))
    is_bool, run = _translate(node.body, names)
    if not is_bool:
        raise _wrong(node.body, "compare numbers, so that it returns True or False")
    return lambda b, h, q, k: run((b, h, q, k))


def _translate(node: ast.expr, names: list[str]) -> tuple[bool, Function]:
    """(whether the result is a bool, the function of the tuple of indices)."""
    match node:
        case ast.Constant(int(number)) if not isinstance(number, bool) and number <= LARGEST:
            return False, lambda indices: number
        case ast.Name(name) if name in names:
            place = names.index(name)
            return False, lambda indices: indices[place]
        case ast.UnaryOp(ast.USub(), inner):
            negated = _operand(inner, names, False)
            return False, lambda indices: -negated(indices)
        case ast.UnaryOp(ast.Invert(), inner):
            inverted = _operand(inner, names, True)
            return True, lambda indices: inverted(indices) ^ True
        case ast.BinOp(left, sign, right) if type(sign) in LOGIC:
            return True, _joined(LOGIC[type(sign)], _operand(left, names, True), _operand(right, names, True))
        case ast.BinOp(left, sign, right) if type(sign) in ARITHMETIC:
            if isinstance(sign, ast.FloorDiv | ast.Mod) and not _is_positive(right):
                raise _wrong(node, "divide by a positive constant")
            return False, _joined(ARITHMETIC[type(sign)], _operand(left, names, False), _operand(right, names, False))
        case ast.Compare(left, [sign], [right]) if type(sign) in COMPARISONS:
            return True, _joined(COMPARISONS[type(sign)], _operand(left, names, False), _operand(right, names, False))
    raise _wrong(node, f"use {', '.join(names)}, whole numbers, + - * // %, one comparison at a time, and & | ^ ~")


def _operand(node: ast.expr, names: list[str], wants_bool: bool) -> Function:
    is_bool, run = _translate(node, names)
    if is_bool != wants_bool:
        raise _wrong(node, "be a comparison in brackets" if wants_bool else "be a number, not a comparison")
    return run


def _joined(operation: Callable[[Any, Any], Any], left: Function, right: Function) -> Function:
    return lambda indices: operation(left(indices), right(indices))


def _is_positive(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value > 0


def _wrong(node: ast.expr, must: str) -> InputError:
    return InputError("fn", must, repr(ast.unparse(node)), hint="predicate(lambda b, h, q, k: (q + k) % 2 == 0)")

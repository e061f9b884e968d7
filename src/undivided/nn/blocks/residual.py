"""The output of a block of a layer, and its residual. The block may be a module that replaced ours."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from undivided.errors import InputError


def output_and_residual(
    name: str, result: Any, x: Tensor, is_normalised: bool, may_be_pair: bool = False
) -> tuple[Tensor, Tensor]:
    """The output of a block, and its residual.

    Args:
        name: of the block, for errors.
        result: what the block returned. A tensor would unpack along its first axis, so its type is checked.
        x: the input of the block, which is the residual unless is_normalised.
        is_normalised: whether the residual is the normalised input, the second result.
        may_be_pair: whether the block may return the normalised input, too, if it is not the residual.

    Raises:
        InputError: the block returned something else.
    """
    is_pair = isinstance(result, tuple | list) and len(result) == 2 and isinstance(result[0], Tensor)
    if is_normalised:
        if is_pair and isinstance(result[1], Tensor):
            return result[0], result[1]
        must = "return (output, normalised input) with apply_residual_connection_post_layernorm"
    else:
        if isinstance(result, Tensor):
            return result, x
        if is_pair and may_be_pair:
            return result[0], x
        must = "return a tensor, or (output, normalised input)" if may_be_pair else "return a tensor"
    raise InputError(name, must, _describe(result))


def _describe(result: Any) -> str:
    if isinstance(result, Tensor):
        return "a tensor"
    kind = type(result).__name__
    return f"a {kind} of {len(result)}" if isinstance(result, tuple | list) else kind

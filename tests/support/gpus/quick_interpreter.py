"""Triton's interpreter without the work that it repeats.

Each call of a helper within a kernel looks through all of `triton.language` to replace its functions by interpreted
ones, although the launch has done so. Each conversion of a type builds the table of all types, and each tensor builds
its shape and the shape of its type. Each sum and product of integers is computed again in 64 bits to find an overflow,
which nothing reports, because assertions are off. Without all that, kernels take a quarter of the time, and their
results have the same bits. Source: `triton/runtime/interpreter.py` and `triton/language/core.py` of Triton 3.7.1.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

REPLACED: list[tuple[Any, str]] = []
"""Whose functions are replaced, and their names; each has the original as `__wrapped__`."""


def install() -> None:
    """Replace these functions in this process; nothing happens without Triton, or with one that has them no more."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton import language
    from triton.runtime import interpreter

    replace: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    if replace is None or not hasattr(interpreter, "_LangPatchScope") or hasattr(replace, "__wrapped__"):
        return
    done = set[tuple[bool, bool]]()

    @functools.wraps(replace)
    def once_per_launch(function: Any) -> Any:
        seen = function.__globals__.values()
        modules = (any(x is language for x in seen), any(x is language.core for x in seen))
        if modules in done:
            return interpreter._LangPatchScope()  # a helper's is never restored, so it may be empty
        scope, restore = replace(function), interpreter._LangPatchScope.restore
        if not done:

            def end_of_launch() -> None:
                done.clear()
                restore(scope)

            scope.restore = end_of_launch
        done.add(modules)
        return scope

    in_numpy = interpreter._get_np_dtype
    known = functools.cache(in_numpy)

    @functools.wraps(in_numpy)
    def known_in_numpy(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, language.block_type) else kind
        return known(element) if type(element) is language.dtype else in_numpy(element)

    _replace(interpreter, "_patch_lang", once_per_launch)
    _replace(interpreter, "_get_np_dtype", known_in_numpy)
    if not interpreter.interpreter_builder.options.debug:
        _leave_out_overflows(interpreter.interpreter_builder)
    _share_shapes(language.core)
    _pass_equal_types(language)


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    setattr(owner, name, function)
    REPLACED.append((owner, name))


def _leave_out_overflows(builder: Any) -> None:
    """Compute no sums again for an assertion that `debug` would have to enable."""
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _share_shapes(core: Any) -> None:
    """Build the shape of a type, and that of its tensors, once per element type and sizes: nothing changes them."""
    own_block_type, block_types = core.block_type.__init__, dict[tuple[Any, ...], dict[str, Any]]()
    own_tensor, shapes = core.tensor.__init__, dict[tuple[int, ...], tuple[Any, Any]]()

    @functools.wraps(own_block_type)
    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape) if type(element_ty) is core.dtype else ()
        if not all(type(size) is int for size in key[1:]) or not key:
            own_block_type(self, element_ty, shape)
        elif key in block_types:
            self.__dict__.update(block_types[key])
        else:
            own_block_type(self, element_ty, shape)
            block_types[key] = dict(self.__dict__)

    @functools.wraps(own_tensor)
    def tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in shapes:
            shapes[sizes] = (core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes]))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[sizes]

    _replace(core.block_type, "__init__", block_type)
    _replace(core.tensor, "__init__", tensor)


def _pass_equal_types(language: Any) -> None:
    """Look for a common type and a common shape of two operands only if theirs differ."""
    semantic, tensor, plain = language.semantic.TritonSemantic, language.core.tensor, language.core.dtype
    own = semantic.binary_op_type_checking_impl

    @functools.wraps(own)
    def operands(self: Any, lhs: Any, rhs: Any, *options: Any) -> Any:
        # the fourth option is that of divisions, whose operands may be converted
        if type(lhs) is tensor and type(rhs) is tensor and lhs.dtype is rhs.dtype and len(options) < 4:
            one, other = lhs.type, rhs.type
            if type(lhs.dtype) is plain and (
                one is other or (one.is_block() and other.is_block() and one.shape is other.shape)
            ):
                return lhs, rhs
        return own(self, lhs, rhs, *options)

    _replace(semantic, "binary_op_type_checking_impl", operands)

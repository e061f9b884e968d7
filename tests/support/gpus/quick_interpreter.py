"""Triton's interpreter without the work that it repeats.

Each call of a helper within a kernel looks through all of `triton.language` to replace its functions by interpreted
ones, although the launch has done so, and each conversion of a type builds the table of all types. Without both,
kernels take less than half of the time, and their results have the same bits. Source:
`triton/runtime/interpreter.py` of Triton 3.7.1.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any


def install() -> None:
    """Replace both functions in this process; nothing happens without Triton, or with one that has them no more."""
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

    interpreter._patch_lang = once_per_launch
    interpreter._get_np_dtype = known_in_numpy

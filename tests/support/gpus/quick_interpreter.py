"""Triton's interpreter without the work that it repeats.

Each call of a helper within a kernel looks through all of `triton.language` to replace its functions by interpreted
ones, although the launch has done so, and each conversion of a type builds the table of all types. Both are a third of
the time of an interpreted kernel, and change no number (Triton 3.4 to 3.8, `triton/runtime/interpreter.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def install() -> None:
    """Replace both functions in this process; nothing happens without Triton, or with one that has them no more."""
    try:
        from triton import language
        from triton.runtime import interpreter
    except ImportError:
        return
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

    def known_in_numpy(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, language.block_type) else kind
        return known(element) if type(element) is language.dtype else in_numpy(element)

    interpreter._patch_lang = once_per_launch
    interpreter._get_np_dtype = known_in_numpy

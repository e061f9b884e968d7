"""An exception between any two lines of some code, as the handler of a signal raises it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


class Interrupt(BaseException):
    pass


def is_interrupted(operation: Callable[[], object], line: int, in_code: Callable[[CodeType], bool]) -> bool:
    """Run the operation and end it before the n-th line of the functions that `in_code` names; False if these have
    fewer lines."""
    count, before = 0, sys.gettrace()

    def in_line(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        if event == "line" and count == line:
            raise Interrupt
        return in_line

    sys.settrace(lambda frame, event, argument: in_line if in_code(frame.f_code) else None)
    try:
        operation()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False

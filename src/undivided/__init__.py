"""Undivided attention: one call, any layout, any mask, any device, and the same answer from every kernel."""

from undivided import masks
from undivided._machine import Machine
from undivided._policy import use_backends
from undivided._result import merge
from undivided._selection import Decision
from undivided.errors import InputError, NoBackendError
from undivided.functional import attention, explain

__all__ = [
    "Decision",
    "InputError",
    "Machine",
    "NoBackendError",
    "attention",
    "explain",
    "masks",
    "merge",
    "use_backends",
]

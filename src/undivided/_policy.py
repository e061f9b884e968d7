"""Which backends the caller allows: argument > context manager > environment.

All of it is read at the call, not at import. Reading costs well under a microsecond, so that a call pays nothing for it.
"""

from __future__ import annotations

import contextvars
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

import torch

from undivided import _sdp_switches
from undivided.errors import InputError


class Policy(NamedTuple):
    """What the caller allows.

    forced: the backend or family that must run, or None. An explicit request never falls back.
    allowed: names or families, in the order to try them, or None for all in the default order.
    disabled: (name or family, who said so) pairs that must not run.
    deterministic: results must repeat bit for bit.
    log: "" (nothing), "info" (each new Decision) or "debug" (and its reasons).
    """

    forced: str | None = None
    allowed: tuple[str, ...] | None = None
    allowed_by: str = ""
    disabled: tuple[tuple[str, str], ...] = ()
    deterministic: bool = False
    log: str = ""


class _Switch(NamedTuple):
    """One setting of `use_backends`, or several laid over each other."""

    allowed: tuple[str, ...] | None = None
    disabled: tuple[str, ...] = ()


class _Statement(NamedTuple):
    """A setting for the process, and the handle that may still turn it into a block's."""

    switch: _Switch
    handle: Callable[[], use_backends | None]


class _Block(NamedTuple):
    """The setting of the innermost ``with`` of this context, and the block around it."""

    switch: _Switch
    outer: _Block | None


_statements: tuple[_Statement, ...] = (_Statement(_Switch(), lambda: None),)
"""The last one holds. Those before it are kept only while one after it may yet become a block's."""
_statements_lock = threading.Lock()
_block: contextvars.ContextVar[_Block | None] = contextvars.ContextVar("undivided_backends", default=None)


def _current_switch() -> _Switch:
    block = _block.get()
    if block is not None:
        return block.switch
    *before, last = _statements
    if (made := last.handle()) is None or made._reaches():
        return last.switch
    return next(s.switch for s in reversed(before) if (made := s.handle()) is None or made._reaches())


class use_backends:
    """Allow only these backends or families, in this order; as a statement for the process, or in a ``with``.

    With no names every backend is allowed again. `use_backends.disable` forbids some and leaves the others.

    Args:
        names: backend names ("reference", "torch_flash", ...) or families ("math", "flash", "fused", ...), str.

    Returns:
        A handle for ``with``, which takes the setting back from the process and narrows it to the block.

    Raises:
        InputError: a name that no backend or family has.

    >>> import torch, undivided
    >>> q = torch.randn(1, 8, 2, 16)
    >>> with undivided.use_backends("reference"):
    ...     undivided.explain(q, q, q, layout="bshd").backend.name
    'reference'
    """

    def __init__(self, *names: str) -> None:
        self._install(_Switch(_known(names) if names else None, ()))

    @classmethod
    def disable(cls, *names: str) -> use_backends:
        """Forbid these backends or families on top of what is set.

        Args:
            names: as for `use_backends`.

        Returns:
            A handle for ``with``, as of `use_backends`.

        Raises:
            InputError: a name that no backend or family has.

        >>> import torch, undivided
        >>> q = torch.randn(1, 8, 2, 16)
        >>> with undivided.use_backends.disable("native"):
        ...     undivided.explain(q, q, q, layout="bshd").reasons["native"][0]
        'switched off by use_backends.disable'
        """
        handle = cls.__new__(cls)
        before = _current_switch()
        handle._install(_Switch(before.allowed, (*before.disabled, *_known(names))))
        return handle

    def _install(self, switch: _Switch) -> None:
        """Set it for the process; `with` takes that back and narrows it to the block."""
        global _statements
        self._switch = switch
        self._thread: int | None = threading.get_ident()
        with _statements_lock:
            settled = max(n for n, statement in enumerate(_statements) if statement.handle() is None)
            _statements = (*_statements[settled:], _Statement(switch, weakref.ref(self)))

    def _reaches(self) -> bool:
        """Whether it holds in this thread. In others it does not until its own has called something, or let go of it: until
        then it may be about to be entered, and a block in one thread must not reach another."""
        if self._thread == threading.get_ident():
            self._thread = None
        return self._thread is None

    def __enter__(self) -> use_backends:
        global _statements
        with _statements_lock:
            _statements = tuple(s for s in _statements if s.handle() is not self)
        _block.set(_Block(self._switch, _block.get()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        block = _block.get()
        _block.set(block.outer if block is not None else None)


def _known(names: Sequence[str], argument: str = "backend") -> tuple[str, ...]:
    from undivided.backends import names_and_families

    known = names_and_families()
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise InputError(argument, f"be one of {', '.join(sorted(known))}", repr(name))
    return tuple(names)


# The variables, as the process' environment stores them. os.environ.get encodes and decodes on every call (1 us each, and
# nine of them are read); its inner dictionary is looked up instead, with the plain way as the fallback.
_VARIABLES = (
    "UNDIVIDED_BACKENDS", "UNDIVIDED_DETERMINISTIC", "UNDIVIDED_LOG", "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN",
    "NVTE_UNFUSED_ATTN", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NVTE_DEBUG", "NVTE_DEBUG_LEVEL",
)  # fmt: skip
_inner = getattr(os.environ, "_data", None)
_ENCODED = tuple(os.fsencode(name) if os.name == "posix" else name for name in _VARIABLES)

Environment = tuple[object, ...]


def environment() -> Environment:
    """The raw values of the variables that matter, to be compared and hashed."""
    if _inner is not None:
        return tuple(map(_inner.get, _ENCODED))
    return tuple(map(os.environ.get, _VARIABLES))


def policy(backend: str | None = None, deterministic: bool | None = None, switches: str = "") -> Policy:
    """The policy of this call; `switches` are PyTorch's own (`_sdp_switches`) where the call is under them."""
    if deterministic is not None and deterministic is not True and deterministic is not False:
        raise InputError("deterministic", "be True, False or None", repr(deterministic))
    if deterministic is None and torch.are_deterministic_algorithms_enabled():
        deterministic = True
    key = (backend, deterministic, _current_switch(), environment(), switches)
    try:
        found = _policies.get(key)
    except TypeError:  # a list, say: the check below tells which argument it was
        found = None
    if found is None:
        if len(_policies) >= _MOST_POLICIES:
            _policies.clear()
        found = _policies[key] = _read_policy(backend, deterministic, key[2], switches)
    return found


_policies: dict[object, Policy] = {}
_MOST_POLICIES = 256


def _read_policy(
    backend: str | None, deterministic: bool | None, switch: _Switch, switches: str = ""
) -> Policy:
    if backend is not None:
        _known((backend,))
    disabled = [(name, "use_backends.disable") for name in switch.disabled]
    for variable, family in (("FLASH", "flash"), ("FUSED", "fused"), ("UNFUSED", "math")):
        if not _flag(f"NVTE_{variable}_ATTN", True):
            disabled.append((family, f"NVTE_{variable}_ATTN=0"))
    disabled += _sdp_switches.disabled(switches)
    allowed, allowed_by = switch.allowed, "use_backends"
    if allowed is None and (text := os.environ.get("UNDIVIDED_BACKENDS", "")).strip():
        allowed, allowed_by = _listed(text), "UNDIVIDED_BACKENDS"
    if allowed is None and (order := _sdp_switches.order(switches)):
        allowed, allowed_by = order, "sdpa_kernel(set_priority=True)"
    if deterministic is None:
        allows_other = _flag("NVTE_ALLOW_NONDETERMINISTIC_ALGO", True)
        deterministic = _flag("UNDIVIDED_DETERMINISTIC", False) or not allows_other
    return Policy(backend, allowed, allowed_by, tuple(disabled), deterministic, _log_level())


def _listed(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        from undivided.backends import names_and_families

        known = ", ".join(sorted(names_and_families()))
        raise InputError("UNDIVIDED_BACKENDS", f"name at least one of {known}", repr(text))
    return _known(names, "UNDIVIDED_BACKENDS")


def _flag(variable: str, default: bool) -> bool:
    text = os.environ.get(variable, "").strip()
    if text not in ("", "0", "1"):
        raise InputError(variable, "be 0 or 1", repr(text))
    return default if text == "" else text == "1"


def _log_level() -> str:
    """UNDIVIDED_LOG, or TransformerEngine's NVTE_DEBUG x NVTE_DEBUG_LEVEL (1 = info, 2 = debug)."""
    level = os.environ.get("UNDIVIDED_LOG", "").strip().lower()
    if level not in ("", "0", "info", "debug"):
        raise InputError("UNDIVIDED_LOG", "be 'info' or 'debug'", repr(level))
    if level in ("", "0") and os.environ.get("NVTE_DEBUG", "0") == "1":
        return {"0": "", "1": "info"}.get(os.environ.get("NVTE_DEBUG_LEVEL", "0"), "debug")
    return level if level in ("info", "debug") else ""

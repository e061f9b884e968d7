"""Which backends the caller allows: argument > context manager > `set_backends` > environment.

All of them are read at every call, not at import. Reading takes well under a microsecond.
"""

from __future__ import annotations

import contextvars
import functools
import os
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import NamedTuple

import torch

from undivided._bounded import Bounded
from undivided.arguments.graphs import outside_of_graphs
from undivided.arguments.signature import checked_call
from undivided.backends import names_and_families
from undivided.errors import InputError, did_you_mean
from undivided.selection import switches as _sdp_switches


class Policy(NamedTuple):
    """The backends that the caller allows, and other settings.

    forced: the backend or family that must run, or None. An explicit request never falls back.
    allowed: names or families, in the order to try them, or None for all in the default order.
    allowed_by: the setting that `allowed` is from.
    disabled: (name or family, the setting) pairs that must not run.
    deterministic: results must repeat bit for bit.
    batch_invariant: a row's result depends on its own query, keys and values only.
    log: "" (nothing), "info" (each new Decision) or "debug" (and its reasons).
    """

    forced: str | None = None
    allowed: tuple[str, ...] | None = None
    allowed_by: str = ""
    disabled: tuple[tuple[str, str], ...] = ()
    deterministic: bool = False
    batch_invariant: bool = False
    log: str = ""


class _Setting(NamedTuple):
    """What `set_backends` and the enclosing `use_backends` blocks allow together."""

    allowed: tuple[str, ...] | None = None
    allowed_by: str = ""
    disabled: tuple[tuple[str, str], ...] = ()
    batch_invariant: bool | None = None


class _Block(NamedTuple):
    """The setting of the innermost ``with`` block of this context, the enclosing block, and what has entered it."""

    setting: _Setting
    outer: _Block | None
    manager: use_backends


_process = _Setting()
_block: contextvars.ContextVar[_Block | None] = contextvars.ContextVar("undivided_backends", default=None)


_NAMED_ELSEWHERE = {"deterministic": ["each call has deterministic=; UNDIVIDED_DETERMINISTIC=1 is for all of them"]}
"""Hints for arguments that the functions below do not have."""


@functools.partial(checked_call, other_names=_NAMED_ELSEWHERE)
def set_backends(*names: str, disable: Sequence[str] = (), batch_invariant: bool | None = None) -> None:
    """Allow only these backends or families, in this order, for the whole process.

    It replaces the setting of an earlier call; with no arguments every backend is allowed again. A `use_backends` block
    replaces it within the block; `use_backends.disable` restricts it further.

    Args:
        names: backend names ("reference", "torch_flash", ...) or families ("math", "flash", "fused", ...), str; none
            for all.
        disable: backends or families that must not run, str.
        batch_invariant: the default of `attention`'s argument; None follows UNDIVIDED_BATCH_INVARIANT.

    Raises:
        InputError: a name that no backend or family has, or batch_invariant is not a bool. The setting is then
            unchanged.

    >>> import torch, undivided
    >>> q = torch.randn(1, 8, 2, 16)
    >>> undivided.set_backends("reference")
    >>> undivided.explain(q, q, q, layout="bshd").backend.name
    'reference'
    >>> undivided.set_backends()
    """
    global _process
    if not isinstance(disable, list | tuple | set | frozenset):
        hint = f"disable=[{disable!r}]" if isinstance(disable, str) else None
        raise InputError("disable", "be a list of names", repr(disable), hint)
    disabled = tuple((name, "set_backends(disable=...)") for name in _check_names(disable, "disable"))
    check_flag("batch_invariant", batch_invariant)
    _process = _Setting(_check_names(names) or None, "set_backends", disabled, batch_invariant)


@functools.partial(
    checked_call,
    other_names={
        "disable": ["use_backends.disable(names) forbids backends in a block"],
        "batch_invariant": ["set_backends and each call have this argument"],
        **_NAMED_ELSEWHERE,
    },
)
class use_backends:
    """Allow only these backends or families, in this order, in a ``with`` block.

    With no names every backend is allowed again. `use_backends.disable` forbids some and leaves the others. The block
    holds in its own thread or task; `set_backends` is for the whole process.

    Args:
        names: backend names ("reference", "torch_flash", ...) or families ("math", "flash", "fused", ...), str; none
            for all.

    Returns:
        A context manager that can be entered any number of times. It ends its own block, also if a block that was
        entered later is still open, as those of generators may be.

    Raises:
        InputError: a name that no backend or family has.

    >>> import torch, undivided
    >>> q = torch.randn(1, 8, 2, 16)
    >>> with undivided.use_backends("reference"):
    ...     undivided.explain(q, q, q, layout="bshd").backend.name
    'reference'
    """

    def __init__(self, *names: str) -> None:
        self._names = _check_names(names)
        self._disabled: tuple[str, ...] | None = None

    @classmethod
    def disable(cls, *names: str) -> use_backends:
        """Forbid these backends or families in a ``with`` block, in addition to the setting around it.

        Args:
            names: as for `use_backends`.

        Returns:
            A context manager, as of `use_backends`.

        Raises:
            InputError: a name that no backend or family has.

        >>> import torch, undivided
        >>> q = torch.randn(1, 8, 2, 16)
        >>> with undivided.use_backends.disable("native"):
        ...     undivided.explain(q, q, q, layout="bshd").reasons["native"][0]
        'switched off by use_backends.disable'
        """
        block = cls()
        block._disabled = _check_names(names)
        return block

    def _inside(self, outer: _Block | None) -> _Block:
        """A block of this manager inside of another one."""
        enclosing = _process if outer is None else outer.setting
        setting = _Setting(self._names or None, "use_backends", (), enclosing.batch_invariant)
        if self._disabled is not None:
            disabled = tuple((name, "use_backends.disable") for name in self._disabled)
            setting = enclosing._replace(disabled=enclosing.disabled + disabled)
        return _Block(setting, outer, self)

    def __enter__(self) -> use_backends:
        _block.set(self._inside(_block.get()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _block.set(_blocks_without(_block.get(), self))


def _blocks_without(block: _Block | None, manager: use_backends) -> _Block | None:
    """The blocks without the innermost one of a manager; all of them if it was entered in another thread or task."""
    inner = []
    rest = block
    while rest is not None and rest.manager is not manager:
        inner.append(rest.manager)
        rest = rest.outer
    if rest is None:
        return block
    outer = rest.outer
    for other in reversed(inner):
        outer = other._inside(outer)
    return outer


@outside_of_graphs
def _check_names(names: Sequence[str], argument: str = "backend") -> tuple[str, ...]:
    """The names; InputError unless each is a backend or a family."""
    known = names_and_families()
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise InputError(argument, f"be one of {', '.join(sorted(known))}", repr(name), _name_hint(name, known))
    return tuple(names)


_FAMILY_OF_SDP_BACKEND = {
    "MATH": "math",
    "FLASH_ATTENTION": "flash",
    "EFFICIENT_ATTENTION": "efficient",
    "CUDNN_ATTENTION": "fused",
}


def _name_hint(name: object, known: Iterable[str]) -> str | None:
    """A hint for a wrong name; None if there is none."""
    family = _FAMILY_OF_SDP_BACKEND.get(getattr(name, "name", ""))
    if family is not None:
        return f"{family!r} is the family of PyTorch's {name}"
    near = did_you_mean(name, known)
    if isinstance(name, list | tuple):
        several = "several: with undivided.use_backends('native', 'reference')"
        return several if near is None else f"{near} {several}"
    return near


# os.environ.get encodes and decodes at every call (1 us each, for ten variables). The encoded names are looked up in
# its inner dictionary instead; os.environ.get is the fallback.
_VARIABLES = (
    "UNDIVIDED_BACKENDS",
    "UNDIVIDED_DETERMINISTIC",
    "UNDIVIDED_BATCH_INVARIANT",
    "UNDIVIDED_LOG",
    "NVTE_FLASH_ATTN",
    "NVTE_FUSED_ATTN",
    "NVTE_UNFUSED_ATTN",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "NVTE_DEBUG",
    "NVTE_DEBUG_LEVEL",
)
_inner = getattr(os.environ, "_data", None)
_ENCODED = tuple(os.fsencode(name) if os.name == "posix" else name for name in _VARIABLES)

Environment = tuple[object, ...]


def environment() -> Environment:
    """The raw values of the variables that are read, for a dictionary key."""
    if _inner is not None:
        return () if _inner.keys().isdisjoint(_ENCODED) else tuple(map(_inner.get, _ENCODED))
    return tuple(map(os.environ.get, _VARIABLES))


def current_policy(
    backend: str | None = None,
    deterministic: bool | None = None,
    batch_invariant: bool | None = None,
    switches: str = "",
) -> Policy:
    """The policy of this call; `switches` are PyTorch's (see `switches.read`), for calls that depend on them."""
    if deterministic is None and torch._C._get_deterministic_algorithms():
        deterministic = True
    block = _block.get()
    setting, values = _process if block is None else block.setting, environment()
    if backend is None and deterministic is batch_invariant is None and not values and not switches:  # as in most calls
        return _plain_policy(setting)
    check_flag("deterministic", deterministic)
    check_flag("batch_invariant", batch_invariant)
    arguments = backend, deterministic, batch_invariant
    key = (*arguments, setting, values, switches)
    try:
        cached = _policies.get(key)
    except TypeError:  # such as a list; the check below names the argument
        cached = None
    if cached is None:
        cached = _policies[key] = _read_policy(*arguments, setting, switches)
    return cached


def check_backend(name: str) -> None:
    """InputError if it is not the name of a backend or family."""
    _check_names((name,))


def check_flag(argument: str, value: object) -> None:
    """InputError if it is not True, False or None."""
    if value is not None and value is not True and value is not False:
        raise InputError(argument, "be True, False or None", repr(value))


def _plain_policy(setting: _Setting) -> Policy:
    """The policy of a call that requests nothing, in an environment without variables of ours."""
    global _last_plain
    last = _last_plain
    if last is None or last[0] is not setting:
        last = _last_plain = setting, _read_policy(None, None, None, setting)
    return last[1]


_policies: Bounded[object, Policy] = Bounded(256)
_last_plain: tuple[_Setting, Policy] | None = None


def _read_policy(
    backend: str | None, deterministic: bool | None, batch_invariant: bool | None, setting: _Setting, switches: str = ""
) -> Policy:
    if backend is not None:
        check_backend(backend)
    disabled = list(setting.disabled)
    for variable, family in (("FLASH", "flash"), ("FUSED", "fused"), ("UNFUSED", "math")):
        if not _flag(f"NVTE_{variable}_ATTN", True):
            disabled.append((family, f"NVTE_{variable}_ATTN=0"))
    disabled += _sdp_switches.disabled(switches)
    allowed, allowed_by = setting.allowed, setting.allowed_by
    if allowed is None and (text := os.environ.get("UNDIVIDED_BACKENDS", "")).strip():
        allowed, allowed_by = _split_names(text), "UNDIVIDED_BACKENDS"
    if allowed is None and (order := _sdp_switches.order(switches)):
        allowed, allowed_by = order, "sdpa_kernel(set_priority=True)"
    if deterministic is None:
        allows_other = _flag("NVTE_ALLOW_NONDETERMINISTIC_ALGO", True)
        deterministic = _flag("UNDIVIDED_DETERMINISTIC", False) or not allows_other
    if batch_invariant is None:
        batch_invariant = setting.batch_invariant
    if batch_invariant is None:
        batch_invariant = _flag("UNDIVIDED_BATCH_INVARIANT", False)
    return Policy(backend, allowed, allowed_by, tuple(disabled), deterministic, batch_invariant, _log_level())


def _split_names(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        known = ", ".join(sorted(names_and_families()))
        raise InputError("UNDIVIDED_BACKENDS", f"name at least one of {known}", repr(text))
    return _check_names(names, "UNDIVIDED_BACKENDS")


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

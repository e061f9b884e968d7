"""The exceptions of the library, as a tree.

    ValueError
      InputError          an argument is wrong; the message has argument, value, limit and hint. From
                          scaled_dot_product_attention it is also of the type that PyTorch raises (mostly RuntimeError),
                          for a missing or unknown argument also a TypeError
        CacheFullError    a cache has no room for new tokens or sequences until others end
    RuntimeError
      NoBackendError      no allowed backend can run the problem; has the Decision with every reason

For wrong input the library raises no other exception, and it changes nothing before it raises one of these.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

__all__ = ["CacheFullError", "InputError", "NoBackendError"]


class Refusal(Protocol):
    """The part of an `undivided.Decision` that a `NoBackendError` needs."""

    @property
    def reasons(self) -> Mapping[str, tuple[str, ...]]:
        """The reasons of every backend, by backend name."""


class InputError(ValueError):
    """An argument is wrong. The message reads ``<argument> must <what>, got <value>``, then a HINT.

    Args:
        argument: name of the argument as the caller wrote it.
        must: what it must be or do, limit included.
        got: the value, or a short description of it.
        hint: the one step that fixes it, if there is one.

    >>> raise InputError("k", "have the head size of q (64)", "32")
    Traceback (most recent call last):
    undivided.errors.InputError: k must have the head size of q (64), got 32
    """

    def __init__(self, argument: str, must: str, got: object, hint: str | None = None) -> None:
        self.argument = argument
        self.hint = hint
        message = f"{argument} must {must}, got {got}"
        # not super().__init__: torch.compile cannot trace it, and would hide the message
        self.args = (message if hint is None else f"{message}\n  HINT: {hint}",)

    def as_also(self, kind: type[Exception], message: str | None = None) -> InputError:
        """The same error as one that ``except kind`` catches as well.

        Args:
            kind: the exception's second type, such as RuntimeError.
            message: PyTorch's message for the same mistake, added on a line of its own; None adds nothing.

        Returns:
            An `InputError` that is also a `kind`.
        """
        first, newline, hint = self.args[0].partition("\n")
        if message is not None:
            first += f"\n  PYTORCH: {message}"
        return _rebuild_input_error(first + newline + hint, self.argument, self.hint, kind, self._own_type())

    def __reduce__(self) -> tuple[object, ...]:
        own, bases = self._own_type(), type(self).__bases__
        kind = ValueError if type(self) is own else bases[-1]
        return (_rebuild_input_error, (self.args[0], self.argument, self.hint, kind, own))

    def _own_type(self) -> type[InputError]:
        return CacheFullError if isinstance(self, CacheFullError) else InputError


class CacheFullError(InputError):
    """A cache has no room for new tokens or a new sequence, and is unchanged. There may be room when others have ended.

    Raised for pages (`PagedKVCache.append`, `InferenceParams.pre_step`) and for the sequences of a batch
    (`max_batch_size`). A sequence that is too long by itself (`max_len`, `max_sequence_length`) is an `InputError`.

    Args:
        argument, must, got, hint: as in `InputError`.

    >>> import torch, undivided
    >>> cache = undivided.PagedKVCache(2, page_size=4, kv_heads=1, head_dim=8, batch=2, dtype=torch.float32)
    >>> new = torch.randn(2, 6, 1, 8)
    >>> try:
    ...     cache.append(new, new)
    ... except undivided.CacheFullError:
    ...     cache.append(new, new, lengths=[6, 0])              # the second sequence waits
    >>> cache.lengths, cache.free_pages
    ((6, 0), 0)
    """


def _rebuild_input_error(
    message: str, argument: str, hint: str | None, kind: Any = ValueError, own: Any = InputError
) -> InputError:
    combined: type[InputError] = own if kind is ValueError else _input_error_and(kind, own)
    error = combined.__new__(combined)
    error.args = (message,)
    error.argument, error.hint = argument, hint
    return error


@functools.cache
def _input_error_and(kind: Any, own: Any) -> Any:
    """A class that derives from InputError, or its own type, and from `kind`."""
    return type(own.__name__, (own, kind), {"__module__": __name__})


def did_you_mean(name: object, known: Iterable[str]) -> str | None:
    """A hint with the known name that is most similar to a wrong one; None if no name is similar.

    >>> did_you_mean("FlashAttn", ["native", "flash_attn"])
    "did you mean 'flash_attn'?"
    """
    near = nearest_name(name, known)
    return None if near is None else f"did you mean {near!r}?"


def nearest_name(name: object, known: Iterable[str], least: float = 0.6) -> str | None:
    """The known name that is most similar to a wrong one, whatever their case; None if no name is similar.

    least: the similarity from 0 to 1 (of `difflib`) that it must have.
    """
    in_lower_case = {other.lower(): other for other in known}
    near = difflib.get_close_matches(str(name).lower(), in_lower_case, n=1, cutoff=least)
    return in_lower_case[near[0]] if near else None


class NoBackendError(RuntimeError):
    """No allowed backend can run the problem. ``.decision`` has every backend's reasons.

    The message prints them; of a requested backend only its own, and which others could run.

    Args:
        decision: the `Decision`, in which no backend is chosen.
        message: the message; None prints the decision.

    >>> import torch, undivided
    >>> q = torch.randn(1, 4, 2, 8)
    >>> try:
    ...     undivided.attention(q, q, q, layout="bshd", backend="torch_efficient")
    ... except undivided.NoBackendError as error:
    ...     print(error.decision.reasons["torch_efficient"][0])
    device=cpu (runs on cuda)
    """

    def __init__(self, decision: Refusal, message: str | None = None) -> None:
        self.decision = decision
        super().__init__(str(decision) if message is None else message)

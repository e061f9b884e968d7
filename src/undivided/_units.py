"""Times and counts as text, with three digits and a unit."""

from __future__ import annotations

_CARRY = 0.9995
"""From this fraction of a larger unit on, three digits round up to that unit: 999.7 ms is ``1 s``."""


def duration(seconds: float) -> str:
    """A time with its unit.

    >>> duration(0.00123), duration(0.9997), duration(5400)
    ('1.23 ms', '1 s', '1.5 h')
    """
    for size, unit in ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms")):
        if seconds >= _CARRY * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def human(count: float, unit: str = "") -> str:
    """A count with a metric prefix and its unit.

    >>> human(56623104), human(3.1e11, "FLOP/s"), human(999_700, "B"), human(12, "B")
    ('56.6 M', '310 GFLOP/s', '1 MB', '12 B')
    """
    for size, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= _CARRY * size:
            return f"{count / size:.3g} {prefix}{unit}"
    return f"{count:.3g} {unit}".rstrip()

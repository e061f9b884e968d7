"""What the tests of running calls share."""

from __future__ import annotations

import pytest

from undivided.masks.normal_form import ranges


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Filled with an entry for each mask whose ranges are computed."""
    seen: list[object] = []
    build = ranges.build

    def counted(*arguments: object) -> object:
        seen.append(arguments[0])
        return build(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ranges, "build", counted)
    return seen

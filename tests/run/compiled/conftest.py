"""What the tests of torch.compile share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()

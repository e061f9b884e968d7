"""A process is killed while it trains; torchrun starts all ranks again, and they go on from the last checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from gloo_ranks import losses_of

EXAMPLE = "21_restart_from_a_checkpoint.py"


@pytest.mark.slow
def test_a_killed_rank_is_restarted_from_the_last_checkpoint_with_the_same_losses(tmp_path: Path) -> None:
    one = losses_of(EXAMPLE, 1)
    assert len(one) == 8
    arguments = ["--folder", str(tmp_path), "--kill-at", "5"]
    found = losses_of(EXAMPLE, 2, restarts=1, arguments=arguments)
    expected = one[:5] + one[4:]  # killed at step 5; the last checkpoint has 4 steps
    assert len(found) == len(expected)
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 5e-5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0002", "step-0004", "step-0006", "step-0008"]

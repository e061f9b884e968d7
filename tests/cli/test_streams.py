"""Standard streams that are closed or full, and terminals of no width."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from command_runs import command_line, refused

FULL = "/dev/full"


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """A command line, in which $U stands for the command."""
    given = {**os.environ, "U": f"{sys.executable} -m undivided"}
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, env=given, check=False)


@pytest.mark.skipif(os.name != "posix", reason="a POSIX shell closes the streams")
class TestStreams:
    def test_a_closed_output_ends_quietly(self) -> None:
        done = shell("$U explain >&-")
        assert (done.returncode, done.stderr) == (0, "")

    def test_a_closed_input_is_an_empty_one(self) -> None:
        done = shell("$U diagnose <&-")
        assert done.returncode == 2
        assert done.stderr.startswith("undivided: TEXT must be given as an argument or on standard input, got neither")

    @pytest.mark.skipif(not os.path.exists(FULL), reason="Linux has /dev/full")
    @pytest.mark.parametrize("words", ["--help", "explain"])
    def test_a_full_output_is_a_message(self, words: str) -> None:
        done = shell(f"$U {words} > {FULL}")
        assert done.returncode == 2
        assert done.stderr == "undivided: No space left on device\n"

    @pytest.mark.parametrize("words", ["--help", "explain --help"])
    def test_a_reader_of_the_help_that_leaves_is_no_error(self, words: str) -> None:
        """The exit code was 1, that of a wrong result."""
        done = shell(f"{{ $U {words}; echo $? >&2; }} | true")
        assert done.stderr in ("141\n", "0\n")  # 0 if all of it was written before


@pytest.mark.parametrize("columns", ["0", "00"])
def test_no_columns_are_no_width(columns: str) -> None:
    """Nothing was printed."""
    out = command_line("mask", "causal()", "--q-len", "4", COLUMNS=columns).stdout
    assert "■" in out or "#" in out
    assert "Usage" in command_line("--help", COLUMNS=columns).stdout
    assert "nothing" in command_line("nothing", COLUMNS=columns).stderr


def test_plans_of_too_many_ranks_are_refused() -> None:
    assert "--world must be at most 1024" in refused("plan", "8192", "--world", "1025")

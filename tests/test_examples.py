"""Every example, and every Python block of the README and of the documentation, runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked_processes
import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NUMBERS_ARE_TESTED = {
    "18_train_on_a_mesh": "tests/parallel/test_data_and_tensor_parallel.py",
    "20_hugging_face_over_ranks": "tests/integrations/ranks/test_transformers_ranks.py",
    "21_restart_from_a_checkpoint": "tests/parallel/test_restart.py",
    "22_trace_a_ring": "tests/context_parallel/test_ring_trace.py",
    "23_checkpoint_on_another_mesh": "tests/parallel/test_checkpoints.py",
}
"""Examples that start several processes, and run in a test of their numbers."""
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "index.md",
    *sorted((ROOT / "docs").glob("learn/*.md")),
    *sorted((ROOT / "docs").glob("how-to/*.md")),
]
BLOCK = re.compile(r"^```python\n(.*?)^```$\n*(?:^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


SLOW_EXAMPLES = {"11_sentence_embeddings", "16_speculative_decoding", "25_quality_of_quantised_caches"}


def _examples() -> Iterator[Any]:
    for path in EXAMPLES:
        if path.stem not in NUMBERS_ARE_TESTED:
            yield pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in SLOW_EXAMPLES))


@pytest.mark.parametrize("path", list(_examples()))
def test_example_runs(path: Path) -> None:
    done = forked_processes.run(path, folder=ROOT, warnings_are_errors=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout, "an example shows something"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page_runs_and_prints_what_it_shows(page: Path) -> None:
    """The Python blocks of a page, one after the other in one program; a text block after one is what it prints."""
    program, shown = [], []
    for code, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        program.append(f"print({MARK!r})\n{code}")
        shown.append(text)
    if not program:
        return
    done = forked_processes.run("\n".join(program), folder=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout.split(f"{MARK}\n")[1:]
    for code, expected, found in zip(program, shown, printed, strict=True):
        if expected:
            assert _trimmed(found) == _trimmed(expected), code


MARK = "-- next block --"


def _trimmed(text: str) -> list[str]:
    """Lines without trailing blanks, and without those of Gloo of PyTorch 2.10; versions of PyTorch are whatever they
    are."""
    lines = [line.rstrip() for line in text.strip("\n").splitlines() if not line.startswith("[Gloo] ")]
    return [re.sub(r"torch \d[\w.+]*", "torch X", line) for line in lines]


def test_examples_with_tests_of_their_numbers_run_there() -> None:
    for stem, test in NUMBERS_ARE_TESTED.items():
        assert f"{stem}.py" in (ROOT / test).read_text(encoding="utf-8")


def test_every_example_is_in_the_list_with_the_first_line_of_its_docstring() -> None:
    listed = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert EXAMPLES
    for path in EXAMPLES:
        title = path.read_text(encoding="utf-8").splitlines()[0].strip('"')
        assert f"| [{path.name}]({path.name}) | {title} |" in listed
    assert "(examples/README.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


SPAWNS = """
import os
from torch.multiprocessing import spawn
def run(rank, text):
    print(__name__, rank, text, os.getppid(), flush=True)
print("runs as", __name__, flush=True)
"""


def test_programs_that_spawn_processes_are_run_as_new_interpreters_would_run_them(tmp_path: Path) -> None:
    """Each process runs the program again, under another name; one that starts processes in turn is an error."""
    program = tmp_path / "program.py"
    program.write_text(f"{SPAWNS}\nif __name__ == '__main__':\n    spawn(run, ('text',), nprocs=2)\n")
    done = forked_processes.run(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("runs as __mp_main__") == done.stdout.count("text") == 2
    program.write_text(f"{SPAWNS}\nspawn(run, ('text',), nprocs=2)\n")
    done = forked_processes.run(program)
    assert done.returncode
    assert "has finished its bootstrapping phase" in done.stderr
    program.write_text(f"{SPAWNS}\nif __name__ == '__main__':\n    spawn(lambda rank: None, nprocs=2)\n")
    done = forked_processes.run(program)
    assert done.returncode
    assert "ickle" in done.stderr

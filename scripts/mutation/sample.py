"""A random sample of mutants of some folders, each run with the tests that call the changed function.

`scripts/mutate sample` runs it in build/mutation, where mutmut's packages are. It collects the tests once and forks for
each mutant; mutmut itself starts the tests anew, which takes seconds per mutant. A mutant is killed if a test fails, or
does not end. It survives if none fails, or if its tests take more than --seconds of the processor: a survivor may
therefore be undecided. Limits are of the processor's time, so that a busy machine does not change the score. Code that
runs when a module is imported is not mutated.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path

import mutmut.mutation.trampoline as trampoline
import pytest
from _pytest.runner import runtestprotocol
from forks import DEADLOCK, NO_TIME, failing_test, in_a_child
from mutmut.mutation.file_mutation import mutate_file_contents


def mutate(folders: Iterable[str]) -> list[str]:
    """Replace the files of these folders by ones that hold all of their mutants; returns the mutants' names."""
    names = []
    for path in sorted(path for folder in folders for path in Path("src/undivided", folder).rglob("*.py")):
        mutants = mutate_file_contents(str(path), path.read_text())
        path.write_text(mutants.code)
        module = ".".join(path.with_suffix("").relative_to("src").parts).removesuffix(".__init__")
        names += [f"{module}.{name}" for name in mutants.mutant_names]
    return names


def call_times(items: list[pytest.Item]) -> str:
    """JSON: of each test that passes, its processor time and the functions that it calls."""
    trampoline.set_mutant_under_test("stats")
    times, hits = [], set()
    trampoline.record_trampoline_hit = lambda name, caller=None: hits.add(name)
    for n, item in enumerate(items):
        hits.clear()
        begin = time.process_time()
        reports = runtestprotocol(item, log=False, nextitem=items[n + 1] if n + 1 < len(items) else None)
        if all(report.passed for report in reports):
            times.append((n, time.process_time() - begin, sorted(hits)))
    return json.dumps(times)


def failing_mutant_test(name: str, items: list[pytest.Item], seconds: float) -> str:
    """`failing_test` on a mutant."""
    trampoline.set_mutant_under_test(name)
    return failing_test(items, seconds)


class Sample:
    """A pytest plugin that runs the sample in place of the tests."""

    def __init__(self, mutants: list[str], seconds: float) -> None:
        self.mutants, self.seconds = mutants, seconds

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Print each mutant on which no test fails, and the score."""
        text = in_a_child(lambda: call_times(session.items), DEADLOCK)
        assert text is not None, "the tests did not end"
        times = sorted(json.loads(text), key=lambda row: row[1])
        print(f"{len(times)} of {len(session.items)} tests pass", flush=True)
        killed = 0
        for count, name in enumerate(self.mutants, 1):
            function = name.rpartition("__mutmut_")[0]
            items = [session.items[n] for n, _, hits in times if function in hits]
            failure = in_a_child(lambda: failing_mutant_test(name, items, self.seconds), 3 * self.seconds)  # noqa: B023
            killed += failure not in ("", NO_TIME)
            if failure in ("", NO_TIME):
                print(f"{'survived' if not failure else 'no time'} {name} ({len(items)} tests)", flush=True)
            if count % 20 == 0 or count == len(self.mutants):
                print(f"{count} mutants, {killed} killed ({killed / count:.1%})", flush=True)
        return True


def main() -> int:
    """Run a sample; returns pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", help="of src/undivided, for example request")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", metavar="MUTANT", help="these mutants in place of a random sample")
    parser.add_argument("--seconds", type=float, default=20, help="of the processor per mutant")
    options = parser.parse_args()
    settings = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["mutmut"]
    names = mutate(options.folders)
    chosen = options.only or random.Random(options.seed).sample(names, min(options.count, len(names)))
    print(f"{len(chosen)} of {len(names)} mutants, seed {options.seed}", flush=True)
    arguments = ["-q", *settings["pytest_add_cli_args"], *settings["pytest_add_cli_args_test_selection"]]
    return int(pytest.main(arguments, plugins=[Sample(chosen, options.seconds)]))


if __name__ == "__main__":
    sys.exit(main())

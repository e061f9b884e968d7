"""Processes of the start method spawn that are forked, after all that spawn does but the start of an interpreter.

A program that starts four processes imports torch five times, seconds each. These processes are forked from the
program, and otherwise start as spawned ones: the program runs again in each as `__mp_main__`, and their targets and
arguments are pickled.
"""

from __future__ import annotations

import io
import multiprocessing
import pickle
import sys
import traceback
import types
from multiprocessing import context, popen_fork, reduction, spawn
from multiprocessing.process import current_process
from typing import Any


def install() -> None:
    """Make all processes of the start method spawn, which this process starts from now on, quick ones."""
    if "fork" in multiprocessing.get_all_start_methods():
        contexts: Any = vars(context)["_concrete_contexts"]
        contexts["spawn"] = _Context()


class _Pickled:
    """What spawn writes to a new interpreter, and what the interpreter does with it."""

    def __init__(self, process: Any, popen: Any) -> None:
        self._written = io.BytesIO()
        context.set_spawning_popen(popen)
        try:
            reduction.dump(spawn.get_preparation_data(process._name), self._written)
            reduction.dump(process, self._written)
        finally:
            context.set_spawning_popen(None)
        self._written.seek(0)

    def _bootstrap(self, parent_sentinel: int) -> Any:
        sys.modules["__main__"] = types.ModuleType("__main__")  # else it would not run again
        this: Any = current_process()
        this._inheriting = True
        try:
            spawn.prepare(pickle.load(self._written))
            process = pickle.load(self._written)
        except Exception:
            traceback.print_exc()
            return 1
        finally:
            del this._inheriting
        return process._bootstrap(parent_sentinel)


class _Popen(popen_fork.Popen):
    method = "spawn"

    def duplicate_for_child(self, number: int) -> int:
        """The number of an open file in the child, which has the same."""
        return number

    def _launch(self, process: Any) -> None:
        super()._launch(_Pickled(process, self))  # type: ignore[misc]


class _Process(context.SpawnProcess):
    @staticmethod
    def _Popen(process: Any) -> Any:
        return _Popen(process)


class _Context(context.SpawnContext):
    Process = _Process

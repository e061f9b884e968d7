"""The command `undivided`: a package of its own, because importing `undivided` imports PyTorch, which takes seconds."""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130
"""`undivided.cli._exit_codes.INTERRUPTED`, which cannot be imported before PyTorch."""


def main() -> None:
    """Run the command line. Ctrl-C during the imports ends the process: a library may swallow KeyboardInterrupt."""
    takes_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else the shell ignores them
    if takes_interrupts:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from undivided.cli.main import main as run

    if takes_interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()

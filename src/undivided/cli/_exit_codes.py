"""Exit codes that several modules of the command line need; it imports nothing optional."""

from __future__ import annotations

INTERRUPTED = 130
"""After Ctrl-C: 128 and the number of the signal, as in a shell."""

BROKEN_PIPE = 141
"""After the reader of the output has ended: 128 and the number of SIGPIPE."""

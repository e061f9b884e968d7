"""The commands of ``undivided``, one per file."""

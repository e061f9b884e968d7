"""The command line: ``undivided demo``, ``doctor``, ``explain``, ``verify``, ``mask``."""

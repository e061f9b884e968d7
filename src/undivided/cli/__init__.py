"""The command line ``undivided``; `undivided.cli.commands` has one file per command."""

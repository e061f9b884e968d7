"""``python -m undivided.cli``: the same as the command ``undivided``."""

from undivided.cli.main import main

if __name__ == "__main__":
    main()

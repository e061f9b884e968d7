"""``python -m undivided.diagnosis``: print docs/troubleshooting.md."""

from undivided.diagnosis._page import page

print(page(), end="")

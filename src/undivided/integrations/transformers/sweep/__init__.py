"""Every architecture of the installed transformers, tiny and with random weights, against eager attention.

``python -m undivided.integrations.transformers.sweep`` compares all of them and writes the table of
``docs/reference/hugging-face.md``; with names of model types it compares these alone.

    _models.py    tiny configurations and models
    _inputs.py    inputs for a model whose signature alone is known
    _compare.py   outputs and gradients against eager, case by case
    _known.py     what single architectures need, and why some differ
    _table.py     the page
"""

from __future__ import annotations

from undivided.integrations.transformers.sweep._compare import Outcome, compare

__all__ = ["Outcome", "compare"]

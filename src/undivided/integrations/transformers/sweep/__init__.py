"""Comparison of every architecture of the installed transformers, tiny and with random weights, with eager attention.

``python -m undivided.integrations.transformers.sweep`` compares all of them and writes the table of
``docs/reference/hugging-face.md``; with names of model types it compares only these.

    _models.py    tiny configurations and models
    _inputs.py    inputs for a model, from its signature
    _compare.py   outputs and gradients compared with eager, case by case
    _known.py     settings of single architectures, and why some differ
    _table.py     the page
"""

from __future__ import annotations

from undivided.integrations.transformers.sweep._compare import ModelOutcome, compare

__all__ = ["ModelOutcome", "compare"]

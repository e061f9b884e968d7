"""Names that differ between versions of transformers."""

from __future__ import annotations

import inspect

from torch import nn


def cache_name(model: nn.Module) -> str:
    """The name of a model's argument and result for its cache: "cache" from transformers 5.24 on.

    Before, it is "past_key_values", which 5.24 still accepts with a warning.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

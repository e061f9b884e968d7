"""``python -m undivided.integrations.transformers.sweep``: compare architectures, and write the page."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from undivided.integrations.transformers import register
from undivided.integrations.transformers.sweep import _compare, _table


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the architectures, and print one line for each."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    parser = argparse.ArgumentParser(prog="python -m undivided.integrations.transformers.sweep", description=__doc__)
    parser.add_argument("types", nargs="*", help="model types; all if none is given")
    parser.add_argument("--write", type=Path, metavar="PATH", help="write the page to this file")
    options = parser.parse_args(arguments)
    register()
    transformers.logging.set_verbosity(logging.ERROR)
    outcomes_by_model = {}
    for name in options.types or sorted(CONFIG_MAPPING.keys()):
        outcomes_by_model[name] = outcomes = _compare.compare(name)
        states = ", ".join(f"{case or 'build'} {one.state}" for case, one in outcomes.items())
        reason = _table.explanation(name, outcomes) if _table.kind(outcomes) == "unequal" else ""
        print(f"{name}: {states}" + (f" ({reason})" if reason else ""), flush=True)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0]}
    limits = {"tolerance": f"{_compare.TOLERANCE:.0e}", "exact": f"{_compare.EXACT:.0e}"}
    text = _table.page(outcomes_by_model, versions, limits)
    if options.write:
        options.write.write_text(text)
    print(text[text.index("| architectures") : text.index("## ")].strip())


if __name__ == "__main__":
    main()

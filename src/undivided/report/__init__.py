"""The report: one HTML file with the machine, its backends, a verification, benchmarks and the mask explorer.

page        the file, from its values               values      the values, measured on this machine
plots       charts of a benchmark report            chart_data  the numbers that the charts draw
compare     two benchmark reports, beyond noise
mask_explorer/, report.html.jinja, report.css       what the file contains
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["EXPLORER", "EXPLORER_SCRIPTS"]

EXPLORER = Path(__file__).parent / "mask_explorer"
"""The folder of the mask explorer, which Node.js can require."""
EXPLORER_SCRIPTS = tuple(
    EXPLORER / f"{name}.js" for name in ("grammar", "masks", "sizes", "ranges", "readings", "explorer")
)
"""Its scripts, in the order in which a page loads them."""

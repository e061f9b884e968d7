"""The table of speed in README: undisturbed lines of the reports in ``benchmarks/``, and nothing else."""

from __future__ import annotations

import re
from typing import Any

from plots import ratio, read_cases

REPORTS = {
    "Granite Rapids, AMX": "2026-11-22-native-granite-rapids-amx.json",
    "Zen 5, AVX-512": "2026-11-23-native-zen5-avx512-bf16.json",
}
ROWS = {
    "forward, 8192 tokens, full": "{}-d128-8192-full",
    "forward, 8192 tokens, causal": "{}-d128-8192-causal",
    "backward, 2048 tokens, causal": "{}-d128-2048-causal-backward",
    "sliding window of 256 in 8192 tokens; PyTorch has a dense mask": "{}-window256-8192",
    "packed documents of 64 to 512 tokens; PyTorch is called once per document": "{}-documents-64-512",
    "decoding, 32 query heads on 8, 16k keys, batch 8": "{}-bhsd-batch8",
}
DTYPES = ("fp32", "bf16")


def _cell(cases: dict[str, dict[str, Any]], name: str) -> str:
    """Times SDPA with two digits; a dash if the machine was disturbed."""
    case = cases[name]
    if case.get("rate", {}).get("contended"):
        return "-"
    value = ratio(case)
    assert value is not None, name
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"


def readme(text: str) -> str:
    """README with its table of speed."""
    reports = [{case["name"]: case for case in read_cases(report)} for report in REPORTS.values()]
    head = [f"{machine}, {dtype}" for machine in REPORTS for dtype in DTYPES]
    lines = [f"| | {' | '.join(head)} |", f"|---|{'--:|' * len(head)}"]
    for label, name in ROWS.items():
        cells = [_cell(cases, name.format(dtype)) for cases in reports for dtype in DTYPES]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    table = "\n".join(lines)
    result, count = re.subn(r"(<!-- speed -->\n).*?(\n<!-- /speed -->)", rf"\g<1>{table}\g<2>", text, flags=re.DOTALL)
    assert count == 1
    return result

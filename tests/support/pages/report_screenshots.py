"""Screenshots of the report; scripts/screenshots runs it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from browser import chromium, missing

ROOT = Path(__file__).resolve().parents[3]

PARTS = ("benchmarks", "masks")
"""The parts of the report that pages of the documentation show."""


def main() -> None:
    """Write the pictures to docs/images."""
    if why := missing():
        raise SystemExit(f"undivided: {why}")
    images = ROOT / "docs" / "images"
    images.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        subprocess.run([sys.executable, "-m", "undivided", "report", "--out", str(page), *sys.argv[1:]], check=True)
        with chromium(1200, 900, False) as browser:
            browser.get(page.as_uri())
            for part in PARTS:
                script = "const e = document.getElementById(arguments[0]); if (e) e.scrollIntoView(); return !!e"
                if browser.execute_script(script, part):
                    path = images / f"report-{part}-light.png"
                    browser.save_screenshot(str(path))
                    print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()

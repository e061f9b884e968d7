"""Screenshots of the report; scripts/screenshots runs it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from browser import chromium, missing

ROOT = Path(__file__).resolve().parents[2]

SHOTS = {"light": (1200, 900, False), "dark": (1200, 900, True), "phone": (390, 844, False)}


def main() -> None:
    """Write the pictures to docs/images."""
    if why := missing():
        raise SystemExit(f"undivided: {why}")
    images = ROOT / "docs" / "images"
    images.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        subprocess.run([sys.executable, "-m", "undivided", "report", "--out", str(page), *sys.argv[1:]], check=True)
        for name, (width, height, dark) in SHOTS.items():
            with chromium(width, height, dark) as browser:
                browser.get(page.as_uri())
                for part in ("machine", "benchmarks", "masks"):
                    found = browser.execute_script(
                        "const e = document.getElementById(arguments[0]); if (e) e.scrollIntoView(); return !!e", part
                    )
                    if found and (part == "masks" or name == "light"):
                        path = images / f"report-{part}-{name}.png"
                        browser.save_screenshot(str(path))
                        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()

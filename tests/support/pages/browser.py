"""A headless Chromium for tests of pages, and axe-core if Node.js finds it."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip


def missing() -> str:
    """Why pages cannot be tested here; empty if they can."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed: pip install selenium"
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        return "chromium is not installed: apt-get install chromium chromium-driver"
    return ""


@contextmanager
def chromium(width: int = 1200, height: int = 900, dark: bool = False) -> Iterator[Any]:
    """A browser whose page has this size and colour scheme, as a selenium driver."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = str(shutil.which("chromium"))
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))
        try:
            metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
            yield driver
        finally:
            driver.quit()


def axe() -> Path | None:
    """The script of axe-core in a folder where Node.js looks for packages; None if there is none."""
    if shutil.which("node") is None:
        return None
    program = "try { console.log(require.resolve('axe-core/axe.min.js')) } catch { }"
    found = subprocess.run(["node", "-e", program], capture_output=True, text=True).stdout.strip()
    if not found and shutil.which("npm"):
        root = subprocess.run(["npm", "root", "-g"], capture_output=True, text=True).stdout.strip()
        found = f"{root}/axe-core/axe.min.js"
    return Path(found) if found and Path(found).is_file() else None

"""A page in headless Chromium, as wide as a phone and without a network."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from python_tests import processes

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_SIZES = """<script>window.addEventListener('load', () => {
  const sizes = [...document.querySelectorAll('svg')].map(i => i.getBoundingClientRect().width);
  const wide = document.documentElement.scrollWidth > window.innerWidth;
  document.body.setAttribute('data-sizes', JSON.stringify([sizes, wide]));
});</script>"""


def loaded(path: Path, scratch: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """The page as Chromium has it once its scripts ran, on stdout, and its console on stderr.

    Skips the test where there is no Chromium.
    """
    browser = next(filter(None, map(shutil.which, _NAMES)), None)
    if browser is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    return processes.run(
        [
            *(browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=500,900"),
            *("--proxy-server=127.0.0.1:9", "--enable-logging=stderr", "--dump-dom"),
            *(f"--user-data-dir={scratch / 'profile'}", "--virtual-time-budget=5000", *flags),
            path.as_uri(),
        ],
        check=True,
    )


def assert_shown(path: Path, scratch: Path) -> int:
    """Every figure is there, no console error, nothing wider than the screen; returns how many.

    Skips the test where there is no Chromium.
    """
    page = path.read_text(encoding="utf-8")
    sized = scratch / "with_sizes.html"
    sized.write_text(page.replace("</body>", _SIZES + "</body>"))
    run = loaded(sized, scratch)
    found = re.search(r'data-sizes="([^"]*)"', run.stdout)
    assert found is not None, run.stderr[-2000:]
    sizes, wide = json.loads(found[1].replace("&quot;", '"'))
    assert len(sizes) == page.count("<svg") > 0 and min(sizes) > 100
    assert not wide, "the page is wider than the screen"
    assert "CONSOLE" not in run.stderr
    return len(sizes)

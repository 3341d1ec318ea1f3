"""Makes the README's images again from a finished demonstration (`make demo`).

    .venv/bin/python tools/make_screenshots.py runs/smear-demo

Needs playwright and Debian's chromium. Writes docs/images/*.webp.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parents[1] / "docs" / "images"
CHROMIUM = "/usr/bin/chromium"
PORT = 8611
MAX_BYTES = 150_000


def main(run: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        save_image(photograph_report(browser, run / "report.html"), "report")
        with serve_bundle(run / "edge"):
            save_image(photograph_slide(browser, sorted((run / "edge" / "slide").glob("*.png"))), "slide")
        browser.close()


def photograph_report(browser: Any, page_path: Path) -> bytes:
    """The top of a run's report: scores, and what each site sees."""
    page = browser.new_page(viewport={"width": 1200, "height": 910}, color_scheme="light")
    page.goto(page_path.resolve().as_uri())
    return bytes(page.screenshot())


def photograph_slide(browser: Any, fields: list[Path]) -> bytes:
    """The lab's page after it has read all fields of a slide; it shows the field with the most flagged cells."""
    page = browser.new_page(viewport={"width": 1360, "height": 1031}, color_scheme="light")
    page.goto(f"http://127.0.0.1:{PORT}/")
    page.wait_for_selector("#facts dt", state="attached")
    page.set_input_files("#files", fields)
    page.wait_for_selector("#list li")
    page.wait_for_selector("#list .busy", state="detached", timeout=300_000)
    page.wait_for_selector("#slide[aria-busy=false]")
    num_flagged = [int(text.split()[1]) for text in page.locator("#list .counts").all_inner_texts()]
    page.locator("#list .pick").nth(num_flagged.index(max(num_flagged))).click()
    page.wait_for_timeout(1000)  # until the field is drawn
    page.evaluate("scrollTo(0, 0)")
    return bytes(page.screenshot())


@contextmanager
def serve_bundle(edge: Path) -> Iterator[None]:
    environment = os.environ | {"HEMOFED_TRUST": str((edge / "trust.json").resolve())}
    command = [sys.executable, "-m", "hemofed", "edge", "serve", str(edge / "bundle"), "--port", str(PORT)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout
        next(line for line in service.stdout if str(PORT) in line)
        try:
            yield
        finally:
            service.terminate()


def save_image(png: bytes, name: str) -> None:
    path = IMAGES / f"{name}.webp"
    path.parent.mkdir(exist_ok=True)
    Image.open(io.BytesIO(png)).convert("RGB").save(path, quality=80, method=6)
    if path.stat().st_size > MAX_BYTES:
        raise SystemExit(f"{path} has {path.stat().st_size:,} bytes; at most {MAX_BYTES:,} are allowed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

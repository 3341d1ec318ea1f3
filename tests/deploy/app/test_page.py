"""The bedside page in a browser."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploy.app.handlers import EdgeHandlers, SlideCountsRequest
from deploy.bundle.operating_points import ModelCalibration
from deploy.imaging.images import InputImage, read_image_bytes
from deploy.inference.local_calibration import LocalCalibration
from deploy.inference.runtime import BundleRuntime
from deploy.slide.reader import ImageResult, SlideReader, SlideResult, summarize_slide
from tests.conftest import REAL_CELLS, needs_real_cells
from tests.support.dicom_files import file as dicom
from tests.support.dicom_files import image as dicom_image

Visit = Callable[..., Any]


def add(page: Any, paths: list[Path]) -> None:
    page.set_input_files("#files", paths)
    settled(page)


def settled(page: Any) -> None:
    page.wait_for_selector("#list li")
    page.wait_for_selector("#list .busy", state="detached")
    judged(page)


def judged(page: Any) -> None:
    """The result belongs to what is shown. ("networkidle" is over once the page is loaded: it waits for no later request.)"""
    page.wait_for_selector("#slide[aria-busy=false]")


def rows(page: Any) -> dict[str, str]:
    return {row.locator("th").inner_text(): row.locator("td").inner_text() for row in page.locator("#rows tr").all()}


def counts(page: Any) -> list[str]:
    return [text.removesuffix(" flagged").strip() for text in page.locator("#list .counts").all_text_contents()]


def readings(paths: list[Path], runtime: BundleRuntime, at: int | None = None) -> list[ImageResult]:
    point = runtime.calibration.find_point() if at is None else runtime.calibration.sorted_points[at]
    return [
        SlideReader(runtime, point).read_image(picture)
        for path in paths
        for picture in read_image_bytes(path.read_bytes(), path.name)
    ]


def expected(found: list[ImageResult], runtime: BundleRuntime, at: int | None = None) -> SlideResult:
    point = runtime.calibration.find_point() if at is None else runtime.calibration.sorted_points[at]
    return summarize_slide(found, runtime, point)


def same(page: Any, found: list[ImageResult], slide: SlideResult) -> None:
    """What the page shows is what Python computed."""
    each = [(sum(c.is_flagged for c in r.cells), sum(c.is_counted for c in r.cells)) for r in found]
    assert counts(page) == [f"⚑ {flagged} of {counted}" for flagged, counted in each]
    shown = rows(page)
    assert shown["cells found"] == f"{slide.num_found:,}"
    assert shown["counted"].startswith(f"{slide.estimate.num_counted:,} ")
    assert shown["called schistocyte"].startswith(f"{slide.estimate.num_flagged:,} ")
    title = page.inner_text("#verdict .large").replace("\xa0", " ")
    assert slide.estimate.verdict.split()[0].capitalize() in title
    for why, n in slide.excluded.items():
        assert shown[f"not counted: {why}"] == f"{n:,}"


def test_two_fields_are_read_and_the_slider_decides_anew(
    visit: Visit, files: list[Path], runtime: BundleRuntime
) -> None:
    page = visit()
    assert page.is_visible("text=Research use only, not a medical device")
    add(page, files)
    first = readings(files, runtime)
    same(page, first, expected(first, runtime))
    steps = runtime.calibration.sorted_points
    flagged = {counts(page)[0]}
    for at in (0, len(steps) // 2, len(steps) - 1):
        page.locator("#slider").fill(str(at))
        judged(page)
        found = readings(files, runtime, at)
        same(page, found, expected(found, runtime, at))
        flagged.add(counts(page)[0])
    assert len(flagged) > 2, "the slider changes what is flagged"
    page.click("#default")
    judged(page)
    same(page, first, expected(first, runtime))


def test_the_interval_stands_where_the_service_says(visit: Visit, files: list[Path], runtime: BundleRuntime) -> None:
    page = visit()
    add(page, files)
    verdict = expected(readings(files, runtime), runtime).estimate
    if verdict.prevalence is None or verdict.prevalence_low is None or verdict.prevalence_high is None:
        assert page.locator("#interval svg").count() == 0
        return
    words = page.inner_text("#interval strong").replace("\xa0", " ")
    assert (
        words
        == f"{100 * verdict.prevalence:.1f} % (95 %: {100 * verdict.prevalence_low:.1f} % to {100 * verdict.prevalence_high:.1f} %)"
    )


def test_a_broken_file_says_why_and_the_others_stay(
    visit: Visit, files: list[Path], runtime: BundleRuntime, tmp_path: Path
) -> None:
    broken = tmp_path / "<img src=x onerror=alert(1)>.jpg"
    broken.write_bytes(b"\xff\xd8\xff broken")
    page = visit()
    add(page, [files[0], broken, files[1]])
    assert page.inner_text("#list .failed .name") == broken.name
    assert "save it again as PNG, JPEG, TIFF, BMP or DICOM" in page.inner_text("#list .failed .error")
    found = readings(files, runtime)
    same(page, found, expected(found, runtime))
    assert "1 of 3 pictures could not be read" in page.inner_text("#warnings")
    page.click("#list .failed .remove")
    judged(page)
    assert page.locator("#list .failed").count() == 0
    assert "could not be read" not in page.inner_text("#warnings")


def test_a_service_that_is_gone_is_told_and_asked_again(
    visit: Visit, files: list[Path], runtime: BundleRuntime
) -> None:
    page = visit()
    page.route("**/api/read*", lambda route: route.abort())
    page.set_input_files("#files", files)
    settled(page)
    assert page.inner_text("#waiting") == "None of these pictures could be read"
    assert all("hemofed edge serve" in text for text in page.locator("#list .error").all_text_contents())
    page.unroute("**/api/read*")
    for _ in files:
        page.locator("#list button:has-text('Try again')").first.click()
        settled(page)
    found = readings(files, runtime)
    same(page, found, expected(found, runtime))


@pytest.mark.parametrize("positive", [None, "schistocyte"])
def test_a_model_that_nobody_measured_counts_and_does_not_judge(
    visit: Visit, files: list[Path], runtime: BundleRuntime, positive: str | None
) -> None:
    calibration = ModelCalibration(temperature=1, positive_class=positive, operating_points=(), measured_on="nothing")
    lab = LocalCalibration(
        bundle_digest=runtime.bundle.digest,
        precision="fp32",
        created="today",
        calibration=calibration,
        ood_reference=None,
    )
    plain = BundleRuntime(runtime.bundle, local_calibration=lab)
    page = visit(of=plain)
    add(page, files)
    counted = sum(c.is_counted for r in readings(files, plain) for c in r.cells)
    title = page.inner_text("#verdict .large")
    assert title == f"{counted} cells counted" if positive is None else title.endswith("Cannot decide")
    assert page.locator("#slider").count() == 0
    assert page.locator("#interval svg").count() == 0
    assert f"{counted} of 1,000" in page.inner_text("#enough")


def test_a_picture_counts_once_and_can_be_taken_out(
    visit: Visit, files: list[Path], runtime: BundleRuntime, tmp_path: Path
) -> None:
    twin = tmp_path / "copy.png"
    twin.write_bytes(files[0].read_bytes())
    page = visit()
    add(page, [*files, twin])
    assert "counted twice" in page.inner_text("#list .failed .error")
    page.click("#list .done:first-child .remove")
    judged(page)
    page.click("#list .failed .remove")
    judged(page)
    found = readings(files[1:], runtime)
    same(page, found, expected(found, runtime))
    page.on("dialog", lambda dialog: dialog.accept())
    page.click("#restart")
    judged(page)
    assert page.is_visible("#drop")
    assert page.inner_text("#verdict .large") == "No cells yet"


def test_frames_of_dicom_are_fields_that_are_drawn(
    visit: Visit, rendered: list[np.ndarray], runtime: BundleRuntime, tmp_path: Path
) -> None:
    path = tmp_path / "two.dcm"
    path.write_bytes(dicom(dicom_image(np.stack(rendered))))
    page = visit()
    add(page, [path])
    assert page.locator("#list .name").all_text_contents() == ["two.dcm#1", "two.dcm#2"]
    found = [
        SlideReader(runtime, runtime.calibration.find_point()).read_image(InputImage("a", pixels))
        for pixels in rendered
    ]
    same(page, found, expected(found, runtime))
    assert page.is_visible("#canvas")


def test_dropping_is_adding(visit: Visit, files: list[Path]) -> None:
    page = visit()
    data = list(files[0].read_bytes())
    drag = page.evaluate_handle(
        "data => { const all = new DataTransfer(); all.items.add(new File([new Uint8Array(data)], 'a.png')); return all; }",
        data,
    )
    page.dispatch_event("body", "drop", {"dataTransfer": drag})
    settled(page)
    assert page.locator("#list .name").all_text_contents() == ["a.png"]


def test_keys_alone_are_enough(visit: Visit, files: list[Path], runtime: BundleRuntime) -> None:
    page = visit()
    add(page, files)
    page.focus("#list .done:nth-child(2) .pick")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"#shown-title:has-text('{files[1].name}')")
    page.focus("#canvas")
    seen = set()
    for key in ("ArrowRight", "ArrowDown", "ArrowRight", "ArrowDown", "+", "ArrowLeft", "ArrowUp"):
        page.keyboard.press(key)
        seen.add(page.inner_text("#told"))
    assert len(seen) > 1
    assert all(text.startswith(("Schistocyte", "Other", "Set apart", "Not answered for")) for text in seen), seen
    page.keyboard.press("Escape")
    assert page.inner_text("#told").startswith("Point at a cell")
    page.focus("#slider")
    before = counts(page)
    page.keyboard.press("End")
    judged(page)
    assert counts(page) != before
    assert page.locator("#default").is_enabled()


def test_a_title_never_stands_over_another_picture(visit: Visit, files: list[Path]) -> None:
    page = visit()
    add(page, files)
    page.wait_for_selector(f"#shown-title:has-text('{files[0].name}')")
    page.evaluate(
        """() => {
            const draw = window.createImageBitmap;
            window.slow = new Promise((go) => { window.go = go; });
            window.createImageBitmap = async (...args) => { await window.slow; return draw(...args); };
        }"""
    )
    page.click("#list .done:nth-child(2) .pick")

    def told() -> tuple[str, str]:
        return page.inner_text("#shown-title"), str(page.get_attribute("#canvas", "aria-label")).split(":")[0]

    assert told() == (files[0].name, files[0].name)
    page.evaluate("window.go()")
    page.wait_for_selector(f"#shown-title:has-text('{files[1].name}')")
    assert told() == (files[1].name, files[1].name)


def test_what_is_saved_belongs_together(visit: Visit, files: list[Path]) -> None:
    page = visit()
    add(page, files)
    held: list[Any] = []
    page.route("**/api/verdict", lambda route: held.append(route))
    with page.expect_request("**/api/verdict"):
        page.locator("#slider").fill("0")
    assert page.get_attribute("#slide", "aria-busy") == "true"
    assert page.is_disabled("#save"), "the flags are new, the verdict is not yet"
    held[0].continue_()
    judged(page)
    assert page.is_enabled("#save")


def test_a_tile_leads_to_its_cell(visit: Visit, files: list[Path], runtime: BundleRuntime) -> None:
    page = visit()
    add(page, files)
    found = readings(files, runtime)
    best = max((c for r in found for c in r.cells if c.is_counted), key=lambda c: c.probability or 0)
    home = next(r for r in found if best in r.cells)
    page.locator("#tiles button").first.click()
    page.wait_for_selector(f"#shown-title:has-text('{home.name}')")
    page.wait_for_selector("#told:has-text('probability')")
    assert page.evaluate("document.activeElement.id") == "canvas"


def test_the_saved_result_is_the_commands_own_kind(visit: Visit, files: list[Path], runtime: BundleRuntime) -> None:
    page = visit()
    add(page, files)
    page.locator("#slider").fill(str(len(runtime.calibration.sorted_points) - 1))
    judged(page)
    with page.expect_download() as waiting:
        page.click("#save")
    saved = json.loads(Path(waiting.value.path()).read_text())
    at = len(runtime.calibration.sorted_points) - 1
    found = readings(files, runtime, at)
    slide = expected(found, runtime, at).to_dict()
    assert saved["notice"] == "research use only, not a medical device"
    assert saved["bundle"]["digest"] == runtime.bundle.digest
    assert [image["cells"] for image in saved["images"]] == [r.to_dict()["cells"] for r in found]
    assert {k: saved["slide"][k] for k in slide if k != "drift"} == {k: v for k, v in slide.items() if k != "drift"}


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (1024, 600), (375, 700)])
def test_nothing_is_wider_than_the_screen(
    visit: Visit, files: list[Path], tmp_path: Path, width: int, height: int
) -> None:
    long = tmp_path / ("a-very-long-name" * 8 + ".jpg")
    long.write_bytes(b"\xff\xd8\xff broken")
    page = visit(width, height)
    add(page, [*files, long])
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.mouse.wheel(0, 5000)
    assert page.locator("#notice").is_visible()
    assert page.evaluate("document.querySelector('#notice').getBoundingClientRect().top") >= 0, (
        "the notice stays in sight"
    )


@needs_real_cells
def test_real_fields(visit: Visit, runtime: BundleRuntime) -> None:
    paths = [Path(str(REAL_CELLS)) / "chula_fields" / f"{n}.jpg" for n in (26, 552)]
    if not all(path.is_file() for path in paths):
        pytest.skip(f"{paths[0].parent} lacks 26.jpg or 552.jpg")
    page = visit()
    add(page, paths)
    found = readings(paths, runtime)
    same(page, found, expected(found, runtime))
    told = EdgeHandlers(runtime, 1).assess_counts(
        SlideCountsRequest(num_counted=expected(found, runtime).estimate.num_counted, num_flagged=0)
    )
    assert rows(page)["counted"] == dict(told["rows"])["counted"]

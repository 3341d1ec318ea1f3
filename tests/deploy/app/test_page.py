"""The edge app's page in a browser."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploy.app.handlers import EdgeHandlers, SlideRequest
from deploy.bundle.calibration import ModelCalibration
from deploy.imaging.images import read_image_bytes
from deploy.imaging.input_image import InputImage
from deploy.inference.local_calibration import LocalCalibration
from deploy.inference.runtime import BundleRuntime
from deploy.slide.image_result import ImageResult
from deploy.slide.json_format import SlideDocument
from deploy.slide.reader import SlideReader
from deploy.slide.slide_result import SlideResult
from tests.support.browser.axe import find_violations_by_layout
from tests.support.dicom_files import encode_dicom, make_dicom
from tests.support.edge.slides import count_slide
from tests.support.image_files import encode_image
from tests.support.markers import REAL_CELLS, needs_real_cells

OpenPage = Callable[..., Any]


def add_images(page: Any, paths: list[Path]) -> None:
    page.set_input_files("#files", paths)
    wait_for_images(page)


def wait_for_images(page: Any) -> None:
    page.wait_for_selector("#list li")
    page.wait_for_selector("#list .busy", state="detached")
    wait_for_result(page)


def wait_for_result(page: Any) -> None:
    """Waits until the result belongs to the shown images ("networkidle" does not wait for requests after loading)."""
    page.wait_for_selector("#slide[aria-busy=false]")


def read_rows(page: Any) -> dict[str, str]:
    return {row.locator("th").inner_text(): row.locator("td").inner_text() for row in page.locator("#rows tr").all()}


def read_counts(page: Any) -> list[str]:
    return [text.removesuffix(" flagged").strip() for text in page.locator("#list .counts").all_text_contents()]


def predict_images(paths: list[Path], runtime: BundleRuntime, at: int | None = None) -> list[ImageResult]:
    point = runtime.calibration.find_point() if at is None else runtime.calibration.sorted_points[at]
    return [
        SlideReader(runtime, point).read_image(picture)
        for path in paths
        for picture in read_image_bytes(path.read_bytes(), path.name)
    ]


def expected_slide(found: list[ImageResult], runtime: BundleRuntime, at: int | None = None) -> SlideResult:
    point = runtime.calibration.find_point() if at is None else runtime.calibration.sorted_points[at]
    return count_slide(found, runtime, point)


def assert_page_shows(page: Any, found: list[ImageResult], slide: SlideResult) -> None:
    """The page shows the numbers that Python computes."""
    each = [(sum(c.is_flagged for c in r.cells), sum(c.is_counted for c in r.cells)) for r in found]
    assert read_counts(page) == [f"⚑ {flagged} of {counted}" for flagged, counted in each]
    shown = read_rows(page)
    assert shown["cells found"] == f"{slide.counts.num_found:,}"
    assert shown["counted"].startswith(f"{slide.counts.num_counted:,} ")
    assert shown["called schistocyte"].startswith(f"{slide.counts.num_flagged:,} ")
    title = page.inner_text("#verdict .large").replace("\xa0", " ")
    assert slide.estimate.verdict.split()[0].capitalize() in title
    for why, n in slide.counts.excluded.items():
        assert shown[f"not counted: {why}"] == f"{n:,}"


def test_slider_updates_flags_and_result(open_page: OpenPage, field_paths: list[Path], runtime: BundleRuntime) -> None:
    page = open_page()
    assert page.is_visible("text=Research use only, not a medical device")
    add_images(page, field_paths)
    first = predict_images(field_paths, runtime)
    assert_page_shows(page, first, expected_slide(first, runtime))
    steps = runtime.calibration.sorted_points
    flagged = {read_counts(page)[0]}
    for at in (0, len(steps) // 2, len(steps) - 1):
        page.locator("#slider").fill(str(at))
        wait_for_result(page)
        found = predict_images(field_paths, runtime, at)
        assert_page_shows(page, found, expected_slide(found, runtime, at))
        flagged.add(read_counts(page)[0])
    assert len(flagged) > 2, "the slider changes what is flagged"
    page.click("#default")
    wait_for_result(page)
    assert_page_shows(page, first, expected_slide(first, runtime))


def test_interval_equals_that_of_the_service(
    open_page: OpenPage, field_paths: list[Path], runtime: BundleRuntime
) -> None:
    page = open_page()
    add_images(page, field_paths)
    verdict = expected_slide(predict_images(field_paths, runtime), runtime).estimate
    if verdict.prevalence is None or verdict.prevalence_low is None or verdict.prevalence_high is None:
        assert page.locator("#interval svg").count() == 0
        return
    words = page.inner_text("#interval strong").replace("\xa0", " ")
    assert (
        words
        == f"{100 * verdict.prevalence:.1f} % (95 %: {100 * verdict.prevalence_low:.1f} % to {100 * verdict.prevalence_high:.1f} %)"
    )


def test_unreadable_file_shows_its_reason(
    open_page: OpenPage, field_paths: list[Path], runtime: BundleRuntime, tmp_path: Path
) -> None:
    broken = tmp_path / "<img src=x onerror=alert(1)>.jpg"
    broken.write_bytes(b"\xff\xd8\xff broken")
    page = open_page()
    add_images(page, [field_paths[0], broken, field_paths[1]])
    assert page.inner_text("#list .failed .name") == broken.name
    assert "save it again as PNG, JPEG, TIFF, BMP or DICOM" in page.inner_text("#list .failed .error")
    found = predict_images(field_paths, runtime)
    assert_page_shows(page, found, expected_slide(found, runtime))
    assert "1 of 3 images could not be read" in page.inner_text("#warnings")
    page.click("#list .failed .remove")
    wait_for_result(page)
    assert page.locator("#list .failed").count() == 0
    assert "could not be read" not in page.inner_text("#warnings")


def test_retry_after_service_failure(open_page: OpenPage, field_paths: list[Path], runtime: BundleRuntime) -> None:
    page = open_page()
    page.route("**/api/images*", lambda route: route.abort())
    page.set_input_files("#files", field_paths)
    wait_for_images(page)
    assert page.inner_text("#waiting") == "None of these images could be read"
    assert all("hemofed edge serve" in text for text in page.locator("#list .error").all_text_contents())
    page.unroute("**/api/images*")
    for _ in field_paths:
        page.locator("#list button:has-text('Try again')").first.click()
        wait_for_images(page)
    found = predict_images(field_paths, runtime)
    assert_page_shows(page, found, expected_slide(found, runtime))


@pytest.mark.parametrize("positive", [None, "schistocyte"])
def test_model_without_operating_points_gives_counts_without_verdict(
    open_page: OpenPage, field_paths: list[Path], runtime: BundleRuntime, positive: str | None
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
    page = open_page(of=plain)
    add_images(page, field_paths)
    counted = sum(c.is_counted for r in predict_images(field_paths, plain) for c in r.cells)
    title = page.inner_text("#verdict .large")
    assert title == f"{counted} cells counted" if positive is None else title.endswith("Cannot decide")
    assert page.locator("#slider").count() == 0
    assert page.locator("#interval svg").count() == 0
    assert f"{counted} of 1,000" in page.inner_text("#cell-count")


def test_duplicate_image_counts_once_and_images_can_be_removed(
    open_page: OpenPage,
    field_paths: list[Path],
    rendered_fields: list[np.ndarray],
    runtime: BundleRuntime,
    tmp_path: Path,
) -> None:
    """The same pixels in another format, as `hemofed predict` recognizes them."""
    twin = tmp_path / "copy.bmp"
    twin.write_bytes(encode_image(rendered_fields[0], "BMP"))
    page = open_page()
    add_images(page, [*field_paths, twin])
    assert read_counts(page)[2] == f"same image as {field_paths[0].name}: not counted again"
    found = predict_images(field_paths, runtime)
    assert read_rows(page)["cells found"] == f"{sum(len(r.cells) for r in found):,}"
    note = f"{twin.name} shows the same image as {field_paths[0].name} and is not counted again"
    assert note in page.inner_text("#warnings").replace("Copy", "copy")
    tiles = page.locator("#tiles button").evaluate_all("all => all.map((tile) => tile.title)")
    assert tiles
    assert not any(twin.name in tile for tile in tiles)
    page.click("#list .done:first-child .remove")  # the copy counts now
    wait_for_result(page)
    found = [*predict_images(field_paths[1:], runtime), *predict_images([twin], runtime)]
    assert_page_shows(page, found, expected_slide(found, runtime))
    assert "not counted again" not in page.inner_text("#warnings")
    page.on("dialog", lambda dialog: dialog.accept())
    page.click("#restart")
    wait_for_result(page)
    assert page.is_visible("#drop")
    assert page.inner_text("#verdict .large") == "No cells yet"


def test_images_of_two_patients_have_no_result(
    open_page: OpenPage, rendered_fields: list[np.ndarray], runtime: BundleRuntime, tmp_path: Path
) -> None:
    for n, pixels in enumerate(rendered_fields):
        (tmp_path / f"{n}.dcm").write_bytes(encode_dicom(make_dicom(pixels[None], PatientID=f"patient {n}")))
    page = open_page()
    add_images(page, [tmp_path / "0.dcm", tmp_path / "1.dcm"])
    assert "several patients; give those of one slide at a time" in page.inner_text("#error")
    assert "1.dcm is not of the patient of 0.dcm" in page.inner_text("#verdict")
    assert page.is_hidden("#result"), "neither counts nor a file to save"
    page.click("#list .done:nth-child(2) .remove")
    wait_for_result(page)
    found = predict_images([tmp_path / "0.dcm"], runtime)
    assert_page_shows(page, found, expected_slide(found, runtime))
    assert page.is_hidden("#error")
    with page.expect_download() as waiting:
        page.click("#save")
    saved = Path(waiting.value.path()).read_text()
    assert found[0].identity is not None
    assert found[0].identity.patient not in saved
    assert "patient" not in json.loads(saved)["images"][0]


def test_dicom_frames_are_fields(
    open_page: OpenPage, rendered_fields: list[np.ndarray], runtime: BundleRuntime, tmp_path: Path
) -> None:
    path = tmp_path / "two.dcm"
    path.write_bytes(encode_dicom(make_dicom(np.stack(rendered_fields))))
    page = open_page()
    add_images(page, [path])
    assert page.locator("#list .name").all_text_contents() == ["two.dcm#1", "two.dcm#2"]
    found = [
        SlideReader(runtime, runtime.calibration.find_point()).read_image(InputImage("a", pixels))
        for pixels in rendered_fields
    ]
    assert_page_shows(page, found, expected_slide(found, runtime))
    assert page.is_visible("#canvas")


def test_drag_and_drop(open_page: OpenPage, field_paths: list[Path]) -> None:
    page = open_page()
    data = list(field_paths[0].read_bytes())
    drag = page.evaluate_handle(
        "data => { const all = new DataTransfer(); all.items.add(new File([new Uint8Array(data)], 'a.png')); return all; }",
        data,
    )
    page.dispatch_event("body", "drop", {"dataTransfer": drag})
    wait_for_images(page)
    assert page.locator("#list .name").all_text_contents() == ["a.png"]


def test_keyboard_navigation(open_page: OpenPage, field_paths: list[Path], runtime: BundleRuntime) -> None:
    page = open_page()
    add_images(page, field_paths)
    page.focus("#list .done:nth-child(2) .pick")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"#shown-title:has-text('{field_paths[1].name}')")
    page.focus("#canvas")
    seen = set()
    for key in ("ArrowRight", "ArrowDown", "ArrowRight", "ArrowDown", "+", "ArrowLeft", "ArrowUp"):
        page.keyboard.press(key)
        seen.add(page.inner_text("#cell-info"))
    assert len(seen) > 1
    assert all(text.startswith(("Schistocyte", "Other", "Excluded", "Rejected")) for text in seen), seen
    page.keyboard.press("Escape")
    assert page.inner_text("#cell-info").startswith("Point at a cell")
    page.focus("#slider")
    before = read_counts(page)
    page.keyboard.press("End")
    wait_for_result(page)
    assert read_counts(page) != before
    assert page.locator("#default").is_enabled()


def test_title_always_belongs_to_the_shown_image(open_page: OpenPage, field_paths: list[Path]) -> None:
    page = open_page()
    add_images(page, field_paths)
    page.wait_for_selector(f"#shown-title:has-text('{field_paths[0].name}')")
    page.evaluate(
        """() => {
            const draw = window.createImageBitmap;
            window.slow = new Promise((go) => { window.go = go; });
            window.createImageBitmap = async (...args) => { await window.slow; return draw(...args); };
        }"""
    )
    page.click("#list .done:nth-child(2) .pick")

    def read_titles() -> tuple[str, str]:
        return page.inner_text("#shown-title"), str(page.get_attribute("#canvas", "aria-label")).split(":")[0]

    assert read_titles() == (field_paths[0].name, field_paths[0].name)
    page.evaluate("window.go()")
    page.wait_for_selector(f"#shown-title:has-text('{field_paths[1].name}')")
    assert read_titles() == (field_paths[1].name, field_paths[1].name)


def test_save_is_disabled_while_the_result_is_pending(open_page: OpenPage, field_paths: list[Path]) -> None:
    page = open_page()
    add_images(page, field_paths)
    held: list[Any] = []
    page.route("**/api/slide", lambda route: held.append(route))
    with page.expect_request("**/api/slide"):
        page.locator("#slider").fill("0")
    assert page.get_attribute("#slide", "aria-busy") == "true"
    assert page.is_disabled("#save"), "the flags are new, the verdict is not yet"
    held[0].continue_()
    wait_for_result(page)
    assert page.is_enabled("#save")


def test_montage_tile_opens_its_cell(open_page: OpenPage, field_paths: list[Path], runtime: BundleRuntime) -> None:
    page = open_page()
    add_images(page, field_paths)
    found = predict_images(field_paths, runtime)
    best = max((c for r in found for c in r.cells if c.is_counted), key=lambda c: c.probability or 0)
    home = next(r for r in found if best in r.cells)
    page.locator("#tiles button").first.click()
    page.wait_for_selector(f"#shown-title:has-text('{home.name}')")
    page.wait_for_selector("#cell-info:has-text('probability')")
    assert page.evaluate("document.activeElement.id") == "canvas"


def test_saved_result_equals_predict_json(open_page: OpenPage, field_paths: list[Path], runtime: BundleRuntime) -> None:
    page = open_page()
    add_images(page, field_paths)
    page.locator("#slider").fill(str(len(runtime.calibration.sorted_points) - 1))
    wait_for_result(page)
    with page.expect_download() as waiting:
        page.click("#save")
    saved = json.loads(Path(waiting.value.path()).read_text())
    at = len(runtime.calibration.sorted_points) - 1
    found = predict_images(field_paths, runtime, at)
    slide = expected_slide(found, runtime, at).to_dict()
    assert SlideDocument.model_validate(saved).slide.num_found == slide["num_found"], "it has the documented format"
    assert [image["counts"] for image in saved["images"]] == [r.to_dict()["counts"] for r in found]
    assert saved["notice"] == "research use only, not a medical device"
    assert saved["bundle"]["digest"] == runtime.bundle.digest
    assert [image["cells"] for image in saved["images"]] == [r.to_dict()["cells"] for r in found]
    assert {k: saved["slide"][k] for k in slide} == slide


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (1024, 600), (375, 700)])
def test_layout_fits_the_screen(
    open_page: OpenPage, field_paths: list[Path], tmp_path: Path, width: int, height: int
) -> None:
    long = tmp_path / ("a-very-long-name" * 8 + ".jpg")
    long.write_bytes(b"\xff\xd8\xff broken")
    page = open_page(width, height)
    add_images(page, [*field_paths, long])
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.mouse.wheel(0, 5000)
    assert page.locator("#notice").is_visible()
    assert page.evaluate("document.querySelector('#notice').getBoundingClientRect().top") >= 0, (
        "the notice stays in sight"
    )


def test_axe_finds_no_violation(open_page: OpenPage, field_paths: list[Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"not an image")
    page = open_page()
    assert find_violations_by_layout(page) == {}
    add_images(page, [*field_paths, broken])
    page.focus("#canvas")
    page.keyboard.press("ArrowRight")
    assert find_violations_by_layout(page) == {}


@needs_real_cells
def test_page_with_real_fields(open_page: OpenPage, runtime: BundleRuntime) -> None:
    paths = [Path(str(REAL_CELLS)) / "chula_fields" / f"{n}.jpg" for n in (26, 552)]
    if not all(path.is_file() for path in paths):
        pytest.skip(f"{paths[0].parent} lacks 26.jpg or 552.jpg")
    page = open_page()
    add_images(page, paths)
    found = predict_images(paths, runtime)
    assert_page_shows(page, found, expected_slide(found, runtime))
    record = EdgeHandlers(runtime, 1).assess_slide(SlideRequest(images=[r.summarize() for r in found]))
    assert read_rows(page)["counted"] == dict(record["rows"])["counted"]

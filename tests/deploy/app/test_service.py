"""The service behind the bedside page: what it tells, what it reads, whom it refuses."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from deploy.app.app import WEB_FOLDER, create_app
from deploy.bundle.ood_guard import MAX_DRIFT, OUT_OF_DISTRIBUTION
from deploy.imaging.images import InputImage, read_image_file
from deploy.inference.runtime import BundleRuntime
from deploy.slide.html_report import format_headline
from deploy.slide.prevalence import RECOMMENDED_CELLS, RESEARCH_USE_NOTICE, SUSPICION_THRESHOLD, assess_prevalence
from deploy.slide.reader import SlideReader, summarize_slide
from tests.conftest import REAL_CELLS, needs_real_cells
from tests.deploy.app.conftest import png
from tests.support.dicom_files import file as dicom
from tests.support.dicom_files import image as dicom_image
from tests.support.fake_api import listening


@pytest.fixture(scope="module")
def client(runtime: BundleRuntime) -> Iterator[httpx.Client]:
    with listening(create_app(runtime)) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def read(client: httpx.Client, data: bytes, name: str = "a", **query: Any) -> list[dict[str, Any]]:
    answer = client.post("/api/read", params={"name": name, **query}, content=data)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["pictures"]
    return found


def test_about_tells_the_bundle_and_its_operating_points(client: httpx.Client, runtime: BundleRuntime) -> None:
    told = client.get("/api/about").json()
    assert (told["digest"], told["signer"], told["precision"]) == (runtime.bundle.digest, "the lead", runtime.precision)
    assert (told["classes"], told["positive"]) == (list(runtime.classes), "schistocyte")
    assert (told["line"], told["enough"], told["notice"], told["lab"]) == (
        SUSPICION_THRESHOLD,
        RECOMMENDED_CELLS,
        RESEARCH_USE_NOTICE,
        False,
    )
    assert told["default"] == runtime.calibration.operating_points[0].to_dict()
    odds = [point["log_odds"] for point in told["curve"]]
    assert odds == sorted(odds, reverse=True)
    assert {p.log_odds for p in (*runtime.calibration.operating_points, *runtime.calibration.curve)} == set(odds)
    assert told["card"] == runtime.bundle.files["card.md"].decode()


def test_named_points_stay_named_on_the_ladder(runtime: BundleRuntime) -> None:
    assert {p.name for p in runtime.calibration.operating_points} >= {
        p.name for p in runtime.calibration.sorted_points
    } - {""}
    (default,) = [
        p for p in runtime.calibration.sorted_points if p.log_odds == runtime.calibration.operating_points[0].log_odds
    ]
    assert default == runtime.calibration.operating_points[0]


def test_a_field_is_read_as_the_command_reads_it(
    client: httpx.Client, runtime: BundleRuntime, rendered: list[np.ndarray]
) -> None:
    (told,) = read(client, png(rendered[0]), "field.png")
    reading = SlideReader(runtime, runtime.calibration.find_point()).read_image(InputImage("field.png", rendered[0]))
    cells = [{k: v for k, v in cell.items() if k != "log_odds"} for cell in told["cells"]]
    assert cells == reading.to_dict()["cells"]
    assert (told["kind"], told["width"], told["height"]) == ("field", *reading.image_size)
    assert told["image"] is None, "the browser draws its own file"
    for cell in told["cells"]:
        if cell["probability"] is not None:
            assert math.isclose(1 / (1 + math.exp(-cell["log_odds"])), cell["probability"], abs_tol=1e-6)


def test_a_page_can_flag_as_the_command_does(
    client: httpx.Client, runtime: BundleRuntime, rendered: list[np.ndarray]
) -> None:
    (told,) = read(client, png(rendered[0]))
    for point in runtime.calibration.sorted_points:
        reading = SlideReader(runtime, point).read_image(InputImage("a", rendered[0]))
        flags = [c["counted"] and c["log_odds"] >= point.log_odds for c in told["cells"]]
        assert flags == [cell.is_flagged for cell in reading.cells]


def test_a_single_cell_has_a_box_too(client: httpx.Client, images: np.ndarray) -> None:
    (told,) = read(client, png(images[0]), "cell.png")
    height, width = images[0].shape[:2]
    assert told["kind"] == "cell"
    assert told["cells"][0]["box"] == [0, 0, width, height]


def test_what_browsers_cannot_draw_comes_with_its_pixels(client: httpx.Client, rendered: list[np.ndarray]) -> None:
    frames = np.stack([rendered[0], rendered[1]])
    told = read(client, dicom(dicom_image(frames)), "two.dcm")
    assert [picture["path"] for picture in told] == ["two.dcm#1", "two.dcm#2"]
    for picture, pixels in zip([*told, *read(client, png(rendered[0], "TIFF"))], [*frames, rendered[0]], strict=True):
        head, _, text = picture["image"].partition(",")
        assert head == "data:image/jpeg;base64"
        shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))
        assert np.abs(shown.astype(int) - pixels).mean() < 5
    assert read(client, png(rendered[0]), drawn=True)[0]["image"] is not None


@pytest.mark.parametrize(
    ("data", "cure"),
    [
        (b"", "export or copy it again"),
        (b"\xff\xd8\xff no", "save it again as PNG"),
        (b"%PDF-1.7", "export the pictures"),
        (b"GIF89a", "PNG"),
    ],
)
def test_broken_bytes_are_refused_with_a_cure(client: httpx.Client, data: bytes, cure: str) -> None:
    answer = client.post("/api/read?name=x.jpg", content=data)
    assert answer.status_code == 422
    assert answer.json()["error"].startswith("x.jpg: ")
    assert cure in answer.json()["error"]


def test_too_large_bodies_are_not_read(runtime: BundleRuntime) -> None:
    with listening(create_app(runtime, max_bytes=1000)) as url:
        assert httpx.get(f"{url}/api/about").json()["most"] == 1000
        for content in (b"0" * 1001, iter([b"0" * 600, b"0" * 600])):  # a length that is told, and one that is not
            answer = httpx.post(f"{url}/api/read", content=content)
            assert answer.status_code == 413
            assert "hemofed predict" in answer.json()["error"]
        counts = {"counted": 0, "flagged": 0, "excluded": {"x" * 1001: 1}}
        assert httpx.post(f"{url}/api/verdict", json=counts).status_code == 413


def test_the_verdict_is_that_of_the_slide(client: httpx.Client, runtime: BundleRuntime) -> None:
    for point in runtime.calibration.sorted_points:
        for counted, flagged in ((0, 0), (210, 10), (1200, 1), (1200, 600)):
            told = client.post(
                "/api/verdict", json={"counted": counted, "flagged": flagged, "log_odds": point.log_odds}
            ).json()
            expected = assess_prevalence(counted, flagged, point)
            assert {k: told[k] for k in expected.to_dict()} == expected.to_dict()
            assert told["headline"] == format_headline(told)
            assert told["operating_point"]["log_odds"] == point.log_odds
            assert ["counted", told["rows"][1][1]] in told["rows"]


def test_drift_from_means_of_pictures_is_that_of_all_cells(
    client: httpx.Client, runtime: BundleRuntime, rendered: list[np.ndarray]
) -> None:
    point = runtime.calibration.find_point()
    told = [read(client, png(pixels))[0] for pixels in rendered]
    cells = [cell for picture in told for cell in picture["cells"]]
    excluded: dict[str, int] = {}
    for picture in told:
        for why, n in picture["excluded"].items():
            excluded[why] = excluded.get(why, 0) + n
    counts = {
        "counted": sum(c["counted"] for c in cells),
        "flagged": sum(c["flagged"] for c in cells),
        "found": len(cells),
        "excluded": excluded,
        "traits": [picture["traits"] for picture in told],
    }
    answer = client.post("/api/verdict", json=counts).json()
    slide = summarize_slide(
        [SlideReader(runtime, point).read_image(InputImage("a", pixels)) for pixels in rendered], runtime, point
    ).to_dict()
    assert answer["drift"] == pytest.approx(slide["drift"], abs=1e-4)
    assert {k: v for k, v in answer.items() if k in slide and k != "drift"} == {
        k: v for k, v in slide.items() if k != "drift"
    }


def test_a_slide_unlike_the_training_cells_is_warned_of(client: httpx.Client, runtime: BundleRuntime) -> None:
    few = client.post("/api/verdict", json={"counted": 90, "flagged": 1, "excluded": {OUT_OF_DISTRIBUTION: 10}}).json()
    many = client.post("/api/verdict", json={"counted": 70, "flagged": 1, "excluded": {OUT_OF_DISTRIBUTION: 30}}).json()
    assert few["warnings"] == []
    assert many["warnings"][0].startswith("30 of 100 red cells look unlike")
    assert runtime.ood_reference is not None
    far = {"n": 200, "mean": [2 * MAX_DRIFT] * len(runtime.ood_reference.feature_mean)}
    told = client.post("/api/verdict", json={"counted": 200, "flagged": 150, "traits": [far]}).json()
    assert told["drifted"] is True
    assert told["warnings"][0].startswith("taken together")
    assert told["verdict"] == "cannot decide"
    few = client.post("/api/verdict", json={"counted": 5, "flagged": 1, "traits": [far | {"n": 5}]}).json()
    assert few["drift"] is None
    mixed = client.post("/api/verdict", json={"counted": 200, "flagged": 1, "diameters": [40.0, 80.0]}).json()
    assert "differ in magnification" in mixed["warnings"][0]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"counted": 1, "flagged": 2}, "flagged cells are counted ones"),
        ({"counted": 1, "flagged": 0, "log_odds": 0.123}, "/api/about"),
        ({"counted": -1, "flagged": 0}, "greater than or equal to 0"),
        ({"counted": 10**30, "flagged": 0}, "less than or equal to"),
        ({"counted": 1, "flagged": 0, "excluded": {"x": -4}}, "greater than or equal to 0"),
        ({"counted": 1, "flagged": 0, "traits": [{"n": 1, "mean": [1e308]}]}, "less than or equal to"),
        ({"counted": 1, "flagged": 0, "traits": [{"n": 1, "mean": [0.0]}]}, "as /api/read gives them"),
        ({"counted": 1}, "flagged"),
    ],
)
def test_counts_that_cannot_be_are_refused(client: httpx.Client, asked: dict[str, Any], why: str) -> None:
    answer = client.post("/api/verdict", json=asked)
    assert answer.status_code == 422
    assert why in answer.json()["error"]


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "localhost:{port}", "[::1]:{port}"])
def test_this_machine_is_let_in(client: httpx.Client, host: str) -> None:
    host = host.format(port=client.base_url.port)
    headers = {"host": host, "origin": f"http://{host}"}
    assert client.get("/api/about", headers=headers).status_code == 200
    assert client.post("/api/verdict", json={"counted": 1, "flagged": 0}, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:80", "127.0.0.1.evil.example:{port}", ""]
)
@pytest.mark.parametrize("path", ["/", "/page.js", "/api/about", "/nowhere"])
def test_foreign_names_for_this_machine_are_refused(client: httpx.Client, host: str, path: str) -> None:
    answer = client.get(path, headers={"host": host.format(port=client.base_url.port)})
    assert answer.status_code == 403
    assert f"127.0.0.1:{client.base_url.port}" in answer.json()["error"]


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1", "http://localhost:{port}"],
)
def test_other_pages_may_send_nothing(client: httpx.Client, origin: str) -> None:
    answer = client.post("/api/read", content=b"x", headers={"origin": origin.format(port=client.base_url.port)})
    assert answer.status_code == 403
    assert "the page that this service shows" in answer.json()["error"]


@pytest.mark.parametrize("path", ["/", "/page.js", "/api/about", "/nowhere", "/docs", "/openapi.json"])
def test_every_answer_has_the_headers(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["img-src"] == "'self' blob: data:"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.status_code == (200 if path in ("/", "/page.js", "/api/about") else 404)


def test_every_file_of_the_page_is_served_and_asks_for_nothing_elsewhere(client: httpx.Client) -> None:
    for file in sorted(WEB_FOLDER.iterdir()):
        answer = client.get("/" if file.name == "index.html" else f"/{file.name}")
        assert answer.content == file.read_bytes()
        text = file.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text
        assert "https://" not in text
        assert "innerHTML" not in text
    assert client.get("/page.js").headers["content-type"].startswith("text/javascript")


def test_a_fault_tells_no_content(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, rendered: list[np.ndarray]
) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("Mrs A's smear")

    monkeypatch.setattr("deploy.app.handlers.read_bytes", fails)
    answer = client.post("/api/read", content=png(rendered[0]))
    assert answer.status_code == 500
    assert answer.json()["error"].startswith("a fault in hemofed (ValueError)")


@needs_real_cells
@pytest.mark.parametrize("number", [26, 552, 720])
def test_real_fields_are_read_as_the_command_reads_them(
    client: httpx.Client, runtime: BundleRuntime, number: int
) -> None:
    path = Path(str(REAL_CELLS)) / "chula_fields" / f"{number}.jpg"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    (told,) = read(client, path.read_bytes(), path.name)
    reading = SlideReader(runtime, runtime.calibration.find_point()).read_image(read_image_file(path)[0])
    assert len(told["cells"]) == len(reading.cells) > 50
    assert told["counts"] == reading.to_dict()["counts"]

"""The edge app's API: its records, the images it reads, the requests it refuses."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from deploy.app.app import WEB_FOLDER, create_app
from deploy.bundle.notice import RESEARCH_USE_NOTICE
from deploy.bundle.ood_guard import MAX_DRIFT, OUT_OF_DISTRIBUTION
from deploy.imaging.images import read_image_file
from deploy.imaging.input_image import InputImage
from deploy.inference.runtime import BundleRuntime
from deploy.slide.image_result import ImageSummary
from deploy.slide.reader import SlideReader
from deploy.slide.verdict import RECOMMENDED_CELLS, SUSPICION_THRESHOLD, assess_prevalence
from tests.support.dicom_files import encode_dicom, make_dicom
from tests.support.edge.slides import count_slide, make_summary
from tests.support.image_files import encode_image
from tests.support.markers import REAL_CELLS, needs_real_cells
from tests.support.web_server import serve_app


@pytest.fixture(scope="module")
def client(runtime: BundleRuntime) -> Iterator[httpx.Client]:
    with serve_app(create_app(runtime)) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def read(client: httpx.Client, data: bytes, name: str = "a", **query: Any) -> list[dict[str, Any]]:
    answer = client.post("/api/images", params={"name": name, **query}, content=data)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["images"]
    return found


def test_api_model_describes_the_bundle_and_its_operating_points(client: httpx.Client, runtime: BundleRuntime) -> None:
    result = client.get("/api/model").json()
    assert (result["digest"], result["signer"], result["precision"]) == (
        runtime.bundle.digest,
        "the lead",
        runtime.precision,
    )
    assert (result["classes"], result["positive_class"]) == (list(runtime.classes), "schistocyte")
    assert (
        result["suspicion_threshold"],
        result["recommended_cells"],
        result["notice"],
        result["has_local_calibration"],
    ) == (
        SUSPICION_THRESHOLD,
        RECOMMENDED_CELLS,
        RESEARCH_USE_NOTICE,
        False,
    )
    assert result["default_point"] == runtime.calibration.operating_points[0].to_dict()
    odds = [point["log_odds"] for point in result["curve"]]
    assert odds == sorted(odds, reverse=True)
    assert {p.log_odds for p in (*runtime.calibration.operating_points, *runtime.calibration.curve)} == set(odds)
    assert result["card"] == runtime.bundle.files["card.md"].decode()


def test_named_operating_points_stay_named_on_the_curve(runtime: BundleRuntime) -> None:
    assert {p.name for p in runtime.calibration.operating_points} >= {
        p.name for p in runtime.calibration.sorted_points
    } - {""}
    (default,) = [
        p for p in runtime.calibration.sorted_points if p.log_odds == runtime.calibration.operating_points[0].log_odds
    ]
    assert default == runtime.calibration.operating_points[0]


def test_api_images_equals_predict_for_a_field(
    client: httpx.Client, runtime: BundleRuntime, rendered_fields: list[np.ndarray]
) -> None:
    (result,) = read(client, encode_image(rendered_fields[0]), "field.png")
    reading = SlideReader(runtime, runtime.calibration.find_point()).read_image(
        InputImage("field.png", rendered_fields[0])
    )
    cells = [{k: v for k, v in cell.items() if k != "log_odds"} for cell in result["cells"]]
    assert cells == reading.to_dict()["cells"]
    assert (result["kind"], result["width"], result["height"]) == ("field", *reading.image_size)
    assert result["data_url"] is None, "the browser draws its own file"
    for cell in result["cells"]:
        if cell["probability"] is not None:
            assert math.isclose(1 / (1 + math.exp(-cell["log_odds"])), cell["probability"], abs_tol=1e-6)


def test_api_images_log_odds_flag_like_predict(
    client: httpx.Client, runtime: BundleRuntime, rendered_fields: list[np.ndarray]
) -> None:
    (result,) = read(client, encode_image(rendered_fields[0]))
    for point in runtime.calibration.sorted_points:
        reading = SlideReader(runtime, point).read_image(InputImage("a", rendered_fields[0]))
        flags = [c["is_counted"] and c["log_odds"] >= point.log_odds for c in result["cells"]]
        assert flags == [cell.is_flagged for cell in reading.cells]


def test_api_images_single_cell_has_a_box(client: httpx.Client, images: np.ndarray) -> None:
    (result,) = read(client, encode_image(images[0]), "cell.png")
    height, width = images[0].shape[:2]
    assert result["kind"] == "cell"
    assert result["cells"][0]["box"] == [0, 0, width, height]


def test_api_images_sends_pixels_that_browsers_cannot_draw(
    client: httpx.Client, rendered_fields: list[np.ndarray]
) -> None:
    frames = np.stack([rendered_fields[0], rendered_fields[1]])
    result = read(client, encode_dicom(make_dicom(frames)), "two.dcm")
    assert [image_record["path"] for image_record in result] == ["two.dcm#1", "two.dcm#2"]
    for image_record, pixels in zip(
        [*result, *read(client, encode_image(rendered_fields[0], "TIFF"))], [*frames, rendered_fields[0]], strict=True
    ):
        head, _, text = image_record["data_url"].partition(",")
        assert head == "data:image/jpeg;base64"
        shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))
        assert np.abs(shown.astype(int) - pixels).mean() < 5
    assert read(client, encode_image(rendered_fields[0]), include_pixels=True)[0]["data_url"] is not None


@pytest.mark.parametrize(
    ("data", "cure"),
    [
        (b"", "export or copy it again"),
        (b"\xff\xd8\xff no", "save it again as PNG"),
        (b"%PDF-1.7", "export the images"),
        (b"GIF89a", "PNG"),
    ],
)
def test_api_images_refuses_broken_bytes_with_a_cure(client: httpx.Client, data: bytes, cure: str) -> None:
    answer = client.post("/api/images?name=x.jpg", content=data)
    assert answer.status_code == 422
    assert answer.json()["error"].startswith("x.jpg: ")
    assert cure in answer.json()["error"]


def test_too_large_requests_are_refused(runtime: BundleRuntime) -> None:
    with serve_app(create_app(runtime, max_bytes=1000)) as url:
        assert httpx.get(f"{url}/api/model").json()["max_bytes"] == 1000
        for content in (b"0" * 1001, iter([b"0" * 600, b"0" * 600])):  # with and without a content length
            answer = httpx.post(f"{url}/api/images", content=content)
            assert answer.status_code == 413
            assert "hemofed predict" in answer.json()["error"]
        summary = make_summary(name="x" * 1001).model_dump(mode="json")
        assert httpx.post(f"{url}/api/slide", json={"images": [summary]}).status_code == 413


def ask_slide(client: httpx.Client, *images: ImageSummary | dict[str, Any], **more: Any) -> dict[str, Any]:
    records = [image if isinstance(image, dict) else image.model_dump(mode="json") for image in images]
    answer = client.post("/api/slide", json={"images": records, **more})
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def counted(num_counted: int, num_flagged: int, excluded: dict[str, int] | None = None, **changes: Any) -> ImageSummary:
    found = num_counted + sum((excluded or {}).values())
    return make_summary(
        num_counted=num_counted, num_flagged=num_flagged, excluded=excluded or {}, num_found=found, **changes
    )


def test_api_slide_equals_assess_prevalence(client: httpx.Client, runtime: BundleRuntime) -> None:
    for point in runtime.calibration.sorted_points:
        for num_counted, num_flagged in ((0, 0), (210, 10), (1200, 1), (1200, 600)):
            result = ask_slide(client, counted(num_counted, num_flagged, {"platelet": 7}), log_odds=point.log_odds)
            expected = asdict(assess_prevalence(num_counted, num_flagged, point))
            assert {k: result[k] for k in expected} == expected
            assert (result["num_found"], result["num_counted"]) == (num_counted + 7, num_counted)
            assert result["headline"].startswith(expected["verdict"])
            assert expected["reason"] in result["headline"]
            assert result["operating_point"]["log_odds"] == point.log_odds
            assert ["counted", result["rows"][1][1]] in result["rows"]


def test_api_slide_of_the_images_summaries_equals_predict(
    client: httpx.Client, runtime: BundleRuntime, rendered_fields: list[np.ndarray]
) -> None:
    """Bit for bit, the drift included."""
    point = runtime.calibration.find_point()
    records = [read(client, encode_image(pixels))[0] for pixels in rendered_fields]
    answer = ask_slide(client, *(record["summary"] for record in records))
    results = [SlideReader(runtime, point).read_image(InputImage("a", pixels)) for pixels in rendered_fields]
    slide = count_slide(results, runtime, point).to_dict()
    assert slide["drift"] > 0
    assert {k: answer[k] for k in slide} == slide


def test_api_slide_counts_equal_pixels_once(client: httpx.Client, rendered_fields: list[np.ndarray]) -> None:
    """A PNG and a BMP of one field have other bytes and the same pixels."""
    (png,) = read(client, encode_image(rendered_fields[0]), "a.png")
    (bmp,) = read(client, encode_image(rendered_fields[0], "BMP"), "b.bmp")
    (other,) = read(client, encode_image(rendered_fields[1]), "c.png")
    answer = ask_slide(client, png["summary"], bmp["summary"], other["summary"])
    assert answer["duplicate_of"] == [None, "a.png", None]
    assert answer["num_found"] == len(png["cells"]) + len(other["cells"])
    assert answer["notes"] == ["b.bmp shows the same image as a.png and is not counted again"]


def test_api_slide_refuses_two_patients(client: httpx.Client, rendered_fields: list[np.ndarray]) -> None:
    def read_dicom(n: int, **tags: str) -> dict[str, Any]:
        data = encode_dicom(make_dicom(rendered_fields[n][None], **tags))
        (record,) = read(client, data, f"{n}.dcm")
        summary: dict[str, Any] = record["summary"]
        return summary

    first, second = read_dicom(0, PatientID="7"), read_dicom(1, PatientID="8")
    assert "7" not in (first["patient"], first["study"])
    answer = client.post("/api/slide", json={"images": [first, second]})
    assert answer.status_code == 422
    assert "several patients; give those of one slide at a time" in answer.json()["error"]
    studies = [read_dicom(n, AccessionNumber=number, StudyInstanceUID="1.2.3") for n, number in enumerate("AB")]
    assert "several studies or accessions" in ask_slide(client, *studies)["notes"][0]
    (plain,) = read(client, encode_image(rendered_fields[1]), "plain.png")
    assert ask_slide(client, first, plain["summary"])["notes"] == [], "a PNG names no patient"


def test_api_slide_reliability_warnings(client: httpx.Client, runtime: BundleRuntime) -> None:
    few = ask_slide(client, counted(90, 1, {OUT_OF_DISTRIBUTION: 10}))
    many = ask_slide(client, counted(70, 1, {OUT_OF_DISTRIBUTION: 30}))
    assert few["reliability_warnings"] == []
    assert many["reliability_warnings"][0].startswith("30 of 100 red cells look unlike")
    assert runtime.ood_reference is not None
    far = [2 * MAX_DRIFT] * len(runtime.ood_reference.feature_mean)
    result = ask_slide(client, counted(200, 150, feature_sums=[200 * mean for mean in far]))
    assert result["drift"] == pytest.approx(2 * MAX_DRIFT)  # the reference's mean is 0
    assert result["has_drifted"] is True
    assert result["reliability_warnings"][0].startswith("on average")
    assert result["verdict"] == "cannot decide"
    assert ask_slide(client, counted(5, 1, feature_sums=[5 * mean for mean in far]))["drift"] is None
    mixed = ask_slide(client, make_summary(1, rbc_diameter_px=40.0), make_summary(2, rbc_diameter_px=80.0))
    assert "differ in magnification" in mixed["reliability_warnings"][0]


def test_api_slide_notes_the_images_that_could_not_be_read(client: httpx.Client) -> None:
    failures = [{"name": f"{n}.png", "reason": "damaged"} for n in range(3)]
    notes = [ask_slide(client, make_summary(), failures=failures[:n])["notes"] for n in (0, 1, 3)]
    assert notes == [
        [],
        ["1 of 2 images could not be read: the result does not include it"],
        ["3 of 4 images could not be read: the result does not include them"],
    ]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_flagged": 211}, "flagged cells must be among the counted"),
        ({"num_found": 228}, "210 counted and 17 excluded, but 228 found"),
        ({"num_counted": -1}, "greater than or equal to 0"),
        ({"num_counted": 10**30}, "less than or equal to"),
        ({"excluded": {"x": -4}}, "greater than or equal to 0"),
        ({"excluded": {"x" * 201: 17}}, "at most 200 characters"),
        ({"excluded": {str(n): 1 for n in range(101)}}, "at most 100"),
        ({"feature_sums": [1e308]}, "less than or equal to"),
        ({"feature_sums": [0.5]}, "send those that /api/images gives"),
        ({"rbc_diameter_px": 1e5}, "less than or equal to"),
        ({"pixel_digest": "../../etc"}, "match pattern"),
        ({"patient": "Mrs A"}, "match pattern"),
        ({"name": "x" * 5001}, "at most 5000 characters"),
        ({"kind": "slide"}, "'cell' or 'field'"),
        ({"verdict": "below the threshold"}, "not permitted"),
    ],
)
def test_api_slide_refuses_impossible_summaries(client: httpx.Client, change: dict[str, Any], why: str) -> None:
    record = make_summary().model_dump(mode="json") | change
    answer = client.post("/api/slide", json={"images": [record]})
    assert answer.status_code == 422
    assert why in answer.json()["error"]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"images": [], "log_odds": 0.123}, "/api/model"),
        ({"images": [{}] * 20_001}, "at most 20000"),
        ({"images": [], "failures": [{"name": "a", "reason": "b" * 100_001}]}, "at most 100000"),
        ({}, "images"),
    ],
)
def test_api_slide_refuses_impossible_requests(client: httpx.Client, asked: dict[str, Any], why: str) -> None:
    answer = client.post("/api/slide", json=asked)
    assert answer.status_code == 422
    assert why in answer.json()["error"]


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "localhost:{port}", "[::1]:{port}"])
def test_local_host_names_are_admitted(client: httpx.Client, host: str) -> None:
    host = host.format(port=client.base_url.port)
    headers = {"host": host, "origin": f"http://{host}"}
    assert client.get("/api/model", headers=headers).status_code == 200
    assert client.post("/api/slide", json={"images": []}, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:80", "127.0.0.1.evil.example:{port}", ""]
)
@pytest.mark.parametrize("path", ["/", "/page.js", "/api/model", "/nowhere"])
def test_foreign_host_header_is_refused(client: httpx.Client, host: str, path: str) -> None:
    answer = client.get(path, headers={"host": host.format(port=client.base_url.port)})
    assert answer.status_code == 403
    assert f"127.0.0.1:{client.base_url.port}" in answer.json()["error"]


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1", "http://localhost:{port}"],
)
def test_foreign_origin_is_refused(client: httpx.Client, origin: str) -> None:
    answer = client.post("/api/images", content=b"x", headers={"origin": origin.format(port=client.base_url.port)})
    assert answer.status_code == 403
    assert "use the page of this service" in answer.json()["error"]


@pytest.mark.parametrize("path", ["/", "/page.js", "/api/model", "/nowhere", "/docs", "/openapi.json"])
def test_security_headers(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["img-src"] == "'self' blob: data:"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.status_code == (200 if path in ("/", "/page.js", "/api/model") else 404)


def test_static_files_have_no_external_requests(client: httpx.Client) -> None:
    for file in sorted(WEB_FOLDER.iterdir()):
        answer = client.get("/" if file.name == "index.html" else f"/{file.name}")
        assert answer.content == file.read_bytes()
        text = file.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text
        assert "https://" not in text
        assert "innerHTML" not in text
    assert client.get("/page.js").headers["content-type"].startswith("text/javascript")


def test_internal_error_reveals_no_content(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, rendered_fields: list[np.ndarray]
) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("Mrs A's smear")

    monkeypatch.setattr("deploy.app.handlers.read_image_bytes", fails)
    answer = client.post("/api/images", content=encode_image(rendered_fields[0]))
    assert answer.status_code == 500
    assert answer.json()["error"].startswith("a fault in hemofed (ValueError)")


@needs_real_cells
@pytest.mark.parametrize("number", [26, 552, 720])
def test_api_images_equals_predict_for_real_fields(client: httpx.Client, runtime: BundleRuntime, number: int) -> None:
    path = Path(str(REAL_CELLS)) / "chula_fields" / f"{number}.jpg"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    (result,) = read(client, path.read_bytes(), path.name)
    reading = SlideReader(runtime, runtime.calibration.find_point()).read_image(read_image_file(path)[0])
    assert len(result["cells"]) == len(reading.cells) > 50
    assert result["counts"] == reading.to_dict()["counts"]

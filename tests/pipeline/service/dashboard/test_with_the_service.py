"""The dashboard with the real service over TLS, from login to a downloaded model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeline.records.live_status import LiveStatusWriter
from pipeline.records.run_control import requested_state
from tests.pipeline.service.dashboard.test_run_page import read_texts
from tests.support.service_factory import STUDY_TOML, make_heartbeat
from tests.support.web_server import serve_app


def run_in_thread(call: Callable[..., Any], *args: Any) -> Any:
    """The browser's event loop runs in the test's own thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *args).result()


def test_study_from_offer_to_downloaded_model(service, recordings, browser):
    recording = recordings["slow"]
    site = run_in_thread(service.enrol_site, "site-01")
    status = {"state": "connected", "run": None, "flare": "running", "disk_free_gb": 55.5, "warnings": 0}
    assert run_in_thread(site.post, "/site/heartbeat", make_heartbeat(status=status)).status_code == 200
    keys = {"ssl_certfile": service.home.path / "web.crt", "ssl_keyfile": service.home.path / "web.key"}
    with serve_app(service.app, **keys) as url:
        page = browser.new_context(ignore_https_errors=True, locale="en-GB").new_page()
        page.set_default_timeout(8000)
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console", lambda message: complaints.append(message.text) if "Security Policy" in message.text else None
        )
        page.goto(f"{url}/#/offer")
        page.fill("#token", service.lead_token)
        page.keyboard.press("Enter")
        page.fill("#toml", STUDY_TOML)
        page.click("#offer-form button")
        page.wait_for_selector("#do-begin[aria-disabled]")
        run = page.url.rpartition("/")[2]
        assert "no image leaves a site" in page.locator("#study").inner_text()

        run_in_thread(
            site.post, "/site/heartbeat", make_heartbeat(service.make_approval(run), status=status)
        )  # the last approval: it begins by itself
        page.wait_for_selector(".run-head .badge >> text=starting")
        assert "approved" in read_texts(page, "#approval-table tbody tr")[0]
        service.store.set_run_state(run, "running")
        live_status = LiveStatusWriter(service.home.runs_folder / run, 4, 3, "train", requested=["site-01"])
        lines = "".join(json.dumps(record) + "\n" for record in recording.rounds[:3])
        service.write_run_file(run, "rounds.jsonl", lines.encode())
        live_status.write()
        page.wait_for_selector(".tiles >> text=2 of 4")
        # a loaded machine may show the page so late that the site counts as slow
        assert re.match(r"site-01 (… waiting|! slow)", read_texts(page, "#live-sites li")[0])
        page.click("#do-pause")
        page.wait_for_selector(".run-head .badge >> text=pausing")
        assert requested_state(service.home.runs_folder / run) == "pause"

        service.write_run_file(
            run, "models/global.safetensors", recording.files["models/global.safetensors"].read_bytes()
        )
        service.write_run_file(run, "results.json", json.dumps(recording.results).encode())
        service.store.set_run_state(run, "finished")
        page.wait_for_selector("#result-table")
        with page.expect_download() as download:
            page.click("#files >> text=models/global.safetensors")
        assert Path(download.value.path()).read_bytes() == recording.files["models/global.safetensors"].read_bytes()
        for hash, text in (("#/", "55.5 GB"), ("#/sites", "keys"), ("#/users", "lead"), ("#/log", "run offered")):
            page.evaluate("(hash) => { location.hash = hash; }", hash)
            page.wait_for_selector(f"main >> text={text} >> nth=0")
        page.click("#sign-out")
        page.wait_for_selector("h1 >> text=Sign in")
        page.context.close()
        service.app.state.context.event_stream.close()
    assert complaints == []

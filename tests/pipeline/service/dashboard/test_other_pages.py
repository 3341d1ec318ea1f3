"""Login, overview, sites, users, log; lost connections; and names that contain HTML."""

from __future__ import annotations

import pytest

from tests.pipeline.service.dashboard.test_run_page import read_texts
from tests.support.dashboard.demo_data import SITE_NAMES, SLOW, TREE, make_fake_api
from tests.support.dashboard.fake_api import serve_fake_api

HTML_NAME = "<img src=x onerror=\"document.title='parsed'\">"


def test_login_rejects_a_wrong_token_and_accepts_a_valid_one(open_page, fake_api):
    page = open_page("#/sites", None)
    page.fill("#token", "guess")
    page.keyboard.press("Enter")
    page.wait_for_selector("[role=alert] >> text=this token is not known; ask the study lead")
    page.fill("#token", " officer-token ")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1 >> text=Sites")  # the page of the address
    assert "Otto, officer" in page.locator(".account").inner_text()
    page.click("#sign-out")
    page.wait_for_selector("h1 >> text=Sign in")
    assert page.context.cookies() == []
    assert {header for _, header, _ in fake_api.posts} == {"1"}


def test_overview_shows_runs_pending_approvals_and_sites(open_page, fake_api):
    page = open_page()
    runs = read_texts(page, "#run-table tbody tr")
    value = fake_api.runs[SLOW].to_dict()["headline"]["value"]
    assert runs[0].startswith(f"moons-stragglers fedprox · {SLOW} ▶ running 21 of 30 {100 * value:.1f} %")
    assert "3 of 4 4 of 4" in runs[0]
    pending = read_texts(page, "#pending tbody tr")
    assert pending[0] == "karolinska smears … pending 9 hours ago"
    assert pending[1] == "st-james smears ✕ revoked 5 hours ago"
    sites = {row.split()[0]: row for row in read_texts(page, "#sites tbody tr")}
    assert sites["uz-leuven"].startswith("uz-leuven ! not connected 7 minutes ago")
    assert "idle 1 warning: see hemofed site status at the site ! 1.4 GB low" in sites["st-james"]
    assert f"in {SLOW} 210.0 GB 0.1.0" in sites["charite"]
    fake_api.change_run(SLOW, state="waiting", reason="2 of 3 sites are connected")
    page.wait_for_selector("#run-table >> text=2 of 3 sites are connected")
    assert "moons-stragglers is waiting." in page.locator("#announce").inner_text()


def test_empty_overview_says_what_to_do_next(open_page, fake_api):
    fake_api.runs.clear()
    fake_api.sites.clear()
    page = open_page()
    assert "Offer a study to the hospitals" in page.locator("#runs").inner_text()
    assert "Invite a hospital" in page.locator("#sites").inner_text()
    assert "as soon as a lead offers a study" in open_page(role="viewer").locator("#runs").inner_text()


def test_lost_connection_is_shown_and_restored(open_page, fake_api):
    page = open_page()
    fake_api.is_offline = True
    page.wait_for_selector("#connection >> text=Connection to the coordinator lost")
    fake_api.runs[SLOW].num_rounds += 1
    fake_api.is_offline = False
    page.wait_for_selector("#connection p", state="detached")
    page.wait_for_selector("#run-table >> text=22 of 30")  # also what changed meanwhile
    assert page.locator("#announce").inner_text() == "Connected again."


def test_rounds_missed_while_offline_are_loaded(open_page, fake_api):
    page = open_page(f"#/runs/{SLOW}")
    fake_api.is_offline = True
    page.wait_for_selector("#connection p")
    fake_api.runs[SLOW].num_rounds += 2
    fake_api.is_offline = False
    page.wait_for_selector(".tiles >> text=23 of 30")
    page.click("text=Show as table")
    assert [row.split()[0] for row in read_texts(page, "#curves-table tbody tr")][:3] == ["23", "22", "21"]


def test_invitation_is_shown_once_with_the_join_command(open_page, fake_api):
    page = open_page("#/sites")
    page.fill("#site", "new-hospital")
    page.click("#invite-form button")
    page.wait_for_selector("dialog[open]")
    assert page.input_value("#secret") == "once-new-hospital"
    command = page.locator("dialog pre").inner_text()
    assert command == f"hemofed site join HOME --coordinator {fake_api.url} --site new-hospital"
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 1  # Escape does not close it
    page.click("dialog >> text=I have saved it")
    page.wait_for_selector("dialog", state="detached")
    assert "once-new-hospital" not in page.content()
    assert fake_api.posts == [("/api/sites/new-hospital/invite", "1", {"hours": 48})]


def test_site_is_removed_after_confirmation(open_page, fake_api):
    page = open_page("#/sites")
    page.click("#remove-motol")
    page.click("dialog >> text=Remove >> nth=-1")
    page.wait_for_selector("#enrolled tr:has-text('motol') >> text=has left")
    assert open_page("#/sites", "officer").locator("#invite, [id^=remove-]").count() == 0


def test_adding_a_user_and_searching_the_log(open_page, fake_api):
    page = open_page("#/users")
    page.fill("#name", "Wanda")
    page.select_option("#role", "officer")
    page.click("#add-form button")
    page.wait_for_selector("dialog[open]")
    assert page.input_value("#secret") == "once-user"
    assert fake_api.posts[-1] == ("/api/users", "1", {"name": "Wanda", "role": "officer"})
    log = open_page("#/log", "officer")
    assert "refused" in read_texts(log, "#records tbody tr")[1]
    log.fill("#search", "uz-leuven")
    log.wait_for_selector("#records tbody tr >> nth=0")
    assert len(read_texts(log, "#records tbody tr")) == 1


@pytest.mark.parametrize(("hash", "role"), [("#/users", "officer"), ("#/log", "viewer"), ("#/offer", "viewer")])
def test_pages_of_other_roles_are_refused(open_page, hash, role):
    page = open_page(hash, role)
    assert f"You are signed in as {role}" in page.locator("[role=alert]").inner_text()


def test_offering_a_study_and_error_in_the_study(open_page, fake_api):
    page = open_page("#/offer")
    page.fill("#toml", 'name = "x"')
    page.uncheck("#to-motol")
    page.fill("#min_sites", "2")
    fake_api.refusal = "the study: data is missing"
    page.click("#offer-form button")
    page.wait_for_selector("[role=alert] >> text=the study: data is missing")
    fake_api.refusal = None
    page.click("#offer-form button")
    page.wait_for_selector("h1 >> text=moons-stragglers")
    path, header, body = fake_api.posts[-1]
    assert (path, header, body["study"], body["min_sites"]) == ("/api/runs", "1", 'name = "x"', 2)
    assert body["sites"] == ["charite", "karolinska", "la-paz", "st-james", "uz-leuven"]


def test_html_in_names_and_reasons_is_shown_as_text(open_page, recordings):
    with serve_fake_api(make_fake_api(recordings, SITE_NAMES | {"site-02": HTML_NAME})) as hostile_api:
        fake_run = hostile_api.runs[SLOW]
        fake_run.run |= {"name": HTML_NAME, "reason": HTML_NAME, "strategy": HTML_NAME}
        fake_run.run["live"]["failures"] = {"uz-leuven": {"kind": "no_reply", "text": HTML_NAME}}
        fake_run.recording.rounds[10]["failures"] = {HTML_NAME: {"kind": "quarantined", "text": HTML_NAME}}
        hostile_api.log.append(
            {"time": hostile_api.log[0]["time"], "level": "info", "event": HTML_NAME, "why": HTML_NAME}
        )
        for hash in ("#/", f"#/runs/{SLOW}", f"#/runs/{TREE}", "#/sites", "#/log", "#/offer"):
            page = open_page(hash, at=hostile_api)
            assert HTML_NAME in page.locator("main").inner_text(), hash
            assert page.locator("main img").count() == 0
            assert page.title() != "parsed"
            page.context.close()
        page = open_page("#/sites", at=hostile_api)
        page.locator("[aria-label^='Remove <img']").click()
        assert HTML_NAME in page.locator("dialog h2").inner_text()
        page.context.close()

"""Signing in, the overview, sites, users, the log; a lost line; and names that would be scripts."""

from __future__ import annotations

import pytest

from tests.pipeline.service.dashboard.test_run_page import texts
from tests.support.demo_data import NAMES, SLOW, TREE, scene
from tests.support.fake_api import served

NASTY = "<img src=x onerror=\"document.title='broken in'\">"


def test_a_wrong_token_is_refused_in_words_and_a_right_one_enters(visit, stage):
    page = visit("#/sites", None)
    page.fill("#token", "guess")
    page.keyboard.press("Enter")
    page.wait_for_selector("[role=alert] >> text=this token is not known; ask the study lead")
    page.fill("#token", " officer-token ")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1 >> text=Sites")  # where they wanted to go
    assert "Otto, officer" in page.locator(".who").inner_text()
    page.click("#sign-out")
    page.wait_for_selector("h1 >> text=Sign in")
    assert page.context.cookies() == []
    assert {header for _, header, _ in stage.posts} == {"1"}


def test_the_overview_shows_runs_sites_and_what_waits_for_whom(visit, stage):
    page = visit()
    runs = texts(page, "#run-table tbody tr")
    value = stage.plays[SLOW].response()["headline"]["value"]
    assert runs[0].startswith(f"moons-stragglers fedprox · {SLOW} ▶ running 21 of 30 {100 * value:.1f} %")
    assert "3 of 4 4 of 4" in runs[0]
    pending = texts(page, "#pending tbody tr")
    assert pending[0] == "karolinska smears … pending 9 hours ago"
    assert pending[1] == "st-james smears ✕ withdrawn 5 hours ago"
    sites = {row.split()[0]: row for row in texts(page, "#sites tbody tr")}
    assert sites["uz-leuven"].startswith("uz-leuven ! not connected 7 minutes ago")
    assert "waits for work 1 warning: see hemofed site status there ! 1.4 GB little left" in sites["st-james"]
    assert f"in {SLOW} 210.0 GB 0.1.0" in sites["charite"]
    stage.change(SLOW, state="waiting", reason="2 of 3 sites are connected")
    page.wait_for_selector("#run-table >> text=2 of 3 sites are connected")
    assert "moons-stragglers is waiting." in page.locator("#announce").inner_text()


def test_an_empty_coordinator_says_what_to_do_next(visit, stage):
    stage.plays.clear()
    stage.sites.clear()
    page = visit()
    assert "Offer a study to the hospitals" in page.locator("#runs").inner_text()
    assert "Invite a hospital" in page.locator("#sites").inner_text()
    assert "as soon as a lead offers a study" in visit(role="viewer").locator("#runs").inner_text()


def test_a_lost_line_is_said_and_mends_itself(visit, stage):
    page = visit()
    stage.deaf = True
    page.wait_for_selector("#lost >> text=Connection to the coordinator lost")
    stage.plays[SLOW].shown += 1
    stage.deaf = False
    page.wait_for_selector("#lost p", state="detached")
    page.wait_for_selector("#run-table >> text=22 of 30")  # what was missed meanwhile is there
    assert page.locator("#announce").inner_text() == "Connected again."


def test_rounds_missed_while_the_line_was_lost_are_fetched(visit, stage):
    page = visit(f"#/runs/{SLOW}")
    stage.deaf = True
    page.wait_for_selector("#lost p")
    stage.plays[SLOW].shown += 2
    stage.deaf = False
    page.wait_for_selector(".tiles >> text=23 of 30")
    page.click("text=Show as table")
    assert [row.split()[0] for row in texts(page, "#curves-table tbody tr")][:3] == ["23", "22", "21"]


def test_an_invitation_is_shown_once_with_the_command_to_type(visit, stage):
    page = visit("#/sites")
    page.fill("#site", "new-hospital")
    page.click("#invite-form button")
    page.wait_for_selector("dialog[open]")
    assert page.input_value("#secret") == "once-new-hospital"
    command = page.locator("dialog pre").inner_text()
    assert command == f"hemofed site join HOME --coordinator {stage.url} --site new-hospital"
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 1  # it cannot be lost by a slip
    page.click("dialog >> text=I have kept it")
    page.wait_for_selector("dialog", state="detached")
    assert "once-new-hospital" not in page.content()
    assert stage.posts == [("/api/sites/new-hospital/invite", "1", {"hours": 48})]


def test_a_site_is_removed_after_a_question(visit, stage):
    page = visit("#/sites")
    page.click("#remove-motol")
    page.click("dialog >> text=Remove >> nth=-1")
    page.wait_for_selector("#enrolled tr:has-text('motol') >> text=has left")
    assert visit("#/sites", "officer").locator("#invite, [id^=remove-]").count() == 0


def test_users_are_added_and_the_log_is_searched(visit, stage):
    page = visit("#/users")
    page.fill("#name", "Wanda")
    page.select_option("#role", "officer")
    page.click("#add-form button")
    page.wait_for_selector("dialog[open]")
    assert page.input_value("#secret") == "once-user"
    assert stage.posts[-1] == ("/api/users", "1", {"name": "Wanda", "role": "officer"})
    log = visit("#/log", "officer")
    assert "refused" in texts(log, "#records tbody tr")[1]
    log.fill("#words", "uz-leuven")
    log.wait_for_selector("#records tbody tr >> nth=0")
    assert len(texts(log, "#records tbody tr")) == 1


@pytest.mark.parametrize(("hash", "role"), [("#/users", "officer"), ("#/log", "viewer"), ("#/offer", "viewer")])
def test_pages_for_others_are_refused_in_words(visit, hash, role):
    page = visit(hash, role)
    assert f"You are signed in as {role}" in page.locator("[role=alert]").inner_text()


def test_a_study_is_offered_and_what_is_wrong_with_it_is_told(visit, stage):
    page = visit("#/offer")
    page.fill("#text", 'name = "x"')
    page.uncheck("#to-motol")
    page.fill("#min_sites", "2")
    stage.refusal = "the study: data is missing"
    page.click("#offer-form button")
    page.wait_for_selector("[role=alert] >> text=the study: data is missing")
    stage.refusal = None
    page.click("#offer-form button")
    page.wait_for_selector("h1 >> text=moons-stragglers")
    path, header, body = stage.posts[-1]
    assert (path, header, body["study"], body["min_sites"]) == ("/api/runs", "1", 'name = "x"', 2)
    assert body["sites"] == ["charite", "karolinska", "la-paz", "st-james", "uz-leuven"]


def test_names_and_reasons_are_text_whatever_they_say(visit, recordings):
    with served(scene(recordings, NAMES | {"site-02": NASTY})) as nasty:
        play = nasty.plays[SLOW]
        play.run |= {"name": NASTY, "reason": NASTY, "strategy": NASTY}
        play.run["live"]["missed"] = {"uz-leuven": {"kind": "no_reply", "text": NASTY}}
        play.recording.rounds[10]["missed"] = {NASTY: {"kind": "quarantined", "text": NASTY}}
        nasty.log.append({"time": nasty.log[0]["time"], "level": "info", "event": NASTY, "why": NASTY})
        for hash in ("#/", f"#/runs/{SLOW}", f"#/runs/{TREE}", "#/sites", "#/log", "#/offer"):
            page = visit(hash, at=nasty)
            assert NASTY in page.locator("main").inner_text(), hash
            assert page.locator("main img").count() == 0
            assert page.title() != "broken in"
            page.context.close()
        page = visit("#/sites", at=nasty)
        page.locator("[aria-label^='Remove <img']").click()
        assert NASTY in page.locator("dialog h2").inner_text()
        page.context.close()

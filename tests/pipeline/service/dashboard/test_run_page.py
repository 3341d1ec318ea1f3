"""The page of a run: what it shows of recorded runs, and what happens while one is watched."""

from __future__ import annotations

from pathlib import Path

from tests.support.demo_data import OFFERED, PRIVATE, SLOW, TREE


def texts(page, selector: str) -> list[str]:
    """Of all that match, as soon as there are any."""
    page.wait_for_selector(selector, state="attached")
    return [" ".join(text.split()) for text in page.locator(selector).all_inner_texts()]


def test_a_running_run_tells_who_is_waited_for_and_what_was_missed(visit, stage):
    page = visit(f"#/runs/{SLOW}")
    people = texts(page, "#people li")
    assert people[0].startswith("karolinska ! slow")  # first who keeps the others waiting
    assert "usually < 0.1 s" in people[0]
    assert people[1:3] == ["charite ✓ answered", "st-james ✓ answered"]
    assert people[3] == "uz-leuven ✕ missed no reply"
    rows = {row.split()[0]: row for row in texts(page, "#site-table tbody tr")}
    rounds = stage.plays[SLOW].recording.rounds[:22]
    counted = sum("karolinska" in record["counted"] for record in rounds)
    missed = sum("karolinska" in record["missed"] for record in rounds)
    assert f"151 {counted} {missed} quarantined: its update is 2.36 times" in rows["karolinska"]
    assert "rounds 57 % of the steps" in rows["karolinska"]
    assert texts(page, "#doubt-table tbody tr")[0].startswith("karolinska ✕ quarantined 21 its update is")
    up = sum(record["bytes"]["up"] + record["bytes"]["evaluate_up"] for record in rounds)
    assert f"↑ {up / 1e6:.1f} MB" in page.locator(".tiles").inner_text()


def test_rounds_and_states_arrive_live_and_only_states_are_announced(visit, stage):
    page = visit(f"#/runs/{SLOW}")
    page.wait_for_selector(".tiles >> text=21 of 30")
    page.wait_for_selector("#chart-accuracy svg path")
    before = page.locator("#chart-accuracy .pooled").first.get_attribute("d")
    stage.next_round(SLOW)
    page.wait_for_selector(".tiles >> text=22 of 30")
    assert page.locator("#chart-accuracy .pooled").first.get_attribute("d") != before
    live = stage.plays[SLOW].run["live"] | {"round": 23, "answered": ["charite", "karolinska"], "missed": {}}
    stage.tell(SLOW, "live", live)
    page.wait_for_selector("#live >> text=Round 23 of 30")
    assert page.locator("#announce").inner_text() == ""
    stage.change(SLOW, state="paused")
    page.wait_for_selector("#announce >> text=moons-stragglers is paused")
    page.wait_for_selector("#live", state="hidden")
    stage.change(SLOW, state="finished")
    page.wait_for_selector("#files >> text=models/global.safetensors")  # what a run leaves comes without a reload
    assert page.locator("#result-table").is_visible()


def test_pause_acts_at_once_and_stop_asks_first(visit, stage):
    page = visit(f"#/runs/{SLOW}")
    page.click("#do-stop")
    page.wait_for_selector("dialog >> text=Stop moons-stragglers?")
    page.keyboard.press("Enter")  # the way out has the focus
    page.wait_for_selector("dialog", state="detached")
    assert stage.posts == []
    page.click("#do-pause")
    page.wait_for_selector(".run-head >> text=Pauses when the present round is done")
    page.click("#do-stop")
    page.click("dialog >> text=Stop the run")
    page.wait_for_selector(".run-head .badge >> text=stopping")
    paths = [(path, header) for path, header, _ in stage.posts]
    assert paths == [(f"/api/runs/{SLOW}/pause", "1"), (f"/api/runs/{SLOW}/stop", "1")]


def test_a_refusal_of_the_coordinator_is_shown_with_its_text(visit, stage):
    page = visit(f"#/runs/{PRIVATE}")
    stage.refusal = "the disk is full; make room on the coordinator's machine"
    page.click("#do-resume")
    page.wait_for_selector("[role=alert] >> text=the disk is full; make room")


def test_a_resumed_run_is_listened_to_again(visit, stage):
    stage.change(PRIVATE, state="stopped")
    page = visit(f"#/runs/{PRIVATE}")
    page.click("#do-resume")
    page.wait_for_selector(".run-head .badge >> text=starting")
    stage.next_round(PRIVATE)
    page.wait_for_selector(".tiles >> text=7 of 8")


def test_others_than_the_lead_read_why_they_cannot(visit, stage):
    page = visit(f"#/runs/{SLOW}", "viewer")
    button = page.locator("#do-stop")
    assert button.get_attribute("aria-disabled") == "true"
    why = page.locator(f"#{button.get_attribute('aria-describedby')}").inner_text()
    assert why == "Only a lead may do this; you are signed in as viewer."
    button.click(force=True)
    assert page.locator("dialog").count() == 0
    assert stage.posts == []


def test_an_offer_begins_only_with_enough_approvals(visit, stage):
    page = visit(f"#/runs/{OFFERED}")
    assert "1 site approved of at least 3" in page.locator("#why-not").inner_text()
    assert texts(page, "#approval-table tbody tr td:nth-child(2)")[:2] == ["✓ approved", "… pending"]
    assert "withdrawn" in texts(page, "#approval-table tbody tr td:nth-child(2)")[2]
    sites = stage.plays[OFFERED].run["sites"]
    approved = [site | {"approved": sites[0]["approved"], "withdrawn": None} for site in sites]
    stage.change(OFFERED, sites=approved)
    page.wait_for_selector("#do-begin:not([aria-disabled])")
    page.click("#do-begin")
    page.wait_for_selector(".run-head .badge >> text=starting")


def test_groups_and_their_tree_are_drawn_and_told(visit, stage):
    page = visit(f"#/runs/{TREE}")
    last = stage.plays[TREE].recording.rounds[-1]
    for row in texts(page, "#group-table tbody tr"):
        group = row.split()[1]
        members = sorted(site for site, where in last["groups"].items() if where == group)
        assert row.startswith(f"group {group} {len(members)} {members[0]}")
    assert page.locator("#groups .branch").count() == len(last["tree"]["merges"])
    page.click("text=Show the tree as table")
    first, second, distance, _ = last["tree"]["merges"][0]
    leaves = last["tree"]["leaves"]
    response = texts(page, "#tree-table tbody tr")[0]
    assert response == f"1 {leaves[first]} {leaves[second]} {float(f'{distance:.3g}')}"


def test_epsilon_stands_against_its_limit_in_bars_and_words(visit, stage):
    page = visit(f"#/runs/{PRIVATE}")
    rows = {row.split()[0]: row for row in texts(page, "#epsilon-table tbody tr")}
    spent = stage.plays[PRIVATE].recording.rounds[6]["epsilon"]
    assert rows["charite"].startswith(f"charite {spent['charite']:.2f} 4.00 4.00 0.00001")
    assert f"{spent['karolinska']:.2f} 2.00 4.00" in rows["karolinska"]  # its refusal names the budget
    assert "! sits out since round 2" in rows["karolinska"]
    share = page.locator("#epsilon-table tr:has-text('charite') [role=img]").get_attribute("aria-label")
    assert share == f"{round(100 * spent['charite'] / 4)} % spent"
    assert texts(page, "#doubt-table tbody tr")[0].startswith("karolinska ■ refused 2–6 would spend epsilon")


def test_an_unprotected_run_is_called_so_and_a_private_offer_is_not(visit, stage):
    assert "This run has no formal privacy protection" in visit(f"#/runs/{TREE}").locator("#privacy").inner_text()
    play = stage.plays[PRIVATE]
    play.run["state"], play.shown = "offered", 0
    object.__setattr__(play.recording, "privacy", None)
    assert "asks for noise at the sites" in visit(f"#/runs/{PRIVATE}").locator("#privacy").inner_text()


def test_the_curves_can_be_read_as_a_table_and_for_another_metric(visit, stage):
    page = visit(f"#/runs/{TREE}")
    page.click("text=Show as table")
    record = stage.plays[TREE].recording.rounds[-1]["metrics"]["val"]
    row = texts(page, "#curves-table tbody tr")[0]
    assert row.startswith(
        f"16 {100 * record['pooled']['accuracy']:.1f} % {100 * record['sites']['charite']['accuracy']:.1f} %"
    )
    page.select_option("#metric", "auroc")
    page.wait_for_selector("#chart-auroc svg")
    assert f"16 {record['pooled']['auroc']:.3f}" in texts(page, "#curves-table tbody tr")[0]
    box = page.locator("#chart-loss svg").bounding_box()
    page.mouse.select_trainable(box["x"] + 60, box["y"] + 60)
    assert page.locator("#chart-loss .readout").inner_text().startswith("Round ")


def test_models_can_be_downloaded(visit, stage):
    page = visit(f"#/runs/{TREE}")
    with page.expect_download() as found:
        page.click("text=models/group/0.safetensors")
    kept = stage.plays[TREE].recording.files["models/group/0.safetensors"].read_bytes()
    assert Path(found.value.path()).read_bytes() == kept
    assert page.locator("#report").get_attribute("href") == f"/api/runs/{TREE}/files/report.html"

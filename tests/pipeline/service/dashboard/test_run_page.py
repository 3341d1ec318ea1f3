"""The page of a run: what it shows of recorded runs, live updates, actions."""

from __future__ import annotations

from pathlib import Path

from tests.support.dashboard.demo_data import OFFERED, PRIVATE, SLOW, TREE


def read_texts(page, selector: str) -> list[str]:
    """Texts of all matching elements, as soon as there is one."""
    page.wait_for_selector(selector, state="attached")
    return [" ".join(text.split()) for text in page.locator(selector).all_inner_texts()]


def test_running_run_shows_live_round_missed_rounds_and_traffic(open_page, fake_api):
    page = open_page(f"#/runs/{SLOW}")
    live_sites = read_texts(page, "#live-sites li")
    assert live_sites[0].startswith("karolinska ! slow")  # waiting sites come first
    assert "usually < 0.1 s" in live_sites[0]
    assert live_sites[1:3] == ["charite ✓ replied", "st-james ✓ replied"]
    assert live_sites[3] == "uz-leuven ✕ missed no reply"
    rows = {row.split()[0]: row for row in read_texts(page, "#site-table tbody tr")}
    rounds = fake_api.runs[SLOW].recording.rounds[:22]
    num_counted = sum("karolinska" in record["accepted"] for record in rounds)
    num_missed = sum("karolinska" in record["failures"] for record in rounds)
    assert f"151 {num_counted} {num_missed} quarantined: its update is 2.36 times" in rows["karolinska"]
    assert "rounds 57 % of the steps" in rows["karolinska"]
    assert read_texts(page, "#quarantine-table tbody tr")[0].startswith("karolinska ✕ quarantined 21 its update is")
    up = sum(record["bytes"]["up"] + record["bytes"]["evaluate_up"] for record in rounds)
    assert f"↑ {up / 1e6:.1f} MB" in page.locator(".tiles").inner_text()


def test_live_updates_announce_only_changes_of_state(open_page, fake_api):
    page = open_page(f"#/runs/{SLOW}")
    page.wait_for_selector(".tiles >> text=21 of 30")
    page.wait_for_selector("#chart-accuracy svg path")
    before = page.locator("#chart-accuracy .pooled").first.get_attribute("d")
    fake_api.add_round(SLOW)
    page.wait_for_selector(".tiles >> text=22 of 30")
    assert page.locator("#chart-accuracy .pooled").first.get_attribute("d") != before
    live = fake_api.runs[SLOW].run["live"] | {"round": 23, "replied": ["charite", "karolinska"], "failures": {}}
    fake_api.publish(SLOW, "live", live)
    page.wait_for_selector("#live >> text=Round 23 of 30")
    assert page.locator("#announce").inner_text() == ""
    fake_api.change_run(SLOW, state="paused")
    page.wait_for_selector("#announce >> text=moons-stragglers is paused")
    page.wait_for_selector("#live", state="hidden")
    fake_api.change_run(SLOW, state="finished")
    page.wait_for_selector("#files >> text=models/global.safetensors")  # without a reload
    assert page.locator("#result-table").is_visible()


def test_pause_acts_at_once_and_stop_asks_for_confirmation(open_page, fake_api):
    page = open_page(f"#/runs/{SLOW}")
    page.click("#do-stop")
    page.wait_for_selector("dialog >> text=Stop moons-stragglers?")
    page.keyboard.press("Enter")  # Cancel has the focus
    page.wait_for_selector("dialog", state="detached")
    assert fake_api.posts == []
    page.click("#do-pause")
    page.wait_for_selector(".run-head >> text=Pauses after the current round")
    page.click("#do-stop")
    page.click("dialog >> text=Stop the run")
    page.wait_for_selector(".run-head .badge >> text=stopping")
    paths = [(path, header) for path, header, _ in fake_api.posts]
    assert paths == [(f"/api/runs/{SLOW}/pause", "1"), (f"/api/runs/{SLOW}/stop", "1")]


def test_error_of_the_coordinator_is_shown(open_page, fake_api):
    page = open_page(f"#/runs/{PRIVATE}")
    fake_api.refusal = "the disk is full; make room on the coordinator's machine"
    page.click("#do-resume")
    page.wait_for_selector("[role=alert] >> text=the disk is full; make room")


def test_resumed_run_gets_live_updates_again(open_page, fake_api):
    fake_api.change_run(PRIVATE, state="stopped")
    page = open_page(f"#/runs/{PRIVATE}")
    page.click("#do-resume")
    page.wait_for_selector(".run-head .badge >> text=starting")
    fake_api.add_round(PRIVATE)
    page.wait_for_selector(".tiles >> text=7 of 8")


def test_viewer_sees_disabled_buttons_with_the_reason(open_page, fake_api):
    page = open_page(f"#/runs/{SLOW}", "viewer")
    button = page.locator("#do-stop")
    assert button.get_attribute("aria-disabled") == "true"
    reason = page.locator(f"#{button.get_attribute('aria-describedby')}").inner_text()
    assert reason == "Only a lead can do this; you are signed in as viewer."
    button.click(force=True)
    assert page.locator("dialog").count() == 0
    assert fake_api.posts == []


def test_offered_run_can_begin_only_with_enough_approvals(open_page, fake_api):
    page = open_page(f"#/runs/{OFFERED}")
    assert "1 site of at least 3 approved" in page.locator("#disabled-reason").inner_text()
    assert read_texts(page, "#approval-table tbody tr td:nth-child(2)")[:2] == ["✓ approved", "… pending"]
    assert "revoked" in read_texts(page, "#approval-table tbody tr td:nth-child(2)")[2]
    sites = fake_api.runs[OFFERED].run["sites"]
    approved = [site | {"approved": sites[0]["approved"], "revoked": None} for site in sites]
    fake_api.change_run(OFFERED, sites=approved)
    page.wait_for_selector("#do-begin:not([aria-disabled])")
    page.click("#do-begin")
    page.wait_for_selector(".run-head .badge >> text=starting")


def test_clusters_and_dendrogram_are_drawn_and_listed(open_page, fake_api):
    page = open_page(f"#/runs/{TREE}")
    last = fake_api.runs[TREE].recording.rounds[-1]
    for row in read_texts(page, "#cluster-table tbody tr"):
        cluster = row.split()[1]
        sites = sorted(site for site, name in last["clusters"].items() if name == cluster)
        assert row.startswith(f"cluster {cluster} {len(sites)} {sites[0]}")
    assert page.locator("#clusters .branch").count() == len(last["dendrogram"]["merges"])
    page.click("text=Show the dendrogram as table")
    first, second, distance, _ = last["dendrogram"]["merges"][0]
    leaves = last["dendrogram"]["leaves"]
    row = read_texts(page, "#tree-table tbody tr")[0]
    assert row == f"1 {leaves[first]} {leaves[second]} {float(f'{distance:.3g}')}"


def test_epsilon_table_compares_spent_epsilon_with_the_limit(open_page, fake_api):
    page = open_page(f"#/runs/{PRIVATE}")
    rows = {row.split()[0]: row for row in read_texts(page, "#epsilon-table tbody tr")}
    spent = fake_api.runs[PRIVATE].recording.rounds[6]["epsilon"]
    assert rows["charite"].startswith(f"charite {spent['charite']:.2f} 4.00 4.00 0.00001")
    assert f"{spent['karolinska']:.2f} 2.00 4.00" in rows["karolinska"]  # its refusal names the budget
    assert "! refuses since round 2" in rows["karolinska"]
    share = page.locator("#epsilon-table tr:has-text('charite') [role=img]").get_attribute("aria-label")
    assert share == f"{round(100 * spent['charite'] / 4)} % spent"
    assert read_texts(page, "#quarantine-table tbody tr")[0].startswith("karolinska ■ refused 2–6 would spend epsilon")


def test_unprotected_run_and_private_offer_are_described(open_page, fake_api):
    assert "This run has no formal privacy protection" in open_page(f"#/runs/{TREE}").locator("#privacy").inner_text()
    fake_run = fake_api.runs[PRIVATE]
    fake_run.run["state"], fake_run.num_rounds = "offered", 0
    object.__setattr__(fake_run.recording, "privacy", None)
    assert (
        "asks for differential privacy at the sites" in open_page(f"#/runs/{PRIVATE}").locator("#privacy").inner_text()
    )


def test_curves_have_a_table_a_choice_of_metrics_and_a_readout(open_page, fake_api):
    page = open_page(f"#/runs/{TREE}")
    page.click("text=Show as table")
    record = fake_api.runs[TREE].recording.rounds[-1]["metrics"]["val"]
    row = read_texts(page, "#curves-table tbody tr")[0]
    assert row.startswith(
        f"16 {100 * record['pooled']['accuracy']:.1f} % {100 * record['sites']['charite']['accuracy']:.1f} %"
    )
    page.select_option("#metric", "auroc")
    page.wait_for_selector("#chart-auroc svg")
    assert f"16 {record['pooled']['auroc']:.3f}" in read_texts(page, "#curves-table tbody tr")[0]
    box = page.locator("#chart-loss svg").bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 60)
    assert page.locator("#chart-loss .readout").inner_text().startswith("Round ")


def test_model_can_be_downloaded(open_page, fake_api):
    page = open_page(f"#/runs/{TREE}")
    with page.expect_download() as download:
        page.click("text=models/cluster/0.safetensors")
    expected = fake_api.runs[TREE].recording.files["models/cluster/0.safetensors"].read_bytes()
    assert Path(download.value.path()).read_bytes() == expected
    assert page.locator("#report").get_attribute("href") == f"/api/runs/{TREE}/files/report.html"


def test_run_page_lists_what_leaves_each_site(open_page):
    page = open_page(f"#/runs/{PRIVATE}")
    page.click("#study-disclosures summary")
    rows = read_texts(page, "#disclosure-table tbody tr")
    (update,) = [row for row in rows if row.startswith("Model update ")]
    assert "every round the coordinator differential privacy noise on what each patient adds" in update
    assert any(row.startswith("Data summary ") and "unprotected" in row for row in rows)
    assert not any(row.startswith("Mean training loss") for row in rows)

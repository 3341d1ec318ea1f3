import re

from pipeline.reports.run.report import write_report
from pipeline.reports.run.sites import _done_fraction
from tests.support.run_folder_factory import HOSTILE_NAME, make_record, make_round_record

PLOTS = {
    "accuracy",
    "loss",
    "baselines",
    "baseline_curves",
    "confusion",
    "reliability",
    "roc",
    "precision_recall",
    "class_counts",
    "traffic",
}


def test_the_headline_of_a_finished_run(report_page):
    tiles = dict(zip(report_page.texts("dt"), report_page.texts("dd"), strict=True))
    assert tiles == {
        "AUROC, schistocyte, test (all sites)": "0.875",
        "Accuracy": "81.2 %",
        "Lowest accuracy of a site: a": "70.0 %",  # the sites have no AUROC of the class
        "Best round": "1",
        "Sites": "2",
        "Rounds": "2",
        "Traffic, both ways": "12.0 MB",
        "Time": "1 min 35 s",
    }
    assert report_page.texts("h1") == ["Smears & friends"]
    assert "fedavg" in report_page.texts("header")[0]
    assert "101,770 parameters" in report_page.texts("header")[0]
    assert "Research use only, not a medical device" in report_page.texts("footer")[0]
    assert "not finished" not in report_page.texts("body")[0]


def test_plots_are_saved_next_to_the_report(report_path):
    plots = list((report_path.parent / "plots").iterdir())
    assert {plot.stem for plot in plots} == PLOTS
    assert all(plot.read_bytes().startswith(b"\x89PNG") for plot in plots)


def test_results_by_site_highlight_the_worst_site(report_page):
    assert report_page.row("a lowest accuracy") == "a lowest accuracy 100 – 70.0 % 70.0 % 0.125 0.600"
    assert report_page.row(HOSTILE_NAME).endswith("0.125 0.200")
    assert [tag.text.split()[0] for tag in report_page.all("tr") if tag.attributes.get("class") == "marked"] == ["a"]
    headings = report_page.texts("th")
    assert "Macro F1" not in headings  # undefined everywhere
    assert "AUROC, schistocyte" in headings
    assert "AUROC" not in headings  # of two classes, a mean says nothing beside the positive one


def test_scores_by_class_come_from_the_confusion_matrix(report_page):
    assert report_page.row("schistocyte") == "schistocyte 8 50.0 % 66.7 %"


def test_the_table_of_baselines(report_page):
    assert (
        report_page.row("Local only")
        == "Local only every site trains alone from the same initial model; its last round 66.0 % – – −27.0"
    )
    assert report_page.row("Federated") == "Federated this run 81.2 % 80.0 % 70.0 % a −11.8"
    assert report_page.row("Centralised").endswith("93.0 % – – –")


def test_names_are_escaped(run_folder, read_page):
    run_folder.results["study"] = HOSTILE_NAME
    run_folder.study_toml += f'[note]\ntext = "{HOSTILE_NAME}"\n'
    page = read_page(write_report(run_folder.write()))
    assert page.all("script") == []
    assert page.texts("h1") == [HOSTILE_NAME]
    assert any(HOSTILE_NAME[:12] in text for text in page.texts("text"))  # in a figure as well


def test_the_page_is_self_contained(report_path):
    html = report_path.read_text("utf-8")
    assert "http://" not in html
    assert "https://" not in html
    assert "@import" not in html


def test_links_and_images_stay_inside_the_page(run_folder, read_page):
    run_folder.round_records[1]["failures"] = {
        HOSTILE_NAME: {"kind": "no_reply", "text": "dropped out"}
    }  # the heatmap of stragglers is an image
    page = read_page(write_report(run_folder.write()))
    targets = [
        value for tag in page.tags for name, value in tag.attributes.items() if name.split(":")[-1] in ("src", "href")
    ]
    assert any(target.startswith("data:image/png") for target in targets)
    assert all(target.startswith(("#", "data:image/png;base64,")) for target in targets)


def test_ids_are_unique_and_every_reference_has_one(report_page):
    ids = [tag.attributes["id"] for tag in report_page.tags if "id" in tag.attributes]
    assert len(ids) == len(set(ids))
    used = [tag.attributes["href"][1:] for tag in report_page.all("use")]
    assert set(used) <= set(ids)
    assert used


def test_tables_and_figures_are_accessible(report_page):
    assert all(tag.attributes.get("scope") in ("col", "row") for tag in report_page.all("th"))
    drawings = [tag for tag in report_page.all("div") if tag.attributes.get("role") == "img"]
    assert len(drawings) == len(report_page.all("svg")) == len(PLOTS)
    assert all(tag.attributes["aria-label"] for tag in drawings)


def test_the_report_is_deterministic(report_path, run_folder):
    again = write_report(run_folder.write())
    for path in [again, *(again.parent / "plots").iterdir()]:
        assert path.read_bytes() == (report_path.parent / path.relative_to(again.parent)).read_bytes(), path.name


def test_report_of_an_unfinished_run(run_folder, read_page):
    run_folder.results = None
    path = run_folder.write()
    with (path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "sampled_clients": ["a"')  # the writer is in the middle of a line
    page = read_page(write_report(path))
    assert "has not finished: round 2 is its last so far" in page.texts("header")[0]
    tiles = dict(zip(page.texts("dt"), page.texts("dd"), strict=True))
    assert tiles["Accuracy, validation (mean over sites)"] == "70.0 %"
    assert tiles["Best round"] == "–"
    assert tiles["Traffic, both ways"] == "12.0 MB"
    assert tiles["Time"] == "1 min 34 s"
    assert page.texts("h1") == ["smears"]


def test_report_of_a_run_without_rounds(tmp_path, read_page):
    (tmp_path / "study.toml").write_text('name = "early"')
    page = read_page(write_report(tmp_path))
    assert "no round is recorded yet" in page.texts("header")[0]
    assert dict(zip(page.texts("dt"), page.texts("dd"), strict=True))["Accuracy"] == "–"


def test_undefined_values_are_dashes(run_folder, read_page):
    run_folder.round_records = [
        make_round_record(round_number, {"a": None, HOSTILE_NAME: None}) for round_number in range(3)
    ]
    run_folder.results["test"] = {"pooled": {"n": 26, "loss": float("nan"), "accuracy": None}, "sites": {"a": {"n": 0}}}
    run_folder.results["worst_site"] = run_folder.results["site_std"] = None
    page = read_page(write_report(run_folder.write()))
    assert page.texts("dd")[0] == "–"
    assert not re.search(r"\bnan\b", page.texts("main")[0], re.IGNORECASE)


def test_missing_updates_by_site_and_reason(run_folder, read_page):
    first, second = run_folder.round_records[1:]
    first |= {"accepted": ["a"], "failures": {HOSTILE_NAME: {"kind": "late", "text": "12 of 50 steps"}}, "clock": 60.0}
    first["work"][HOSTILE_NAME]["steps_done"] = 12
    missed = {HOSTILE_NAME: {"kind": "late", "text": "3 of 50 steps"}, "a": {"kind": "no_reply", "text": "dropped out"}}
    second |= {"accepted": [], "failures": missed, "clock": 130.0}
    second["void"] = "0 of 2 answers, quorum 1"
    page = read_page(write_report(run_folder.write()))
    body = page.texts("main")[0]
    assert "3 updates of 4 requested missing. Simulated time: 2 min 10 s." in body
    rows = page.texts("tr")
    assert "Site Sampled Accepted Late No reply" in rows
    assert "a 2 1 0 1" in rows
    assert f"{HOSTILE_NAME} 2 0 2 0" in rows
    assert "2 0 of 2 answers, quorum 1" in rows
    assert (run_folder.path / "plots" / "stragglers.png").exists()


def test_complete_work_has_no_straggler_heatmap(report_page):
    assert "Every sampled site finished its work in every round." in report_page.texts("main")[0]


def test_data_study_and_software_are_in_the_report(report_page, run_folder):
    body = report_page.texts("main")[0]
    assert "Data fingerprint: sha256:feed" in body
    assert "1 file skipped b/17.png: truncated" in report_page.texts("details")[0]
    assert "a 42 4 13" in report_page.texts("tr")
    assert "torch 2.13.0" in report_page.texts("tr")
    assert run_folder.study_toml.split() == report_page.texts("pre")[-1].split()


def test_no_roc_without_a_positive_class(run_folder, read_page):
    run_folder.site_data["classes"] = ["x", "y", "z"]
    for site in run_folder.site_data["sites"].values():
        site["train"] = [1, 2, 3]
    run_folder.results["positive_class"] = None
    run_folder.results["test"]["pooled"]["confusion"] = [[1, 0, 0], [0, 1, 0], [0, 0, 0]]
    page = read_page(write_report(run_folder.write()))
    assert "ROC curve" not in page.texts("main")[0]
    assert page.row("z") == "z 0 – –"


def test_the_band_is_described(report_page, run_folder, read_page):
    wider = read_page(write_report(run_folder.write(), band="95"))
    assert "one standard deviation over sites (68 %)" in report_page.texts("main")[0]
    assert "1.96 standard deviations over sites (95 %)" in wider.texts("main")[0]


def test_the_completed_part_of_a_sites_work():
    work = {"a": {"steps_requested": 50, "steps_done": 20, "num_examples": 10}}
    record = make_record(3, {"a": 0.5, "b": 0.5, "c": 0.5}, work=work, accepted=["a", "b"])
    assert [_done_fraction(record, site) for site in ("a", "b", "c", "d")] == [0.4, 1.0, 0.0, None]

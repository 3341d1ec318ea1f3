from pipeline.reports.run.report import write_report

PLOTS = {
    "accuracy",
    "loss",
    "baselines",
    "yardstick_curves",
    "confusion",
    "reliability",
    "roc",
    "precision_recall",
    "class_counts",
    "traffic",
}


def test_the_headline_of_a_finished_run(page):
    tiles = dict(zip(page.texts("dt"), page.texts("dd"), strict=True))
    assert tiles == {
        "AUROC, schistocyte, test (all sites)": "0.875",
        "Accuracy": "81.2 %",
        "Lowest accuracy of a site: a": "70.0 %",  # the sites tell no AUROC of the class
        "Best round": "1",
        "Sites": "2",
        "Rounds": "2",
        "Traffic, both ways": "12.0 MB",
        "Time": "1 min 35 s",
    }
    assert page.texts("h1") == ["Smears & friends"]
    assert "fedavg" in page.texts("header")[0]
    assert "101,770 parameters" in page.texts("header")[0]
    assert "Research use only, not a medical device" in page.texts("footer")[0]
    assert "not finished" not in page.texts("body")[0]


def test_plots_are_saved_beside_the_report(finished):
    plots = list((finished.parent / "plots").iterdir())
    assert {plot.stem for plot in plots} == PLOTS
    assert all(plot.read_bytes().startswith(b"\x89PNG") for plot in plots)


def test_results_per_site_mark_the_worst_in_words(page, nasty):
    assert page.row("a lowest accuracy") == "a lowest accuracy 100 – 70.0 % 70.0 % 0.125 0.600"
    assert page.row(nasty).endswith("0.125 0.200")
    assert [tag.text.split()[0] for tag in page.all("tr") if tag.attributes.get("class") == "marked"] == ["a"]
    headings = page.texts("th")
    assert "Macro F1" not in headings  # undefined everywhere
    assert "AUROC, schistocyte" in headings
    assert "AUROC" not in headings  # of two classes, a mean says nothing beside the positive one


def test_class_by_class_numbers_come_from_the_confusion_matrix(page):
    assert page.row("schistocyte") == "schistocyte 8 50.0 % 66.7 %"


def test_yardsticks_stand_beside_the_federation(page):
    assert (
        page.row("Each site alone")
        == "Each site alone every site goes on alone from the same start; its last round 66.0 % – – −27.0"
    )
    assert page.row("Federated") == "Federated this run 81.2 % 80.0 % 70.0 % a −11.8"
    assert page.row("All data in one place").endswith("93.0 % – – –")


def test_a_name_cannot_leave_its_place(folder, read_page, nasty):
    folder.results["study"] = nasty
    folder.study += f'[note]\ntext = "{nasty}"\n'
    page = read_page(write_report(folder.write()))
    assert page.all("script") == []
    assert page.texts("h1") == [nasty]
    assert any(nasty[:12] in text for text in page.texts("text"))  # in a drawing as well


def test_the_page_needs_nothing_else(finished):
    html = finished.read_text("utf-8")
    assert "http://" not in html
    assert "https://" not in html
    assert "@import" not in html


def test_links_and_images_stay_inside_the_page(folder, read_page, nasty):
    folder.rounds[1]["missed"] = {nasty: "dropped out"}  # the strip of stragglers is an image
    page = read_page(write_report(folder.write()))
    targets = [
        value for tag in page.tags for name, value in tag.attributes.items() if name.split(":")[-1] in ("src", "href")
    ]
    assert any(target.startswith("data:image/png") for target in targets)
    assert all(target.startswith(("#", "data:image/png;base64,")) for target in targets)


def test_ids_are_unique_and_every_reference_has_one(page):
    ids = [tag.attributes["id"] for tag in page.tags if "id" in tag.attributes]
    assert len(ids) == len(set(ids))
    used = [tag.attributes["href"][1:] for tag in page.all("use")]
    assert set(used) <= set(ids)
    assert used


def test_tables_and_figures_are_accessible(page):
    assert all(tag.attributes.get("scope") in ("col", "row") for tag in page.all("th"))
    drawings = [tag for tag in page.all("div") if tag.attributes.get("role") == "img"]
    assert len(drawings) == len(page.all("svg")) == len(PLOTS)
    assert all(tag.attributes["aria-label"] for tag in drawings)


def test_the_same_run_gives_the_same_bytes(finished, folder):
    again = write_report(folder.write())
    for path in [again, *(again.parent / "plots").iterdir()]:
        assert path.read_bytes() == (finished.parent / path.relative_to(again.parent)).read_bytes(), path.name


def test_an_unfinished_run_says_so(folder, read_page):
    folder.results = None
    path = folder.write()
    with (path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "asked": ["a"')  # the writer is in the middle of a line
    page = read_page(write_report(path))
    assert "has not finished: it stands at round 2" in page.texts("header")[0]
    tiles = dict(zip(page.texts("dt"), page.texts("dd"), strict=True))
    assert tiles["Accuracy, validation (mean over sites)"] == "70.0 %"
    assert tiles["Best round"] == "–"
    assert tiles["Traffic, both ways"] == "12.0 MB"
    assert tiles["Time"] == "1 min 34 s"
    assert page.texts("h1") == ["smears"]


def test_a_run_without_any_round_has_a_page(tmp_path, read_page):
    (tmp_path / "study.toml").write_text('name = "early"')
    page = read_page(write_report(tmp_path))
    assert "no round is recorded yet" in page.texts("header")[0]
    assert dict(zip(page.texts("dt"), page.texts("dd"), strict=True))["Accuracy"] == "–"


def test_undefined_values_are_dashes(folder, read_page, line, nasty):
    folder.rounds = [line(turn, {"a": None, nasty: None}) for turn in range(3)]
    folder.results["test"] = {"pooled": {"n": 26, "loss": float("nan"), "accuracy": None}, "sites": {"a": None}}
    folder.results["worst"] = folder.results["spread"] = None
    page = read_page(write_report(folder.write()))
    assert page.texts("dd")[0] == "–"
    assert "nan" not in page.texts("main")[0].lower()


def test_who_was_missed_and_why(folder, read_page, nasty):
    first, second = folder.rounds[1:]
    first |= {"counted": ["a"], "missed": {nasty: "late: 12 of 50 steps"}, "clock": 60.0}
    first["work"][nasty]["done"] = 12
    second |= {"counted": [], "missed": {nasty: "late: 3 of 50 steps", "a": "dropped out"}, "clock": 130.0}
    second["void"] = "0 of 2 answers, quorum 1"
    page = read_page(write_report(folder.write()))
    body = page.texts("main")[0]
    assert "3 answers of 4 asked for did not count. The virtual clock stands at 2 min 10 s." in body
    rows = page.texts("tr")
    assert "Site Asked Counted Dropped out Late" in rows
    assert "a 2 1 1 0" in rows
    assert f"{nasty} 2 0 0 2" in rows
    assert "2 0 of 2 answers, quorum 1" in rows
    assert (folder.path / "plots" / "stragglers.png").exists()


def test_full_work_needs_no_strip(page):
    assert "Every site that was asked finished its work in every round." in page.texts("main")[0]


def test_data_study_and_software_are_on_record(page, folder):
    body = page.texts("main")[0]
    assert "Fingerprint of the data: sha256:feed" in body
    assert "1 file skipped b/17.png: truncated" in page.texts("details")[0]
    assert "a 42 4 13" in page.texts("tr")
    assert "torch 2.13.0" in page.texts("tr")
    assert folder.study.split() == page.texts("pre")[-1].split()


def test_no_roc_without_a_positive_class(folder, read_page):
    folder.data["classes"] = ["x", "y", "z"]
    for site in folder.data["sites"].values():
        site["train"] = [1, 2, 3]
    folder.results["positive"] = None
    folder.results["test"]["pooled"]["confusion"] = [[1, 0, 0], [0, 1, 0], [0, 0, 0]]
    page = read_page(write_report(folder.write()))
    assert "ROC curve" not in page.texts("main")[0]
    assert page.row("z") == "z 0 – –"


def test_the_band_is_named(page, folder, read_page):
    wider = read_page(write_report(folder.write(), band="95"))
    assert "one standard deviation over sites (68 %)" in page.texts("main")[0]
    assert "1.96 standard deviations over sites (95 %)" in wider.texts("main")[0]

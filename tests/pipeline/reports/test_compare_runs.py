import pytest

from pipeline.core.errors import RunFolderError
from pipeline.reports.compare import flatten_settings, write_comparison


@pytest.fixture
def two_runs(run_folder, tmp_path):
    first = run_folder.write()
    run_folder.path = tmp_path / "other"
    run_folder.results |= {"strategy": "fedprox", "best_round": 2}
    run_folder.study_toml = 'name = "smears"\nseed = 1\n[strategy]\nname = "fedprox"\nmu = 0.1\n[model]\nname = "mlp"\n'
    return [first, run_folder.write()]


def test_rows_are_plain_numbers(two_runs, tmp_path):
    _, rows = write_comparison(two_runs, tmp_path / "c.html")
    assert rows[1] == {
        "name": "other",
        "strategy": "fedprox",
        "best_round": 2,
        "judged_on": "test, all sites",
        "accuracy": 0.812,
        "loss": pytest.approx(0.376),
        "traffic": 12_000_000,
        "seconds": 95.0,
    }


def test_the_page_shows_scores_curves_and_differing_settings(two_runs, tmp_path, read_page):
    path, _ = write_comparison(two_runs, tmp_path / "pages")
    page = read_page(path)
    assert path == tmp_path / "pages" / "compare.html"
    rows = page.texts("tr")
    assert "other fedprox 2 test, all sites 81.2 % 0.376 12.0 MB 1 min 35 s" in rows
    assert "strategy.name fedavg fedprox" in rows
    assert "strategy.mu – 0.1" in rows
    assert not any(row.startswith(("seed", "model.name")) for row in rows)
    assert {"run", "other"} <= set(page.texts("text"))
    assert "on validation data, mean over sites" in page.texts("figcaption")[0]


def test_the_chosen_metric_has_a_column(two_runs, tmp_path, read_page):
    path, rows = write_comparison(two_runs, tmp_path, metric="auroc")
    assert rows[0]["auroc"] == 0.75
    assert "AUROC" in read_page(path).texts("th")


def test_runs_evaluated_differently_are_named(two_runs, run_folder, tmp_path, read_page):
    for record in run_folder.round_records:
        record["metrics"] = {"test": {"coordinator": {"n": 10, "accuracy": 0.1 * record["round"]}}}
    run_folder.write()
    path, _ = write_comparison(two_runs, tmp_path)
    assert "The runs were evaluated differently: run: validation data" in read_page(path).texts("figcaption")[0]


def test_an_unfinished_run_is_named(two_runs, run_folder, tmp_path, read_page):
    run_folder.results = None
    run_folder.write()
    path, rows = write_comparison(two_runs, tmp_path)
    assert "Not finished, scores of the last evaluated round: other." in read_page(path).texts("header")[0]
    assert rows[1]["best_round"] is None


def test_runs_with_equal_names_and_equal_studies(run_folder, tmp_path, read_page):
    run_folder.path = tmp_path / "x" / "run"
    first = run_folder.write()
    run_folder.path = tmp_path / "y" / "run"
    path, rows = write_comparison([first, run_folder.write(), first], tmp_path)
    assert [row["name"] for row in rows] == ["x/run (1)", "y/run", "x/run (2)"]
    assert "the study files have the same settings" in read_page(path).texts("main")[0]


def test_an_unknown_metric_is_refused_with_the_valid_ones(two_runs, tmp_path):
    with pytest.raises(RunFolderError, match="'acuracy'; valid: accuracy"):
        write_comparison(two_runs, tmp_path, metric="acuracy")


def test_flatten_settings():
    assert flatten_settings({"a": {"b": {"c": 1}}, "d": [1, 2]}) == {"a.b.c": "1", "d": "[1, 2]"}

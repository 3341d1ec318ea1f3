import pytest

from pipeline.core.errors import RunFolderError
from pipeline.reports.run.record import load_run_record
from tests.support.run_folder_factory import make_metrics, make_round_record


def test_of_a_repeated_round_the_last_line_counts(run_folder):
    run_folder.round_records.append(make_round_record(1, {"a": 0.9}))
    record = load_run_record(run_folder.write())
    assert [entry.round for entry in record.round_records] == [0, 1, 2]
    assert record.site_metric_by_round("val", "accuracy")[1] == [0.9]


def test_a_damaged_line_is_named(run_folder):
    path = run_folder.write()
    lines = (path / "rounds.jsonl").read_text().splitlines()
    (path / "rounds.jsonl").write_text("\n".join([lines[0], '{"round"', lines[2]]))
    with pytest.raises(RunFolderError, match=r"rounds\.jsonl, line 2"):
        load_run_record(path)


@pytest.mark.parametrize(("file", "content"), [("sites.json", "{"), ("results.json", "[]")])
def test_a_damaged_file_is_named(run_folder, file, content):
    path = run_folder.write()
    (path / file).write_text(content)
    with pytest.raises(RunFolderError, match=file):
        load_run_record(path)


def test_a_damaged_study_is_named(run_folder):
    run_folder.study_toml = "name ="
    run_folder.results = None
    record = load_run_record(run_folder.write())
    with pytest.raises(RunFolderError, match=r"study\.toml"):
        _ = record.model_name


def test_the_result_is_of_the_best_round(run_folder):
    assert load_run_record(run_folder.write()).result_round == 1
    run_folder.results = None
    assert load_run_record(run_folder.write()).result_round == 2


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(RunFolderError, match="is not a run folder"):
        load_run_record(tmp_path)


def test_most_evaluated_split(run_folder):
    run_folder.round_records[2]["metrics"]["test"] = {"pooled": make_metrics(0.5)}
    assert load_run_record(run_folder.write()).most_evaluated_split() == "val"

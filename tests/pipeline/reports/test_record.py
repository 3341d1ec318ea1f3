import pytest

from pipeline.core.errors import RunFolderError
from pipeline.reports.run.record import finite_or_none, load_run_record


def test_a_resumed_run_counts_a_round_once(folder, line):
    folder.rounds.append(line(1, {"a": 0.9}))
    record = load_run_record(folder.write())
    assert [one["round"] for one in record.round_records] == [0, 1, 2]
    assert record.site_metric_by_round("val", "accuracy")[1] == [0.9]


def test_a_damaged_line_is_named(folder):
    path = folder.write()
    lines = (path / "rounds.jsonl").read_text().splitlines()
    (path / "rounds.jsonl").write_text("\n".join([lines[0], '{"round"', lines[2]]))
    with pytest.raises(RunFolderError, match=r"rounds\.jsonl, line 2"):
        load_run_record(path)


@pytest.mark.parametrize(("file", "content"), [("sites.json", "{"), ("results.json", "[]")])
def test_a_damaged_file_is_named(folder, file, content):
    path = folder.write()
    (path / file).write_text(content)
    with pytest.raises(RunFolderError, match=file):
        load_run_record(path)


def test_a_damaged_study_is_named(folder):
    folder.study = "name ="
    folder.results = None
    record = load_run_record(folder.write())
    with pytest.raises(RunFolderError, match=r"study\.toml"):
        record.component_name("model")


def test_another_folder_is_refused(tmp_path):
    with pytest.raises(RunFolderError, match="is no run folder"):
        load_run_record(tmp_path)


def test_the_split_judged_most_is_shown(folder):
    folder.rounds[2]["metrics"]["test"] = {"pooled": {"accuracy": 0.5}}
    assert load_run_record(folder.write()).most_evaluated_split() == "val"


@pytest.mark.parametrize(("value", "found"), [(None, None), (float("inf"), None), ("3", None), (2, 2.0), (0.5, 0.5)])
def test_only_finite_numbers_are_numbers(value, found):
    assert finite_or_none(value) == found

"""The cache of baselines, which outlives a version of hemofed."""

from pipeline.coordinator.run_folder import RUN_FORMAT, RunFolder
from pipeline.records.sites_record import SitesRecord
from pipeline.runs import baselines
from pipeline.study.toml_file import find_study, load_study


def test_a_baseline_of_another_run_format_is_not_used(tmp_path, monkeypatch):
    study = load_study(find_study("moons-demo"))
    folder = RunFolder.create(tmp_path / "run", study)
    SitesRecord(classes=("0", "1"), shape=(2,), sites={}, fingerprint="f" * 40, skipped=()).write(folder.path)
    monkeypatch.setattr(baselines, "user_cache_path", lambda name: tmp_path / "cache")
    first = baselines._open_cache_folder(study, folder)
    assert baselines._open_cache_folder(study, folder).path == first.path
    monkeypatch.setattr(baselines, "RUN_FORMAT", RUN_FORMAT + 1)
    assert baselines._open_cache_folder(study, folder).path != first.path

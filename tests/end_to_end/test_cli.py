"""The commands `hemofed run`, `study`, `compare`, `evaluate`, `report`, `strategies`, `reproduce` and `join-run` as processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

COMMAND: list[str] = []  # set by `use_command_server`


@pytest.fixture(scope="module", autouse=True)
def use_command_server(hemofed_command):
    COMMAND[:] = [str(hemofed_command)]


def run_hemofed(*args: str, cwd: Path, ok: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    """`ok`: whether the command must succeed."""
    completed = subprocess.run(
        [*COMMAND, *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"COLUMNS": "200"} | env,
    )
    assert (completed.returncode == 0) == ok, completed.stderr
    assert "Traceback" not in completed.stderr, completed.stderr
    return completed


def test_help_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['hemofed', '--help']\n"
        "from pipeline.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'monai', 'matplotlib', 'sklearn', 'scipy', 'albumentations', 'cv2'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    for command in ("run", "study", "compare", "evaluate", "reproduce", "report", "strategies", "site"):
        assert command in completed.stdout


def test_missing_extra_is_named_with_the_install_command(tmp_path):
    """None in sys.modules makes the import of torch fail."""
    code = "import sys; sys.modules['torch'] = None; sys.argv = ['hemofed', 'run']; from pipeline.cli.main import main; main()"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert completed.returncode == 2
    assert "pip install 'hemofed[train]'" in completed.stderr
    assert "Traceback" not in completed.stderr


@pytest.fixture(scope="module")
def runs_folder(tmp_path_factory) -> Path:
    """Two finished runs, "one" with baselines and "two" with FedProx."""
    folder = tmp_path_factory.mktemp("runs")
    run_hemofed(
        "run",
        "moons-demo",
        "--out",
        "one",
        "--set",
        "rounds=4",
        "--baselines",
        "-q",
        cwd=folder,
        XDG_CACHE_HOME=str(folder / "cache"),
    )
    run_hemofed("run", "moons-demo", "--out", "two", "--set", "rounds=4", "--set", "strategy=fedprox", "-q", cwd=folder)
    return folder


def test_run_writes_all_files_of_the_run_folder(runs_folder):
    names = {p.name for p in (runs_folder / "one").iterdir()}
    assert {
        "run.json",
        "study.toml",
        "sites.json",
        "rounds.jsonl",
        "results.json",
        "checkpoint",
        "models",
        "plots",
        "report.html",
    } <= names
    results = json.loads((runs_folder / "one" / "results.json").read_text())
    assert set(results["baselines"]) == {"local_only", "centralized"}
    assert len((runs_folder / "one" / "rounds.jsonl").read_text().splitlines()) == 5


def test_run_json_prints_only_json(tmp_path):
    completed = run_hemofed("run", "moons-demo", "--set", "rounds=2", "--json", cwd=tmp_path)
    assert json.loads(completed.stdout)["run"] == "runs/moons-demo"
    again = run_hemofed("run", "moons-demo", "--set", "rounds=2", "--json", cwd=tmp_path)
    assert json.loads(again.stdout)["run"] == "runs/moons-demo-2"


def test_progress_without_a_terminal_is_one_line_per_round(tmp_path):
    completed = run_hemofed("run", "moons-demo", "--set", "rounds=2", cwd=tmp_path)
    assert completed.stderr.count("round ") == 3
    assert "test accuracy" in completed.stdout


def test_compare_lists_runs_and_writes_a_page(runs_folder):
    rows = json.loads(run_hemofed("compare", "one", "two", "--json", cwd=runs_folder).stdout)
    assert [r["strategy"] for r in rows] == ["fedavg", "fedprox"]
    assert "strategy" in (runs_folder / "compare.html").read_text()
    run_hemofed("compare", "one", "nowhere", cwd=runs_folder, ok=False)


def test_evaluate_on_other_data(runs_folder):
    scores = json.loads(
        run_hemofed("evaluate", "one", "--data", ".", "--json", "--set", "points=400", cwd=runs_folder).stdout
    )
    assert scores["n"] == 400
    assert 0.5 < scores["accuracy"] <= 1
    assert sum(map(sum, scores["confusion"])) == 400
    assert "accuracy" in run_hemofed("evaluate", "one", "--data", ".", "--split", "test", cwd=runs_folder).stdout


def test_evaluate_names_valid_models_splits_and_sources(runs_folder):
    def error_text(*options: str) -> str:
        return run_hemofed("evaluate", "one", "--data", ".", *options, cwd=runs_folder, ok=False).stderr

    assert "valid: global" in error_text("--model", "best")
    assert "valid: all" in error_text("--split", "tset")
    assert "moons" in error_text("--source", "moon")


def test_study_new_check_show_list(tmp_path):
    run_hemofed("study", "new", "mine.toml", "--like", "moons-demo", cwd=tmp_path)
    run_hemofed("study", "new", "mine.toml", cwd=tmp_path, ok=False)
    checked = json.loads(run_hemofed("study", "check", "mine.toml", "--json", cwd=tmp_path).stdout)
    assert checked["num_parameters"] == 22
    assert len(checked["sites"]) == 4
    shown = run_hemofed("study", "show", "mine.toml", "--set", "local.lr=0.5", cwd=tmp_path).stdout
    assert "lr = 0.5" in shown
    assert {"moons-demo", "fashion-mnist-table"} <= {
        s["name"] for s in json.loads(run_hemofed("study", "list", "--json", cwd=tmp_path).stdout)
    }
    (tmp_path / "mine.toml").write_text((tmp_path / "mine.toml").read_text().replace("rounds", "rouns"))
    error_text = run_hemofed("study", "check", "mine.toml", cwd=tmp_path, ok=False).stderr
    assert "mine.toml:3: unknown key 'rouns'; did you mean 'rounds'?" in error_text


def test_missing_data_folder_is_named(tmp_path):
    error_text = run_hemofed("run", "fashion-mnist-table", "--set", "data.path=nowhere", cwd=tmp_path, ok=False).stderr
    assert "nowhere" in error_text
    assert not (tmp_path / "runs" / "fashion-mnist-table" / "results.json").exists()


def test_corrupt_image_is_named_and_can_be_skipped(tmp_path):
    for label in ("normal", "schistocyte"):
        for i in range(12):
            file = tmp_path / "cells" / label / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 40), (20 * i, 40, 200 if label == "normal" else 20)).save(file)
    (tmp_path / "cells" / "normal" / "3.png").write_bytes(b"\x89PNG but no more")
    (tmp_path / "s.toml").write_text(
        'name = "cells"\nrounds = 2\n[data]\nname = "folder"\npath = "cells"\nval = 0.0\n[sites]\ncount = 2\n'
        '[model]\nname = "mlp"\n[evaluation]\npositive_class = "schistocyte"\n'
    )
    error_text = run_hemofed("run", "s.toml", "--out", "bad", cwd=tmp_path, ok=False).stderr
    assert "normal/3.png" in error_text
    assert "data.corrupt = 'skip'" in error_text
    completed = json.loads(
        run_hemofed("run", "s.toml", "--out", "good", "--set", "data.corrupt=skip", "--json", cwd=tmp_path).stdout
    )
    assert completed["test"]["pooled"]["n"] == 5
    assert "normal/3.png" in (tmp_path / "good" / "report.html").read_text()
    scores = json.loads(
        run_hemofed("evaluate", "good", "--data", "cells", "--set", "corrupt=skip", "--json", cwd=tmp_path).stdout
    )
    assert scores["n"] == 23
    assert "positive_auroc" in scores


def test_resume_refuses_new_settings(runs_folder):
    error_text = run_hemofed("run", "--resume", "one", "--set", "rounds=9", cwd=runs_folder, ok=False).stderr
    assert "--resume continues a run with its own settings" in error_text
    run_hemofed("run", "--resume", "one", "-q", cwd=runs_folder)
    assert "is not a run folder" in run_hemofed("run", "--resume", "cache", cwd=runs_folder, ok=False).stderr


def test_strategies_command_lists_strategies_codecs_and_rules(tmp_path):
    components = json.loads(run_hemofed("strategies", "--json", cwd=tmp_path).stdout)
    assert {r["name"] for r in components["codecs"]} == {"fp16", "qsgd", "randk", "ring", "topk"}
    assert {r["name"] for r in components["aggregation_rules"]} >= {"mean", "median", "krum"}
    rows = {r["name"]: r for r in components["strategies"]}
    assert rows["cfl"]["visibility"] == "each"
    assert rows["ditto"]["client_state"] == "its own model"
    assert all(r["paper"] for name, r in rows.items() if name not in ("local_only", "centralized"))
    assert rows["fedprox"]["settings"]["mu"] == 0.01
    assert rows["fedavg"]["visibility"] == "totals"


def test_reproduce_lists_reproductions_and_suggests_names(tmp_path):
    names = json.loads(run_hemofed("reproduce", "--json", cwd=tmp_path).stdout)
    assert {"fashion-mnist-table", "moons", "stragglers", "communication"} <= set(names)
    assert "did you mean 'moons'" in run_hemofed("reproduce", "moon", cwd=tmp_path, ok=False).stderr


def test_report_command_rewrites_the_report(runs_folder):
    (runs_folder / "two" / "report.html").unlink()
    run_hemofed("report", "two", "--band", "95", cwd=runs_folder)
    assert (runs_folder / "two" / "report.html").exists()
    assert "valid: 68, 95" in run_hemofed("report", "two", "--band", "50", cwd=runs_folder, ok=False).stderr


PERSONALIZED_STUDY = """
name = "own"
rounds = 3
[data]
name = "moons"
points = 200
[sites]
count = 3
[model]
name = "moons_net"
[local]
lr = 0.1
batch_size = 8
[strategy]
name = "ditto"
[evaluation]
evaluate_at = "sites"
"""


def test_personalized_run_has_a_local_only_baseline_unless_disabled(tmp_path):
    (tmp_path / "study.toml").write_text(PERSONALIZED_STUDY)
    output = run_hemofed("run", "study.toml", "--out", "run", "-q", cwd=tmp_path).stdout
    assert "personalized model" in output
    assert "global model" in output
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["baselines"].keys() == {"local_only"}
    assert len(list((tmp_path / "run" / "models" / "site").glob("*.safetensors"))) == 3
    run_hemofed("run", "study.toml", "--out", "without", "-q", "--no-baselines", cwd=tmp_path)
    assert json.loads((tmp_path / "without" / "results.json").read_text())["baselines"] == {}


def test_join_run_adds_a_site_to_a_finished_run(tmp_path):
    (tmp_path / "study.toml").write_text(PERSONALIZED_STUDY)
    run_hemofed("run", "study.toml", "--out", "run", "-q", "--no-baselines", cwd=tmp_path)
    result = json.loads(run_hemofed("join-run", "run", "--set", "seed=9", "--json", cwd=tmp_path).stdout)
    assert {"personalized_model", "global_model", "local_only"} <= result.keys()
    assert "give the new site another --name" in run_hemofed(
        "join-run", "run", "--name", "site-01", cwd=tmp_path, ok=False
    ).stderr.replace("\n", " ")

"""The command as a person meets it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

HEMOFED = [sys.executable, "-c", "from pipeline.cli.main import main; main()"]


def hemofed(*args: str, cwd: Path, ok: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*HEMOFED, *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"COLUMNS": "200"} | env,
    )
    assert (done.returncode == 0) == ok, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_help_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['hemofed', '--help']\n"
        "from pipeline.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'monai', 'matplotlib', 'sklearn', 'scipy', 'albumentations', 'cv2'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in ("run", "study", "compare", "evaluate", "reproduce", "report", "strategies", "site"):
        assert command in done.stdout


def test_a_missing_extra_is_named(tmp_path):
    """torch is hidden by a module of that name that is not there to be found."""
    code = "import sys; sys.modules['torch'] = None; sys.argv = ['hemofed', 'run']; from pipeline.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "pip install 'hemofed[train]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    hemofed(
        "run",
        "moons-demo",
        "--out",
        "one",
        "--set",
        "rounds=4",
        "--baselines",
        "-q",
        cwd=place,
        XDG_CACHE_HOME=str(place / "cache"),
    )
    hemofed("run", "moons-demo", "--out", "two", "--set", "rounds=4", "--set", "strategy=fedprox", "-q", cwd=place)
    return place


def test_a_run_leaves_all_its_files(finished):
    names = {p.name for p in (finished / "one").iterdir()}
    assert {
        "study.toml",
        "sites.json",
        "rounds.jsonl",
        "results.json",
        "checkpoint",
        "models",
        "plots",
        "report.html",
    } <= names
    results = json.loads((finished / "one" / "results.json").read_text())
    assert set(results["baselines"]) == {"local_only", "centralized"}
    assert len((finished / "one" / "rounds.jsonl").read_text().splitlines()) == 5


def test_run_prints_json_alone(tmp_path):
    done = hemofed("run", "moons-demo", "--set", "rounds=2", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["run"] == "runs/moons-demo"
    again = hemofed("run", "moons-demo", "--set", "rounds=2", "--json", cwd=tmp_path)
    assert json.loads(again.stdout)["run"] == "runs/moons-demo-2"


def test_progress_is_a_line_a_round_without_a_terminal(tmp_path):
    done = hemofed("run", "moons-demo", "--set", "rounds=2", cwd=tmp_path)
    assert done.stderr.count("round ") == 3
    assert "test accuracy" in done.stdout


def test_compare_overlays_runs(finished):
    rows = json.loads(hemofed("compare", "one", "two", "--json", cwd=finished).stdout)
    assert [r["strategy"] for r in rows] == ["fedavg", "fedprox"]
    assert "strategy" in (finished / "compare.html").read_text()
    hemofed("compare", "one", "nowhere", cwd=finished, ok=False)


def test_evaluate_on_other_data(finished):
    seen = json.loads(hemofed("evaluate", "one", "--data", ".", "--json", "--set", "points=400", cwd=finished).stdout)
    assert seen["n"] == 400
    assert 0.5 < seen["accuracy"] <= 1
    assert sum(map(sum, seen["confusion"])) == 400
    assert "accuracy" in hemofed("evaluate", "one", "--data", ".", "--split", "test", cwd=finished).stdout


def test_evaluate_names_a_wrong_model_split_or_source(finished):
    assert (
        "valid: global" in hemofed("evaluate", "one", "--data", ".", "--model", "best", cwd=finished, ok=False).stderr
    )
    assert "valid: all" in hemofed("evaluate", "one", "--data", ".", "--split", "tset", cwd=finished, ok=False).stderr
    assert "moons" in hemofed("evaluate", "one", "--data", ".", "--source", "moon", cwd=finished, ok=False).stderr


def test_study_new_check_show_list(tmp_path):
    hemofed("study", "new", "mine.toml", "--like", "moons-demo", cwd=tmp_path)
    hemofed("study", "new", "mine.toml", cwd=tmp_path, ok=False)
    checked = json.loads(hemofed("study", "check", "mine.toml", "--json", cwd=tmp_path).stdout)
    assert checked["parameters"] == 22
    assert len(checked["sites"]) == 4
    shown = hemofed("study", "show", "mine.toml", "--set", "local.lr=0.5", cwd=tmp_path).stdout
    assert "lr = 0.5" in shown
    assert {"moons-demo", "fashion-mnist-table"} <= {
        s["name"] for s in json.loads(hemofed("study", "list", "--json", cwd=tmp_path).stdout)
    }
    (tmp_path / "mine.toml").write_text((tmp_path / "mine.toml").read_text().replace("rounds", "rouns"))
    said = hemofed("study", "check", "mine.toml", cwd=tmp_path, ok=False).stderr
    assert "mine.toml:3: unknown key 'rouns'; did you mean 'rounds'?" in said


def test_missing_data_names_every_cure(tmp_path):
    said = hemofed("run", "fashion-mnist-table", "--set", "data.path=nowhere", cwd=tmp_path, ok=False).stderr
    assert "nowhere" in said
    assert not (tmp_path / "runs" / "fashion-mnist-table" / "results.json").exists()


def test_a_corrupt_image_is_named_and_can_be_skipped(tmp_path):
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
    said = hemofed("run", "s.toml", "--out", "bad", cwd=tmp_path, ok=False).stderr
    assert "normal/3.png" in said
    assert "data.corrupt = 'skip'" in said
    done = json.loads(
        hemofed("run", "s.toml", "--out", "good", "--set", "data.corrupt=skip", "--json", cwd=tmp_path).stdout
    )
    assert done["test"]["pooled"]["n"] == 5
    assert "normal/3.png" in (tmp_path / "good" / "report.html").read_text()
    seen = json.loads(
        hemofed("evaluate", "good", "--data", "cells", "--set", "corrupt=skip", "--json", cwd=tmp_path).stdout
    )
    assert seen["n"] == 23
    assert "positive_auroc" in seen


def test_resume_takes_no_new_settings(finished):
    said = hemofed("run", "--resume", "one", "--set", "rounds=9", cwd=finished, ok=False).stderr
    assert "--resume continues a run as it was" in said
    hemofed("run", "--resume", "one", "-q", cwd=finished)
    assert "no run folder" in hemofed("run", "--resume", "cache", cwd=finished, ok=False).stderr


def test_strategies_are_listed(tmp_path):
    found = json.loads(hemofed("strategies", "--json", cwd=tmp_path).stdout)
    assert {r["name"] for r in found["codecs"]} == {"fp16", "qsgd", "randk", "ring", "topk"}
    assert {r["name"] for r in found["aggregation_rules"]} >= {"mean", "median", "krum"}
    rows = {r["name"]: r for r in found["strategies"]}
    assert rows["cfl"]["sees"] == "each"
    assert rows["ditto"]["remembered"] == "the site's own model"
    assert all(r["paper"] for name, r in rows.items() if name not in ("local_only", "centralized"))
    assert rows["fedprox"]["settings"]["mu"] == 0.01
    assert rows["fedavg"]["sees"] == "totals"


def test_reproduce_lists_and_refuses(tmp_path):
    known = json.loads(hemofed("reproduce", "--json", cwd=tmp_path).stdout)
    assert {"fashion-mnist-table", "moons", "stragglers", "communication"} <= set(known)
    assert "did you mean 'moons'" in hemofed("reproduce", "moon", cwd=tmp_path, ok=False).stderr


def test_report_is_written_anew(finished):
    (finished / "two" / "report.html").unlink()
    hemofed("report", "two", "--band", "95", cwd=finished)
    assert (finished / "two" / "report.html").exists()
    assert "valid: 68, 95" in hemofed("report", "two", "--band", "50", cwd=finished, ok=False).stderr


PERSONAL = """
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


def test_a_personalised_run_is_held_against_each_site_alone_unless_refused(tmp_path):
    (tmp_path / "study.toml").write_text(PERSONAL)
    said = hemofed("run", "study.toml", "--out", "run", "-q", cwd=tmp_path).stdout
    assert "own model" in said
    assert "common model" in said
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["baselines"].keys() == {"local_only"}
    assert len(list((tmp_path / "run" / "models" / "site").glob("*.safetensors"))) == 3
    hemofed("run", "study.toml", "--out", "bare", "-q", "--no-baselines", cwd=tmp_path)
    assert json.loads((tmp_path / "bare" / "results.json").read_text())["baselines"] == {}


def test_a_new_site_joins_by_one_command(tmp_path):
    (tmp_path / "study.toml").write_text(PERSONAL)
    hemofed("run", "study.toml", "--out", "run", "-q", "--no-baselines", cwd=tmp_path)
    got = json.loads(hemofed("join-run", "run", "--set", "seed=9", "--json", cwd=tmp_path).stdout)
    assert {"own", "global", "alone"} <= got.keys()
    assert "already; give the new one another --name" in hemofed(
        "join-run", "run", "--name", "site-01", cwd=tmp_path, ok=False
    ).stderr.replace("\n", " ")

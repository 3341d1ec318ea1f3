"""A run killed by kill -9, Ctrl-C or a full disk resumes and ends with the same bits."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pipeline.coordinator.checkpoint import load_checkpoint
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import NoSpaceError, RunFolderError
from pipeline.core.tensor_io import load_tensors
from pipeline.engines.simulated import SimulatedEngine
from pipeline.protocol.serialization import deserialize_message, deserialize_reply
from pipeline.records.run_results import RunResults
from pipeline.runs.simulation import run_simulation
from pipeline.study.toml_file import to_toml
from tests.support.machine import mount_small_disk
from tests.support.studies import final_weights

HEMOFED = [sys.executable, "-c", "from pipeline.cli.main import main; main()"]

FEDAVG = {"strategy": "fedavg"}
UNRELIABLE_SITES = {
    "strategy": {"name": "fedprox", "mu": 0.1},
    "sites": {"count": 4, "speed": [1.0, 2.0, 4.0, 8.0], "dropout": 0.2, "stragglers": 0.5},
    "round": {"deadline": 4.0},
    "client_sampling": {"fraction": 0.75},
}
LATE_UPDATES = {
    "sites": {"count": 4, "speed": [1.0, 2.0, 4.0, 8.0]},
    "round": {"deadline": 1.5, "late_updates": "keep", "partial_updates": "drop"},
}
CLIENT_STATE = {"strategy": "local_only"}
MOMENTUM = {"local": {"lr": 0.05, "batch_size": 8, "epochs": 2, "momentum": 0.9, "lr_schedule": "cosine"}}


class KilledError(Exception):
    pass


def assert_same_records(a: Path, b: Path) -> None:
    def lines(path: Path) -> list[dict]:
        records = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
        for record in records:
            record.pop("seconds")
            for work in record["work"].values():
                work.pop("seconds")
        return records

    assert lines(a) == lines(b)


@pytest.mark.parametrize(
    "sections",
    [FEDAVG, UNRELIABLE_SITES, LATE_UPDATES, CLIENT_STATE, MOMENTUM],
    ids=["fedavg", "unreliable-sites", "late-updates", "client-state", "momentum"],
)
@pytest.mark.parametrize("stop", [0, 1, 4])
def test_run_stopped_in_any_round_resumes_bit_for_bit(moons, run_study, tmp_path, sections, stop):
    study = moons(**sections)
    uninterrupted, expected = run_study(study, "uninterrupted")
    folder = RunFolder.create(tmp_path / "interrupted", study)

    def on_round_end(record):
        if record.round == stop:
            raise KilledError

    with pytest.raises(KilledError):
        run_simulation(study, folder, on_round_end=on_round_end)
    results = run_simulation(RunFolder.open(folder.path).load_study(), RunFolder.open(folder.path))
    assert results.test == expected.test
    assert_same_records(uninterrupted.path, folder.path)
    one, other = (load_checkpoint(f.path / "checkpoint") for f in (uninterrupted, folder))
    assert one[0]["progress"]["last_accepted"].keys() == other[0]["progress"]["last_accepted"].keys()
    for key, value in one[1].items():
        if key.startswith("late/"):  # late replies contain their duration
            one_reply, other_reply = (deserialize_reply("site-01", t.numpy().tobytes()) for t in (value, other[1][key]))
            assert torch.equal(one_reply.update.averaged["delta"], other_reply.update.averaged["delta"])
        else:
            assert torch.equal(value, other[1][key]), key


def test_run_killed_at_random_moments_resumes_bit_for_bit(moons, run_study, tmp_path):
    """Real processes, killed several times at random moments."""
    study = moons(rounds=150, **UNRELIABLE_SITES)
    uninterrupted, expected = run_study(study, "uninterrupted")
    (tmp_path / "study.toml").write_text(to_toml(study.to_dict()))
    path = tmp_path / "interrupted"
    start = [*HEMOFED, "run", str(tmp_path / "study.toml"), "--out", str(path), "-q"]
    resume = [*HEMOFED, "run", "--resume", str(path), "-q"]
    rng = random.Random()
    kills = 0
    while kills < 3:
        process = subprocess.Popen(
            resume if (path / "study.toml").exists() else start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        first_round = count_rounds(path)
        deadline = time.monotonic() + 60
        while (
            process.poll() is None
            and count_rounds(path) < min(first_round + rng.randint(1, 40), 140)
            and time.monotonic() < deadline
        ):
            time.sleep(0.002)
        time.sleep(rng.random() * 0.02)
        if process.poll() is not None:
            break
        process.kill()
        process.wait()
        kills += 1
    assert kills, "the run ended before it could be killed"
    subprocess.run(resume, check=True, stdout=subprocess.DEVNULL, timeout=120)
    assert torch.equal(final_weights(RunFolder(path)), final_weights(uninterrupted))
    assert RunResults.read(path).test == expected.test
    assert_same_records(uninterrupted.path, path)


def count_rounds(folder: Path) -> int:
    file = folder / "rounds.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def enable_sigint() -> None:
    """Background processes of a shell ignore SIGINT by default."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_prints_the_resume_command(moons, tmp_path):
    study = moons(rounds=5000)
    (tmp_path / "study.toml").write_text(to_toml(study.to_dict()))
    out = tmp_path / "run"
    process = subprocess.Popen(
        [*HEMOFED, "run", str(tmp_path / "study.toml"), "--out", str(out)],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=enable_sigint,
    )
    while count_rounds(out) < 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, error_text = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "nothing is lost" in error_text
    assert f"hemofed run --resume {out}" in error_text.replace("\n", "")
    assert "Traceback" not in error_text
    assert load_checkpoint(out / "checkpoint")[0]["progress"]["round"] >= 1


@pytest.fixture
def small_disk(tmp_path):
    with mount_small_disk(tmp_path / "disk") as disk:
        yield disk


def test_run_on_a_full_disk_can_be_resumed(moons, small_disk):
    study = moons(rounds=2000)
    folder = RunFolder.create(small_disk / "run", study)
    with pytest.raises(NoSpaceError, match=r"no space left to write .* --resume"):
        run_simulation(study, folder)
    checkpoint_round = load_checkpoint(folder.path / "checkpoint")[0]["progress"]["round"]
    assert checkpoint_round > 0
    subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
    recorded = []

    def on_round_end(record):
        recorded.append(record.round)
        if len(recorded) == 3:
            raise KilledError

    with pytest.raises(KilledError):
        run_simulation(study, RunFolder.open(folder.path), on_round_end=on_round_end)
    assert recorded == [checkpoint_round + 1, checkpoint_round + 2, checkpoint_round + 3]


def test_run_is_not_resumed_by_another_study(moons, run_study, tmp_path):
    study = moons(rounds=2)
    folder = RunFolder.create(tmp_path / "run", study)

    def on_round_end(record):
        raise KilledError

    with pytest.raises(KilledError):
        run_simulation(study, folder, on_round_end=on_round_end)
    with pytest.raises(RunFolderError, match="another study"):
        run_simulation(moons(rounds=2, seed=9), folder)


def test_damaged_checkpoint_falls_back_to_the_previous_one(moons, run_study):
    folder, _ = run_study(moons(rounds=3))
    newest, previous = sorted((folder.path / "checkpoint").glob("*.safetensors"), reverse=True)
    newest.write_bytes(newest.read_bytes()[:200])
    assert load_checkpoint(folder.path / "checkpoint")[0]["progress"]["round"] == 2
    previous.write_bytes(b"")
    with pytest.raises(RunFolderError, match="cannot be read"):
        load_checkpoint(folder.path / "checkpoint")


def test_run_folder_is_not_created_in_a_nonempty_folder(moons, tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(RunFolderError, match="is not empty"):
        RunFolder.create(tmp_path, moons())
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_model_file_is_safetensors(moons, run_study):
    folder, results = run_study(moons(rounds=2))
    header, tensors = load_tensors(folder.path / "models" / "global.safetensors")
    assert header["round"] == results.best_round
    assert tensors["weights"].shape == (22,)


def test_repeated_rounds_have_different_attempts(moons, tmp_path):
    study = moons(rounds=3)
    folder = RunFolder.create(tmp_path / "run", study)
    attempts = []

    class CrashError(Exception):
        pass

    def crash_in_round_2(self, encoded_messages, round_policy):
        message = deserialize_message(next(iter(encoded_messages.values())))
        if message.round == 2:
            attempts.append((message.round, message.attempt))
            raise CrashError
        yield from exchange(self, encoded_messages, round_policy)

    exchange = SimulatedEngine.exchange
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedEngine, "exchange", crash_in_round_2)
        for _ in range(4):
            with pytest.raises(CrashError):
                run_simulation(study, folder)
    assert attempts == [(2, 0), (2, 1), (2, 2), (2, 3)]
    run_simulation(study, folder)

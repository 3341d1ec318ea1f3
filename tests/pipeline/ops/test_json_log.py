"""The JSON log of a service: one event a line, no secrets, bounded size."""

import json
import threading

import pytest

from pipeline.ops.json_log import open_log, redact


def test_log_event_is_a_line_with_its_fields(tmp_path):
    log = open_log(tmp_path / "log" / "a.jsonl")
    log.write_event("login refused", "warning", user="eva", address="10.0.0.1")
    (line,) = (tmp_path / "log" / "a.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record.pop("time").endswith("+00:00")
    assert record == {"level": "warning", "event": "login refused", "user": "eva", "address": "10.0.0.1"}
    assert (tmp_path / "log" / "a.jsonl").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "name",
    [
        "token",
        "Token_sha256",
        "credential",
        "password",
        "Authorization",
        "key",
        "api_key",
        "public-key",
        "keys",
        "proof",
        "cookie",
        "set-cookie",
        "csr",
        "client_secret",
        "key_pem",
    ],
)
def test_log_redacts_secrets_by_field_name_at_any_depth(tmp_path, name):
    log = open_log(tmp_path / "a.jsonl")
    log.write_event("x", about={"list": [{name: "s3cret"}]}, **{name: ["s3cret"]})
    assert "s3cret" not in (tmp_path / "a.jsonl").read_text()


@pytest.mark.parametrize("name", ["monkey", "keyword", "site", "user", "why", "reason"])
def test_log_keeps_other_fields(name):
    assert redact({name: "plain"}) == {name: "plain"}


def test_log_redacts_secrets_within_texts():
    assert "abc" not in redact("got Authorization: Bearer abc in a header")
    pem = "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----"
    assert "MIIE" not in redact(f"odd: {pem}")
    assert len(redact("x" * 10_000)) < 5000


def test_log_line_break_in_a_field_makes_no_second_record(tmp_path):
    log = open_log(tmp_path / "a.jsonl")
    log.write_event("x", user='eva\n{"event": "forged"}')
    assert [record["event"] for record in log.read_last(10)] == ["x"]


def test_log_rotates_by_size_and_keeps_backups(tmp_path):
    log = open_log(tmp_path / "a.jsonl", max_bytes=300, num_backups=2)
    for number in range(40):
        log.write_event("e", number=number)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "a.jsonl.1", "a.jsonl.2"]
    assert all(p.stat().st_size <= 300 and p.stat().st_mode & 0o077 == 0 for p in tmp_path.iterdir())
    assert [r["number"] for r in log.read_last(4)] == [36, 37, 38, 39]
    assert log.read_last(0) == []


def test_log_threads_write_whole_lines(tmp_path):
    log = open_log(tmp_path / "a.jsonl", max_bytes=2000, num_backups=200)
    threads = [
        threading.Thread(target=lambda: [log.write_event("e", filler="x" * 50) for _ in range(25)]) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = [line for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    assert len([json.loads(line) for line in lines]) == 200


def test_log_that_cannot_be_written_warns_once_and_does_not_fail(tmp_path, capsys):
    log = open_log(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").mkdir()
    log.write_event("x")
    log.write_event("x")
    assert capsys.readouterr().err.count("cannot be written") == 1


def test_log_reader_skips_a_truncated_line(tmp_path):
    log = open_log(tmp_path / "a.jsonl")
    log.write_event("whole")
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"event": "ha')
    assert [r["event"] for r in log.read_last(5)] == ["whole"]

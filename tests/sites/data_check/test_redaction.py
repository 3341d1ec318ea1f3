import pytest

from sites.data_check.phi_tags import TagSummary
from sites.data_check.redaction import Redactor
from tests.support.image_files import PATIENT_ID, PATIENT_NAME

REDACTOR = Redactor.from_identifiers([PATIENT_NAME, PATIENT_ID])


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("ward/muller_anna/4711-0815_2.png", "ward/***/***.png"),
        ("ward/Müller Anna/a.png", "ward/***/a.png"),
        ("MUELLER.dcm", "***.dcm"),
        ("AnnaMuller/1.png", "***/1.png"),
        ("scanmuelleranna.png", "***.png"),
        ("id47110815/x.png", "***/x.png"),
        ("schistocyte/4711.png", "schistocyte/4711.png"),  # a part of a number identifies nobody
        ("normal/0001.png", "normal/0001.png"),
        ("a.4711-0815", "***"),
    ],
)
def test_redact_path(path, expected):
    assert REDACTOR.redact_path(path) == expected


def test_redact_text_removes_names_only():
    text = "/data: 2 of 80 images cannot be used:\n  normal/mueller.png: empty file\n  normal/4711 0815.png: damaged"
    redacted = REDACTOR.redact_text(text)
    assert "mueller" not in redacted
    assert "0815" not in redacted
    assert redacted.startswith("/data: 2 of 80 images cannot be used:\n  normal/***.png: empty file\n  normal/")
    assert REDACTOR.redact_text("the same as ever") == "the same as ever"


def test_redaction_is_wider_than_identification():
    norma = Redactor.from_identifiers(["Norma^Li"])
    assert norma.contains_identifier("normal")
    assert not norma.identifies_person("normal")
    assert norma.identifies_person("norma_3.png")
    assert norma.identifies_person("LiNorma.png")


@pytest.mark.parametrize("placeholder", ["", "Anonymous^", "TEST", "1", "^^", "--"])
def test_placeholder_names_are_not_redacted(placeholder):
    redactor = Redactor.from_identifiers([placeholder])
    assert redactor.redact_path("anonymous/test/1.png") == "anonymous/test/1.png"
    assert not redactor.identifies_person("test")


def test_short_name_is_redacted_only_as_a_word():
    redactor = Redactor.from_identifiers(["Kim^Su"])
    assert redactor.redact_path("kim_1.png") == "***.png"
    assert redactor.redact_path("skimmed.png") == "skimmed.png"


def test_repr_hides_identifiers():
    assert "mull" not in repr(REDACTOR)
    assert "Anna" not in repr(TagSummary(identifiers=frozenset({PATIENT_NAME})))

import pytest

from sites.data_check.phi_tags import TagSummary
from sites.data_check.redaction import Redactor
from tests.support.image_files import PATIENT_NAME, PATIENT_ID

MASK = Redactor.from_identifiers([PATIENT_NAME, PATIENT_ID])


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("ward/muller_anna/4711-0815_2.png", "ward/***/***.png"),
        ("ward/Müller Anna/a.png", "ward/***/a.png"),
        ("MUELLER.dcm", "***.dcm"),
        ("AnnaMuller/1.png", "***/1.png"),
        ("scanmuelleranna.png", "***.png"),
        ("id47110815/x.png", "***/x.png"),
        ("schistocyte/4711.png", "schistocyte/4711.png"),  # a part of a number is nobody's
        ("normal/0001.png", "normal/0001.png"),
        ("a.4711-0815", "***"),
    ],
)
def test_paths_without_the_people_in_them(path, shown):
    assert MASK.redact_path(path) == shown


def test_messages_lose_the_name_and_keep_the_rest():
    said = "/data: 2 of 80 images cannot be used:\n  normal/mueller.png: empty file\n  normal/4711 0815.png: damaged"
    masked = MASK.redact_text(said)
    assert "mueller" not in masked
    assert "0815" not in masked
    assert masked.startswith("/data: 2 of 80 images cannot be used:\n  normal/***.png: empty file\n  normal/")
    assert MASK.redact_text("the same as ever") == "the same as ever"


def test_masking_takes_too_much_and_stopping_does_not():
    norma = Redactor.from_identifiers(["Norma^Li"])
    assert norma.contains_identifier("normal")
    assert not norma.identifies_person("normal")
    assert norma.identifies_person("norma_3.png")
    assert norma.identifies_person("LiNorma.png")


@pytest.mark.parametrize("nobody", ["", "Anonymous^", "TEST", "1", "^^", "--"])
def test_nobody_is_not_masked(nobody):
    mask = Redactor.from_identifiers([nobody])
    assert mask.redact_path("anonymous/test/1.png") == "anonymous/test/1.png"
    assert not mask.identifies_person("test")


def test_three_letters_are_a_name_only_as_a_word():
    mask = Redactor.from_identifiers(["Kim^Su"])
    assert mask.redact_path("kim_1.png") == "***.png"
    assert mask.redact_path("skimmed.png") == "skimmed.png"


def test_no_repr_shows_a_secret():
    assert "mull" not in repr(MASK)
    assert "Anna" not in repr(TagSummary(identifiers=frozenset({PATIENT_NAME})))

import pytest

from sites.data_check.phi_tags import Told
from sites.data_check.redaction import Mask
from tests.support.image_files import NAME, NUMBER

MASK = Mask.of([NAME, NUMBER])


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
    assert MASK.path(path) == shown


def test_messages_lose_the_name_and_keep_the_rest():
    said = "/data: 2 of 80 images cannot be used:\n  normal/mueller.png: empty file\n  normal/4711 0815.png: damaged"
    masked = MASK.text(said)
    assert "mueller" not in masked
    assert "0815" not in masked
    assert masked.startswith("/data: 2 of 80 images cannot be used:\n  normal/***.png: empty file\n  normal/")
    assert MASK.text("the same as ever") == "the same as ever"


def test_masking_takes_too_much_and_stopping_does_not():
    norma = Mask.of(["Norma^Li"])
    assert norma.hides("normal")
    assert not norma.names("normal")
    assert norma.names("norma_3.png")
    assert norma.names("LiNorma.png")


@pytest.mark.parametrize("nobody", ["", "Anonymous^", "TEST", "1", "^^", "--"])
def test_nobody_is_not_masked(nobody):
    mask = Mask.of([nobody])
    assert mask.path("anonymous/test/1.png") == "anonymous/test/1.png"
    assert not mask.names("test")


def test_three_letters_are_a_name_only_as_a_word():
    mask = Mask.of(["Kim^Su"])
    assert mask.path("kim_1.png") == "***.png"
    assert mask.path("skimmed.png") == "skimmed.png"


def test_no_repr_shows_a_secret():
    assert "mull" not in repr(MASK)
    assert "Anna" not in repr(Told(secrets=frozenset({NAME})))

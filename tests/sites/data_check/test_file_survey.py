import os

import numpy as np
import pytest
from PIL import Image

from sites.data_check.file_survey import survey_files
from tests.support.image_files import write_dicom, write_image, make_textures


def kinds(found):
    return {seen.path: seen.kind for seen in found.files}


def test_a_file_is_what_it_contains(tmp_path):
    pixels = make_textures(1)[0]
    write_image(tmp_path / "a" / "png_called.jpg", pixels, format="PNG")
    write_image(tmp_path / "a" / "right.jpg", pixels)
    write_image(tmp_path / "a" / "deep.tif", np.full((8, 9), 4000, np.uint16))
    write_dicom(tmp_path / "scan")
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty.png").touch()
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nxxxx")
    (tmp_path / ".DS_Store").write_text("hidden")
    (tmp_path / ".cache").mkdir()
    write_image(tmp_path / ".cache" / "b.png", pixels)
    found = survey_files(tmp_path)
    assert kinds(found) == {
        "a/png_called.jpg": "image",
        "a/right.jpg": "image",
        "a/deep.tif": "image",
        "scan": "dicom",
        "notes.txt": "other",
        "empty.png": "unreadable",
        "broken.png": "unreadable",
    }
    assert [seen.path for seen in found.files if seen.is_misnamed] == ["a/png_called.jpg"]
    assert [(seen.path, seen.size) for seen in found.files if seen.is_16_bit] == [("a/deep.tif", (9, 8))]
    assert found.num_hidden == 2
    assert found.image_sizes == {(48, 48): 2, (9, 8): 1}


def test_links_are_not_followed_out_of_the_folder(tmp_path):
    inside, outside = tmp_path / "in", tmp_path / "out"
    write_image(inside / "a.png", make_textures(1)[0])
    write_image(outside / "b.png", make_textures(1)[0])
    (inside / "b.png").symlink_to(outside / "b.png")
    (inside / "folder").symlink_to(outside)
    (inside / "nowhere.png").symlink_to(outside / "c.png")
    (inside / "round").symlink_to(inside / "round")
    (inside / "same.png").symlink_to(inside / "a.png")
    found = survey_files(inside)
    assert kinds(found) == {"a.png": "image", "same.png": "image"}
    assert sorted(found.outside_links) == ["b.png", "folder", "nowhere.png", "round"]


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    (seen,) = survey_files(tmp_path).files
    assert (seen.kind, seen.reason) == ("unreadable", "no regular file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_told(tmp_path):
    write_image(tmp_path / "a.png", make_textures(1)[0]).chmod(0)
    (tmp_path / "closed").mkdir(mode=0)
    found = survey_files(tmp_path)
    assert [(seen.kind, seen.reason) for seen in found.files] == [("unreadable", "Permission denied")]
    assert found.unreadable_folders == ("closed",)
    (tmp_path / "closed").chmod(0o700)


def test_a_single_file_is_looked_at(tmp_path):
    write_image(tmp_path / "other.png", make_textures(1)[0])
    assert kinds(survey_files(write_image(tmp_path / "a.png", make_textures(1)[0]))) == {"a.png": "image"}


def test_a_bomb_is_not_unpacked(tmp_path):
    Image.new("1", (20_000, 20_000)).save(tmp_path / "a.png")
    (seen,) = survey_files(tmp_path).files
    assert seen.size in ((20_000, 20_000), None)


def test_progress_counts_every_file(tmp_path):
    for at, pixels in enumerate(make_textures(3)):
        write_image(tmp_path / f"{at}.png", pixels)
    ticks = []
    survey_files(tmp_path, lambda *tick: ticks.append(tick))
    assert ticks == [("looking at files", done, 3) for done in (1, 2, 3)]

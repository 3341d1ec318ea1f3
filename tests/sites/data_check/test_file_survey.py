import os

import numpy as np
import pytest
from PIL import Image

from sites.data_check.file_survey import survey_files
from tests.support.image_files import make_textures, write_dicom, write_image


def kinds_by_path(survey):
    return {file.path: file.kind for file in survey.files}


def test_file_kind_is_recognized_by_content(tmp_path):
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
    survey = survey_files(tmp_path)
    assert kinds_by_path(survey) == {
        "a/png_called.jpg": "image",
        "a/right.jpg": "image",
        "a/deep.tif": "image",
        "scan": "dicom",
        "notes.txt": "other",
        "empty.png": "unreadable",
        "broken.png": "unreadable",
    }
    assert [file.path for file in survey.files if file.is_misnamed] == ["a/png_called.jpg"]
    assert [(file.path, file.size) for file in survey.files if file.is_16_bit] == [("a/deep.tif", (9, 8))]
    assert survey.num_hidden == 2
    assert survey.image_sizes == {(48, 48): 2, (9, 8): 1}


def test_links_out_of_the_folder_are_not_followed(tmp_path):
    inside, outside = tmp_path / "in", tmp_path / "out"
    write_image(inside / "a.png", make_textures(1)[0])
    write_image(outside / "b.png", make_textures(1)[0])
    (inside / "b.png").symlink_to(outside / "b.png")
    (inside / "folder").symlink_to(outside)
    (inside / "nowhere.png").symlink_to(outside / "c.png")
    (inside / "round").symlink_to(inside / "round")
    (inside / "same.png").symlink_to(inside / "a.png")
    survey = survey_files(inside)
    assert kinds_by_path(survey) == {"a.png": "image", "same.png": "image"}
    assert sorted(survey.outside_links) == ["b.png", "folder", "nowhere.png", "round"]


def test_named_pipe_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    (file,) = survey_files(tmp_path).files
    assert (file.kind, file.reason) == ("unreadable", "not a regular file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read every file")
def test_unreadable_files_and_folders_are_reported(tmp_path):
    write_image(tmp_path / "a.png", make_textures(1)[0]).chmod(0)
    (tmp_path / "closed").mkdir(mode=0)
    survey = survey_files(tmp_path)
    assert [(file.kind, file.reason) for file in survey.files] == [("unreadable", "Permission denied")]
    assert survey.unreadable_folders == ("closed",)
    (tmp_path / "closed").chmod(0o700)


def test_survey_of_a_single_file(tmp_path):
    write_image(tmp_path / "other.png", make_textures(1)[0])
    assert kinds_by_path(survey_files(write_image(tmp_path / "a.png", make_textures(1)[0]))) == {"a.png": "image"}


def test_decompression_bomb_is_not_decoded(tmp_path):
    Image.new("1", (20_000, 20_000)).save(tmp_path / "a.png")
    (file,) = survey_files(tmp_path).files
    assert file.size in ((20_000, 20_000), None)


def test_progress_counts_every_file(tmp_path):
    for index, pixels in enumerate(make_textures(3)):
        write_image(tmp_path / f"{index}.png", pixels)
    calls = []
    survey_files(tmp_path, lambda *args: calls.append(args))
    assert calls == [("examining files", done, 3) for done in (1, 2, 3)]

import numpy as np

from pipeline.study.schema import Study
from sites.data.folder import ImageFolder
from sites.data_check.class_counts import class_count_findings, count_classes
from sites.data_check.examples import CHECK_IMAGE_PIXELS, NO_FOLDER_CLASS, load_examples, resolve_source
from sites.data_check.file_survey import survey_files
from sites.governance.settings import SiteSettings
from tests.support.image_files import write_image, write_smear_folder, make_textures


def held(folder, study=None, **settings):
    site = SiteSettings(data=folder, **settings)
    return load_examples(
        resolve_source(ImageFolder() if study is None else study.data, site), study, site, survey_files(folder)
    )


def asks(**data):
    return Study.model_validate(
        {"name": "s", "data": {"name": "folder"} | data, "model": "cnn28", "sites": {"count": 2}}
    )


def test_every_row_has_the_name_of_its_file(tmp_path):
    write_smear_folder(tmp_path, 20)
    (tmp_path / "normal" / "000.png").write_bytes(b"")
    (tmp_path / "schistocyte" / "007.png").write_bytes(b"rubbish")
    found, refused = held(tmp_path)
    assert refused == ""
    assert len(found.names) == 18
    assert found.dataset.skipped[0].startswith("normal/000.png: ")
    pixels = make_textures(20)
    for row, name in enumerate(found.names):
        assert (found.dataset.x[row].numpy().transpose(1, 2, 0) == pixels[int(name[-7:-4])]).all()


def test_a_sites_layout_is_its_own(tmp_path):
    write_smear_folder(tmp_path, 20)
    lines = [f"{('normal', 'schistocyte')[n % 2]}/{n:03}.png,{'ab'[n % 2]},p{n // 4},s{n // 10}" for n in range(20)]
    (tmp_path / "list.csv").write_text("path,label,who,smear\n" + "\n".join(lines))
    found, refused = held(tmp_path, asks(), layout={"manifest": "list.csv", "patient": "who"})
    assert refused == ""
    assert found.dataset.classes == ("a", "b")
    assert found.dataset.privacy_unit == "who"
    assert found.names[:2] == ("normal/000.png", "schistocyte/001.png")
    assert sum(count_classes(found.dataset).num_units.values()) == 5


def test_images_of_several_sizes_are_looked_at_all_the_same(tmp_path):
    write_smear_folder(tmp_path, 20)
    write_image(tmp_path / "normal" / "wide.png", make_textures(1, side=80)[0])
    found, refused = held(tmp_path)
    assert refused == ""  # no study asks for a size yet
    assert found.dataset.shape == (3, CHECK_IMAGE_PIXELS, CHECK_IMAGE_PIXELS)
    found, refused = held(tmp_path, asks())
    assert "differ in size" in refused
    assert len(found.names) == 21
    assert held(tmp_path, asks(size=32))[1] == ""


def test_images_in_no_class_are_looked_at_all_the_same(tmp_path):
    for at, pixels in enumerate(make_textures(6)):
        write_image(tmp_path / ("deep/er" if at % 2 else ".") / f"{at}.png", pixels)
    found, refused = held(tmp_path)
    assert "class folders" in refused
    assert found.is_plain_folder
    assert found.dataset.classes == (NO_FOLDER_CLASS, "deep/er")
    census = count_classes(found.dataset)
    assert census.counts == {"all": [3, 3]}
    assert [*class_count_findings(census)] == []


def test_nothing_to_look_at(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    found, refused = held(tmp_path)
    assert found is None
    assert "class folders" in refused


def test_a_rehearsal_takes_one_sites_part(tmp_path):
    study = Study.model_validate(
        {
            "name": "s",
            "data": {"name": "synthetic_smear", "cells": 120, "patients": 12, "size": 24},
            "model": "cnn28",
            "sites": {"count": 3},
        }
    )
    parts = [
        load_examples(resolve_source(study.data, s), study, s, None)[0]
        for s in map(_plays, ("site-01", "site-02", "site-03"))
    ]
    names = [name for part in parts for name in part.names]
    assert len(names) == len(set(names)) == 120
    assert "(field " in names[0]
    whole = load_examples(resolve_source(study.data, SiteSettings()), study, SiteSettings(), None)[0]
    counts = np.sum([list(count_classes(part.dataset).counts.values()) for part in parts], axis=0)
    assert counts.tolist() == list(count_classes(whole.dataset).counts.values())
    _, refused = load_examples(resolve_source(study.data, _plays("nobody")), study, _plays("nobody"), None)
    assert "plays 'nobody'" in refused


def _plays(site):
    return SiteSettings(simulated_site=site)


def test_what_is_too_little(tmp_path):
    write_smear_folder(tmp_path, 60)
    lines = ["path,label,split,patient"]
    for n in range(60):
        split = "test" if n >= 40 else "val" if n >= 30 else "train"
        label = "rare" if n == 0 else "other" if n < 40 else "seldom"
        lines.append(f"{('normal', 'schistocyte')[n % 2]}/{n:03}.png,{label},{split},p{n // 5}")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    census = count_classes(held(tmp_path, layout={"manifest": "list.csv"})[0].dataset)
    assert census.num_units == {"train": 6, "val": 2, "test": 4}
    said = [finding.message for finding in class_count_findings(census)]
    assert said == [
        "no training examples of seldom",
        "fewer than 10 training examples of rare (1)",
        "29 times as many training examples of other as of rare",
        "no test examples of other, rare",
        "4 patients in the test split, fewer than 10",
        "6 patients in the training split, fewer than 10",
    ]

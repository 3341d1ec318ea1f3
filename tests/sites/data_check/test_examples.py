import numpy as np

from pipeline.study.schema import Study
from sites.data.folder import ImageFolder
from sites.data_check.class_counts import class_count_findings, count_classes
from sites.data_check.examples import CHECK_IMAGE_PIXELS, NO_FOLDER_CLASS, load_examples, resolve_source
from sites.data_check.file_survey import survey_files
from sites.governance.settings import SiteSettings
from tests.support.image_files import make_textures, write_image, write_smear_folder


def load_folder(folder, study=None, **settings):
    site_settings = SiteSettings(data=folder, **settings)
    return load_examples(
        resolve_source(ImageFolder() if study is None else study.data, site_settings),
        study,
        site_settings,
        survey_files(folder),
    )


def make_study(**data):
    return Study.model_validate(
        {"name": "s", "data": {"name": "folder"} | data, "model": "cnn28", "sites": {"count": 2}}
    )


def test_load_examples_names_each_row_after_its_file(tmp_path):
    write_smear_folder(tmp_path, 20)
    (tmp_path / "normal" / "000.png").write_bytes(b"")
    (tmp_path / "schistocyte" / "007.png").write_bytes(b"rubbish")
    examples, read_error = load_folder(tmp_path)
    assert read_error == ""
    assert len(examples.names) == 18
    assert examples.dataset.skipped[0].startswith("normal/000.png: ")
    pixels = make_textures(20)
    for row, name in enumerate(examples.names):
        assert (examples.dataset.x[row].numpy().transpose(1, 2, 0) == pixels[int(name[-7:-4])]).all()


def test_site_layout_overrides_the_study(tmp_path):
    write_smear_folder(tmp_path, 20)
    lines = [f"{('normal', 'schistocyte')[n % 2]}/{n:03}.png,{'ab'[n % 2]},p{n // 4},s{n // 10}" for n in range(20)]
    (tmp_path / "list.csv").write_text("path,label,who,smear\n" + "\n".join(lines))
    examples, read_error = load_folder(tmp_path, make_study(), layout={"manifest": "list.csv", "patient": "who"})
    assert read_error == ""
    assert examples.dataset.classes == ("a", "b")
    assert examples.dataset.privacy_unit == "who"
    assert examples.names[:2] == ("normal/000.png", "schistocyte/001.png")
    assert sum(count_classes(examples.dataset).num_units.values()) == 5


def test_images_of_several_sizes_are_resized_for_the_check(tmp_path):
    write_smear_folder(tmp_path, 20)
    write_image(tmp_path / "normal" / "wide.png", make_textures(1, side=80)[0])
    examples, read_error = load_folder(tmp_path)
    assert read_error == ""  # no study asks for a size yet
    assert examples.dataset.shape == (3, CHECK_IMAGE_PIXELS, CHECK_IMAGE_PIXELS)
    examples, read_error = load_folder(tmp_path, make_study())
    assert "differ in size" in read_error
    assert len(examples.names) == 21
    assert load_folder(tmp_path, make_study(size=32))[1] == ""


def test_images_outside_class_folders_are_loaded_without_splits(tmp_path):
    for index, pixels in enumerate(make_textures(6)):
        write_image(tmp_path / ("deep/er" if index % 2 else ".") / f"{index}.png", pixels)
    examples, read_error = load_folder(tmp_path)
    assert "class folders" in read_error
    assert examples.is_fallback
    assert examples.dataset.classes == (NO_FOLDER_CLASS, "deep/er")
    class_counts = count_classes(examples.dataset)
    assert class_counts.counts == {"all": [3, 3]}
    assert [*class_count_findings(class_counts)] == []


def test_folder_without_images_has_no_examples(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    examples, read_error = load_folder(tmp_path)
    assert examples is None
    assert "class folders" in read_error


def test_simulated_site_loads_its_partition_only(tmp_path):
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
        for s in (SiteSettings(simulated_site=name) for name in ("site-01", "site-02", "site-03"))
    ]
    names = [name for part in parts for name in part.names]
    assert len(names) == len(set(names)) == 120
    assert "(field " in names[0]
    full = load_examples(resolve_source(study.data, SiteSettings()), study, SiteSettings(), None)[0]
    counts = np.sum([list(count_classes(part.dataset).counts.values()) for part in parts], axis=0)
    assert counts.tolist() == list(count_classes(full.dataset).counts.values())
    unknown = SiteSettings(simulated_site="nobody")
    _, read_error = load_examples(resolve_source(study.data, unknown), study, unknown, None)
    assert "simulate 'nobody'" in read_error


def test_class_count_findings_on_missing_rare_and_few(tmp_path):
    write_smear_folder(tmp_path, 60)
    lines = ["path,label,split,patient"]
    for n in range(60):
        split = "test" if n >= 40 else "val" if n >= 30 else "train"
        label = "rare" if n == 0 else "other" if n < 40 else "seldom"
        lines.append(f"{('normal', 'schistocyte')[n % 2]}/{n:03}.png,{label},{split},p{n // 5}")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    class_counts = count_classes(load_folder(tmp_path, layout={"manifest": "list.csv"})[0].dataset)
    assert class_counts.num_units == {"train": 6, "val": 2, "test": 4}
    messages = [finding.message for finding in class_count_findings(class_counts)]
    assert messages == [
        "no training examples of seldom",
        "fewer than 10 training examples of rare (1)",
        "29 times as many training examples of other as of rare",
        "no test examples of other, rare",
        "4 patients in the test split, fewer than 10",
        "6 patients in the training split, fewer than 10",
    ]

import numpy as np

from pipeline.study.schema import Study
from sites.data.folder import Folder
from sites.data_check.class_counts import count_up, findings
from sites.data_check.examples import LOOK, NO_FOLDER, hold, source_at
from sites.data_check.file_survey import survey
from sites.governance.settings import Settings
from tests.support.image_files import picture, smears, textures


def held(folder, study=None, **settings):
    site = Settings(data=folder, **settings)
    return hold(source_at(Folder() if study is None else study.data, site), study, site, survey(folder))


def asks(**data):
    return Study.model_validate(
        {"name": "s", "data": {"name": "folder"} | data, "model": "cnn28", "sites": {"count": 2}}
    )


def test_every_row_has_the_name_of_its_file(tmp_path):
    smears(tmp_path, 20)
    (tmp_path / "normal" / "000.png").write_bytes(b"")
    (tmp_path / "schistocyte" / "007.png").write_bytes(b"rubbish")
    found, refused = held(tmp_path)
    assert refused == ""
    assert len(found.names) == 18
    assert found.data.skipped[0].startswith("normal/000.png: ")
    pixels = textures(20)
    for row, name in enumerate(found.names):
        assert (found.data.x[row].numpy().transpose(1, 2, 0) == pixels[int(name[-7:-4])]).all()


def test_a_sites_layout_is_its_own(tmp_path):
    smears(tmp_path, 20)
    lines = [f"{('normal', 'schistocyte')[n % 2]}/{n:03}.png,{'ab'[n % 2]},p{n // 4},s{n // 10}" for n in range(20)]
    (tmp_path / "list.csv").write_text("path,label,who,smear\n" + "\n".join(lines))
    found, refused = held(tmp_path, asks(), layout={"manifest": "list.csv", "patient": "who"})
    assert refused == ""
    assert found.data.classes == ("a", "b")
    assert found.data.unit == "who"
    assert found.names[:2] == ("normal/000.png", "schistocyte/001.png")
    assert sum(count_up(found.data).units.values()) == 5


def test_images_of_several_sizes_are_looked_at_all_the_same(tmp_path):
    smears(tmp_path, 20)
    picture(tmp_path / "normal" / "wide.png", textures(1, side=80)[0])
    found, refused = held(tmp_path)
    assert refused == ""  # no study asks for a size yet
    assert found.data.shape == (3, LOOK, LOOK)
    found, refused = held(tmp_path, asks())
    assert "differ in size" in refused
    assert len(found.names) == 21
    assert held(tmp_path, asks(size=32))[1] == ""


def test_images_in_no_class_are_looked_at_all_the_same(tmp_path):
    for at, pixels in enumerate(textures(6)):
        picture(tmp_path / ("deep/er" if at % 2 else ".") / f"{at}.png", pixels)
    found, refused = held(tmp_path)
    assert "class folders" in refused
    assert found.loose
    assert found.data.classes == (NO_FOLDER, "deep/er")
    census = count_up(found.data)
    assert census.counts == {"all": [3, 3]}
    assert [*findings(census)] == []


def test_nothing_to_look_at(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    found, refused = held(tmp_path)
    assert found is None
    assert "class folders" in refused


def test_a_rehearsal_takes_one_sites_part(tmp_path):
    study = Study.model_validate(
        {"name": "s", "data": {"name": "synthetic_smear", "cells": 120, "patients": 12, "size": 24},
         "model": "cnn28", "sites": {"count": 3}}
    )  # fmt: skip
    parts = [hold(source_at(study.data, s), study, s, None)[0] for s in map(_plays, ("site-01", "site-02", "site-03"))]
    names = [name for part in parts for name in part.names]
    assert len(names) == len(set(names)) == 120
    assert "(field " in names[0]
    whole = hold(source_at(study.data, Settings()), study, Settings(), None)[0]
    counts = np.sum([list(count_up(part.data).counts.values()) for part in parts], axis=0)
    assert counts.tolist() == list(count_up(whole.data).counts.values())
    _, refused = hold(source_at(study.data, _plays("nobody")), study, _plays("nobody"), None)
    assert "plays 'nobody'" in refused


def _plays(site):
    return Settings(plays=site)


def test_what_is_too_little(tmp_path):
    smears(tmp_path, 60)
    lines = ["path,label,split,patient"]
    for n in range(60):
        split = "test" if n >= 40 else "val" if n >= 30 else "train"
        label = "rare" if n == 0 else "other" if n < 40 else "seldom"
        lines.append(f"{('normal', 'schistocyte')[n % 2]}/{n:03}.png,{label},{split},p{n // 5}")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    census = count_up(held(tmp_path, layout={"manifest": "list.csv"})[0].data)
    assert census.units == {"train": 6, "val": 2, "test": 4}
    said = [finding.what for finding in findings(census)]
    assert said == [
        "no training examples of seldom",
        "fewer than 10 training examples of rare (1)",
        "29 times as many training examples of other as of rare",
        "no test examples of other, rare",
        "4 patients in the test split, fewer than 10",
        "6 patients in the training split, fewer than 10",
    ]

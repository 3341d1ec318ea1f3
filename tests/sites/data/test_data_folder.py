from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from pipeline.core.errors import DataError, MissingDataError
from sites.data.folder import ImageFolder


def image(file: Path, grey: int = 0, size: tuple[int, int] = (4, 4)) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, grey).save(file)


@pytest.fixture
def smears(tmp_path: Path) -> Path:
    """Ten images: six normal ones of grey 0..5 and four schistocytes of grey 100..103."""
    for i in range(6):
        image(tmp_path / "normal" / f"{i}.png", i)
    for i in range(4):
        image(tmp_path / "schistocyte" / f"{i}.TIF", 100 + i)
    return tmp_path


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """Six patients with five images each; the grey value is 10 * patient + image."""
    lines = ["path,label,patient,hospital"]
    for p in range(6):
        for i in range(5):
            image(tmp_path / f"{p}-{i}.png", 10 * p + i)
            lines.append(f"{p}-{i}.png,{'odd' if i % 2 else 'even'},p{p},{'north' if p < 2 else 'south'}")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    return tmp_path


def test_class_folders(smears: Path) -> None:
    data = ImageFolder(path=smears, channels=1).load(None, 0)
    assert data.classes == ("normal", "schistocyte")
    assert data.x[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 100, 101, 102, 103]
    assert data.y.tolist() == [0] * 6 + [1] * 4
    assert data.shape == (1, 4, 4)
    assert [len(data.rows_in_split(s)) for s in ("train", "val", "test")] == [7, 1, 2]
    assert (data.privacy_unit, data.skipped, dict(data.keys)) == (None, (), {})


def test_root_colour_and_size(smears: Path) -> None:
    data = ImageFolder(size=8).load(smears, 0)
    assert data.x.shape == (10, 3, 8, 8)
    assert data.x.dtype == torch.uint8


def test_seed_decides_the_split(smears: Path) -> None:
    one, same = (ImageFolder().load(smears, 0) for _ in range(2))
    assert torch.equal(one.split, same.split)
    assert one.fingerprint == same.fingerprint
    assert any(not torch.equal(one.split, ImageFolder().load(smears, seed).split) for seed in range(1, 5))


def test_what_is_no_image_is_passed_over(smears: Path) -> None:
    (smears / "notes.txt").touch()
    (smears / "normal" / "Thumbs.db").touch()
    (smears / "normal" / "._0.png").touch()
    image(smears / ".hidden" / "0.png")
    (smears / "empty").mkdir()
    assert len(ImageFolder().load(smears, 0).y) == 10


def test_order_of_classes_is_the_studys(smears: Path) -> None:
    data = ImageFolder(classes=("schistocyte", "platelet", "normal")).load(smears, 0)
    assert torch.bincount(data.y).tolist() == [4, 0, 6]
    with pytest.raises(DataError, match=r"schistocyte not in data.classes"):
        ImageFolder(classes=("normal", "platelet")).load(smears, 0)


def test_corrupt_ones_are_all_listed(smears: Path) -> None:
    (smears / "normal" / "2.png").write_bytes(b"")
    (smears / "normal" / "3.png").write_bytes(b"junk")
    with pytest.raises(DataError, match="2 of 10 images cannot be used") as caught:
        ImageFolder().load(smears, 0)
    assert "normal/2.png: empty file" in str(caught.value)
    assert "normal/3.png: no PNG" in str(caught.value)
    assert "data.corrupt = 'skip'" in str(caught.value)


def test_corrupt_ones_are_skipped_if_so_told(smears: Path) -> None:
    (smears / "normal" / "2.png").write_bytes(b"")
    data = ImageFolder(corrupt="skip", channels=1).load(smears, 0)
    assert data.skipped == ("normal/2.png: empty file",)
    assert data.x[:, 0, 0, 0].tolist() == [0, 1, 3, 4, 5, 100, 101, 102, 103]
    assert len(data.y) == len(data.split) == 9


def test_nothing_left_to_skip(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.png").touch()
    with pytest.raises(DataError, match="1 of 1 images"):
        ImageFolder(corrupt="skip").load(tmp_path, 0)


def test_sizes_that_differ(smears: Path) -> None:
    image(smears / "normal" / "wide.png", size=(7, 4))
    with pytest.raises(DataError, match=r"say data.size.*\n  4 x 4: 10 images\n  7 x 4: 1 images"):
        ImageFolder().load(smears, 0)
    assert ImageFolder(size=4).load(smears, 0).shape == (3, 4, 4)


def test_patients_stay_whole(listed: Path) -> None:
    data = ImageFolder(manifest="list.csv", test=0.34, val=0.25).load(listed, 0)
    assert data.privacy_unit == "patient"
    assert data.keys["patient"].names == ("p0", "p1", "p2", "p3", "p4", "p5")
    assert torch.bincount(data.keys["hospital"].codes).tolist() == [10, 20]
    units = [set(data.keys["patient"].codes[data.rows_in_split(s)].tolist()) for s in ("train", "val", "test")]
    assert [len(u) for u in units] == [3, 1, 2]
    assert len(set.union(*units)) == 6


def test_another_column_is_the_unit(listed: Path) -> None:
    data = ImageFolder(manifest="list.csv", patient="hospital", test=0.5, val=0).load(listed, 0)
    assert data.privacy_unit == "hospital"
    assert sorted(len(data.rows_in_split(s)) for s in ("train", "test")) == [10, 20]


def test_a_split_column_is_kept(smears: Path) -> None:
    rows = [f"normal/{i}.png,n,{'test' if i == 5 else 'train'}" for i in range(6)]
    (smears / "list.csv").write_text("\n".join(["path,label,split", *rows, "schistocyte/0.TIF,s,val"]))
    data = ImageFolder(manifest="list.csv", val=0.5).load(smears, 0)
    assert data.split.tolist() == [0, 0, 0, 0, 0, 2, 1]
    assert data.classes == ("n", "s")


def test_listed_but_absent_files(listed: Path) -> None:
    (listed / "3-0.png").unlink()
    with pytest.raises(DataError, match=r"3-0.png: no such file"):
        ImageFolder(manifest="list.csv").load(listed, 0)
    data = ImageFolder(manifest="list.csv", corrupt="skip").load(listed, 0)
    assert data.skipped == ("3-0.png: no such file",)


def test_too_few_patients_to_split(listed: Path) -> None:
    with pytest.raises(DataError, match=r"30 images of 2 patients .* nothing for test; change data.test"):
        ImageFolder(manifest="list.csv", patient="hospital", test=0.1).load(listed, 0)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"say data.path, --data or HEMOFED_DATA"):
        ImageFolder().load(None, 0)
    with pytest.raises(MissingDataError, match="is no folder"):
        ImageFolder(path=tmp_path / "absent").load(None, 0)
    with pytest.raises(MissingDataError, match="no class folders with images"):
        ImageFolder(path=tmp_path).load(None, 0)


def test_one_class_is_no_task(tmp_path: Path) -> None:
    image(tmp_path / "normal" / "0.png")
    with pytest.raises(DataError, match="all images are 'normal'"):
        ImageFolder().load(tmp_path, 0)


def test_fields_that_disagree() -> None:
    with pytest.raises(ValidationError, match="say manifest"):
        ImageFolder(patient="owner")
    with pytest.raises(ValidationError, match="one class twice"):
        ImageFolder(classes=("a", "a"))


def test_a_patient_in_two_splits_is_refused(listed: Path) -> None:
    lines = (listed / "list.csv").read_text().splitlines()
    splits = ["train"] * 14 + ["test"] * 16  # patient 2 has four images in train and one in test
    (listed / "list.csv").write_text(
        "\n".join([f"{lines[0]},split", *(f"{a},{b}" for a, b in zip(lines[1:], splits, strict=True))])
    )
    with pytest.raises(DataError, match=r"1 patients .* more than one split(.|\n)*2-0\.png"):
        ImageFolder(manifest="list.csv").load(listed, 0)

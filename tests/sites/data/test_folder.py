from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from pipeline.core.errors import DataError, MissingDataError
from sites.data.folder import ImageFolder


def save_image(file: Path, grey: int = 0, size: tuple[int, int] = (4, 4)) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, grey).save(file)


@pytest.fixture
def class_folders(tmp_path: Path) -> Path:
    """Ten images: six normal ones of grey 0..5 and four schistocytes of grey 100..103."""
    for i in range(6):
        save_image(tmp_path / "normal" / f"{i}.png", i)
    for i in range(4):
        save_image(tmp_path / "schistocyte" / f"{i}.TIF", 100 + i)
    return tmp_path


@pytest.fixture
def manifest_folder(tmp_path: Path) -> Path:
    """Six patients with five images each; the grey value is 10 * patient + image."""
    lines = ["path,label,patient,hospital"]
    for p in range(6):
        for i in range(5):
            save_image(tmp_path / f"{p}-{i}.png", 10 * p + i)
            lines.append(f"{p}-{i}.png,{'odd' if i % 2 else 'even'},p{p},{'north' if p < 2 else 'south'}")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    return tmp_path


def test_image_folder_class_folders(class_folders: Path) -> None:
    data = ImageFolder(path=class_folders, channels=1).load(None, 0)
    assert data.classes == ("normal", "schistocyte")
    assert data.x[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 100, 101, 102, 103]
    assert data.y.tolist() == [0] * 6 + [1] * 4
    assert data.shape == (1, 4, 4)
    assert [len(data.rows_in_split(s)) for s in ("train", "val", "test")] == [7, 1, 2]
    assert (data.privacy_unit, data.skipped, dict(data.keys)) == (None, (), {})


def test_image_folder_root_channels_and_size(class_folders: Path) -> None:
    data = ImageFolder(size=8).load(class_folders, 0)
    assert data.x.shape == (10, 3, 8, 8)
    assert data.x.dtype == torch.uint8


def test_image_folder_split_follows_the_seed(class_folders: Path) -> None:
    one, same = (ImageFolder().load(class_folders, 0) for _ in range(2))
    assert torch.equal(one.split, same.split)
    assert one.fingerprint == same.fingerprint
    assert any(not torch.equal(one.split, ImageFolder().load(class_folders, seed).split) for seed in range(1, 5))


def test_image_folder_skips_other_files(class_folders: Path) -> None:
    (class_folders / "notes.txt").touch()
    (class_folders / "normal" / "Thumbs.db").touch()
    (class_folders / "normal" / "._0.png").touch()
    save_image(class_folders / ".hidden" / "0.png")
    (class_folders / "empty").mkdir()
    assert len(ImageFolder().load(class_folders, 0).y) == 10


def test_image_folder_class_order_is_the_studys(class_folders: Path) -> None:
    data = ImageFolder(classes=("schistocyte", "platelet", "normal")).load(class_folders, 0)
    assert torch.bincount(data.y).tolist() == [4, 0, 6]
    with pytest.raises(DataError, match=r"schistocyte not in data.classes"):
        ImageFolder(classes=("normal", "platelet")).load(class_folders, 0)


def test_image_folder_corrupt_images_are_all_listed(class_folders: Path) -> None:
    (class_folders / "normal" / "2.png").write_bytes(b"")
    (class_folders / "normal" / "3.png").write_bytes(b"junk")
    with pytest.raises(DataError, match="2 of 10 images cannot be used") as caught:
        ImageFolder().load(class_folders, 0)
    assert "normal/2.png: empty file" in str(caught.value)
    assert "normal/3.png: no PNG" in str(caught.value)
    assert "data.corrupt = 'skip'" in str(caught.value)


def test_image_folder_corrupt_skip(class_folders: Path) -> None:
    (class_folders / "normal" / "2.png").write_bytes(b"")
    data = ImageFolder(corrupt="skip", channels=1).load(class_folders, 0)
    assert data.skipped == ("normal/2.png: empty file",)
    assert data.x[:, 0, 0, 0].tolist() == [0, 1, 3, 4, 5, 100, 101, 102, 103]
    assert len(data.y) == len(data.split) == 9


def test_image_folder_corrupt_skip_refuses_an_empty_data_set(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.png").touch()
    with pytest.raises(DataError, match="1 of 1 images"):
        ImageFolder(corrupt="skip").load(tmp_path, 0)


def test_image_folder_different_sizes_are_refused(class_folders: Path) -> None:
    save_image(class_folders / "normal" / "wide.png", size=(7, 4))
    with pytest.raises(DataError, match=r"set data.size.*\n  4 x 4: 10 images\n  7 x 4: 1 images"):
        ImageFolder().load(class_folders, 0)
    assert ImageFolder(size=4).load(class_folders, 0).shape == (3, 4, 4)


def test_image_folder_patients_stay_in_one_split(manifest_folder: Path) -> None:
    data = ImageFolder(manifest="list.csv", test=0.34, val=0.25).load(manifest_folder, 0)
    assert data.privacy_unit == "patient"
    assert data.keys["patient"].names == ("p0", "p1", "p2", "p3", "p4", "p5")
    assert torch.bincount(data.keys["hospital"].codes).tolist() == [10, 20]
    units = [set(data.keys["patient"].codes[data.rows_in_split(s)].tolist()) for s in ("train", "val", "test")]
    assert [len(u) for u in units] == [3, 1, 2]
    assert len(set.union(*units)) == 6


def test_image_folder_patient_setting_names_the_unit(manifest_folder: Path) -> None:
    data = ImageFolder(manifest="list.csv", patient="hospital", test=0.5, val=0).load(manifest_folder, 0)
    assert data.privacy_unit == "hospital"
    assert sorted(len(data.rows_in_split(s)) for s in ("train", "test")) == [10, 20]


def test_image_folder_split_column_is_used(class_folders: Path) -> None:
    rows = [f"normal/{i}.png,n,{'test' if i == 5 else 'train'}" for i in range(6)]
    (class_folders / "list.csv").write_text("\n".join(["path,label,split", *rows, "schistocyte/0.TIF,s,val"]))
    data = ImageFolder(manifest="list.csv", val=0.5).load(class_folders, 0)
    assert data.split.tolist() == [0, 0, 0, 0, 0, 2, 1]
    assert data.classes == ("n", "s")


def test_image_folder_missing_files(manifest_folder: Path) -> None:
    (manifest_folder / "3-0.png").unlink()
    with pytest.raises(DataError, match=r"3-0.png: no such file"):
        ImageFolder(manifest="list.csv").load(manifest_folder, 0)
    data = ImageFolder(manifest="list.csv", corrupt="skip").load(manifest_folder, 0)
    assert data.skipped == ("3-0.png: no such file",)


def test_image_folder_too_few_patients_to_split(manifest_folder: Path) -> None:
    with pytest.raises(DataError, match=r"30 images of 2 patients .* nothing for test; change data.test"):
        ImageFolder(manifest="list.csv", patient="hospital", test=0.1).load(manifest_folder, 0)


def test_image_folder_missing_data(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"set data.path, --data or HEMOFED_DATA"):
        ImageFolder().load(None, 0)
    with pytest.raises(MissingDataError, match="is not a folder"):
        ImageFolder(path=tmp_path / "absent").load(None, 0)
    with pytest.raises(MissingDataError, match="no class folders with images"):
        ImageFolder(path=tmp_path).load(None, 0)


def test_image_folder_one_class_is_refused(tmp_path: Path) -> None:
    save_image(tmp_path / "normal" / "0.png")
    with pytest.raises(DataError, match="all images are 'normal'"):
        ImageFolder().load(tmp_path, 0)


def test_image_folder_contradicting_settings() -> None:
    with pytest.raises(ValidationError, match="set manifest"):
        ImageFolder(patient="owner")
    with pytest.raises(ValidationError, match="a class twice"):
        ImageFolder(classes=("a", "a"))


def test_image_folder_patient_in_two_splits_is_refused(manifest_folder: Path) -> None:
    lines = (manifest_folder / "list.csv").read_text().splitlines()
    splits = ["train"] * 14 + ["test"] * 16  # patient 2 has four images in train and one in test
    (manifest_folder / "list.csv").write_text(
        "\n".join([f"{lines[0]},split", *(f"{a},{b}" for a, b in zip(lines[1:], splits, strict=True))])
    )
    with pytest.raises(DataError, match=r"1 patients .* more than one split(.|\n)*2-0\.png"):
        ImageFolder(manifest="list.csv").load(manifest_folder, 0)

"""Handmade cell files and Chula folders, and the real cells if they are installed."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from pipeline.core.errors import DataError, IncompatibleStudyError, MissingDataError
from pipeline.core.registry import registered_components
from sites.data.base import SPLITS, Dataset
from sites.data.smear.chula_folder import read_chula_folder
from sites.data.smear.npz_file import read_cell_file, read_jpeg_size
from sites.data.smear.records import CHULA_TYPES
from sites.data.smear_cells import SmearCells
from sites.population.partition import KeyPartitioner
from tests.support.markers import REAL_CELLS, needs_real_cells

Arrays = dict[str, np.ndarray]
TYPES = [0, 9, 10, 3, 9, 0, 0, 12, 9, 0, 9, 1]
GROUPS = [1, 1, 1, 2, 2, 3, 3, 4, 5, 5, 6, 6]


def encode_jpeg(colour: int, side: int = 72) -> np.ndarray:
    """A uniform red cell, whose mean is known at any size."""
    cell = np.zeros((side, side, 3), np.uint8)
    cell[..., 2] = colour  # OpenCV's order is blue, green, red
    return cv2.imencode(".jpg", cell, [cv2.IMWRITE_JPEG_QUALITY, 95])[1]


def pack_jpegs(cells: list[np.ndarray]) -> Arrays:
    return {"jpeg": np.concatenate(cells), "offset": np.cumsum([0, *map(len, cells)])}


@pytest.fixture
def arrays() -> Arrays:
    """Twelve cells in six groups; row 2 is uncategorised, row 4 repeats row 1, row 7 is of batch 4."""
    group = np.array(GROUPS)
    dup_of = np.full(12, -1)
    dup_of[4] = 1
    return {
        "labels": np.array(TYPES),
        "class_names": np.array(CHULA_TYPES),
        "group": group,
        "field": group * 10,
        "batch": np.array([0, 0, 0, 1, 1, 2, 2, 4, 3, 3, 0, 0]),
        "fold": np.array([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3]),
        "dup_of": dup_of,
        **pack_jpegs([encode_jpeg(20 * i) for i in range(12)]),
    }


@pytest.fixture
def write_cell_file(tmp_path: Path) -> Callable[[Arrays], Path]:
    def write(arrays: Arrays) -> Path:
        np.savez_compressed(tmp_path / "chula_rbc12.npz", **arrays)
        return tmp_path

    return write


def key_names(data: Dataset, key: str) -> list[str]:
    return [data.keys[key].names[c] for c in data.keys[key].codes.tolist()]


def keys_in_split(data: Dataset, split: str, key: str) -> set[str]:
    names = key_names(data, key)
    return {names[i] for i in data.rows_in_split(split).tolist()}


def is_split_by_whole_units(data: Dataset) -> bool:
    assert data.privacy_unit is not None
    units = [keys_in_split(data, split, data.privacy_unit) for split in SPLITS]
    return sum(map(len, units)) == len(set.union(*units))


def test_smear_cells_is_registered_and_survives_a_study_file() -> None:
    assert registered_components("data")["smear_cells"] is SmearCells
    source = SmearCells(batches="all", task="types")
    assert SmearCells.model_validate(source.model_dump(mode="json", exclude_none=True)) == source


def test_cell_file_contents(arrays: Arrays, write_cell_file: Callable[[Arrays], Path]) -> None:
    data = SmearCells(val=0.4).load(write_cell_file(arrays), 0)
    selected = [0, 1, 3, 5, 6, 8, 9, 10, 11]
    assert data.x.shape == (9, 3, 72, 72)
    assert data.x.dtype == torch.uint8
    assert data.x[:, 0].float().mean((1, 2)).tolist() == pytest.approx([20 * i for i in selected], abs=3)
    assert data.x[:, 1:].float().mean() < 3
    assert data.classes == ("other", "schistocyte")
    assert data.y.tolist() == [int(TYPES[i] == 9) for i in selected]
    assert key_names(data, "type") == [CHULA_TYPES[TYPES[i]] for i in selected]
    assert key_names(data, "group") == [f"group-{GROUPS[i]}" for i in selected]
    assert key_names(data, "field")[0] == "field-10"
    assert data.keys["batch"].names == ("batch-0", "batch-1", "batch-2", "batch-3")
    assert data.privacy_unit == "group"
    assert data.rows_in_split("test").tolist() == [0, 1]
    assert len(keys_in_split(data, "val", "group")) == 2  # 0.4 of the five groups that are not in fold 0
    assert is_split_by_whole_units(data)
    assert data.skipped == (
        "chula_rbc12.npz: cells of batches that data.batches does not name left out: 1",
        "chula_rbc12.npz: cells of type uncategorised left out: 1",
        "chula_rbc12.npz: repeats of a cell in an overlapping field left out: 1",
    )


def test_types_task_includes_classes_without_cells(arrays: Arrays, write_cell_file: Callable[[Arrays], Path]) -> None:
    data = SmearCells(task="types", batches="all", size=24, test_fold=3).load(write_cell_file(arrays), 0)
    assert data.classes == tuple(t for t in CHULA_TYPES if t != "uncategorised")
    assert [data.classes[c] for c in data.y] == key_names(data, "type")
    assert data.shape == (3, 24, 24)
    assert keys_in_split(data, "test", "group") == {"group-6"}


def test_seed_changes_the_validation_split_only(arrays: Arrays, write_cell_file: Callable[[Arrays], Path]) -> None:
    folder = write_cell_file(arrays)
    one, same, other = (SmearCells(val=0.4).load(folder, seed) for seed in (0, 0, 3))
    assert one.fingerprint == same.fingerprint != other.fingerprint
    assert torch.equal(one.rows_in_split("test"), other.rows_in_split("test"))


def test_cell_file_path_precedes_root_and_may_be_the_file(
    arrays: Arrays, write_cell_file: Callable[[Arrays], Path], tmp_path: Path
) -> None:
    file = write_cell_file(arrays) / "chula_rbc12.npz"
    for source, root in ((SmearCells(path=file), Path("nowhere")), (SmearCells(), file)):
        assert len(source.load(root, 0).y) == 9


def test_uncompressed_images_need_no_class_names(tmp_path: Path) -> None:
    images = np.arange(6, dtype=np.uint8)[:, None, None, None] * np.full((1, 48, 48, 3), 40, np.uint8)
    arrays = {"images": images, "labels": np.array([0, 1] * 3), "type": np.array([0, 9, 3, 9, 11, 9])}
    rows = {"group": np.arange(6), "field": np.arange(6), "batch": np.arange(6) % 4, "fold": np.arange(6) % 3}
    np.savez(tmp_path / "small.npz", **arrays, **rows)
    for size in (48, 72):
        data = SmearCells(file="small.npz", size=size, val=0).load(tmp_path, 0)
        assert data.y.tolist() == [0, 1] * 3
        assert data.x[:, 0, 5, 7].tolist() == [0, 40, 80, 120, 160, 200]
        assert data.rows_in_split("test").tolist() == [0, 3]


def test_cell_file_with_its_own_classes_and_units(arrays: Arrays, tmp_path: Path) -> None:
    own = {k: v for k, v in arrays.items() if k not in ("group", "batch", "fold", "dup_of")}
    own |= {"labels": np.array(TYPES) % 2, "class_names": np.array(["plain", "parasite"])}
    own |= {"slide": np.array(GROUPS) + 1000, "species": np.array(GROUPS) % 2, "species_names": np.array(["a", "b"])}
    np.savez(tmp_path / "own.npz", **own)
    data = SmearCells(file="own.npz", task="labels", test=0.34, val=0.25).load(tmp_path, 0)
    assert (data.classes, data.privacy_unit, len(data.y), data.skipped) == (("plain", "parasite"), "slide", 12, ())
    assert data.keys["slide"].names[0] == "slide-1001"
    assert data.keys["species"].names == ("a", "b")
    assert [len(data.rows_in_split(s)) for s in SPLITS] == [5, 2, 5]
    assert sum(len(keys_in_split(data, s, "slide")) for s in SPLITS) == 6  # no slide in two of them
    assert is_split_by_whole_units(data)
    for task in ("schistocyte", "types"):
        with pytest.raises(IncompatibleStudyError, match=f"{task}.*plain, parasite; set data.task = 'labels'"):
            SmearCells(file="own.npz", task=task).load(tmp_path, 0)


def set_row(name: str, row: int, value: int) -> Callable[[Arrays], Any]:
    def change(arrays: Arrays) -> None:
        arrays[name][row] = value

    return change


def replace_last_cells(*others: np.ndarray) -> Callable[[Arrays], Any]:
    """Replaces the last cells of the file by these."""
    return lambda a: a.update(pack_jpegs([*(encode_jpeg(90) for _ in range(12 - len(others))), *others]))


BROKEN = np.concatenate([[0xFF, 0xD8], np.arange(60), [0xFF, 0xD9]]).astype(np.uint8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: [a.pop(k) for k in ("field", "offset")], "lacks field, offset; see 'Cell files'"),
        (lambda a: a.pop("group"), "lacks patient or slide or group"),
        (lambda a: a.pop("class_names"), "lacks class_names"),
        (lambda a: a.update(class_names=np.array(["a"] * 13)), "class_names is not a list of distinct names"),
        (lambda a: a.update(class_names=np.array(["a", {}], object)), "class_names cannot be read.*download it again"),
        (lambda a: a.update(labels=np.array(TYPES, object)), "labels cannot be read"),
        (lambda a: a.update(labels=np.array(TYPES, float)), "labels is float64 of shape .12,., not integers"),
        (lambda a: a.update(labels=np.array([], int)), "holds no cells"),
        (lambda a: a.update(batch=np.zeros(11, int)), "batch is int64 of shape .11,."),
        (lambda a: a.update(field=np.zeros((12, 2), int)), "field is int64"),
        (set_row("labels", 5, 13), r"labels must be in 0..12.*\n  row 5: labels 13"),
        (set_row("labels", 0, -1), "row 0: labels -1"),
        (set_row("offset", 12, 10**6), "row 11: bytes .* to 1000000 of"),
        (set_row("offset", 4, 0), "offset must ascend.*\n  row 3: bytes"),
        (set_row("offset", 0, -9), "row 0: bytes -9"),
        (lambda a: a.update(offset=a["offset"][:-1]), "offset is int64 of shape .12,."),
        (lambda a: a.update(jpeg=a["jpeg"].astype(float)), "jpeg is float64"),
        (lambda a: a["offset"].__setitem__(4, a["offset"][4] - 9), "\n  row 3: incomplete JPEG\n  row 4: incomplete"),
        (replace_last_cells(BROKEN), "row 11: a JPEG that does not decode"),
        (replace_last_cells(encode_jpeg(9, 64), encode_jpeg(9)), "row 10: 64 x 64 pixels, not a cell of 72 x 72"),
        (set_row("fold", 0, 3), "more than one fold.*\n  group 1$"),
        (set_row("group", 0, 7), "more than one group.*\n  field 10$"),
        (lambda a: a.update(images=np.zeros((12, 9, 8, 3), np.uint8)), "images is uint8 of shape"),
        (lambda a: a.update(dup_of=np.eye(1, 12, dtype=int)[0]), "no cell is left.*: 10$"),
        (lambda a: a.update(fold=np.zeros(12, int)), "9 cells of 5 units .group. leave nothing for train"),
        (lambda a: [a.pop("fold"), a.update(group=np.ones(12, int))], "1 units .group. leave nothing for test"),
    ],
)
def test_cell_file_errors_name_the_cure(
    arrays: Arrays, write_cell_file: Callable[[Arrays], Path], change: Callable[[Arrays], Any], message: str
) -> None:
    change(arrays)
    with pytest.raises(DataError, match=f"(?s)chula_rbc12.npz.*{message}"):
        SmearCells().load(write_cell_file(arrays), 0)


def test_cell_file_damaged_archives_are_refused(arrays: Arrays, write_cell_file: Callable[[Arrays], Path]) -> None:
    folder = write_cell_file(arrays)
    file = folder / "chula_rbc12.npz"
    good = file.read_bytes()
    middle = len(good) // 2
    for damage in (b"", b"no zip", good[:middle], good[:200] + bytes(300) + good[500:], good[:-9]):
        file.write_bytes(damage)
        with pytest.raises(DataError, match=r"(not an \.npz file|cannot be read).*download it again"):
            SmearCells().load(folder, 0)
    with zipfile.ZipFile(file, "w") as other:
        other.writestr("labels.txt", "a zip of other things")
    with pytest.raises(DataError, match="lacks labels"):
        SmearCells().load(folder, 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"test_fold": 7}, "test_fold = 7, .* valid: 0, 1, 2, 3$"),
        ({"batches": (0, 5, 9)}, "has no batch 5, 9; valid: 0, 1, 2, 3, 4, or 'all'"),
    ],
)
def test_cell_file_unknown_fold_or_batch_is_refused(
    arrays: Arrays, write_cell_file: Callable[[Arrays], Path], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(IncompatibleStudyError, match=message):
        SmearCells(**fields).load(write_cell_file(arrays), 0)


@pytest.mark.parametrize(
    "fields", [{"file": "../x.npz"}, {"file": "x.csv"}, {"size": 8}, {"batches": ()}, {"task": "x"}]
)
def test_smear_cells_settings_are_checked(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SmearCells(**fields)


@pytest.mark.parametrize("folder", [None, "nothing", "."])
def test_missing_cells_error_names_the_sources(tmp_path: Path, folder: str | None) -> None:
    with pytest.raises(MissingDataError, match=r"Chula-PIC-Lab/Chula-RBC-12-Dataset(?s:.*)synthetic_smear"):
        SmearCells(path=folder and tmp_path / folder).load(None, 0)


@pytest.fixture
def chula_folder(tmp_path: Path) -> Path:
    """Seven fields: 3 is the image of 1 with another number and suffix, 4 has no label file, 5 has an empty one."""
    folder = tmp_path / "smear"
    rng = np.random.default_rng(0)
    for part in ("Dataset", "Label"):
        (folder / part).mkdir(parents=True)
    for number in (1, 2, 4, 5, 6, 62):
        Image.fromarray(rng.integers(0, 255, (100, 120, 3), np.uint8)).save(folder / "Dataset" / f"{number}.png")
    shutil.copy(folder / "Dataset" / "1.png", folder / "Dataset" / "3.jpg")
    (folder / "Dataset" / ".hidden.png").touch()
    lines = {
        1: "60 50 9\n0 0 0\n",
        2: "20 30 10\r\n30 70 3\r\n",
        3: "66 56 0\n100 20 9\n",
        5: "\n",
        6: "9 9 9",
        62: "8 8 4",
    }
    for number, text in lines.items():
        (folder / "Label" / f"{number}.txt").write_text(text, newline="")
    return folder


def read_field(chula_folder: Path, name: str) -> np.ndarray:
    return np.asarray(Image.open(chula_folder / "Dataset" / name)).astype(int)


def test_chula_folder_contents(chula_folder: Path) -> None:
    data = SmearCells(path=chula_folder, task="types", test=0.25, val=0.34).load(None, 0)
    assert key_names(data, "field") == ["field-1", "field-1", "field-2", "field-3", "field-6", "field-62"]
    assert key_names(data, "group") == ["group-1", "group-1", "group-2", "group-1", "group-6", "group-62"]
    assert key_names(data, "batch") == ["batch-0"] * 5 + ["batch-1"]
    assert key_names(data, "type") == ["schistocyte", "normal", "spherocyte", "schistocyte", "schistocyte", "target"]
    assert [len(keys_in_split(data, s, "group")) for s in SPLITS] == [2, 1, 1]
    assert is_split_by_whole_units(data)
    assert data.skipped == (
        "smear: fields without a label file left out: 4",
        "smear: fields with an empty label file left out: 5",
        "smear: cells of type uncategorised left out: 1",
        "smear: repeats of a cell in an overlapping field left out: 1",
    )
    field = read_field(chula_folder, "1.png")
    assert np.array_equal(data.x[0].numpy().transpose(1, 2, 0), field[14:86, 24:96])
    assert np.array_equal(data.x[1, :, 36:, 36:].numpy().transpose(1, 2, 0), field[:36, :36])
    assert torch.equal(data.x[1, :, 35], data.x[1, :, 37])  # mirrored about the border's own row


def test_chula_folder_window_and_size(chula_folder: Path) -> None:
    data = SmearCells(path=chula_folder, window=96, size=48, test=0.25).load(None, 0)
    field = read_field(chula_folder, "1.png")[2:98, 12:108]
    halves = field.reshape(48, 2, 48, 2, 3).mean((1, 3))
    assert np.abs(data.x[0].numpy().transpose(1, 2, 0) - halves).max() <= 1


def test_chula_folder_other_names_make_no_batches(chula_folder: Path) -> None:
    for part, suffix in (("Dataset", "png"), ("Label", "txt")):
        (chula_folder / part / f"62.{suffix}").rename(chula_folder / part / f"ward-a.{suffix}")
    data = SmearCells(path=chula_folder).load(None, 0)
    assert set(data.keys) == {"group", "field", "type"}
    assert "field-ward-a" in data.keys["field"].names


def test_chula_folder_errors_are_all_listed(chula_folder: Path) -> None:
    label = chula_folder / "Label"
    (label / "1.txt").write_text("60 50 9\n60 50\n60,50,9\n60 50 13\n-1 50 9\n1.5 50 9\n")
    (label / "2.txt").write_text("120 5 0\n5 100 0\n119 99 0\n")
    (label / "3.txt").write_bytes(b"\xff\xfe\x00")
    (label / "99.txt").write_text("1 1 1\n")
    (chula_folder / "Dataset" / "6.png").write_bytes(b"broken")
    Image.new("RGB", (60, 60)).save(chula_folder / "Dataset" / "62.png")
    (chula_folder / "Dataset" / "5.bmp").touch()
    with pytest.raises(DataError) as caught:
        read_chula_folder(chula_folder, 72, 72)
    text = str(caught.value)
    for line in (2, 3, 5, 6):
        assert f"Label/1.txt, line {line}: " in text
    assert "Label/1.txt, line 4: type 13 is not in 0..12" in text
    assert "Dataset/5.bmp: 5.png has the same name" in text
    assert "Label/3.txt: cannot be read as text" in text
    assert "Label/99.txt: Dataset has no image 99" in text
    assert "and 2 more" in text
    for number in (1, 3, 99):
        (label / f"{number}.txt").unlink()
    (chula_folder / "Dataset" / "5.bmp").unlink()
    with pytest.raises(DataError) as caught:
        read_chula_folder(chula_folder, 72, 72)
    assert str(caught.value).splitlines()[1:] == [
        "  Label/2.txt, line 1: 120 5 is outside the image of 120 x 100",
        "  Label/2.txt, line 2: 5 100 is outside the image of 120 x 100",
        "  Dataset/6.png: no PNG, JPEG, TIFF or BMP image, or a damaged one",
        "  Dataset/62.png: 60 x 60 pixels, less than data.window = 72",
    ]


def test_chula_folder_without_labels_is_refused(chula_folder: Path) -> None:
    shutil.rmtree(chula_folder / "Label")
    (chula_folder / "Label").mkdir()
    with pytest.raises(DataError, match="no image in Dataset has a line in Label; write `x y type`"):
        SmearCells(path=chula_folder).load(None, 0)


@needs_real_cells
def test_real_chula_cells() -> None:
    with np.load(REAL_CELLS / "chula_rbc12.npz") as raw:
        assert (len(raw["labels"]), int((raw["labels"] == 9).sum())) == (17_680, 717)
    data = SmearCells().load(REAL_CELLS, 0)
    assert is_split_by_whole_units(data)
    test = data.rows_in_split("test")
    assert (len(data.y), len(test), int(data.y[test].sum())) == (15_728, 4036, 178)
    shards = KeyPartitioner(by="batch").assign(data, None, 0)
    assert [s.name for s in shards] == ["batch-0", "batch-1", "batch-2", "batch-3"]
    assert [len(s.train) + len(s.val) + len(s.test) for s in shards] == [3435, 3681, 5945, 2667]
    assert data.x[::50].float().mean((0, 2, 3)).tolist() == pytest.approx([138, 138, 142], abs=5)


@needs_real_cells
@pytest.mark.parametrize(
    ("file", "task", "cells", "unit"),
    [
        ("chula_schisto_small.npz", "schistocyte", [788, 426], "group"),
        ("bccd_cells.npz", "labels", [4153, 372, 361], "group"),
        ("mpidb_cells.npz", "labels", [1309, 992], "slide"),
    ],
)
def test_other_real_cell_files(file: str, task: Any, cells: list[int], unit: str) -> None:
    if not (REAL_CELLS / file).is_file():
        pytest.skip(f"{file} is not in {REAL_CELLS}")
    data = SmearCells(file=file, task=task, size=24).load(REAL_CELLS, 0)
    assert (torch.bincount(data.y).tolist(), data.privacy_unit) == (cells, unit)
    assert is_split_by_whole_units(data)
    assert all(len(data.rows_in_split(split)) for split in SPLITS)


@needs_real_cells
def test_chula_folder_gives_the_cells_of_the_cell_file(tmp_path: Path) -> None:
    """26 and 720 (PNG bytes) as packed; 560 and 607 are the same image; 53's label file is empty, 108 has none."""
    if not (REAL_CELLS / "chula_fields").is_dir():
        pytest.skip(f"chula_fields is not in {REAL_CELLS}")
    for part, suffix in (("Dataset", "jpg"), ("Label", "txt")):
        (tmp_path / part).mkdir()
        for number in (26, 53, 108, 560, 607, 720):
            if (file := REAL_CELLS / "chula_fields" / f"{number}.{suffix}").is_file():
                shutil.copy(file, tmp_path / part)
    own = SmearCells(task="types", batches="all").load(tmp_path, 0)
    cells = read_cell_file(REAL_CELLS / "chula_rbc12.npz", 72)
    numbers = cells.keys["field"].values
    rows = np.flatnonzero(
        np.isin(numbers, (26, 53, 108, 560, 607, 720)) & ~cells.is_repeat & (cells.cell_type.values != 10)
    )
    rows = rows[np.argsort(numbers[rows], kind="stable")]
    assert own.keys["group"].names == ("group-26", "group-560", "group-720")
    for key, column in (*cells.keys.items(), ("type", cells.cell_type)):
        expected = column.to_group_key(key, rows)
        assert key_names(own, key) == [expected.names[c] for c in expected.codes.tolist()]
    assert np.abs(own.x.numpy().astype(int) - cells.decode_pixels(rows)).mean((1, 2, 3)).max() < 4
    assert [line.partition(": ")[2] for line in own.skipped[:2]] == [
        "fields without a label file left out: 108",
        "fields with an empty label file left out: 53",
    ]


def test_read_jpeg_size_of_a_decompression_bomb() -> None:
    giant = bytearray(encode_jpeg(9).tobytes())
    position = giant.index(b"\xff\xc0")
    giant[position + 5 : position + 9] = (30000).to_bytes(2, "big") * 2
    assert read_jpeg_size(bytes(giant)) == (30000, 30000)
    assert read_jpeg_size(encode_jpeg(9).tobytes()) == (72, 72)
    assert read_jpeg_size(b"\xff\xd8\xff") is None


def test_cell_file_giant_cells_and_wrong_dup_of_are_refused(arrays: Arrays, tmp_path: Path) -> None:
    cells = [encode_jpeg(10 * i) for i in range(12)]
    giant = cells[5].copy()
    position = bytes(giant).index(b"\xff\xc0")
    giant[position + 5 : position + 9] = np.frombuffer((30000).to_bytes(2, "big") * 2, np.uint8)
    np.savez(tmp_path / "giant.npz", **(arrays | pack_jpegs([*cells[:5], giant, *cells[6:]])))
    with pytest.raises(DataError, match="row 5: 30000 x 30000 pixels"):
        SmearCells(file="giant.npz").load(tmp_path, 0)
    for wrong in (99, 3, -2):
        dup_of = np.full(12, -1)
        dup_of[3] = wrong
        np.savez(tmp_path / "wrong.npz", **(arrays | pack_jpegs(cells) | {"dup_of": dup_of}))
        with pytest.raises(DataError, match=rf"row 3: dup_of {wrong}"):
            SmearCells(file="wrong.npz").load(tmp_path, 0)


def test_cell_file_units_may_be_large_numbers(arrays: Arrays, tmp_path: Path) -> None:
    group = np.array(GROUPS, np.uint64) + np.uint64(2**63)
    field = group * np.uint64(1) + np.uint64(7)
    np.savez(
        tmp_path / "large.npz",
        **(arrays | pack_jpegs([encode_jpeg(10 * i) for i in range(12)]) | {"group": group, "field": field}),
    )
    assert len(SmearCells(file="large.npz").load(tmp_path, 0).keys["group"].names) >= 4


def test_chula_folder_pipes_links_and_repeated_points_are_named(tmp_path: Path) -> None:
    for name in ("Dataset", "Label"):
        (tmp_path / name).mkdir()
    Image.new("RGB", (120, 100), (200, 180, 190)).save(tmp_path / "Dataset" / "1.png")
    (tmp_path / "Label" / "1.txt").write_text("40 40 9\n60 50 0\n40 40 3\n")
    os.mkfifo(tmp_path / "Label" / "2.txt")
    (tmp_path / "secret").write_text("password:x")
    (tmp_path / "Label" / "3.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(DataError) as error_info:
        read_chula_folder(tmp_path, 72, 48)
    for words in (
        "Label/2.txt: not a regular file",
        "Label/3.txt: not a regular file",
        "line 3: 40 40 is already on line 1",
    ):
        assert words in str(error_info.value)
    assert "password" not in str(error_info.value)

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.core.errors import DataError, MissingDataError
from sites.data.manifest import read_manifest


def write_and_read(folder: Path, text: str | bytes, unit: str | None = None, classes: tuple[str, ...] | None = None):
    raw = text.encode() if isinstance(text, str) else text
    (folder / "list.csv").write_bytes(raw)
    return read_manifest(folder, "list.csv", unit, classes)


def test_manifest_columns_become_keys(tmp_path: Path) -> None:
    [one, two], unit = write_and_read(
        tmp_path, "path,label,split,slide,patient\na.png,x,train,s1,p1\nd/b.png,y,TEST,,p2\n"
    )
    assert (one.label, one.split, dict(one.keys)) == ("x", "train", {"slide": "s1", "patient": "p1"})
    assert (two.file, two.split, two.keys["slide"]) == (tmp_path.resolve() / "d/b.png", "test", "unknown")
    assert unit == "patient"


def test_manifest_privacy_unit_is_the_named_or_the_coarsest_column(tmp_path: Path) -> None:
    text = "path,label,group,slide,owner\na.png,x,g,s,o\n"
    assert write_and_read(tmp_path, text)[1] == "slide"
    assert write_and_read(tmp_path, text, unit="owner")[1] == "owner"
    assert write_and_read(tmp_path, "path,label\na.png,x\n")[1] is None


@pytest.mark.parametrize(
    "text",
    [
        "path;label\r\na.png;x\r\n",
        "path\tlabel\na.png\tx\n",
        "\ufeffpath,label\n\n a.png , x \n,\n",
        ",path,label\n0,a.png,x",
    ],
)
def test_manifest_spreadsheet_dialects(tmp_path: Path, text: str) -> None:
    [entry], _ = write_and_read(tmp_path, text)
    assert (entry.display_name, entry.label, dict(entry.keys)) == ("a.png", "x", {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: no column named path or label"),
        ("path,class\na.png,x\n", "line 1: no column named label; found: path, class"),
        ("path,label,label\na.png,x,x\n", "line 1: a column name appears twice"),
        ("path,label\n", "lists no images"),
        ("path,label\na.png,x\nb.png,\n", "line 3: label is empty"),
        ("path,label\n,x\n", "line 2: path is empty"),
        ("path,label,patient\na.png,x,\n", "line 2: patient is empty"),
        ("path,label,split\na.png,x,tset\n", "line 2: split 'tset' is not known; did you mean 'test'"),
        ("path,label,split\na.png,x,\n", "line 2: split '' is not known"),
        ("path,label\na.png\n", "line 2: 1 cells under 2 columns"),
        ("path,label\na.png,x,y\n", "line 2: 3 cells under 2 columns"),
        ("path,label\na.png,x\nd/../a.png,y\n", "line 3: d/../a.png is already on line 2"),
        ('path,label\n"a.png,x\n', "line 2: unexpected end of data"),
        ("path,label\n../a.png,x\n", "line 2: ../a.png leads out of"),
        ("path,label\n/etc/passwd,x\n", "line 2: /etc/passwd leads out of"),
        ("path,label\nd/../../a.png,x\n", "line 2: d/../../a.png leads out of"),
        ("path,label\na\0.png,x\n", "line 2: 'a\\x00.png' cannot be followed"),
        (b"path,label\n\xe9.png,x\n", "is not UTF-8"),
    ],
)
def test_manifest_errors_name_the_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(DataError) as caught:
        write_and_read(tmp_path, text)
    assert message in str(caught.value)


def test_manifest_errors_list_all_problems(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        write_and_read(tmp_path, "path,label\n" + "a.png,\n" * 12)
    assert "line 2:" in str(caught.value)
    assert str(caught.value).endswith("and 2 more")


def test_manifest_named_unit_column_must_exist(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no column named owner"):
        write_and_read(tmp_path, "path,label,patient\na.png,x,p\n", unit="owner")


def test_manifest_label_outside_the_classes(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"line 2: label 'schistocite' is not in data.classes; did you mean 'schistocyte'"
    ):
        write_and_read(tmp_path, "path,label\na.png,schistocite\n", classes=("normal", "schistocyte"))


def test_manifest_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "secret.png").touch()
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "up").symlink_to(tmp_path)
    (folder / "loop.png").symlink_to(folder / "loop.png")
    for path in ("link.png", "up/secret.png"):
        with pytest.raises(DataError, match="leads out of"):
            write_and_read(folder, f"path,label\n{path},x\n")
    with pytest.raises(DataError, match="cannot be followed"):
        write_and_read(folder, "path,label\nloop.png,x\n")


def test_manifest_missing_or_outside_the_folder(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"correct data.manifest"):
        read_manifest(tmp_path, "absent.csv", None, None)
    with pytest.raises(DataError, match="leads out of"):
        read_manifest(tmp_path, "../list.csv", None, None)

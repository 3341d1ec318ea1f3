from __future__ import annotations

import gzip
import hashlib
import socket
import struct
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.core.errors import DataError, MissingDataError
from sites.data import fashion_mnist
from sites.data.fashion_mnist import DEBIAN_FOLDER, SHA256, FashionMnist

needs_debian = pytest.mark.skipif(
    not (DEBIAN_FOLDER / "train-images-idx3-ubyte.gz").exists(),
    reason="Debian's package dataset-fashion-mnist is not installed",
)
IMAGES = {"train": np.arange(5 * 784, dtype=np.uint32).astype(np.uint8), "t10k": np.full(2 * 784, 7, np.uint8)}
LABELS = {"train": np.array([9, 0, 3, 3, 1], np.uint8), "t10k": np.array([4, 2], np.uint8)}


def make_fashion_mnist(folder: Path, suffix: str = ".gz") -> Path:
    """Five training and two test images."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, labels in LABELS.items():
        files = {
            f"{part}-images-idx3-ubyte": struct.pack(">4I", 0x803, len(labels), 28, 28) + IMAGES[part].tobytes(),
            f"{part}-labels-idx1-ubyte": struct.pack(">2I", 0x801, len(labels)) + labels.tobytes(),
        }
        for name, raw in files.items():
            (folder / f"{name}{suffix}").write_bytes(gzip.compress(raw) if suffix else raw)
    return folder


@pytest.fixture(autouse=True)
def _isolated_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No Debian package, no cache, no network."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = free.getsockname()[1]
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", tmp_path / "debian")
    monkeypatch.setattr(fashion_mnist, "MIRRORS", (f"http://127.0.0.1:{closed}/",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def mirror_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder served over HTTP as the only mirror."""

    class QuietHandler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    folder = tmp_path / "served"
    folder.mkdir()
    http = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder)))
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setattr(fashion_mnist, "MIRRORS", (f"http://127.0.0.1:{http.server_port}/",))
    yield folder
    http.shutdown()
    thread.join()
    http.server_close()


def patch_checksums(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    sums = {name: hashlib.sha256((folder / f"{name}.gz").read_bytes()).hexdigest() for name in SHA256}
    monkeypatch.setattr(fashion_mnist, "SHA256", sums)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_fashion_mnist_train_images_come_first(tmp_path: Path, suffix: str) -> None:
    data = FashionMnist(path=make_fashion_mnist(tmp_path / "d", suffix), val=0).load(None, 0)
    assert data.x.shape == (7, 1, 28, 28)
    assert data.x.dtype == torch.uint8
    assert data.x[:5].flatten().tolist() == IMAGES["train"].tolist()
    assert data.y.tolist() == [9, 0, 3, 3, 1, 4, 2]
    assert data.split.tolist() == [0] * 5 + [2] * 2
    assert data.classes[9] == "Ankle boot"


def test_fashion_mnist_limit_and_val(tmp_path: Path) -> None:
    data = FashionMnist(path=make_fashion_mnist(tmp_path / "d"), val=0.25, limit=4, limit_test=1).load(None, 0)
    assert data.y.tolist() == [9, 0, 3, 3, 4]
    assert [len(data.rows_in_split(s)) for s in ("train", "val", "test")] == [3, 1, 1]


def test_fashion_mnist_fingerprint_follows_the_content(tmp_path: Path) -> None:
    folder = make_fashion_mnist(tmp_path / "d")
    first, again = (FashionMnist(path=folder).load(None, 0).fingerprint for _ in range(2))
    fewer = FashionMnist(path=folder, limit=4).load(None, 0).fingerprint
    assert first == again != fewer


@pytest.mark.parametrize("layout", [".", "fashion_mnist", "fashion-mnist", "FashionMNIST/raw"])
def test_fashion_mnist_is_found_below_the_root(tmp_path: Path, layout: str) -> None:
    make_fashion_mnist(tmp_path / "root" / layout)
    assert len(FashionMnist().load(tmp_path / "root", 0).y) == 7


def test_fashion_mnist_path_precedes_root(tmp_path: Path) -> None:
    make_fashion_mnist(tmp_path / "root")
    with pytest.raises(MissingDataError, match="nowhere does not exist"):
        FashionMnist(path=tmp_path / "nowhere").load(tmp_path / "root", 0)


def test_fashion_mnist_debian_package_is_found(tmp_path: Path) -> None:
    make_fashion_mnist(tmp_path / "debian")
    assert len(FashionMnist(download=False).load(tmp_path / "empty", 0).y) == 7


@pytest.mark.parametrize("download", [True, False])
def test_fashion_mnist_missing_data_error_names_all_cures(tmp_path: Path, download: bool) -> None:
    folder = make_fashion_mnist(tmp_path / "root")
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(MissingDataError) as caught:
        FashionMnist(download=download).load(folder, 0)
    text = str(caught.value)
    for word in ("apt install dataset-fashion-mnist", "data.path, --data or HEMOFED_DATA", "data.download = true"):
        assert word in text
    assert f"{folder} lacks t10k-labels-idx1-ubyte" in text
    assert ("Connection refused" in text) is download


def truncate(raw: bytes) -> bytes:
    return raw[: len(raw) // 2]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("damage", [truncate, lambda raw: b"", lambda raw: b"<html>404</html>", lambda raw: raw[:3]])
def test_fashion_mnist_damaged_file_is_named(tmp_path: Path, damage, suffix: str) -> None:
    file = make_fashion_mnist(tmp_path / "d", suffix) / f"train-images-idx3-ubyte{suffix}"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DataError, match="delete it") as caught:
        FashionMnist(path=file.parent).load(None, 0)
    assert str(file) in str(caught.value)


def test_fashion_mnist_flipped_bit_in_gz_is_refused(tmp_path: Path) -> None:
    file = make_fashion_mnist(tmp_path / "d") / "t10k-images-idx3-ubyte.gz"
    raw = bytearray(file.read_bytes())
    raw[-6] ^= 1  # in the CRC
    file.write_bytes(raw)
    with pytest.raises(DataError, match="CRC"):
        FashionMnist(path=file.parent).load(None, 0)


def test_fashion_mnist_labels_out_of_range_are_refused(tmp_path: Path) -> None:
    folder = make_fashion_mnist(tmp_path / "d", "")
    (folder / "t10k-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, 2) + bytes([4, 10]))
    with pytest.raises(DataError, match="up to 10"):
        FashionMnist(path=folder).load(None, 0)


def test_fashion_mnist_download_fills_the_cache(
    tmp_path: Path, mirror_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_checksums(monkeypatch, make_fashion_mnist(mirror_folder))
    assert len(FashionMnist().load(None, 0).y) == 7
    cache = tmp_path / "cache" / "hemofed" / "fashion_mnist"
    assert {f.name for f in cache.iterdir()} == {f"{name}.gz" for name in SHA256}
    for file in mirror_folder.iterdir():
        file.unlink()
    assert len(FashionMnist(download=False).load(None, 0).y) == 7


def test_fashion_mnist_wrong_checksum_stores_nothing(tmp_path: Path, mirror_folder: Path) -> None:
    make_fashion_mnist(mirror_folder)
    with pytest.raises(MissingDataError, match="wrong SHA-256"):
        FashionMnist().load(None, 0)
    assert not list((tmp_path / "cache" / "hemofed" / "fashion_mnist").iterdir())


def test_fashion_mnist_second_mirror_is_tried(mirror_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_checksums(monkeypatch, make_fashion_mnist(mirror_folder / "good"))
    base = fashion_mnist.MIRRORS[0]
    monkeypatch.setattr(fashion_mnist, "MIRRORS", (f"{base}absent/", f"{base}good/"))
    assert len(FashionMnist().load(None, 0).y) == 7


def test_fashion_mnist_file_missing_on_the_mirror(mirror_folder: Path) -> None:
    with pytest.raises(MissingDataError, match="HTTP Error 404"):
        FashionMnist().load(None, 0)


@needs_debian
def test_fashion_mnist_debian_files() -> None:
    data = FashionMnist(path=DEBIAN_FOLDER, val=0).load(None, 0)
    assert data.x.shape == (70_000, 1, 28, 28)
    assert data.y[:5].tolist() == [9, 0, 0, 3, 0]
    assert torch.bincount(data.y[data.rows_in_split("train")]).tolist() == [6000] * 10
    assert torch.bincount(data.y[data.rows_in_split("test")]).tolist() == [1000] * 10


@needs_debian
@pytest.mark.parametrize("name", SHA256)
def test_fashion_mnist_checksums_are_the_official_files(name: str) -> None:
    """Debian's gzip header lacks name and time; with both restored, the bytes equal the published files."""
    debian = (DEBIAN_FOLDER / f"{name}.gz").read_bytes()
    time = 1504176606 if name.startswith("train") else 1504176627  # 31 August 2017
    official = b"\x1f\x8b\x08\x08" + struct.pack("<I", time) + debian[8:10] + name.encode() + b"\0" + debian[10:]
    assert hashlib.sha256(official).hexdigest() == SHA256[name]

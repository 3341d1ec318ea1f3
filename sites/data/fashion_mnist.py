"""Fashion-MNIST (Xiao, Rasul, Vollgraf 2017): 60,000 training and 10,000 test images of 28 x 28 grey pixels."""

from __future__ import annotations

import gzip
import hashlib
import struct
import urllib.request
import zlib
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Literal
from urllib.error import HTTPError

import numpy as np
import platformdirs
import torch
from pydantic import Field

from pipeline.core.errors import DataError, MissingDataError
from pipeline.core.files import write_atomically
from sites.data.base import SPLITS, Dataset, DataSource, assign_split, fingerprint

CLASS_NAMES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
# Of the official .gz files. Debian ships the same deflate streams with another gzip header.
SHA256 = {
    "train-images-idx3-ubyte": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "train-labels-idx1-ubyte": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "t10k-images-idx3-ubyte": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "t10k-labels-idx1-ubyte": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
}
# The first is the official host; it has no HTTPS, so the checksums authenticate the files.
MIRRORS = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
)
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
SUBFOLDERS = (".", "fashion_mnist", "fashion-mnist", "FashionMNIST/raw")
TIMEOUT_SECONDS = 15  # without receiving a byte
MAX_DOWNLOAD_BYTES = 64 << 20  # every official file is smaller than half of this


class FashionMnist(DataSource):
    """`limit` and `limit_test` keep only the first images of each part, for quick studies."""

    name: Literal["fashion_mnist"] = "fashion_mnist"
    download: bool = True
    limit: int | None = Field(None, gt=0)
    limit_test: int | None = Field(None, gt=0)

    def load(self, root: Path | None, seed: int) -> Dataset:
        folder = self._find_folder(root)
        train = _read_part(folder, "train", self.limit)
        test = _read_part(folder, "t10k", self.limit_test)
        x, y = (torch.from_numpy(np.concatenate(arrays)) for arrays in zip(train, test, strict=True))
        split = np.repeat(
            np.array([SPLITS.index("train"), SPLITS.index("test")], np.uint8), [len(train[1]), len(test[1])]
        )
        split = assign_split(split, self.val, seed)
        return Dataset(x, y, CLASS_NAMES, torch.from_numpy(split), fingerprint(x, y, split))

    def _find_folder(self, root: Path | None) -> Path:
        searched: list[str] = []
        for folder in self._candidate_folders(root):
            missing = [name for name in SHA256 if _find_file(folder, name) is None]
            if not missing:
                return folder
            searched.append(f"{folder} " + ("does not exist" if not folder.is_dir() else f"lacks {', '.join(missing)}"))
        if self.path is not None:
            download_failure = "not tried, because data.path names a folder"
        elif not self.download:
            download_failure = "disabled by data.download = false"
        else:
            try:
                return _download(_cache_folder())
            except MissingDataError as error:
                download_failure = str(error)
        raise MissingDataError(
            "Fashion-MNIST was not found. Looked in:\n"
            + "".join(f"  {entry}\n" for entry in searched)
            + f"Download: {download_failure}\n"
            "Do one of these:\n"
            "  - on Debian or Ubuntu: apt install dataset-fashion-mnist\n"
            f"  - put {', '.join(SHA256)} (.gz or not) into a folder and name it in data.path, --data or HEMOFED_DATA\n"
            f"  - leave data.path unset, data.download = true, and allow a connection to {MIRRORS[0]}"
        )

    def _candidate_folders(self, root: Path | None) -> Iterator[Path]:
        """With data.path set, only that folder: no other copy may replace it."""
        base_folder = self.path or root
        if base_folder is not None:
            yield from (base_folder / layout for layout in SUBFOLDERS)
        if self.path is None:
            yield DEBIAN_FOLDER
            yield _cache_folder()


def _cache_folder() -> Path:
    return platformdirs.user_cache_path("hemofed") / "fashion_mnist"


def _find_file(folder: Path, name: str) -> Path | None:
    return next((file for file in (folder / name, folder / f"{name}.gz") if file.is_file()), None)


def _read_part(folder: Path, part: str, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(N, 1, 28, 28) uint8 images and (N,) int64 labels."""
    images = _read_idx(folder, f"{part}-images-idx3-ubyte")
    labels = _read_idx(folder, f"{part}-labels-idx1-ubyte")
    if images.shape != (len(labels), 28, 28) or not len(labels) or labels.max() >= len(CLASS_NAMES):
        raise DataError(
            f"{folder}: {part} images {images.shape} and labels {labels.shape} up to {labels.max(initial=0)} are not "
            "Fashion-MNIST's (N, 28, 28) and (N,) up to 9; replace the files with the official ones"
        )
    return images[:limit, None], labels[:limit].astype(np.int64)


def _read_idx(folder: Path, name: str) -> np.ndarray:
    """An idx file: two zero bytes, the type (8 = uint8), the number of dimensions, their lengths, the values."""
    file = _find_file(folder, name)
    if file is None:
        raise MissingDataError(f"{folder / name} disappeared while it was being read; start again")
    dimensions = int(name[-7])  # "...-idx3-ubyte"
    try:
        raw = file.read_bytes()
        raw = gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw
        magic, *shape = struct.unpack_from(f">{1 + dimensions}I", raw)
        if magic != 0x800 + dimensions:
            raise ValueError(f"starts with {raw[:4].hex()}, not with {0x800 + dimensions:08x}")
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as error:
        raise DataError(
            f"{file} is damaged or not an idx file ({error}); delete it and replace it with the official one "
            "(apt install --reinstall dataset-fashion-mnist, or let hemofed download it)"
        ) from error


def _download(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in SHA256:
            if _find_file(folder, name) is None:
                _download_file(name, folder)
    except OSError as error:
        raise MissingDataError(f"cannot write to {folder} ({error})") from error
    return folder


def _download_file(name: str, folder: Path) -> None:
    failures = []
    for mirror in MIRRORS:
        url = f"{mirror}{name}.gz"
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
                content = response.read(MAX_DOWNLOAD_BYTES)
        except HTTPError as error:
            error.close()
            failures.append(f"{url}: {error}")
        except (OSError, HTTPException) as error:
            failures.append(f"{url}: {error}")
        else:
            digest = hashlib.sha256(content).hexdigest()
            if digest == SHA256[name]:
                write_atomically(folder / f"{name}.gz", content)
                return
            failures.append(f"{url}: wrong SHA-256 {digest}, expected {SHA256[name]}; file discarded")
    raise MissingDataError("; ".join(failures))

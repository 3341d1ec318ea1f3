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

from pipeline.core.errors import BadData, MissingData
from pipeline.core.files import write_atomically
from sites.data.base import SPLITS, Dataset, Source, carve, fingerprint

CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
# Of the official .gz files. Debian ships the same deflate streams under another gzip header.
SHA256 = {
    "train-images-idx3-ubyte": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "train-labels-idx1-ubyte": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "t10k-images-idx3-ubyte": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "t10k-labels-idx1-ubyte": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
}
# The first is the official host; it has no https, which the checksums make up for.
MIRRORS = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
)
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
LAYOUTS = (".", "fashion_mnist", "fashion-mnist", "FashionMNIST/raw")
TIMEOUT = 15  # seconds without a byte
LARGEST = 64 << 20  # no official file is half as large


class FashionMnist(Source):
    """`limit` and `limit_test` keep only the first images of each part, for quick studies."""

    name: Literal["fashion_mnist"] = "fashion_mnist"
    download: bool = True
    limit: int | None = Field(None, gt=0)
    limit_test: int | None = Field(None, gt=0)

    def load(self, root: Path | None, seed: int) -> Dataset:
        folder = self._find(root)
        train = _pair(folder, "train", self.limit)
        test = _pair(folder, "t10k", self.limit_test)
        x, y = (torch.from_numpy(np.concatenate(both)) for both in zip(train, test, strict=True))
        split = np.repeat(
            np.array([SPLITS.index("train"), SPLITS.index("test")], np.uint8), [len(train[1]), len(test[1])]
        )
        split = carve(split, self.val, seed)
        return Dataset(x, y, CLASSES, torch.from_numpy(split), fingerprint(x, y, split))

    def _find(self, root: Path | None) -> Path:
        looked: list[str] = []
        for folder in self._folders(root):
            lacking = [name for name in SHA256 if _file(folder, name) is None]
            if not lacking:
                return folder
            looked.append(f"{folder} " + ("does not exist" if not folder.is_dir() else f"lacks {', '.join(lacking)}"))
        if self.path is not None:
            failed = "not tried, because data.path names a folder"
        elif not self.download:
            failed = "switched off by data.download = false"
        else:
            try:
                return _download(_cache())
            except MissingData as error:
                failed = str(error)
        raise MissingData(
            "Fashion-MNIST was not found. Looked in:\n"
            + "".join(f"  {place}\n" for place in looked)
            + f"Download: {failed}\n"
            "Any one of these helps:\n"
            "  - on Debian or Ubuntu: apt install dataset-fashion-mnist\n"
            f"  - put {', '.join(SHA256)} (.gz or not) into a folder and name it by data.path, --data or HEMOFED_DATA\n"
            f"  - leave data.path unset, data.download = true, and allow a connection to {MIRRORS[0]}"
        )

    def _folders(self, root: Path | None) -> Iterator[Path]:
        """Whoever names a folder by data.path means that one: other copies do not stand in for it."""
        given = self.path or root
        if given is not None:
            yield from (given / layout for layout in LAYOUTS)
        if self.path is None:
            yield DEBIAN
            yield _cache()


def _cache() -> Path:
    return platformdirs.user_cache_path("hemofed") / "fashion_mnist"


def _file(folder: Path, name: str) -> Path | None:
    return next((file for file in (folder / name, folder / f"{name}.gz") if file.is_file()), None)


def _pair(folder: Path, part: str, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(N, 1, 28, 28) uint8 images and (N,) int64 labels."""
    images = _idx(folder, f"{part}-images-idx3-ubyte")
    labels = _idx(folder, f"{part}-labels-idx1-ubyte")
    if images.shape != (len(labels), 28, 28) or not len(labels) or labels.max() >= len(CLASSES):
        raise BadData(
            f"{folder}: {part} images {images.shape} and labels {labels.shape} up to {labels.max(initial=0)} are not "
            "Fashion-MNIST's (N, 28, 28) and (N,) up to 9; replace the files by the official ones"
        )
    return images[:limit, None], labels[:limit].astype(np.int64)


def _idx(folder: Path, name: str) -> np.ndarray:
    """An idx file: two zero bytes, the type (8 = uint8), the number of dimensions, their lengths, the values."""
    file = _file(folder, name)
    if file is None:
        raise MissingData(f"{folder / name} has gone while it was being read; start again")
    dimensions = int(name[-7])  # "...-idx3-ubyte"
    try:
        raw = file.read_bytes()
        raw = gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw
        magic, *shape = struct.unpack_from(f">{1 + dimensions}I", raw)
        if magic != 0x800 + dimensions:
            raise ValueError(f"starts with {raw[:4].hex()} and not with {0x800 + dimensions:08x}")
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as error:
        raise BadData(
            f"{file} is damaged or no idx file ({error}); delete it and put the official one in its place "
            "(apt install --reinstall dataset-fashion-mnist, or let hemofed download it)"
        ) from error


def _download(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in SHA256:
            if _file(folder, name) is None:
                _fetch(name, folder)
    except OSError as error:
        raise MissingData(f"cannot write to {folder} ({error})") from error
    return folder


def _fetch(name: str, folder: Path) -> None:
    failures = []
    for mirror in MIRRORS:
        url = f"{mirror}{name}.gz"
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
                content = answer.read(LARGEST)
        except HTTPError as error:
            error.close()
            failures.append(f"{url}: {error}")
        except (OSError, HTTPException) as error:
            failures.append(f"{url}: {error}")
        else:
            got = hashlib.sha256(content).hexdigest()
            if got == SHA256[name]:
                write_atomically(folder / f"{name}.gz", content)
                return
            failures.append(f"{url}: wrong SHA-256 {got}, expected {SHA256[name]}; nothing was kept")
    raise MissingData("; ".join(failures))

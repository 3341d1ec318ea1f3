"""A model as it goes to a bedside machine: a folder, or the same in one zip file, checked byte by byte before it is used.

model.onnx        uint8 images (N, H, W, 3) in; probabilities, traits and measures out
model.int8.onnx   the same, quantised; where it was asked for and lost little
bundle.json       what a machine has to know to use it
calibration.json  temperature and operating points; reference.json: what the guard holds images against
card.json card.md what a person has to know; metadata.json: the same as MONAI's bundles say it
SHA256SUMS        of all of these; SIGNATURE.json: an Ed25519 signature under it
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deploy.bundle.ood_guard import Reference
from deploy.bundle.operating_points import Calibration
from deploy.bundle.trust_store import Trust
from pipeline.core.errors import BadBundle
from privacy.ledger.keys import fingerprint, public_hex, sign, verified

SUMS, SIGNATURE = "SHA256SUMS", "SIGNATURE.json"
NEEDED = frozenset({"model.onnx", "bundle.json", "calibration.json", "card.json", "card.md", "metadata.json"})
OPTIONAL = frozenset({"model.int8.onnx", "reference.json"})
KNOWN = NEEDED | OPTIONAL | {SUMS, SIGNATURE}
LARGEST = 1 << 30  # bytes in all
SMALL = 1 << 16  # bytes of signature and sums, which are read before anybody is trusted
LINE = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9._-]+)")
# what a runtime can do to colours, and the numbers that each needs
NORMALISED: Mapping[str, tuple[str, ...]] = {
    "none": (), "image": ("mean", "std"), "site": ("mean", "std"), "background": ("level", "density"),
}  # fmt: skip
Precision = Literal["fp32", "int8"]
Side = Annotated[int, Field(ge=8, le=2048)]  # pixels
Parsed = TypeVar("Parsed", bound=BaseModel)


class Manifest(BaseModel):
    """bundle.json"""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal[1] = 1
    name: str
    model: str
    classes: tuple[str, ...] = Field(min_length=2, max_length=10_000)
    size: tuple[Side, Side]  # height, width of an image as the network takes it
    resize: Literal["area", "triangle"]  # how larger images become this small
    turns: Literal[1, 8]  # answers are means over so many ways to lay an image down
    normalise: dict[str, Any]  # as the study has it; "none" and "image" are inside the graph
    # of a whole field, what is cut about each cell, in diameters of a red one; None: single images only
    window: float | None = Field(gt=0.5, lt=20)
    diameter: float | None = Field(gt=3, lt=1000)  # pixels of a red cell in the fields that it learnt from
    precisions: tuple[Precision, ...] = Field(min_length=1)
    opset: int
    made: str
    software: dict[str, str]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(set(self.classes)) != len(self.classes):
            raise ValueError("a class stands twice")
        if (self.window is None) != (self.diameter is None):
            raise ValueError("window and diameter go together")
        wanted = NORMALISED.get(self.normalise.get("name", ""))
        if wanted is None or any(not isinstance(self.normalise.get(key), float | int) for key in wanted):
            raise ValueError(f"normalise must be one of {', '.join(NORMALISED)}, with its numbers")
        return self


class Signature(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str = Field(pattern=r"^[0-9a-f]{64}$")
    signature: str = Field(pattern=r"^[0-9a-f]{128}$")


@dataclass(frozen=True)
class Bundle:
    """Verified, and in memory: a file that is changed on disk later changes nothing."""

    origin: Path
    files: Mapping[str, bytes]
    signer: str  # the name under which its key is pinned
    digest: str  # of SHA256SUMS: names this bundle and no other

    @classmethod
    def open(cls, path: Path, trust: Trust) -> Bundle:
        """Who signed it is asked before anything large is read."""
        with _inside(path) as inside:
            key, sums = signed(path, inside)
            signer = trust.name_of(key)
            if signer is None:
                raise BadBundle(
                    f"{path} is signed by {fingerprint(bytes.fromhex(key))}, which is not pinned on this machine. Ask its maker for "
                    "the key by another way; if it is this one: hemofed trust add NAME " + key
                )
            files = _checked(path, inside, sums)
        bundle = cls(path, files, signer, hashlib.sha256(sums.encode()).hexdigest())
        bundle.check()
        return bundle

    def check(self) -> None:
        """Every part can be read, and they speak of the same model."""
        manifest, calibration = self.manifest, self.calibration
        _ = self.reference, self.card
        if calibration.positive is not None and calibration.positive not in manifest.classes:
            raise BadBundle(f"{self.origin}: calibration.json is about {calibration.positive}, which is no class of it")
        if ("int8" in manifest.precisions) != ("model.int8.onnx" in self.files):
            raise BadBundle(f"{self.origin}: bundle.json and the files do not agree about int8; export it anew")

    @cached_property
    def manifest(self) -> Manifest:
        return self._parsed("bundle.json", Manifest)

    @cached_property
    def calibration(self) -> Calibration:
        return self._parsed("calibration.json", Calibration)

    @cached_property
    def reference(self) -> Reference | None:
        return self._parsed("reference.json", Reference) if "reference.json" in self.files else None

    @cached_property
    def card(self) -> dict[str, Any]:
        try:
            card: dict[str, Any] = json.loads(self.files["card.json"])
            self.files["card.md"].decode()
        except ValueError as error:
            raise BadBundle(f"{self.origin}: its card cannot be read ({error}); export it anew") from error
        return card

    @property
    def title(self) -> str:
        return f"{self.manifest.name} ({self.manifest.model}), {self.digest[:12]}"

    def graph(self, precision: Precision) -> bytes:
        if precision not in self.manifest.precisions:
            raise BadBundle(f"{self.origin} has no {precision} model; it has {', '.join(self.manifest.precisions)}")
        return self.files["model.onnx" if precision == "fp32" else "model.int8.onnx"]

    def _parsed(self, name: str, kind: type[Parsed]) -> Parsed:
        try:
            return kind.model_validate_json(self.files[name])
        except ValidationError as error:
            first = error.errors()[0]
            raise BadBundle(
                f"{self.origin}: {name}: {'.'.join(map(str, first['loc']))}: {first['msg']}; it was made by another version "
                "of hemofed: install that one, or export anew"
            ) from error


def signer_of(path: Path) -> str:
    """The public key that a bundle says it is signed by, and is; whether to believe it is another question."""
    with _inside(path) as inside:
        return signed(path, inside)[0]


def sealed(files: Mapping[str, bytes], key: Ed25519PrivateKey) -> dict[str, bytes]:
    """With sums and signature."""
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(files.items()))
    mark = Signature(key=public_hex(key), signature=sign(key, "bundle", sums))
    return {**files, SUMS: sums.encode(), SIGNATURE: (mark.model_dump_json(indent=1) + "\n").encode()}


def zipped(files: Mapping[str, bytes], path: Path) -> None:
    """The same files give the same bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)


class Inside(Protocol):
    """A folder's or a zip's files: their sizes as told, and at most so many bytes of one."""

    @property
    def sizes(self) -> Mapping[str, int]: ...

    def read(self, name: str, most: int) -> bytes: ...


@dataclass(frozen=True)
class Folder:
    path: Path

    @property
    def sizes(self) -> Mapping[str, int]:
        found = {p.name: p for p in sorted(self.path.iterdir())}
        if strangers := [n for n, p in found.items() if n not in KNOWN or p.is_symlink() or not p.is_file()]:
            raise BadBundle(
                f"{self.path} is no bundle, or has been added to: remove {', '.join(strangers[:3])}, or use its zip file"
            )
        return {name: p.stat().st_size for name, p in found.items()}

    def read(self, name: str, most: int) -> bytes:
        with (self.path / name).open("rb") as file:
            return file.read(most + 1)


@dataclass(frozen=True)
class Zip:
    path: Path
    archive: zipfile.ZipFile

    @property
    def sizes(self) -> Mapping[str, int]:
        names = [info.filename for info in self.archive.infolist()]
        if len(set(names)) != len(names) or not set(names) <= KNOWN:
            strangers = ", ".join(n for n in names if n not in KNOWN)[:80]
            raise BadBundle(f"{self.path} is no bundle: it holds {strangers or 'a file twice'}")
        return {info.filename: info.file_size for info in self.archive.infolist()}

    def read(self, name: str, most: int) -> bytes:
        with self.archive.open(name) as file:
            return file.read(most + 1)


@contextlib.contextmanager
def _inside(path: Path) -> Iterator[Inside]:
    try:
        if path.is_dir():
            yield Folder(path)
            return
        if not path.is_file():
            raise BadBundle(f"there is no bundle at {path}; make one with `hemofed export RUN -o BUNDLE`")
        with zipfile.ZipFile(path) as archive:
            yield Zip(path, archive)
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError, OSError) as error:
        raise BadBundle(f"{path} is no bundle, or a damaged one ({error}); fetch it again") from error


def signed(path: Path, inside: Inside) -> tuple[str, str]:
    """The public key whose owner signed the sums, and the sums."""
    sizes = inside.sizes
    if SIGNATURE not in sizes or SUMS not in sizes:
        raise BadBundle(f"{path} is not signed; make a bundle with `hemofed export RUN -o BUNDLE`")
    raw, sums = inside.read(SIGNATURE, SMALL), inside.read(SUMS, SMALL)
    try:
        mark, text = Signature.model_validate_json(raw[:SMALL]), sums[:SMALL].decode()
    except (ValidationError, UnicodeDecodeError) as error:
        raise BadBundle(f"{path}: {SIGNATURE} or {SUMS} is damaged; fetch the bundle again") from error
    if not verified(mark.key, "bundle", text, mark.signature):
        raise BadBundle(f"{path}: the signature does not fit; it was changed after it was signed. Do not use it")
    return mark.key, text


def _checked(path: Path, inside: Inside, text: str) -> dict[str, bytes]:
    """All files, each of which has the digest that was signed."""
    lines = [LINE.fullmatch(line) for line in text.splitlines()]
    sums = {found[2]: found[1] for found in lines if found}
    sizes = inside.sizes
    if len(sums) != len(lines) or sizes.keys() - {SUMS, SIGNATURE} != sums.keys():
        raise BadBundle(f"{path}: {SUMS} does not list just the files that are there; do not use it")
    if missing := NEEDED - sums.keys():
        raise BadBundle(f"{path} lacks {', '.join(sorted(missing))}")
    if sum(sizes.values()) > LARGEST:
        raise BadBundle(f"{path} unpacks to more than {LARGEST >> 20} MB; no bundle does")
    files = {name: inside.read(name, sizes[name]) for name in sums}
    for name, digest in sums.items():
        if hashlib.sha256(files[name]).hexdigest() != digest:
            raise BadBundle(f"{path}: {name} was changed after it was signed; do not use it, fetch the bundle again")
    return files | {SUMS: text.encode(), SIGNATURE: inside.read(SIGNATURE, SMALL)}

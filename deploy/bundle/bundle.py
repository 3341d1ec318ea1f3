"""A model bundle for edge machines: a folder, or the same files in a zip file, verified before use.

model.onnx        input: uint8 images (N, H, W, 3); outputs: probabilities, features, quality_measures
model.int8.onnx   the same graph, quantized to int8 (optional)
bundle.json       the manifest: what the runtime needs
calibration.json  temperature and operating points
reference.json    the reference of the out-of-distribution guard (optional)
card.json card.md the model card; metadata.json: the same in the format of MONAI's bundles
SHA256SUMS        digests of all of these; SIGNATURE.json: an Ed25519 signature of SHA256SUMS
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
from typing import Annotated, Any, Final, Literal, Protocol, Self, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deploy.bundle.calibration import ModelCalibration
from deploy.bundle.ood_guard import OodReference
from deploy.bundle.trust_store import TrustStore
from pipeline.core.errors import BundleError
from privacy.ledger.keys import fingerprint, is_valid_signature, public_hex, sign

CHECKSUMS_FILE, SIGNATURE_FILE = "SHA256SUMS", "SIGNATURE.json"
REQUIRED_FILES = frozenset({"model.onnx", "bundle.json", "calibration.json", "card.json", "card.md", "metadata.json"})
OPTIONAL_FILES = frozenset({"model.int8.onnx", "reference.json"})
KNOWN_FILES = REQUIRED_FILES | OPTIONAL_FILES | {CHECKSUMS_FILE, SIGNATURE_FILE}
FORMAT_VERSION: Final = 2
MAX_BUNDLE_BYTES = 1 << 30  # unpacked
MAX_SIGNATURE_BYTES = 1 << 16  # of SIGNATURE.json and SHA256SUMS, which are read before the signer is verified
CHECKSUM_LINE = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9._-]+)")
# color normalizations that a runtime supports, and the numbers that each needs
RUNTIME_NORMALIZATIONS: Mapping[str, tuple[str, ...]] = {
    "none": (), "image": ("mean", "std"), "site": ("mean", "std"), "background": ("level", "density"),
}  # fmt: skip
Precision = Literal["fp32", "int8"]
SidePixels = Annotated[int, Field(ge=8, le=2048)]  # pixels
ParsedModel = TypeVar("ParsedModel", bound=BaseModel)


class BundleManifest(BaseModel):
    """bundle.json"""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal[2] = FORMAT_VERSION
    name: str
    model: str
    classes: tuple[str, ...] = Field(min_length=2, max_length=10_000)
    input_size: tuple[SidePixels, SidePixels]  # height, width of the network's input
    resize: Literal["area", "triangle"]  # how larger images are reduced to it
    num_tta_views: Literal[1, 8]  # orientations of test-time augmentation
    normalization: dict[str, Any]  # the study's; "none" and "image" are inside the graph
    # side of the crop around a cell of a field, in diameters of a red cell; None: single images only
    crop_diameters: float | None = Field(gt=0.5, lt=20)
    rbc_diameter_px: float | None = Field(gt=3, lt=1000)  # of a red cell in the training fields
    precisions: tuple[Precision, ...] = Field(min_length=1)
    opset: int
    created: str
    software: dict[str, str]

    @model_validator(mode="after")
    def _validate_consistency(self) -> Self:
        if len(set(self.classes)) != len(self.classes):
            raise ValueError("a class is listed twice")
        if (self.crop_diameters is None) != (self.rbc_diameter_px is None):
            raise ValueError("crop_diameters and rbc_diameter_px must be given together")
        required_keys = RUNTIME_NORMALIZATIONS.get(self.normalization.get("name", ""))
        if required_keys is None or any(
            not isinstance(self.normalization.get(key), float | int) for key in required_keys
        ):
            raise ValueError(f"normalization must be one of {', '.join(RUNTIME_NORMALIZATIONS)}, with its numbers")
        return self


class BundleSignature(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str = Field(pattern=r"^[0-9a-f]{64}$")
    signature: str = Field(pattern=r"^[0-9a-f]{128}$")


@dataclass(frozen=True)
class ModelBundle:
    """A verified bundle in memory, so that later changes on disk have no effect."""

    origin: Path
    files: Mapping[str, bytes]
    signer: str  # the name under which its key is pinned
    digest: str  # of SHA256SUMS: identifies the bundle

    @classmethod
    def open(cls, path: Path, trust_store: TrustStore) -> ModelBundle:
        """Verifies the signer before it reads anything large."""
        with _open_files(path) as bundle_files:
            key, checksums = verify_signature(path, bundle_files)
            signer = trust_store.find_name(key)
            if signer is None:
                raise BundleError(
                    f"{path} is signed by {fingerprint(bytes.fromhex(key))}, which is not pinned on this machine. Compare the key "
                    "with its owner over another channel; if it matches: hemofed trust add NAME " + key
                )
            files = _read_verified_files(path, bundle_files, checksums)
        bundle = cls(path, files, signer, hashlib.sha256(checksums.encode()).hexdigest())
        bundle.validate()
        return bundle

    def validate(self) -> None:
        """Checks that every part can be parsed and that the parts are consistent."""
        manifest, calibration = self.manifest, self.calibration
        _ = self.ood_reference, self.model_card
        if calibration.positive_class is not None and calibration.positive_class not in manifest.classes:
            raise BundleError(
                f"{self.origin}: calibration.json has the positive class {calibration.positive_class}, which bundle.json lacks; "
                "export it again"
            )
        if ("int8" in manifest.precisions) != ("model.int8.onnx" in self.files):
            raise BundleError(f"{self.origin}: bundle.json and the files disagree about int8; export it again")

    @cached_property
    def manifest(self) -> BundleManifest:
        self._check_format()
        return self._parse_json("bundle.json", BundleManifest)

    @cached_property
    def calibration(self) -> ModelCalibration:
        return self._parse_json("calibration.json", ModelCalibration)

    @cached_property
    def ood_reference(self) -> OodReference | None:
        return self._parse_json("reference.json", OodReference) if "reference.json" in self.files else None

    @cached_property
    def model_card(self) -> dict[str, Any]:
        try:
            card: dict[str, Any] = json.loads(self.files["card.json"])
            self.files["card.md"].decode()
        except ValueError as error:
            raise BundleError(f"{self.origin}: its card cannot be read ({error}); export it again") from error
        return card

    @property
    def title(self) -> str:
        return f"{self.manifest.name} ({self.manifest.model}), {self.digest[:12]}"

    def onnx_graph(self, precision: Precision) -> bytes:
        if precision not in self.manifest.precisions:
            raise BundleError(f"{self.origin} has no {precision} model; it has {', '.join(self.manifest.precisions)}")
        return self.files["model.onnx" if precision == "fp32" else "model.int8.onnx"]

    def _check_format(self) -> None:
        """Refuses another format in one sentence, before its renamed keys give a confusing error."""
        try:
            manifest = json.loads(self.files["bundle.json"])
        except ValueError:
            return  # `_parse_json` reports it
        version = manifest.get("format") if isinstance(manifest, dict) else None
        if isinstance(version, int) and version != FORMAT_VERSION:
            raise BundleError(
                f"{self.origin} has bundle format {version}, but this hemofed reads format {FORMAT_VERSION}; export the run again "
                "with this version, or install the one that made it"
            )

    def _parse_json(self, name: str, model_type: type[ParsedModel]) -> ParsedModel:
        try:
            return model_type.model_validate_json(self.files[name])
        except ValidationError as error:
            first_error = error.errors()[0]
            raise BundleError(
                f"{self.origin}: {name}: {'.'.join(map(str, first_error['loc']))}: {first_error['msg']}; export it again"
            ) from error


def read_signer_key(path: Path) -> str:
    """The public key whose signature the bundle carries; the signature is valid, the key need not be trusted."""
    with _open_files(path) as bundle_files:
        return verify_signature(path, bundle_files)[0]


def sign_files(files: Mapping[str, bytes], signing_key: Ed25519PrivateKey) -> dict[str, bytes]:
    """The files together with SHA256SUMS and SIGNATURE.json."""
    checksums = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(files.items()))
    signature = BundleSignature(key=public_hex(signing_key), signature=sign(signing_key, "bundle", checksums))
    return {
        **files,
        CHECKSUMS_FILE: checksums.encode(),
        SIGNATURE_FILE: (signature.model_dump_json(indent=1) + "\n").encode(),
    }


def write_zip(files: Mapping[str, bytes], path: Path) -> None:
    """Writes a reproducible zip file: the same files give the same bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)


class BundleFiles(Protocol):
    """The files of a folder or of a zip file."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes as declared, not verified."""

    def read(self, name: str, max_bytes: int) -> bytes:
        """At most max_bytes + 1 bytes."""


@dataclass(frozen=True)
class FolderFiles:
    path: Path

    @property
    def sizes(self) -> Mapping[str, int]:
        paths = {p.name: p for p in sorted(self.path.iterdir())}
        if unexpected := [n for n, p in paths.items() if n not in KNOWN_FILES or p.is_symlink() or not p.is_file()]:
            raise BundleError(
                f"{self.path} is not a bundle, or has extra files: remove {', '.join(unexpected[:3])}, or use its zip file"
            )
        return {name: p.stat().st_size for name, p in paths.items()}

    def read(self, name: str, max_bytes: int) -> bytes:
        with (self.path / name).open("rb") as file:
            return file.read(max_bytes + 1)


@dataclass(frozen=True)
class ZipFiles:
    path: Path
    archive: zipfile.ZipFile

    @property
    def sizes(self) -> Mapping[str, int]:
        names = [info.filename for info in self.archive.infolist()]
        if len(set(names)) != len(names) or not set(names) <= KNOWN_FILES:
            unexpected = ", ".join(n for n in names if n not in KNOWN_FILES)[:80]
            raise BundleError(f"{self.path} is not a bundle: it holds {unexpected or 'a file twice'}; fetch it again")
        return {info.filename: info.file_size for info in self.archive.infolist()}

    def read(self, name: str, max_bytes: int) -> bytes:
        with self.archive.open(name) as file:
            return file.read(max_bytes + 1)


@contextlib.contextmanager
def _open_files(path: Path) -> Iterator[BundleFiles]:
    try:
        if path.is_dir():
            yield FolderFiles(path)
            return
        if not path.is_file():
            raise BundleError(f"there is no bundle at {path}; make one with `hemofed export RUN -o BUNDLE`")
        with zipfile.ZipFile(path) as archive:
            yield ZipFiles(path, archive)
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError, OSError) as error:
        raise BundleError(f"{path} is not a bundle, or is damaged ({error}); fetch it again") from error


def verify_signature(path: Path, bundle_files: BundleFiles) -> tuple[str, str]:
    """The signer's public key and the signed text of SHA256SUMS."""
    sizes = bundle_files.sizes
    if SIGNATURE_FILE not in sizes or CHECKSUMS_FILE not in sizes:
        raise BundleError(f"{path} is not signed; make a bundle with `hemofed export RUN -o BUNDLE`")
    signature_bytes, checksum_bytes = (
        bundle_files.read(SIGNATURE_FILE, MAX_SIGNATURE_BYTES),
        bundle_files.read(CHECKSUMS_FILE, MAX_SIGNATURE_BYTES),
    )
    try:
        signature, checksums = (
            BundleSignature.model_validate_json(signature_bytes[:MAX_SIGNATURE_BYTES]),
            checksum_bytes[:MAX_SIGNATURE_BYTES].decode(),
        )
    except (ValidationError, UnicodeDecodeError) as error:
        raise BundleError(f"{path}: {SIGNATURE_FILE} or {CHECKSUMS_FILE} is damaged; fetch the bundle again") from error
    if not is_valid_signature(signature.key, "bundle", checksums, signature.signature):
        raise BundleError(
            f"{path}: the signature is invalid; the bundle was changed after it was signed. Do not use it"
        )
    return signature.key, checksums


def _read_verified_files(path: Path, bundle_files: BundleFiles, checksums: str) -> dict[str, bytes]:
    """Reads all files and checks each against its signed digest."""
    line_matches = [CHECKSUM_LINE.fullmatch(line) for line in checksums.splitlines()]
    digests = {line_match[2]: line_match[1] for line_match in line_matches if line_match}
    sizes = bundle_files.sizes
    if len(digests) != len(line_matches) or sizes.keys() - {CHECKSUMS_FILE, SIGNATURE_FILE} != digests.keys():
        raise BundleError(f"{path}: {CHECKSUMS_FILE} does not list exactly the files of the bundle; do not use it")
    if missing := REQUIRED_FILES - digests.keys():
        raise BundleError(f"{path} lacks {', '.join(sorted(missing))}; fetch it again")
    if sum(sizes.values()) > MAX_BUNDLE_BYTES:
        raise BundleError(
            f"{path} unpacks to more than {MAX_BUNDLE_BYTES >> 20} MB, the limit of a bundle; do not use it"
        )
    files = {name: bundle_files.read(name, sizes[name]) for name in digests}
    for name, digest in digests.items():
        if hashlib.sha256(files[name]).hexdigest() != digest:
            raise BundleError(f"{path}: {name} was changed after it was signed; do not use it, fetch the bundle again")
    return files | {
        CHECKSUMS_FILE: checksums.encode(),
        SIGNATURE_FILE: bundle_files.read(SIGNATURE_FILE, MAX_SIGNATURE_BYTES),
    }

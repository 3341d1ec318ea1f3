"""Folders in one file: a tar whose last member lists the SHA-256 of all others, optionally encrypted with a passphrase.

Encryption is AES-256-GCM in chunks of 1 MiB with a key from scrypt (RFC 7914). A chunk's nonce holds its index and whether
it is the last one (STREAM, Hoang et al. 2015), so that a missing, moved or truncated chunk is detected. The file has mode
0600 because it holds keys.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO, cast

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from pipeline.core.errors import RunFolderError
from pipeline.core.files import raise_no_space

MAGIC = b"hemofed-backup/1\n"
MANIFEST_NAME = ".hemofed-backup.json"
CHUNK_BYTES, TAG_BYTES = 2**20, 16
SALT_BYTES, NONCE_PREFIX_BYTES = 16, 7  # random: of the key derivation, and of all nonces
SCRYPT_COST = 2**15  # scrypt's N: 32 MB and about 0.1 s


def pack_archive(
    archive_path: Path, files: Iterable[tuple[str, bytes, int]], metadata: dict[str, Any], passphrase: str | None
) -> Path:
    """Writes the archive atomically; `files`: (name, content, mode)."""
    if archive_path.exists():
        raise RunFolderError(f"{archive_path} exists and is not overwritten; choose another name")
    with raise_no_space(archive_path):
        archive_path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary_name = tempfile.mkstemp(
            dir=archive_path.parent, prefix=f".{archive_path.name}.", suffix=".tmp"
        )  # mode 0600
        temporary = Path(temporary_name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                with _open_sink(file, passphrase) as sink, tarfile.open(fileobj=sink, mode="w|") as tar:
                    digests = {}
                    for path, content, mode in files:
                        digests[path] = hashlib.sha256(content).hexdigest()
                        _add_member(tar, path, content, mode)
                    _add_member(
                        tar,
                        MANIFEST_NAME,
                        json.dumps({"metadata": metadata, "sha256": digests}, indent=1).encode(),
                        0o600,
                    )
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(archive_path)
        finally:
            temporary.unlink(missing_ok=True)
    return archive_path


def unpack_archive(archive_path: Path, target_folder: Path, passphrase: str | None) -> dict[str, Any]:
    """Unpacks into an empty folder and returns the metadata. The files are verified only once this has returned."""
    digests: dict[str, str] = {}
    manifest: Any = None
    try:
        with (
            archive_path.open("rb") as raw,
            tarfile.open(fileobj=_open_source(raw, archive_path, passphrase), mode="r|") as tar,
        ):
            for member in tar:
                name = _check_member_name(archive_path, member, digests)
                source = tar.extractfile(member)
                assert source is not None
                if name == MANIFEST_NAME:
                    manifest = json.loads(source.read())
                    continue
                if manifest is not None:
                    raise RunFolderError(
                        f"{archive_path}: {name!r} comes after the list of contents; the archive was altered"
                    )
                digests[name] = _copy_member(source, target_folder / name, member.mode)
    except (tarfile.TarError, EOFError, ValueError, FileExistsError, NotADirectoryError) as error:
        raise RunFolderError(f"{archive_path} is not a backup, or is damaged ({error}); use another copy") from error
    if not isinstance(manifest, dict) or not all(isinstance(manifest.get(key), dict) for key in ("metadata", "sha256")):
        raise RunFolderError(f"{archive_path} is truncated: its list of contents is missing; use another copy")
    if mismatches := sorted(set(digests.items()) ^ set(manifest["sha256"].items())):
        raise RunFolderError(f"{archive_path}: {mismatches[0][0]!r} differs from what was saved; use another copy")
    metadata: dict[str, Any] = manifest["metadata"]
    return metadata


def is_encrypted(archive_path: Path) -> bool:
    with archive_path.open("rb") as raw:
        return raw.read(len(MAGIC)) == MAGIC


def _add_member(tar: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), mode & 0o755
    tar.addfile(member, io.BytesIO(content))


def _check_member_name(archive_path: Path, member: tarfile.TarInfo, digests: dict[str, str]) -> str:
    """Accepts a regular file inside the folder whose name occurs once."""
    member_path = PurePosixPath(member.name)
    if not member.isreg() or member.issparse():
        raise RunFolderError(
            f"{archive_path}: {member.name!r} is not a regular file; hemofed writes no such backup and does not restore it"
        )
    if (
        member_path.is_absolute()
        or ".." in member_path.parts
        or str(member_path) != member.name
        or "\\" in member.name
        or member_path == PurePosixPath()
    ):
        raise RunFolderError(
            f"{archive_path}: {member.name!r} is outside the folder; hemofed writes no such backup and does not restore it"
        )
    if member.name in digests:
        raise RunFolderError(f"{archive_path}: {member.name!r} occurs twice; the archive was altered")
    return member.name


def _copy_member(source: IO[bytes], target: Path, mode: int) -> str:
    digest = hashlib.sha256()
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with raise_no_space(target), os.fdopen(descriptor, "wb") as file:
        while block := source.read(CHUNK_BYTES):
            digest.update(block)
            file.write(block)
        os.fchmod(file.fileno(), mode & 0o755)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


@contextmanager
def _open_sink(file: BinaryIO, passphrase: str | None) -> Iterator[IO[bytes]]:
    if passphrase is None:
        yield file
        return
    salt, prefix = os.urandom(SALT_BYTES), os.urandom(NONCE_PREFIX_BYTES)
    file.write(MAGIC + salt + prefix)
    sink = _EncryptingWriter(file, AESGCM(_derive_key(passphrase, salt)), prefix)
    yield cast("IO[bytes]", sink)
    sink.finish()


def _open_source(raw: BinaryIO, archive_path: Path, passphrase: str | None) -> IO[bytes]:
    magic = raw.read(len(MAGIC))
    if magic != MAGIC:
        raw.seek(0)
        return raw
    if passphrase is None:
        raise RunFolderError(
            f"{archive_path} is encrypted, and no passphrase was given; set HEMOFED_PASSPHRASE, or type it in"
        )
    salt, prefix = raw.read(SALT_BYTES), raw.read(NONCE_PREFIX_BYTES)
    return cast("IO[bytes]", _DecryptingReader(raw, archive_path, AESGCM(_derive_key(passphrase, salt)), prefix))


def _derive_key(passphrase: str, salt: bytes) -> bytes:
    return Scrypt(salt=salt, length=32, n=SCRYPT_COST, r=8, p=1).derive(passphrase.encode())


def _make_nonce(prefix: bytes, counter: int, is_last: bool) -> bytes:
    return prefix + counter.to_bytes(4, "big") + bytes([is_last])


class _EncryptingWriter:
    def __init__(self, file: BinaryIO, cipher: AESGCM, prefix: bytes) -> None:
        self._file, self._cipher, self._prefix, self._counter, self._buffer = file, cipher, prefix, 0, bytearray()

    def write(self, data: bytes) -> int:
        self._buffer += data
        while len(self._buffer) > CHUNK_BYTES:  # the last chunk is known only at the end
            self._write_chunk(bytes(self._buffer[:CHUNK_BYTES]), False)
            del self._buffer[:CHUNK_BYTES]
        return len(data)

    def finish(self) -> None:
        self._write_chunk(bytes(self._buffer), True)

    def _write_chunk(self, chunk: bytes, is_last: bool) -> None:
        self._file.write(self._cipher.encrypt(_make_nonce(self._prefix, self._counter, is_last), chunk, MAGIC))
        self._counter += 1


class _DecryptingReader:
    def __init__(self, raw: BinaryIO, archive_path: Path, cipher: AESGCM, prefix: bytes) -> None:
        self._raw, self._archive_path, self._cipher, self._prefix, self._counter = raw, archive_path, cipher, prefix, 0
        self._buffer, self._next_chunk, self._is_exhausted = b"", raw.read(CHUNK_BYTES + TAG_BYTES), False

    def read(self, size: int) -> bytes:
        while len(self._buffer) < size and not self._is_exhausted:
            chunk, self._next_chunk = self._next_chunk, self._raw.read(CHUNK_BYTES + TAG_BYTES)
            self._is_exhausted = not self._next_chunk
            try:
                self._buffer += self._cipher.decrypt(
                    _make_nonce(self._prefix, self._counter, self._is_exhausted), chunk, MAGIC
                )
            except InvalidTag as error:
                reason = (
                    "the passphrase is wrong, or the file is damaged"
                    if self._counter == 0
                    else "it is damaged or truncated"
                )
                raise RunFolderError(
                    f"{self._archive_path} cannot be read: {reason}; try again, or use another copy"
                ) from error
            self._counter += 1
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data

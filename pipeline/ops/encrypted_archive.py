"""Folders in one file: a tar whose last member lists the SHA-256 of all others, in the clear or under a passphrase.

Under a passphrase the tar goes through AES-256-GCM in chunks of 1 MiB; the key is scrypt's (RFC 7914). A chunk's nonce
counts it and says whether it is the last one (the STREAM construction of Hoang et al. 2015), so none can be left out,
moved or cut off unseen. The file is for its owner's eyes only (mode 0600), for it holds keys.
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

from pipeline.core.errors import BadRun
from pipeline.core.files import full_disk_is_named

MAGIC = b"hemofed-backup/1\n"
MANIFEST = ".hemofed-backup.json"
CHUNK, TAG = 2**20, 16
SALT, PREFIX = 16, 7  # random bytes: of the key, and of all nonces
COST = 2**15  # scrypt's N: 32 MB and a tenth of a second


def pack(out: Path, files: Iterable[tuple[str, bytes, int]], about: dict[str, Any], passphrase: str | None) -> Path:
    """(name, content, mode) each. The whole file is there at the end, or nothing is."""
    if out.exists():
        raise BadRun(f"{out} exists and is not overwritten; choose another name")
    with full_disk_is_named(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.", suffix=".tmp")  # mode 0600
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                with _sealing(file, passphrase) as sink, tarfile.open(fileobj=sink, mode="w|") as tar:
                    sums = {}
                    for path, content, mode in files:
                        sums[path] = hashlib.sha256(content).hexdigest()
                        _add(tar, path, content, mode)
                    _add(tar, MANIFEST, json.dumps({"about": about, "sha256": sums}, indent=1).encode(), 0o600)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(out)
        finally:
            temporary.unlink(missing_ok=True)
    return out


def unpack(file: Path, into: Path, passphrase: str | None) -> dict[str, Any]:
    """Into an empty folder, and what its maker said about it. Only after this returns is any of it to be believed."""
    found: dict[str, str] = {}
    manifest: Any = None
    try:
        with file.open("rb") as raw, tarfile.open(fileobj=_opened(raw, file, passphrase), mode="r|") as tar:
            for member in tar:
                name = _safe(file, member, found)
                source = tar.extractfile(member)
                assert source is not None
                if name == MANIFEST:
                    manifest = json.loads(source.read())
                    continue
                if manifest is not None:
                    raise BadRun(f"{file}: {name!r} comes after the list of what is in it; it was altered")
                found[name] = _copy(source, into / name, member.mode)
    except (tarfile.TarError, EOFError, ValueError, FileExistsError, NotADirectoryError) as error:
        raise BadRun(f"{file} is no backup, or is damaged ({error}); use another copy") from error
    if not isinstance(manifest, dict) or not all(isinstance(manifest.get(part), dict) for part in ("about", "sha256")):
        raise BadRun(f"{file} is cut short: the list of what should be in it is missing; use another copy")
    if wrong := sorted(set(found.items()) ^ set(manifest["sha256"].items())):
        raise BadRun(f"{file}: {wrong[0][0]!r} is not what was saved; use another copy")
    about: dict[str, Any] = manifest["about"]
    return about


def is_sealed(file: Path) -> bool:
    with file.open("rb") as raw:
        return raw.read(len(MAGIC)) == MAGIC


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), mode & 0o755
    tar.addfile(member, io.BytesIO(content))


def _safe(file: Path, member: tarfile.TarInfo, found: dict[str, str]) -> str:
    """A plain file, below the folder, once."""
    path = PurePosixPath(member.name)
    if not member.isreg() or member.issparse():
        raise BadRun(
            f"{file}: {member.name!r} is a link or no plain file; such a backup is not ours and is not restored"
        )
    if (
        path.is_absolute()
        or ".." in path.parts
        or str(path) != member.name
        or "\\" in member.name
        or path == PurePosixPath()
    ):
        raise BadRun(f"{file}: {member.name!r} points out of the folder; such a backup is not ours and is not restored")
    if member.name in found:
        raise BadRun(f"{file}: {member.name!r} is in it twice; it was altered")
    return member.name


def _copy(source: IO[bytes], target: Path, mode: int) -> str:
    digest = hashlib.sha256()
    target.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with full_disk_is_named(target), os.fdopen(handle, "wb") as out:
        while block := source.read(CHUNK):
            digest.update(block)
            out.write(block)
        os.fchmod(out.fileno(), mode & 0o755)
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


@contextmanager
def _sealing(file: BinaryIO, passphrase: str | None) -> Iterator[IO[bytes]]:
    if passphrase is None:
        yield file
        return
    salt, prefix = os.urandom(SALT), os.urandom(PREFIX)
    file.write(MAGIC + salt + prefix)
    sink = _Sealed(file, AESGCM(_key(passphrase, salt)), prefix)
    yield cast("IO[bytes]", sink)
    sink.end()


def _opened(raw: BinaryIO, file: Path, passphrase: str | None) -> IO[bytes]:
    head = raw.read(len(MAGIC))
    if head != MAGIC:
        raw.seek(0)
        return raw
    if passphrase is None:
        raise BadRun(f"{file} is protected by a passphrase, and none was given; set HEMOFED_PASSPHRASE, or type it in")
    salt, prefix = raw.read(SALT), raw.read(PREFIX)
    return cast("IO[bytes]", _Unsealed(raw, file, AESGCM(_key(passphrase, salt)), prefix))


def _key(passphrase: str, salt: bytes) -> bytes:
    return Scrypt(salt=salt, length=32, n=COST, r=8, p=1).derive(passphrase.encode())


def _nonce(prefix: bytes, number: int, last: bool) -> bytes:
    return prefix + number.to_bytes(4, "big") + bytes([last])


class _Sealed:
    def __init__(self, file: BinaryIO, cipher: AESGCM, prefix: bytes) -> None:
        self._file, self._cipher, self._prefix, self._number, self._rest = file, cipher, prefix, 0, bytearray()

    def write(self, data: bytes) -> int:
        self._rest += data
        while len(self._rest) > CHUNK:  # the last chunk is known only at the end
            self._out(bytes(self._rest[:CHUNK]), False)
            del self._rest[:CHUNK]
        return len(data)

    def end(self) -> None:
        self._out(bytes(self._rest), True)

    def _out(self, chunk: bytes, last: bool) -> None:
        self._file.write(self._cipher.encrypt(_nonce(self._prefix, self._number, last), chunk, MAGIC))
        self._number += 1


class _Unsealed:
    def __init__(self, raw: BinaryIO, file: Path, cipher: AESGCM, prefix: bytes) -> None:
        self._raw, self._file, self._cipher, self._prefix, self._number = raw, file, cipher, prefix, 0
        self._have, self._next, self._over = b"", raw.read(CHUNK + TAG), False

    def read(self, size: int) -> bytes:
        while len(self._have) < size and not self._over:
            chunk, self._next = self._next, self._raw.read(CHUNK + TAG)
            self._over = not self._next
            try:
                self._have += self._cipher.decrypt(_nonce(self._prefix, self._number, self._over), chunk, MAGIC)
            except InvalidTag as error:
                why = "the passphrase is wrong, or it is damaged" if self._number == 0 else "it is damaged or cut short"
                raise BadRun(f"{self._file} cannot be read: {why}; try again, or use another copy") from error
            self._number += 1
        given, self._have = self._have[:size], self._have[size:]
        return given

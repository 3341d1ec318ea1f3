"""Archives unpack to what was packed, or are refused."""

import io
import json
import tarfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.core.errors import NoSpaceError, RunFolderError
from pipeline.ops.encrypted_archive import CHUNK_BYTES, MANIFEST_NAME, is_encrypted, pack_archive, unpack_archive
from tests.support.machine import fill_disk, mount_small_disk

FILES = [("a.txt", b"alpha", 0o600), ("deep/er/b.bin", bytes(range(256)) * 9000, 0o644), ("empty", b"", 0o755)]


@pytest.mark.parametrize("passphrase", [None, "correct horse"])
def test_archive_round_trip(tmp_path, passphrase):
    file = pack_archive(tmp_path / "x.tar", iter(FILES), {"kind": "test"}, passphrase)
    assert file.stat().st_mode & 0o777 == 0o600
    assert is_encrypted(file) == (passphrase is not None)
    assert (b"alpha" in file.read_bytes()) == (passphrase is None)
    assert unpack_archive(file, tmp_path / "out", passphrase) == {"kind": "test"}
    for name, content, mode in FILES:
        made = tmp_path / "out" / name
        assert (made.read_bytes(), made.stat().st_mode & 0o777) == (content, mode)
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["x.tar"]


@pytest.mark.parametrize("size", [0, CHUNK_BYTES - 3000, CHUNK_BYTES, 2 * CHUNK_BYTES + 1])
def test_archive_of_any_length(tmp_path, size):
    file = pack_archive(tmp_path / "x", [("f", b"x" * size, 0o600)], {}, "p")
    unpack_archive(file, tmp_path / "out", "p")
    assert (tmp_path / "out" / "f").stat().st_size == size


def test_archive_needs_its_passphrase(tmp_path):
    file = pack_archive(tmp_path / "x", FILES, {}, "right")
    with pytest.raises(RunFolderError, match="the passphrase is wrong, or the file is damaged"):
        unpack_archive(file, tmp_path / "out", "wrong")
    with pytest.raises(RunFolderError, match="is encrypted, and no passphrase was given"):
        unpack_archive(file, tmp_path / "out", None)
    assert "right" not in file.read_bytes().decode("latin1")


def test_archive_overwrites_no_file(tmp_path):
    (tmp_path / "x").write_text("precious")
    with pytest.raises(RunFolderError, match="exists and is not overwritten"):
        pack_archive(tmp_path / "x", FILES, {}, None)
    assert (tmp_path / "x").read_text() == "precious"


@pytest.fixture(scope="module")
def encrypted_archive(tmp_path_factory):
    return pack_archive(tmp_path_factory.mktemp("sealed") / "x", FILES, {}, "p").read_bytes()


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_truncated_or_altered_archive_is_refused(encrypted_archive, tmp_path_factory, data):
    place = tmp_path_factory.mktemp("cut")
    cut = data.draw(st.one_of(st.integers(0, len(encrypted_archive) - 20_000), st.just(CHUNK_BYTES + 16 + 40)))
    (place / "cut").write_bytes(encrypted_archive[:cut])
    with pytest.raises(RunFolderError):
        unpack_archive(place / "cut", place / "out", "p")
    at = data.draw(st.integers(0, len(encrypted_archive) - 20_000))
    (place / "flipped").write_bytes(
        encrypted_archive[:at] + bytes([encrypted_archive[at] ^ 1]) + encrypted_archive[at + 1 :]
    )
    with pytest.raises(RunFolderError):
        unpack_archive(place / "flipped", place / "out2", "p")


def test_swapped_chunks_are_refused(tmp_path):
    whole = pack_archive(tmp_path / "x", [("f", b"x" * (4 * CHUNK_BYTES), 0o600)], {}, "p").read_bytes()
    head, size = 17 + 16 + 7, CHUNK_BYTES + 16
    one, two = whole[head : head + size], whole[head + size : head + 2 * size]
    (tmp_path / "y").write_bytes(whole[:head] + two + one + whole[head + 2 * size :])
    with pytest.raises(RunFolderError, match="cannot be read"):
        unpack_archive(tmp_path / "y", tmp_path / "out", "p")


@pytest.mark.parametrize("cut", [0, 100, 600, 1500, 5000])
def test_truncated_plain_archive_is_refused(tmp_path, cut):
    whole = pack_archive(tmp_path / "x", FILES, {}, None).read_bytes()
    (tmp_path / "y").write_bytes(whole[:cut])
    with pytest.raises(RunFolderError):
        unpack_archive(tmp_path / "y", tmp_path / "out", None)


def test_altered_plain_archive_is_refused(tmp_path):
    whole = pack_archive(tmp_path / "x", FILES, {}, None).read_bytes()
    (tmp_path / "y").write_bytes(whole.replace(b"alpha", b"omega", 1))
    with pytest.raises(RunFolderError, match=r"'a\.txt' differs from what was saved"):
        unpack_archive(tmp_path / "y", tmp_path / "out", None)


def write_tar(file, members, listed=None):
    with tarfile.open(file, "w") as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        text = json.dumps({"metadata": {}, "sha256": listed or {}}).encode()
        last = tarfile.TarInfo(MANIFEST_NAME)
        last.size = len(text)
        tar.addfile(last, io.BytesIO(text))
    return file


def make_special_member(name, kind):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "/etc/passwd"
    return member


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/../../evil", "a//b", "./a", "..", ".", "a\\..\\b"])
def test_member_outside_the_folder_is_refused(tmp_path, name):
    with pytest.raises(RunFolderError, match="is outside the folder"):
        unpack_archive(write_tar(tmp_path / "x", [(tarfile.TarInfo(name), b"x")]), tmp_path / "in" / "out", None)
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_member_that_is_not_a_regular_file_is_refused(tmp_path, kind):
    with pytest.raises(RunFolderError, match="is not a regular file"):
        unpack_archive(write_tar(tmp_path / "x", [(make_special_member("a", kind), b"")]), tmp_path / "out", None)


def test_duplicate_missing_and_conflicting_members_are_refused(tmp_path):
    twice = [(tarfile.TarInfo("a"), b"1"), (tarfile.TarInfo("a"), b"2")]
    with pytest.raises(RunFolderError, match="occurs twice"):
        unpack_archive(write_tar(tmp_path / "1", twice), tmp_path / "o1", None)
    with pytest.raises(RunFolderError, match="differs from what was saved"):
        unpack_archive(write_tar(tmp_path / "2", twice[:1]), tmp_path / "o2", None)
    with pytest.raises(RunFolderError, match="differs from what was saved"):
        unpack_archive(write_tar(tmp_path / "3", [], {"gone": "00"}), tmp_path / "o3", None)
    inside = [(tarfile.TarInfo("a"), b"1"), (tarfile.TarInfo("a/b"), b"2")]
    with pytest.raises(RunFolderError, match="is damaged"):
        unpack_archive(write_tar(tmp_path / "4", inside), tmp_path / "o4", None)


def test_full_disk_leaves_no_partial_archive(tmp_path):
    with mount_small_disk(tmp_path / "disk") as disk:
        fill_disk(disk, 8192)
        with pytest.raises(NoSpaceError, match="no space left to write"):
            pack_archive(disk / "x", FILES, {}, "p")
        assert [p.name for p in disk.iterdir()] == ["filling"]

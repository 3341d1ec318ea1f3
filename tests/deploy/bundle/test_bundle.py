"""What is believed and what is not."""

from __future__ import annotations

import json
import shutil
import stat
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deploy.bundle.bundle import CHECKSUMS_FILE, SIGNATURE_FILE, ModelBundle, sign_files, write_zip
from deploy.bundle.trust_store import TrustStore, read_public_key
from deploy.inference.runtime import BundleRuntime
from pipeline.core.errors import BundleError, HemofedError, KeyFileError
from privacy.ledger import keys


@pytest.fixture
def copy(world, tmp_path) -> Path:
    shutil.copytree(world.made.folder, tmp_path / "bundle")
    return tmp_path / "bundle"


def test_folder_and_zip_are_the_same_bundle(world):
    folder, packed = (ModelBundle.open(path, world.trust) for path in (world.made.folder, world.made.zip_path))
    assert folder.digest == packed.digest == world.made.digest
    assert folder.files == packed.files
    assert folder.signer == "the lead"


def test_nobody_is_trusted_by_default(world, tmp_path):
    with pytest.raises(BundleError, match=f"hemofed trust add NAME {world.made.key}"):
        ModelBundle.open(world.made.folder, TrustStore(tmp_path / "none.json"))


def test_another_signer_is_not_the_lead(world, copy):
    files = {p.name: p.read_bytes() for p in copy.iterdir() if p.name not in (CHECKSUMS_FILE, SIGNATURE_FILE)}
    for name, data in sign_files(files, keys.generate_key()).items():
        (copy / name).write_bytes(data)
    with pytest.raises(BundleError, match="not pinned"):
        ModelBundle.open(copy, world.trust)


@pytest.mark.parametrize(
    "name", ["model.onnx", "calibration.json", "reference.json", "card.json", "card.md", "bundle.json", CHECKSUMS_FILE]
)
def test_a_changed_file_is_noticed(world, copy, name):
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / name).write_bytes(bytes(data))
    with pytest.raises(BundleError, match=r"changed after it was signed|signature does not fit|damaged"):
        ModelBundle.open(copy, world.trust)


def test_files_more_or_less_are_noticed(world, copy):
    (copy / "model.int8.onnx").unlink()
    with pytest.raises(BundleError, match="does not list just the files"):
        ModelBundle.open(copy, world.trust)
    shutil.copy(copy / "model.onnx", copy / "model.int8.onnx")
    with pytest.raises(BundleError, match="changed"):
        ModelBundle.open(copy, world.trust)
    (copy / "notes.txt").write_text("hello")
    with pytest.raises(BundleError, match=r"notes\.txt"):
        ModelBundle.open(copy, world.trust)


def test_a_link_out_of_the_folder_is_refused(world, copy, tmp_path):
    shutil.move(copy / "card.md", tmp_path / "card.md")
    (copy / "card.md").symlink_to(tmp_path / "card.md")
    with pytest.raises(BundleError, match=r"card\.md"):
        ModelBundle.open(copy, world.trust)


def test_without_a_signature_or_a_bundle(world, copy, tmp_path):
    (copy / SIGNATURE_FILE).unlink()
    with pytest.raises(BundleError, match="not signed"):
        ModelBundle.open(copy, world.trust)
    with pytest.raises(BundleError, match="no bundle at"):
        ModelBundle.open(tmp_path / "nowhere", world.trust)


def test_zips_that_lie(world, tmp_path):
    bad = tmp_path / "bad.zip"
    with zipfile.ZipFile(bad, "w") as archive:
        archive.writestr("../../evil", b"x")
    with pytest.raises(BundleError, match="evil"):
        ModelBundle.open(bad, world.trust)
    with zipfile.ZipFile(bad, "w") as archive:
        archive.writestr(CHECKSUMS_FILE, b"x")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr(CHECKSUMS_FILE, b"y")
    with pytest.raises(BundleError, match="twice"):
        ModelBundle.open(bad, world.trust)
    with (
        zipfile.ZipFile(bad, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("model.onnx", "w", force_zip64=True) as out,
    ):
        for _ in range(1100):
            out.write(bytes(1 << 20))
    with pytest.raises(BundleError, match="not signed"):  # and nothing of it was unpacked
        ModelBundle.open(bad, world.trust)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_no_byte_of_a_zip_can_be_changed_unnoticed(world, tmp_path, data):
    """Either it is refused, or what is inside is what was signed."""
    raw = bytearray(world.made.zip.read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    changed = tmp_path / "changed.zip"
    changed.write_bytes(bytes(raw[: data.draw(st.integers(len(raw) // 2, len(raw)))] if at % 7 == 0 else raw))
    try:
        found = ModelBundle.open(changed, world.trust)
    except BundleError:
        return
    assert found.digest == world.made.digest
    assert found.files == world.bundle.files


def changed(name: str, **parts: object) -> tuple[str, dict[str, object]]:
    return name, parts


NONSENSE = [
    changed("bundle.json", format=9),
    changed("bundle.json", size=[0, 0]),
    changed("bundle.json", size=[48, 64]),
    changed("bundle.json", size=[100_000, 100_000]),
    changed("bundle.json", classes=["a", "a"]),
    changed("bundle.json", classes=["other", "schistocyte", "third"]),
    changed("bundle.json", diameter=0),
    changed("bundle.json", window=-3),
    changed("bundle.json", window=None),
    changed("bundle.json", normalization={}),
    changed("bundle.json", normalization={"name": "site"}),
    changed("bundle.json", precisions=["fp32"]),
    changed("calibration.json", positive="nobody"),
    changed("calibration.json", temperature=1e300),
    changed("calibration.json", temperature=-1),
    changed("reference.json", limits={}),
    changed("reference.json", distance=-1),
    changed("reference.json", middle=[0.0]),
    changed("reference.json", false_alarms=7),
    changed("calibration.json", points=[{"name": "safe"}]),
]


@pytest.mark.parametrize(
    ("name", "parts"), NONSENSE, ids=[f"{n}-{next(iter(p))}-{i}" for i, (n, p) in enumerate(NONSENSE)]
)
def test_what_is_signed_but_wrong_is_named(world, tmp_path, name, parts):
    """A signature says who made it, not that it is right."""
    files = {n: d for n, d in world.bundle.files.items() if n not in (CHECKSUMS_FILE, SIGNATURE_FILE)}
    files[name] = json.dumps(json.loads(files[name]) | parts).encode()
    write_zip(sign_files(files, keys.load_key(world.key)), tmp_path / "new.zip")
    with pytest.raises(BundleError):
        BundleRuntime(ModelBundle.open(tmp_path / "new.zip", world.trust))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("card.json", b"{"),
        ("card.md", b"\xff\xfe"),
        ("calibration.json", b"NaN"),
        ("bundle.json", b"[]"),
        ("reference.json", b'{"distance": Infinity}'),
    ],
)
def test_signed_files_that_cannot_be_read(world, tmp_path, name, data):
    files = {n: d for n, d in world.bundle.files.items() if n not in (CHECKSUMS_FILE, SIGNATURE_FILE)} | {name: data}
    write_zip(sign_files(files, keys.load_key(world.key)), tmp_path / "new.zip")
    with pytest.raises(BundleError):
        ModelBundle.open(tmp_path / "new.zip", world.trust)


def test_keys_are_pinned_once_and_by_name(tmp_path):
    trust, (a, b) = TrustStore(tmp_path / "t.json"), (keys.public_hex(keys.generate_key()) for _ in range(2))
    trust.add("lead", a)
    trust.add("lead", a)
    with pytest.raises(KeyFileError, match="first: hemofed trust remove"):
        trust.add("lead", b)
    with pytest.raises(KeyFileError, match="no name"):
        trust.add("../x", b)
    trust.remove("lead")
    assert trust.load_keys() == {}
    with pytest.raises(KeyFileError, match="pinned: none"):
        trust.remove("lead")
    (tmp_path / "t.json").write_text('{"lead": "zz"}')
    with pytest.raises(KeyFileError, match="damaged"):
        trust.load_keys()


def test_keys_are_read_from_words_files_and_bundles(world, tmp_path):
    key = keys.public_hex(keys.generate_key())
    (tmp_path / "lead.pub").write_text(f"{key} the lead\n")
    assert read_public_key(key.upper()) == read_public_key(str(tmp_path / "lead.pub")) == key
    assert read_public_key(str(world.made.folder)) == read_public_key(str(world.made.zip)) == world.made.key
    for wrong in ("12", str(tmp_path / "none"), str(tmp_path)):
        with pytest.raises(HemofedError):
            read_public_key(wrong)


def test_the_signing_key_is_the_owners_alone(trusted, tmp_path):
    from pipeline.cli.commands.export import load_signing_key

    first, again = load_signing_key(None), load_signing_key(None)
    assert keys.public_hex(first) == keys.public_hex(again)
    (file,) = (tmp_path / "data").rglob("signing.pem")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    with pytest.raises(HemofedError, match="others may use"):
        load_signing_key(None)

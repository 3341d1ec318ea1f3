"""Signatures, checksums and contents of bundles; pinned keys."""

from __future__ import annotations

import json
import shutil
import stat
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deploy.bundle.bundle import CHECKSUMS_FILE, FORMAT_VERSION, SIGNATURE_FILE, ModelBundle, sign_files, write_zip
from deploy.bundle.trust_store import TrustStore, read_public_key
from deploy.inference.runtime import BundleRuntime
from pipeline.core.errors import BundleError, HemofedError, KeyFileError
from privacy.ledger import keys


@pytest.fixture
def bundle_copy(exported_run, tmp_path) -> Path:
    shutil.copytree(exported_run.export.folder, tmp_path / "bundle")
    return tmp_path / "bundle"


def test_folder_and_zip_give_the_same_bundle(exported_run):
    folder, packed = (
        ModelBundle.open(path, exported_run.trust_store)
        for path in (exported_run.export.folder, exported_run.export.zip_path)
    )
    assert folder.digest == packed.digest == exported_run.export.digest
    assert folder.files == packed.files
    assert folder.signer == "the lead"


def test_unpinned_signer_is_refused(exported_run, tmp_path):
    with pytest.raises(BundleError, match=f"hemofed trust add NAME {exported_run.export.public_key}"):
        ModelBundle.open(exported_run.export.folder, TrustStore(tmp_path / "none.json"))


def test_bundle_signed_by_another_key_is_refused(exported_run, bundle_copy):
    files = {p.name: p.read_bytes() for p in bundle_copy.iterdir() if p.name not in (CHECKSUMS_FILE, SIGNATURE_FILE)}
    for name, data in sign_files(files, keys.generate_key()).items():
        (bundle_copy / name).write_bytes(data)
    with pytest.raises(BundleError, match="not pinned"):
        ModelBundle.open(bundle_copy, exported_run.trust_store)


@pytest.mark.parametrize(
    "name", ["model.onnx", "calibration.json", "reference.json", "card.json", "card.md", "bundle.json", CHECKSUMS_FILE]
)
def test_changed_bundle_file_is_refused(exported_run, bundle_copy, name):
    data = bytearray((bundle_copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (bundle_copy / name).write_bytes(bytes(data))
    with pytest.raises(BundleError, match=r"changed after it was signed|signature is invalid|damaged"):
        ModelBundle.open(bundle_copy, exported_run.trust_store)


def test_missing_and_extra_bundle_files_are_refused(exported_run, bundle_copy):
    (bundle_copy / "model.int8.onnx").unlink()
    with pytest.raises(BundleError, match="does not list exactly the files"):
        ModelBundle.open(bundle_copy, exported_run.trust_store)
    shutil.copy(bundle_copy / "model.onnx", bundle_copy / "model.int8.onnx")
    with pytest.raises(BundleError, match="changed"):
        ModelBundle.open(bundle_copy, exported_run.trust_store)
    (bundle_copy / "notes.txt").write_text("hello")
    with pytest.raises(BundleError, match=r"notes\.txt"):
        ModelBundle.open(bundle_copy, exported_run.trust_store)


def test_symlink_in_bundle_is_refused(exported_run, bundle_copy, tmp_path):
    shutil.move(bundle_copy / "card.md", tmp_path / "card.md")
    (bundle_copy / "card.md").symlink_to(tmp_path / "card.md")
    with pytest.raises(BundleError, match=r"card\.md"):
        ModelBundle.open(bundle_copy, exported_run.trust_store)


def test_missing_signature_or_bundle_is_refused(exported_run, bundle_copy, tmp_path):
    (bundle_copy / SIGNATURE_FILE).unlink()
    with pytest.raises(BundleError, match="not signed"):
        ModelBundle.open(bundle_copy, exported_run.trust_store)
    with pytest.raises(BundleError, match="no bundle at"):
        ModelBundle.open(tmp_path / "nowhere", exported_run.trust_store)


def test_malicious_zip_files_are_refused(exported_run, tmp_path):
    bad = tmp_path / "bad.zip"
    with zipfile.ZipFile(bad, "w") as archive:
        archive.writestr("../../evil", b"x")
    with pytest.raises(BundleError, match="evil"):
        ModelBundle.open(bad, exported_run.trust_store)
    with zipfile.ZipFile(bad, "w") as archive:
        archive.writestr(CHECKSUMS_FILE, b"x")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr(CHECKSUMS_FILE, b"y")
    with pytest.raises(BundleError, match="twice"):
        ModelBundle.open(bad, exported_run.trust_store)
    with (
        zipfile.ZipFile(bad, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("model.onnx", "w", force_zip64=True) as out,
    ):
        for _ in range(1100):
            out.write(bytes(1 << 20))
    with pytest.raises(BundleError, match="not signed"):  # before anything is unpacked
        ModelBundle.open(bad, exported_run.trust_store)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_any_changed_byte_of_a_zip_is_refused_or_harmless(exported_run, tmp_path, data):
    """The changed zip is refused, or its content is what was signed."""
    raw = bytearray(exported_run.export.zip_path.read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    changed = tmp_path / "changed.zip"
    changed.write_bytes(bytes(raw[: data.draw(st.integers(len(raw) // 2, len(raw)))] if at % 7 == 0 else raw))
    try:
        found = ModelBundle.open(changed, exported_run.trust_store)
    except BundleError:
        return
    assert found.digest == exported_run.export.digest
    assert found.files == exported_run.bundle.files


def test_bundle_format_1_is_refused(exported_run, tmp_path):
    """The keys of format 1 are renamed: the message names the format and the cure, not the first unknown key."""
    files = {n: d for n, d in exported_run.bundle.files.items() if n not in (CHECKSUMS_FILE, SIGNATURE_FILE)}
    manifest = json.loads(files["bundle.json"])
    assert manifest["format"] == FORMAT_VERSION == 2
    old_manifest = manifest | {"format": 1, "size": manifest["input_size"]}
    del old_manifest["input_size"]
    files["bundle.json"] = json.dumps(old_manifest).encode()
    write_zip(sign_files(files, keys.load_key(exported_run.key_path)), tmp_path / "old.zip")
    with pytest.raises(BundleError, match="has bundle format 1, but this hemofed reads format 2; export the run again"):
        ModelBundle.open(tmp_path / "old.zip", exported_run.trust_store)


def change_keys(name: str, **parts: object) -> tuple[str, dict[str, object]]:
    return name, parts


INVALID_CONTENT = [
    change_keys("bundle.json", format=9),
    change_keys("bundle.json", input_size=[0, 0]),
    change_keys("bundle.json", input_size=[48, 64]),
    change_keys("bundle.json", input_size=[100_000, 100_000]),
    change_keys("bundle.json", classes=["a", "a"]),
    change_keys("bundle.json", classes=["other", "schistocyte", "third"]),
    change_keys("bundle.json", rbc_diameter_px=0),
    change_keys("bundle.json", crop_diameters=-3),
    change_keys("bundle.json", crop_diameters=None),
    change_keys("bundle.json", normalization={}),
    change_keys("bundle.json", normalization={"name": "site"}),
    change_keys("bundle.json", precisions=["fp32"]),
    change_keys("calibration.json", positive_class="nobody"),
    change_keys("calibration.json", temperature=1e300),
    change_keys("calibration.json", temperature=-1),
    change_keys("reference.json", quality_limits={}),
    change_keys("reference.json", max_distance=-1),
    change_keys("reference.json", feature_mean=[0.0]),
    change_keys("reference.json", false_alarm_rate=7),
    change_keys("calibration.json", operating_points=[{"name": "safe"}]),
]


@pytest.mark.parametrize(
    ("name", "parts"), INVALID_CONTENT, ids=[f"{n}-{next(iter(p))}-{i}" for i, (n, p) in enumerate(INVALID_CONTENT)]
)
def test_signed_but_invalid_content_is_refused(exported_run, tmp_path, name, parts):
    """A valid signature does not imply valid content."""
    files = {n: d for n, d in exported_run.bundle.files.items() if n not in (CHECKSUMS_FILE, SIGNATURE_FILE)}
    files[name] = json.dumps(json.loads(files[name]) | parts).encode()
    write_zip(sign_files(files, keys.load_key(exported_run.key_path)), tmp_path / "new.zip")
    with pytest.raises(BundleError):
        BundleRuntime(ModelBundle.open(tmp_path / "new.zip", exported_run.trust_store))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("card.json", b"{"),
        ("card.md", b"\xff\xfe"),
        ("calibration.json", b"NaN"),
        ("bundle.json", b"[]"),
        ("reference.json", b'{"max_distance": Infinity}'),
    ],
)
def test_signed_but_unreadable_files_are_refused(exported_run, tmp_path, name, data):
    files = {n: d for n, d in exported_run.bundle.files.items() if n not in (CHECKSUMS_FILE, SIGNATURE_FILE)} | {
        name: data
    }
    write_zip(sign_files(files, keys.load_key(exported_run.key_path)), tmp_path / "new.zip")
    with pytest.raises(BundleError):
        ModelBundle.open(tmp_path / "new.zip", exported_run.trust_store)


def test_trust_store_pins_one_key_per_name(tmp_path):
    trust, (a, b) = TrustStore(tmp_path / "t.json"), (keys.public_hex(keys.generate_key()) for _ in range(2))
    trust.add("lead", a)
    trust.add("lead", a)
    with pytest.raises(KeyFileError, match="first: hemofed trust remove"):
        trust.add("lead", b)
    with pytest.raises(KeyFileError, match="not a valid name"):
        trust.add("../x", b)
    trust.remove("lead")
    assert trust.load_keys() == {}
    with pytest.raises(KeyFileError, match="pinned keys: none"):
        trust.remove("lead")
    (tmp_path / "t.json").write_text('{"lead": "zz"}')
    with pytest.raises(KeyFileError, match="damaged"):
        trust.load_keys()


def test_public_key_from_text_file_or_bundle(exported_run, tmp_path):
    key = keys.public_hex(keys.generate_key())
    (tmp_path / "lead.pub").write_text(f"{key} the lead\n")
    assert read_public_key(key.upper()) == read_public_key(str(tmp_path / "lead.pub")) == key
    assert (
        read_public_key(str(exported_run.export.folder))
        == read_public_key(str(exported_run.export.zip_path))
        == exported_run.export.public_key
    )
    for wrong in ("12", str(tmp_path / "none"), str(tmp_path)):
        with pytest.raises(HemofedError):
            read_public_key(wrong)


def test_signing_key_file_is_private(trusted_env, tmp_path):
    from deploy.export.signing_key import load_signing_key

    first, again = load_signing_key(None), load_signing_key(None)
    assert keys.public_hex(first) == keys.public_hex(again)
    (file,) = (tmp_path / "data").rglob("signing.pem")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    with pytest.raises(HemofedError, match="other users can access"):
        load_signing_key(None)

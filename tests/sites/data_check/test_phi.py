import json

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from pydicom.sequence import Sequence

from sites.data_check.file_survey import survey_files
from sites.data_check.phi import build_redactor, phi_findings, summarize_phi
from sites.data_check.phi_tags import MetadataTag
from tests.support.image_files import PATIENT_NAME, PATIENT_ID, make_dicom_dataset, write_dicom, write_image, make_textures

VALUES = ("ller", "Anna", "4711", "0815", "19610203", "Elsewhere", "whisper", "hush", "Holm", "SN-77", "1.2.3.4.5")


def told(folder):
    found = survey_files(folder)
    return summarize_phi(found), [*phi_findings(found, build_redactor(found))]


def test_tags_are_named_and_counted_and_never_quoted(tmp_path):
    everything = {
        "PatientName": PATIENT_NAME,
        "PatientID": PATIENT_ID,
        "PatientBirthDate": "19610203",
        "InstitutionName": "St Elsewhere",
        "ImageComments": "a whisper",
        "ReferringPhysicianName": "Holm^Per",
        "PatientSex": "F",
        "AccessionNumber": "",
    }
    write_dicom(tmp_path / "a.dcm", private="hush", **everything)
    write_dicom(tmp_path / "b.dcm", PatientID="other-77123", BurnedInAnnotation="NO")
    who, found = told(tmp_path)
    assert who.num_dicom == 2
    assert who.dicom_tags[MetadataTag("patient", "PatientID")] == 2
    assert who.dicom_tags[MetadataTag("patient", "PatientName")] == 1
    assert (
        who.dicom_tags[MetadataTag("people and places", "ReferringPhysicianName")] == 1
    )  # not listed: a person's name by its kind
    assert who.dicom_tags[MetadataTag("free text", "ImageComments")] == 1
    assert who.dicom_tags[MetadataTag("private", "private tags")] == 1
    assert who.dicom_tags[MetadataTag("unique numbers", "SOPInstanceUID")] == 2
    assert MetadataTag("patient", "AccessionNumber") not in who.dicom_tags  # empty
    assert who.burned_in_counts == {"unsaid": 1, "no": 1}
    all_said = json.dumps([who.to_dict(), [finding.to_dict() for finding in found]])
    assert not [value for value in VALUES if value in all_said]
    assert "the patient is named in 2 DICOM files: PatientID (2), PatientBirthDate (1), PatientName (1)" in all_said
    assert {finding.severity for finding in found} == {"look"}


def test_a_name_inside_a_sequence_is_found(tmp_path):
    write_dicom(
        tmp_path / "a", RequestAttributesSequence=Sequence([make_dicom_dataset(RequestingPhysician="Holm^Per", PatientName=PATIENT_NAME)])
    )
    who, _ = told(tmp_path)
    assert who.dicom_tags[MetadataTag("patient", "PatientName")] == 1


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"BurnedInAnnotation": "YES"}, "yes"),
        ({"BurnedInAnnotation": "NO"}, "no"),
        ({"BurnedInAnnotation": "NO", "ImageType": ["ORIGINAL", "PRIMARY", "LABEL", "NONE"]}, "yes"),
        ({"SpecimenLabelInImage": "YES"}, "yes"),
        ({}, "unsaid"),
    ],
)
def test_text_in_the_picture(tmp_path, attributes, expected):
    write_dicom(tmp_path / "a.dcm", **attributes)
    who, found = told(tmp_path)
    assert who.burned_in_counts == {expected: 1}
    assert [f.severity for f in found] == {"yes": ["stop"], "no": [], "unsaid": ["look"]}[expected]


def test_a_file_that_was_cleaned_has_a_pseudonym(tmp_path):
    write_dicom(tmp_path / "P0042.dcm", PatientID="P0042", PatientIdentityRemoved="YES", BurnedInAnnotation="NO")
    who, found = told(tmp_path)
    assert who.num_deidentified == 1
    assert who.num_identifying_paths == 0
    assert found == []


def test_a_path_that_names_a_patient_stops_and_is_masked(tmp_path):
    write_dicom(tmp_path / "scans" / "x.dcm", PatientName=PATIENT_NAME, BurnedInAnnotation="NO")
    write_image(tmp_path / "Mueller_Anna" / "cell.png", make_textures(1)[0])
    who, found = told(tmp_path)
    assert who.num_identifying_paths == 1
    stop = next(finding for finding in found if finding.severity == "stop")
    assert stop.locations == ("***/cell.png",)


def test_dicom_without_its_preamble_and_what_only_looks_so(tmp_path):
    write_dicom(tmp_path / "bare", preamble=False, PatientName=PATIENT_NAME)
    (tmp_path / "no").write_bytes(b"\x08\x00" + bytes(range(256)))
    found = survey_files(tmp_path)
    assert {seen.path: seen.kind for seen in found.files} == {"bare": "dicom", "no": "other"}
    assert summarize_phi(found).dicom_tags[MetadataTag("patient", "PatientName")] == 1


def test_damaged_dicom_is_told(tmp_path):
    whole = write_dicom(tmp_path / "a.dcm", PatientName=PATIENT_NAME, PatientID=PATIENT_ID).read_bytes()
    (tmp_path / "a.dcm").write_bytes(whole[:140] + b"\xff\xfe\x00" * 9)
    (tmp_path / "b.dcm").write_bytes(bytes(128) + b"DICM")
    who, found = told(tmp_path)
    assert who.num_dicom == 2
    assert who.num_damaged == 2
    assert any("tags cannot be read" in finding.message for finding in found)


def test_what_stands_beside_the_pixels(tmp_path):
    pixels = make_textures(1)[0]
    exif = Image.Exif()
    exif[0x013B] = "Per Holm"
    exif[0x010F] = "Nikon"
    exif.get_ifd(0x8769)[0xA431] = "SN-77"
    exif.get_ifd(0x8825)[1] = "N"
    write_image(tmp_path / "camera.jpg", pixels, exif=exif, comment=b"whisper")
    write_image(tmp_path / "slide.tif", pixels, description="whisper")
    write_image(tmp_path / "per_holm.png", pixels)
    who, found = told(tmp_path)
    names = {tag.name: number for tag, number in who.image_tags.items()}
    assert names == {"Artist": 1, "BodySerialNumber": 1, "GPS": 1, "Comment": 1, "ImageDescription": 1}
    said = json.dumps([finding.to_dict() for finding in found])
    assert not [value for value in VALUES if value in said]
    assert found[0].severity == "stop"  # the author's name is a file's
    assert found[0].locations == ("***.png",)


def test_text_behind_the_pixels_of_a_png(tmp_path):
    words = PngInfo()
    words.add_text("Author", "Per Holm")
    words.add_text("Software", "scanner 3")
    words.add_text("Anna Müller", "whisper", zip=True)  # a keyword may itself be a name
    words.add_itxt("Comment", "hush")
    exif = Image.Exif()
    exif[0x010F] = "Nikon"
    exif.get_ifd(0x8769)[0xA431] = "SN-77"
    file = write_image(tmp_path / "a.png", make_textures(1)[0], pnginfo=words, exif=exif)
    plain = file.read_bytes()
    # signature and IHDR, what stands before the pixels, the pixels, IEND
    cuts = [33, plain.index(b"IDAT") - 4, plain.index(b"IEND") - 4]
    file.write_bytes(plain[: cuts[0]] + plain[cuts[1] : cuts[2]] + plain[cuts[0] : cuts[1]] + plain[cuts[2] :])
    who, _ = told(tmp_path)
    assert {tag.name for tag in who.image_tags} == {"Author", "other text", "Comment", "BodySerialNumber"}
    assert build_redactor(survey_files(tmp_path)).redact_path("holm.png") == "***.png"


def test_metadata_that_cannot_be_read_do_not_spoil_the_picture(tmp_path):
    write_image(tmp_path / "a.png", make_textures(1)[0], exif=b"Exif\0\0rubbish")
    (seen,) = survey_files(tmp_path).files
    assert seen.kind == "image"
    assert {tag.name for tag in seen.tag_summary.tags} == {"metadata that cannot be read"}


def test_a_colour_profile_names_nobody(tmp_path):
    from PIL import ImageCms

    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    write_image(tmp_path / "a.png", np.zeros((8, 8, 3), np.uint8), icc_profile=profile)
    assert told(tmp_path)[1] == []

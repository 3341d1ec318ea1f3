import json

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from pydicom.sequence import Sequence

from sites.data_check.file_survey import survey_files
from sites.data_check.phi import build_redactor, phi_findings, summarize_phi
from sites.data_check.phi_tags import MetadataTag
from tests.support.image_files import (
    PATIENT_ID,
    PATIENT_NAME,
    make_dicom_dataset,
    make_textures,
    write_dicom,
    write_image,
)

SECRETS = ("ller", "Anna", "4711", "0815", "19610203", "Elsewhere", "whisper", "hush", "Holm", "SN-77", "1.2.3.4.5")


def check_phi(folder):
    survey = survey_files(folder)
    return summarize_phi(survey), [*phi_findings(survey, build_redactor(survey))]


def test_dicom_tags_are_counted_and_values_never_shown(tmp_path):
    attributes = {
        "PatientName": PATIENT_NAME,
        "PatientID": PATIENT_ID,
        "PatientBirthDate": "19610203",
        "InstitutionName": "St Elsewhere",
        "ImageComments": "a whisper",
        "ReferringPhysicianName": "Holm^Per",
        "PatientSex": "F",
        "AccessionNumber": "",
    }
    write_dicom(tmp_path / "a.dcm", private="hush", **attributes)
    write_dicom(tmp_path / "b.dcm", PatientID="other-77123", BurnedInAnnotation="NO")
    summary, findings = check_phi(tmp_path)
    assert summary.num_dicom == 2
    assert summary.dicom_tags[MetadataTag("patient", "PatientID")] == 2
    assert summary.dicom_tags[MetadataTag("patient", "PatientName")] == 1
    # not listed: recognized as a person's name by its value representation
    assert summary.dicom_tags[MetadataTag("people and places", "ReferringPhysicianName")] == 1
    assert summary.dicom_tags[MetadataTag("free text", "ImageComments")] == 1
    assert summary.dicom_tags[MetadataTag("private", "private tags")] == 1
    assert summary.dicom_tags[MetadataTag("unique numbers", "SOPInstanceUID")] == 2
    assert MetadataTag("patient", "AccessionNumber") not in summary.dicom_tags  # empty
    assert summary.burned_in_counts == {"unsaid": 1, "no": 1}
    output = json.dumps([summary.to_dict(), [finding.to_dict() for finding in findings]])
    assert not [value for value in SECRETS if value in output]
    assert "2 DICOM files identify the patient: PatientID (2), PatientBirthDate (1), PatientName (1)" in output
    assert {finding.severity for finding in findings} == {"look"}


def test_dicom_name_in_a_sequence_is_found(tmp_path):
    write_dicom(
        tmp_path / "a",
        RequestAttributesSequence=Sequence(
            [make_dicom_dataset(RequestingPhysician="Holm^Per", PatientName=PATIENT_NAME)]
        ),
    )
    summary, _ = check_phi(tmp_path)
    assert summary.dicom_tags[MetadataTag("patient", "PatientName")] == 1


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
def test_burned_in_annotation(tmp_path, attributes, expected):
    write_dicom(tmp_path / "a.dcm", **attributes)
    summary, findings = check_phi(tmp_path)
    assert summary.burned_in_counts == {expected: 1}
    assert [f.severity for f in findings] == {"yes": ["stop"], "no": [], "unsaid": ["look"]}[expected]


def test_deidentified_file_has_a_pseudonym(tmp_path):
    write_dicom(tmp_path / "P0042.dcm", PatientID="P0042", PatientIdentityRemoved="YES", BurnedInAnnotation="NO")
    summary, findings = check_phi(tmp_path)
    assert summary.num_deidentified == 1
    assert summary.num_identifying_paths == 0
    assert findings == []


def test_path_with_a_patient_name_stops_and_is_redacted(tmp_path):
    write_dicom(tmp_path / "scans" / "x.dcm", PatientName=PATIENT_NAME, BurnedInAnnotation="NO")
    write_image(tmp_path / "Mueller_Anna" / "cell.png", make_textures(1)[0])
    summary, findings = check_phi(tmp_path)
    assert summary.num_identifying_paths == 1
    stop = next(finding for finding in findings if finding.severity == "stop")
    assert stop.locations == ("***/cell.png",)


def test_dicom_without_preamble(tmp_path):
    write_dicom(tmp_path / "no-preamble", preamble=False, PatientName=PATIENT_NAME)
    (tmp_path / "not-dicom").write_bytes(b"\x08\x00" + bytes(range(256)))
    survey = survey_files(tmp_path)
    assert {file.path: file.kind for file in survey.files} == {"no-preamble": "dicom", "not-dicom": "other"}
    assert summarize_phi(survey).dicom_tags[MetadataTag("patient", "PatientName")] == 1


def test_damaged_dicom_is_reported(tmp_path):
    complete = write_dicom(tmp_path / "a.dcm", PatientName=PATIENT_NAME, PatientID=PATIENT_ID).read_bytes()
    (tmp_path / "a.dcm").write_bytes(complete[:140] + b"\xff\xfe\x00" * 9)
    (tmp_path / "b.dcm").write_bytes(bytes(128) + b"DICM")
    summary, findings = check_phi(tmp_path)
    assert summary.num_dicom == 2
    assert summary.num_damaged == 2
    assert any(finding.message == "the tags of 2 DICOM files cannot be read" for finding in findings)


def test_exif_and_comments_are_reported(tmp_path):
    pixels = make_textures(1)[0]
    exif = Image.Exif()
    exif[0x013B] = "Per Holm"
    exif[0x010F] = "Nikon"
    exif.get_ifd(0x8769)[0xA431] = "SN-77"
    exif.get_ifd(0x8825)[1] = "N"
    write_image(tmp_path / "camera.jpg", pixels, exif=exif, comment=b"whisper")
    write_image(tmp_path / "slide.tif", pixels, description="whisper")
    write_image(tmp_path / "per_holm.png", pixels)
    summary, findings = check_phi(tmp_path)
    names = {tag.name: number for tag, number in summary.image_tags.items()}
    assert names == {"Artist": 1, "BodySerialNumber": 1, "GPS": 1, "Comment": 1, "ImageDescription": 1}
    output = json.dumps([finding.to_dict() for finding in findings])
    assert not [value for value in SECRETS if value in output]
    assert findings[0].severity == "stop"  # a file has the author's name
    assert findings[0].locations == ("***.png",)


def test_png_text_chunks_behind_the_pixels_are_found(tmp_path):
    info = PngInfo()
    info.add_text("Author", "Per Holm")
    info.add_text("Software", "scanner 3")
    info.add_text("Anna Müller", "whisper", zip=True)  # a keyword may itself be a name
    info.add_itxt("Comment", "hush")
    exif = Image.Exif()
    exif[0x010F] = "Nikon"
    exif.get_ifd(0x8769)[0xA431] = "SN-77"
    file = write_image(tmp_path / "a.png", make_textures(1)[0], pnginfo=info, exif=exif)
    png = file.read_bytes()
    # signature and IHDR, metadata chunks, pixels, IEND: move the metadata behind the pixels
    metadata, pixels, end = 33, png.index(b"IDAT") - 4, png.index(b"IEND") - 4
    file.write_bytes(png[:metadata] + png[pixels:end] + png[metadata:pixels] + png[end:])
    summary, _ = check_phi(tmp_path)
    assert {tag.name for tag in summary.image_tags} == {"Author", "other text", "Comment", "BodySerialNumber"}
    assert build_redactor(survey_files(tmp_path)).redact_path("holm.png") == "***.png"


def test_image_with_unreadable_metadata_is_usable(tmp_path):
    write_image(tmp_path / "a.png", make_textures(1)[0], exif=b"Exif\0\0rubbish")
    (file,) = survey_files(tmp_path).files
    assert file.kind == "image"
    assert {tag.name for tag in file.tag_summary.tags} == {"metadata that cannot be read"}


def test_colour_profile_is_not_identifying(tmp_path):
    from PIL import ImageCms

    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    write_image(tmp_path / "a.png", np.zeros((8, 8, 3), np.uint8), icc_profile=profile)
    assert check_phi(tmp_path)[1] == []

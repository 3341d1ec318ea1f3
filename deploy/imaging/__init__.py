"""Bytes of image files become RGB arrays: PNG, JPEG, TIFF and DICOM."""

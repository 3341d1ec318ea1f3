"""A verified bundle at work: resizing, test-time augmentation, ONNX sessions, local calibration."""

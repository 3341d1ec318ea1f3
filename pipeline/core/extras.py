"""Which extra of hemofed installs which optional package."""

from __future__ import annotations

from pipeline.core.errors import MissingExtraError

# missing module -> extra that installs it
EXTRA_BY_MODULE = {"torch": "train", "monai": "train", "albumentations": "train", "sklearn": "train", "scipy": "train",
          "safetensors": "train", "matplotlib": "train", "jinja2": "train", "PIL": "edge",
          "opacus": "privacy", "dp_accounting": "privacy", "cryptography": "edge", "reportlab": "privacy",
          "nvflare": "hospital", "fastapi": "edge-smear", "uvicorn": "edge-smear", "sqlalchemy": "hospital",
          "httpx": "hospital", "psutil": "hospital", "onnxruntime": "edge", "pydicom": "edge", "onnx": "export",
          "onnxscript": "export", "cv2": "edge-smear", "highdicom": "edge-smear"}  # fmt: skip


def missing_extra(error: ModuleNotFoundError) -> MissingExtraError | None:
    """The error that names the extra to install; None if no extra installs the missing module."""
    extra = EXTRA_BY_MODULE.get((error.name or "").partition(".")[0])
    if extra is None:
        return None
    return MissingExtraError(f"this needs {error.name}; install it with: pip install 'hemofed[{extra}]'")

"""What every function of the API does around its work."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.core.extras import missing_extra


@contextmanager
def api_call() -> Iterator[None]:
    """Restores the warning filters, which imported packages change, and names the extra of a package that is missing."""
    with warnings.catch_warnings():
        try:
            yield
        except ModuleNotFoundError as error:
            missing = missing_extra(error)
            if missing is None:
                raise
            raise missing from error

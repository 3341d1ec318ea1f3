"""Parcels that are looked at twice: in memory while they are few, on disk from then on."""

from __future__ import annotations

import tempfile
from types import TracebackType
from typing import Self

IN_MEMORY = 128 << 20  # bytes


class Shelf:
    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        self._file = tempfile.SpooledTemporaryFile(in_memory)  # noqa: SIM115 (closed with the shelf)
        self._places: list[tuple[int, int]] = []  # begin, length

    def put(self, parcel: bytes) -> None:
        begin = self._file.seek(0, 2)
        self._file.write(parcel)
        self._places.append((begin, len(parcel)))

    def get(self, number: int) -> bytes:
        begin, length = self._places[number]
        self._file.seek(begin)
        return self._file.read(length)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

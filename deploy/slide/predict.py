"""One slide from its files to its result: read, segment, crop, infer, guard, count, decide, write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.imaging.images import iter_image_files
from deploy.imaging.input_image import InputImage
from deploy.inference.runtime import ModelInfo
from deploy.slide.image_result import ImageFailure, ImageResult
from deploy.slide.json_format import FailureRecord, SlideDocument
from deploy.slide.outputs import SlideOutputs
from deploy.slide.reader import SlideReader
from deploy.slide.session import SlideSession
from deploy.slide.slide_result import SlideResult
from pipeline.core.errors import DataError, IncompatibleStudyError


@dataclass(frozen=True)
class SlidePrediction:
    images: tuple[ImageResult, ...]
    failures: tuple[ImageFailure, ...]
    slide: SlideResult
    model: ModelInfo
    written: tuple[Path, ...]

    def to_document(self) -> SlideDocument:
        failures = (FailureRecord(path=failure.name, error=failure.reason) for failure in self.failures)
        return SlideDocument(
            bundle=self.model,
            images=(*(image.to_record() for image in self.images), *failures),
            slide=self.slide.to_record(),
            written=tuple(str(path) for path in self.written),
        )


def predict_slide(
    paths: Sequence[Path], reader: SlideReader, outputs: SlideOutputs, report_progress: Callable[[str], None]
) -> SlidePrediction:
    """An image that cannot be read does not stop the others."""
    session = SlideSession(reader.runtime, reader.operating_point)
    results: list[ImageResult] = []
    for batch in _iter_batches(paths, reader, session, report_progress):
        for image, result in _read_batch(batch, reader, session):
            result = replace(result, duplicate_of=session.add_image(result.summarize()))
            outputs.add_image(image, result)
            results.append(result)
    slide, model = session.result(), reader.runtime.model_info
    written = outputs.write(slide, model, results, session.failures)
    return SlidePrediction(tuple(results), tuple(session.failures), slide, model, tuple(written))


def _iter_batches(
    paths: Sequence[Path], reader: SlideReader, session: SlideSession, report_progress: Callable[[str], None]
) -> Iterator[list[InputImage]]:
    """Each field alone, and all single cells at the end: some color normalizations use the colors of all cells."""
    single_cells: list[InputImage] = []
    for name, images in iter_image_files(paths):
        report_progress(f"reading {name}")
        if isinstance(images, str):
            session.add_failure(ImageFailure(name=name, reason=images))
            continue
        for image in images:
            if reader.is_field(image):
                yield [image]
            else:
                single_cells.append(image)
    if single_cells:
        yield single_cells


def _read_batch(
    batch: list[InputImage], reader: SlideReader, session: SlideSession
) -> list[tuple[InputImage, ImageResult]]:
    try:
        results = [reader.read_field(batch[0])] if reader.is_field(batch[0]) else reader.read_cells(batch)
    except (DataError, IncompatibleStudyError) as error:
        for image in batch:
            session.add_failure(ImageFailure(name=image.name, reason=str(error)))
        return []
    return list(zip(batch, results, strict=True))

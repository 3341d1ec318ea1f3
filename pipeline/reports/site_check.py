"""The page of `hemofed site check`: findings on a site's own images, for the site only."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from pipeline.reports.document.formatting import SPLIT_LABELS, format_count, format_integer
from pipeline.reports.document.page import CaptionedImage, CountBar, HtmlPage, TableCell, TableColumn

if TYPE_CHECKING:
    from sites.data_check.check import DataCheck
    from sites.data_check.phi import PhiSummary
    from sites.data_check.phi_tags import MetadataTag

MAX_IMAGES_PER_CLASS = 60  # in the class's gallery
MAX_CLASS_GALLERIES = 24
MAX_OUTLIER_TILES = 24  # images of one kind, or pairs of duplicates
MAX_LISTED_NAMES = 12  # files of one finding
CLASS_TILE_PIXELS, OUTLIER_TILE_PIXELS = 56, 88  # side on the page
MAX_STORED_SIDE_PIXELS = 96  # of an embedded image
MAX_LOSSLESS_SIDE_PIXELS = 40  # up to here PNG; on so few pixels, JPEG artefacts would be visible
PixelArray = NDArray[np.uint8]  # (C, H, W)
CONFIDENTIAL_NOTICE = "This page contains images: it must not leave the hospital. It was made on this machine; no data was sent or changed."
VERDICT_TEXTS = {
    "stop": "fix this before a study starts",
    "look": "a study can start, but review the findings",
    "fine": "no findings",
}
BURNED_IN_LABELS = {"yes": "yes", "no": "no", "unsaid": "not stated"}
MAX_BAR_CLASSES = 10  # with more classes, colours of bars are hard to distinguish


def write_site_check(check: DataCheck, site: str, read_as: str, out_path: Path, seed: int = 0) -> Path:
    page = HtmlPage(
        f"{site}: images before a study", " · ".join(filter(None, [check.data_path, read_as])), CONFIDENTIAL_NOTICE
    )
    _add_summary_tiles(page, check)
    _add_findings_section(page, check)
    _add_counts_section(page, check)
    _add_outliers_section(page, check)
    _add_duplicates_section(page, check)
    if check.phi_summary is not None:
        _add_identity_section(page, check.phi_summary)
    _add_class_galleries(page, check, seed)
    if check.skipped:
        page.add_section("Skipped files").add_details(
            format_count(len(check.skipped), "note"), "\n".join(check.skipped)
        )
    page.save(out_path)
    out_path.chmod(0o600)
    return out_path


def _add_summary_tiles(page: HtmlPage, check: DataCheck) -> None:
    tiles: list[tuple[str, TableCell]] = [(VERDICT_TEXTS[check.severity], check.severity.capitalize())]
    if check.class_counts is not None:
        tiles.append(("examples", format_integer(check.class_counts.num_examples)))
        tiles.append(("classes", format_integer(len(check.class_counts.classes))))
        if check.class_counts.unit is not None:
            tiles.append((f"{check.class_counts.unit}s", format_integer(sum(check.class_counts.num_units.values()))))
    if check.file_counts:
        tiles.append(("files examined", format_integer(check.file_counts["files"])))
    page.add_tiles(tiles, lead=True)


def _add_findings_section(page: HtmlPage, check: DataCheck) -> None:
    page.add_section("Findings")
    if not check.findings:
        page.add_text("No findings.")
        return
    rows: list[list[TableCell]] = [
        [_level_badge(finding.severity), (finding.message, _list_names(finding.locations)), finding.remedy]
        for finding in check.findings
    ]
    page.add_table(
        [TableColumn("Level"), TableColumn("Finding", is_text=True), TableColumn("Remedy", is_text=True)], rows
    )


def _level_badge(level: str) -> Markup:
    colors = {"stop": "mark-ink", "look": "warn", "fine": "quiet"}
    badge = Markup('<span class="badge" style="color:var(--{})">{}</span>')
    return badge.format(colors[level], level.capitalize())


def _list_names(names: Sequence[str]) -> str:
    num_hidden = len(names) - MAX_LISTED_NAMES
    return ", ".join(names[:MAX_LISTED_NAMES]) + (f" and {num_hidden:,} more" if num_hidden > 0 else "")


def _add_counts_section(page: HtmlPage, check: DataCheck) -> None:
    census = check.class_counts
    if census is None:
        return
    page.add_section("Class counts")
    bars = [
        CountBar(
            f"{SPLIT_LABELS.get(split, split).capitalize()} {sum(counts):,}",
            list(zip(census.classes, counts, strict=True)),
        )
        for split, counts in census.counts.items()
        if sum(counts)
    ]
    if len(census.classes) <= MAX_BAR_CLASSES:
        page.add_legend(census.classes).add_images([CaptionedImage("", bars=bars)])
    total = max(census.num_examples, 1)
    rows = [
        [
            name,
            *(format_integer(counts[class_index]) for counts in census.counts.values()),
            format_integer(class_total),
            f"{100 * class_total / total:.1f} %",
        ]
        for class_index, (name, class_total) in enumerate(zip(census.classes, census.totals_by_class, strict=True))
    ]
    if census.unit is not None:
        unit_counts = [format_integer(number) for number in census.num_units.values()]
        rows.append([f"{census.unit.capitalize()}s", *unit_counts, format_integer(sum(census.num_units.values())), ""])
    split_columns = [TableColumn(SPLIT_LABELS.get(split, split).capitalize(), True) for split in census.counts]
    page.add_table([TableColumn("Class"), *split_columns, TableColumn("Total", True), TableColumn("Share", True)], rows)


def _image_pixels(check: DataCheck, row: int) -> PixelArray:
    assert check.examples is not None
    pixels: PixelArray = check.examples.dataset.x[row].numpy()
    return pixels


def _add_outliers_section(page: HtmlPage, check: DataCheck) -> None:
    if not check.outliers:
        return
    page.add_section("Unusual images").add_text(
        "Compared with the site's own images, in units of their spread. An unusual image can be correct, for example one "
        "with a rare stain. The most unusual images come first."
    )
    for outliers in check.outliers:
        rows = [int(row) for row in outliers.rows[:MAX_OUTLIER_TILES]]
        tiles = [
            GalleryTile([_image_pixels(check, row)], check.example_names[row], check.example_names[row]) for row in rows
        ]
        truncation_note = f" The first {MAX_OUTLIER_TILES} are shown." if len(outliers.rows) > MAX_OUTLIER_TILES else ""
        title = f"{outliers.kind.capitalize()}: {format_count(len(outliers.rows), 'image')}"
        page.add_gallery(
            title,
            render_gallery(title, tiles, OUTLIER_TILE_PIXELS),
            f"{outliers.description.capitalize()}.{truncation_note}",
        )


def _add_duplicates_section(page: HtmlPage, check: DataCheck) -> None:
    identical = check.duplicates.identical_groups if check.duplicates is not None else ()
    if not identical and not check.leaking_pairs:
        return
    page.add_section("Duplicate images")
    for duplicate_sets, title in (
        (identical, "Identical pixels"),
        (check.leaking_pairs, "Nearly identical, in two splits or of two units"),
    ):
        if duplicate_sets:
            tiles = [_duplicate_tile(check, duplicate_rows) for duplicate_rows in duplicate_sets[:MAX_OUTLIER_TILES]]
            shown = "all are" if len(duplicate_sets) <= MAX_OUTLIER_TILES else f"the first {MAX_OUTLIER_TILES} are"
            page.add_gallery(
                title,
                render_gallery(title, tiles, OUTLIER_TILE_PIXELS),
                f"{len(duplicate_sets):,} found; {shown} shown.",
            )


def _duplicate_tile(check: DataCheck, rows: Sequence[int]) -> GalleryTile:
    shown = rows[:2]
    text_lines = [f"{check.example_names[row]} · {_describe_origin(check, row)}" for row in shown]
    text_lines += [f"and {len(rows) - 2} more"] if len(rows) > 2 else []
    return GalleryTile(
        [_image_pixels(check, row) for row in shown],
        " = ".join(check.example_names[row] for row in rows),
        "\n".join(text_lines),
    )


def _describe_origin(check: DataCheck, row: int) -> str:
    assert check.examples is not None
    assert check.class_counts is not None
    data = check.examples.dataset
    label, split = check.class_counts.classes[int(data.y[row])], int(data.split[row])
    return label if split >= len(SPLIT_LABELS) else f"{label}, {SPLIT_LABELS[('train', 'val', 'test')[split]]}"


def _add_identity_section(page: HtmlPage, identity: PhiSummary) -> None:
    from sites.data_check.phi import rank_tags
    from sites.data_check.phi_tags import TAG_KIND_TEXT as KINDS

    def tag_rows(tags: dict[MetadataTag, int]) -> list[list[str]]:
        return [[tag.name, KINDS[tag.kind], format_integer(number)] for tag, number in rank_tags(tags)]

    page.add_section("Identifying information in metadata")
    columns = [TableColumn("Tag"), TableColumn("Information", is_text=True), TableColumn("Files", True)]
    if not identity.num_dicom and not identity.image_tags:
        page.add_text("No DICOM files, and no image metadata with text, locations, names or serial numbers.")
        return
    page.add_text("Tags that have a value, and the number of files. The values are not shown.")
    if identity.num_dicom:
        burned_in_text = ", ".join(
            f"{label}: {identity.burned_in_counts.get(key, 0):,}" for key, label in BURNED_IN_LABELS.items()
        )
        page.add_text(
            f"{format_count(identity.num_dicom, 'DICOM file')}, {identity.num_deidentified:,} of them marked as de-identified "
            f"(PatientIdentityRemoved). Burned-in annotation: {burned_in_text}."
        )
        page.add_table(columns, tag_rows(identity.dicom_tags), "DICOM")
    if identity.image_tags:
        page.add_table(columns, tag_rows(identity.image_tags), "Images")


def _add_class_galleries(page: HtmlPage, check: DataCheck, seed: int) -> None:
    if check.examples is None or check.class_counts is None or not check.examples.has_images:
        return
    page.add_section("Images of each class").add_text(
        f"Up to {MAX_IMAGES_PER_CLASS} images of each class, drawn at random. Hover over an image to see its name. Check that each image shows its class."
    )
    labels = check.examples.dataset.y.numpy()
    present_classes = [class_index for class_index, number in enumerate(check.class_counts.totals_by_class) if number]
    for class_index in present_classes[:MAX_CLASS_GALLERIES]:
        rows = np.random.default_rng([seed, class_index]).permutation(np.flatnonzero(labels == class_index))[
            :MAX_IMAGES_PER_CLASS
        ]
        tiles = [GalleryTile([_image_pixels(check, int(row))], check.example_names[int(row)]) for row in np.sort(rows)]
        caption = f"{len(rows):,} of {(labels == class_index).sum():,} images."
        class_name = check.class_counts.classes[class_index]
        page.add_gallery(class_name, render_gallery(class_name, tiles, CLASS_TILE_PIXELS), caption)
    if len(present_classes) > MAX_CLASS_GALLERIES:
        page.add_text(f"{len(present_classes) - MAX_CLASS_GALLERIES:,} more classes are not shown.")


# Galleries: small embedded images side by side, each with its name


@dataclass(frozen=True)
class GalleryTile:
    """One image, or several of the same size next to each other; `name` is the tooltip."""

    images: Sequence[PixelArray]
    name: str
    text: str = ""  # below the images


def render_gallery(title: str, tiles: Sequence[GalleryTile], display_pixels: int) -> Markup:
    """`display_pixels`: height of an image on the page."""
    spans = Markup("").join(_render_tile(tile, display_pixels) for tile in tiles)
    heading = Markup('<strong style="display:block;margin-bottom:.4rem">{}</strong>').format(title)
    return heading + Markup('<div style="display:flex;flex-wrap:wrap;gap:{}px;padding:1px">{}</div>').format(
        14 if _has_texts(tiles) else 3, spans
    )


def _has_texts(tiles: Sequence[GalleryTile]) -> bool:
    return any(tile.text for tile in tiles)


def _render_tile(tile: GalleryTile, display_pixels: int) -> Markup:
    image_markup = Markup(
        '<img src="{}" alt="{}" height="{}" style="display:inline-block;border-radius:3px;outline:1px solid var(--line);{}">'
    )
    scaling_style = "image-rendering:pixelated;" if max(tile.images[0].shape[1:]) <= MAX_LOSSLESS_SIDE_PIXELS else ""
    images = Markup("&thinsp;").join(
        image_markup.format(_image_data_url(pixels), tile.name, display_pixels, scaling_style) for pixels in tile.images
    )
    width = display_pixels * len(tile.images) + 8
    text_style = "display:block;font-size:.72rem;line-height:1.3;overflow-wrap:anywhere"
    text_spans = Markup("").join(
        Markup('<span style="{}">{}</span>').format(text_style, escape(text_line))
        for text_line in tile.text.splitlines()
    )
    width_style = f"max-width:{max(width, 110)}px" if tile.text else ""
    return Markup('<span title="{}" style="display:inline-block;{}">{}{}</span>').format(
        tile.name, width_style, images, text_spans
    )


def _image_data_url(pixels: PixelArray) -> str:
    from PIL import Image

    array: NDArray[Any] = pixels[0] if pixels.shape[0] == 1 else pixels.transpose(1, 2, 0)
    image = Image.fromarray(np.ascontiguousarray(array))
    image.thumbnail((MAX_STORED_SIDE_PIXELS, MAX_STORED_SIDE_PIXELS), Image.Resampling.BOX)
    buffer = io.BytesIO()
    image_format = "PNG" if max(image.size) <= MAX_LOSSLESS_SIDE_PIXELS else "JPEG"
    image.save(buffer, image_format, **({"quality": 88} if image_format == "JPEG" else {}))
    return f"data:image/{image_format.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"

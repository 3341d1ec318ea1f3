"""What lies in a site's folder, whether a study could read it, and what it passes over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sites.data.base import Source
from sites.data.folder import Folder
from sites.data.images import FORMATS, SUFFIXES
from sites.data_check.examples import Holding
from sites.data_check.file_survey import Survey
from sites.data_check.findings import Finding, count, some
from sites.data_check.redaction import Mask


def count_up(found: Survey) -> dict[str, int]:
    kinds = Counter(seen.kind for seen in found.files)
    return {
        "files": len(found.files), "images": kinds["image"], "dicom": kinds["dicom"], "other": kinds["other"], "unreadable": kinds["unreadable"],
        "hidden": found.hidden, "links_out": len(found.leads_out),
    }  # fmt: skip


def of_survey(found: Survey, held: Holding | None, mask: Mask, source: Source) -> Iterator[Finding]:
    def told(files: list[str]) -> tuple[str, ...]:
        return tuple(map(mask.path, files))

    if found.closed:
        yield Finding(
            "stop", "files", f"{count(len(found.closed), 'folder')} cannot be opened",
            "let the agent's user read them", told(list(found.closed)),
        )  # fmt: skip
    if found.leads_out:
        yield Finding(
            "look", "files", f"{count(len(found.leads_out), 'link')} out of the folder, or to nowhere; not followed here",
            "copy what they lead to into the folder, or remove them", told(list(found.leads_out)),
        )  # fmt: skip
    listed_already = set() if held is None else {line.partition(": ")[0] for line in held.data.skipped}
    if bad := [seen for seen in found.of("unreadable") if seen.path not in listed_already]:
        reasons = Counter(seen.reason for seen in bad)
        listed = some([f"{mask.text(reason)} ({number:,})" for reason, number in reasons.most_common()])
        yield Finding(
            "look", "files", f"{count(len(bad), 'file')} cannot be read: {listed}", "repair or remove them",
            told([seen.path for seen in bad]),
        )  # fmt: skip
    if misnamed := [seen.path for seen in found.files if seen.misnamed]:
        yield Finding(
            "fine", "files", f"{count(len(misnamed), 'image')} with another suffix than the content's, e.g. a PNG called .jpg",
            "nothing has to be done: content counts, not the name", told(misnamed),
        )  # fmt: skip
    if deep := [seen.path for seen in found.files if seen.deep]:
        yield Finding(
            "fine", "files", f"{count(len(deep), 'image')} with 16 bits",
            "they are scaled by the full range of 16 bits, never stretched", told(deep),
        )  # fmt: skip
    if isinstance(source, Folder) and (passed := [s.path for s in found.of("image") if s.suffix not in SUFFIXES]):
        yield Finding(
            "look", "files", f"{count(len(passed), 'image')} passed over by studies because of the suffix",
            f"call them {', '.join(sorted(SUFFIXES))}", told(passed),
        )  # fmt: skip
    if isinstance(source, Folder) and (dicom := found.of("dicom")):
        yield Finding(
            "look", "files", f"{count(len(dicom), 'DICOM file')} passed over: a study of a folder reads {', '.join(FORMATS)}",
            "export them as PNG or TIFF if they shall be used", told([seen.path for seen in dicom]),
        )  # fmt: skip


def of_reading(
    source: Source, held: Holding | None, refused: str, mask: Mask, found: Survey | None
) -> Iterator[Finding]:
    if found is not None and not found.files:
        yield Finding("stop", "files", "the folder is empty", "correct `data` in site.toml, or --data")
        return
    if refused:
        what, _, rest = mask.text(refused).partition("\n")
        yield Finding("stop", "files", f"a study could not read them: {what}", "put this right, and check again",
                      tuple(line.strip() for line in rest.splitlines()))  # fmt: skip
    bad = held.data.skipped if held is not None and isinstance(source, Folder) else ()
    if bad:
        refuses = isinstance(source, Folder) and source.corrupt == "refuse"
        yield Finding(
            "stop" if refuses else "look", "files", f"{count(len(bad), 'image')} cannot be used"
            + (", and a study refuses such folders" if refuses else ""),
            "repair or remove them" + ("" if not refuses else ", or ask the study lead for data.corrupt = 'skip'"),
            tuple(map(mask.text, bad)),
        )  # fmt: skip

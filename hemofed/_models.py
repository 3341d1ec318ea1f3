"""What follows a run: `evaluate`, `compare`, `audit`, `export`, `trust` and `predict`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hemofed._calls import api_call

if TYPE_CHECKING:
    from deploy.export.export import ExportResult
    from deploy.slide.predict import SlidePrediction
    from hemofed._runs import AnyPath, RunLike
    from pipeline.runs.score_saved_model import SavedModelScores
    from privacy.audit.facts import AuditFacts


@api_call()
def evaluate(
    run: RunLike,
    data: AnyPath | None = None,
    *,
    model: str = "global",
    source: str | None = None,
    split: Literal["all", "train", "val", "test"] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> SavedModelScores:
    """Metrics of a saved model on other data.

    data: a folder or file; by default the run's own data. source: the kind of data, by default that of the study.
    split: by default all examples of other data, and the test examples of the run's own.
    overrides: settings of the data source.
    """
    from hemofed._runs import model_files, open_run_folder, optional_path
    from pipeline.runs.score_saved_model import score_saved_model

    folder = open_run_folder(run)
    file = model_files(folder).get(model, model)
    return score_saved_model(folder, optional_path(data), source, file, split, overrides or {})


@api_call()
def compare(runs: Iterable[RunLike], out: AnyPath, metric: str = "accuracy") -> list[dict[str, object]]:
    """Writes a page that compares the runs, and returns its table: one row per run.

    out: an .html file, or a folder that gets compare.html.
    """
    from hemofed._runs import open_run_folder
    from pipeline.reports.compare import write_comparison

    return write_comparison([open_run_folder(run).path for run in runs], Path(out), metric)[1]


@api_call()
def audit(run: RunLike, *, attack: bool = False, out: AnyPath | None = None, data: AnyPath | None = None) -> AuditFacts:
    """Writes what a run promised, spent and disclosed, and returns it; `ok` is False if there are `problems`.

    attack: attack the run's model too, as evidence. out: by default the folder audit of the run.
    data: the folder of the data sets, for the attack.
    """
    from hemofed._runs import data_folder, open_run_folder, optional_path
    from privacy.audit.collect import collect_facts
    from privacy.audit.write import write_audit

    folder = open_run_folder(run)
    if attack:
        from privacy.attacks.run import attack_run

        attack_run(folder, data_folder(data))
    facts = collect_facts(folder)
    write_audit(facts, folder.path, optional_path(out) or folder.path / "audit")
    return facts


@api_call()
def export(
    run: RunLike,
    out: AnyPath,
    *,
    model: str = "global",
    int8: bool = False,
    key: AnyPath | None = None,
    license_text: str | None = None,
    crop_px: float | None = None,
    rbc_diameter_px: float | None = None,
) -> ExportResult:
    """Exports a model as a signed ONNX bundle, the folder OUT and OUT.zip, for machines without torch.

    model: "global", "cluster/NAME", or "site/NAME" for a personalized model. int8: add a quantized model if it loses
    little accuracy. key: the private key to sign with; by default your own, created at first use.
    crop_px, rbc_diameter_px: side of a training image and diameter of a red cell in pixels of a field, if the data do
    not say.
    """
    from deploy.export.export import LICENSE_NOT_STATED, check_export, export_bundle
    from deploy.export.signing_key import load_signing_key
    from hemofed._runs import open_run_folder, optional_path

    run_folder = open_run_folder(run)
    check_export(run_folder, model, Path(out), (crop_px, rbc_diameter_px))  # before a key is created
    return export_bundle(
        run_folder=run_folder,
        model_name=model,
        output_folder=Path(out),
        signing_key=load_signing_key(optional_path(key)),
        with_int8=int8,
        license_text=license_text or LICENSE_NOT_STATED,
        crop_and_diameter_px=(crop_px, rbc_diameter_px),
    )


@api_call()
def trust(name: str, key: AnyPath) -> None:
    """Pins the public key of a signer, so that this user's machine accepts the bundles signed with it.

    key: 64 hex digits, a file that begins with them, or a bundle that was signed with it.
    """
    from deploy.bundle.trust_store import TrustStore, read_public_key

    TrustStore.open_default().add(name, read_public_key(os.fspath(key)))


@api_call()
def predict(
    bundle: AnyPath,
    images: AnyPath | Sequence[AnyPath],
    *,
    out: AnyPath | None = None,
    dicom_out: AnyPath | None = None,
    input_type: Literal["auto", "cell", "field"] = "auto",
    operating_point: str | None = None,
    rbc_diameter_px: float | None = None,
    precision: Literal["fp32", "int8"] | None = None,
    ignore_local_calibration: bool = False,
    num_threads: int = 1,
) -> SlidePrediction:
    """Classifies cells, counts them on the fields of one slide, and gives the slide's verdict. Needs no torch.

    images: images or DICOM files of cells or fields of one slide, or folders of them. Those that cannot be read are
    listed in `failures` of the result.
    out, dicom_out: new folders for the report, and for results as DICOM.
    operating_point: its name, or a probability. rbc_diameter_px: by default measured.
    """
    from deploy.slide.outputs import SlideOutputs
    from deploy.slide.predict import predict_slide
    from pipeline.cli.commands.predict import PredictOptions, open_reader

    paths = [images] if isinstance(images, str | os.PathLike) else images
    options = PredictOptions(
        bundle=Path(bundle),
        paths=tuple(map(Path, paths)),
        out=None if out is None else Path(out),
        dicom_out=None if dicom_out is None else Path(dicom_out),
        input_type=input_type,
        operating_point=operating_point,
        rbc_diameter_px=rbc_diameter_px,
        precision=precision,
        ignore_local_calibration=ignore_local_calibration,
        num_threads=num_threads,
    )
    outputs = SlideOutputs(options.out, options.dicom_out)
    return predict_slide(options.paths, open_reader(options), outputs, lambda text: None)

"""`hemofed study new | check | show | list` and `hemofed site preview`."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cli.output import build_table, console, print_json
from pipeline.core.errors import StudyError
from pipeline.protocol.tasks import TrainJob
from pipeline.reports.document.formatting import format_count
from pipeline.study.schema import Study
from pipeline.study.toml_file import PACKAGED_STUDIES, find_study, load_study, parse_override, to_toml

if TYPE_CHECKING:
    from pipeline.runs.simulation import Simulation

MAX_SHOWN_NOTES = 5  # of data that were left out
MAX_SHOWN_PREVIEWS = 20
MAX_NOISE_RATIO = 3.0  # of noise to the largest possible mean gradient; above it, only many steps average the noise out


def new_command(path: Path, template: str) -> None:
    if path.exists():
        raise StudyError(f"{path} exists already; choose another name")
    path.write_text(find_study(template).read_text(encoding="utf-8"), encoding="utf-8")
    console.print(f"wrote {path}; edit it, then: hemofed study check {path}", soft_wrap=True)


def show_command(study_name: str, overrides: list[str], json: bool) -> None:
    study = load_study(find_study(study_name), dict(map(parse_override, overrides)))
    if json:
        print_json(study.to_dict() | {"study_hash": study.hash})
    else:
        console.print(to_toml(study.to_dict()), soft_wrap=True)


def list_command(json: bool) -> None:
    studies = [load_study(path) for path in sorted(PACKAGED_STUDIES.glob("*.toml"))]
    if json:
        print_json(
            [
                {"name": s.name, "description": s.description, "data": s.data.name, "strategy": s.strategy.name}
                for s in studies
            ]
        )
    else:
        rows = [[s.name, s.data.name, s.strategy.name, str(s.rounds), s.description] for s in studies]
        console.print(build_table(["study", "data", "strategy", "rounds", "description"], rows, num_text_columns=5))


def check_command(study_name: str, overrides: list[str], data: Path | None, json: bool) -> None:
    from pipeline.runs.simulation import dry_run_study
    from sites.training.select_trainer import select_device

    study = load_study(find_study(study_name), dict(map(parse_override, overrides)))
    simulation = dry_run_study(study, data)
    dataset, environment = simulation.dataset, simulation.round_loop.environment
    counts = {site: dataset.class_counts(site) for site in dataset.sites}
    if json:
        print_json(
            {
                "study": study.name,
                "study_hash": study.hash,
                "num_parameters": simulation.trainer_context.spec.num_parameters,
                "classes": dataset.classes,
                "sites": counts,
                "skipped": dataset.skipped,
                **environment,
                **({"privacy": simulation.privacy_setup.privacy_record} if simulation.privacy_setup else {}),
            }
        )
        return
    rows = [
        [site, *(str(sum(c[split])) for split in ("train", "val", "test")), " ".join(map(str, c["train"]))]
        for site, c in counts.items()
    ]
    console.print(
        build_table(
            ["site", "train", "val", "test", "train by class"],
            rows,
            title=f"{study.name}: {', '.join(dataset.classes)}",
        )
    )
    round_policy = study.round_policy
    console.print(
        f"{study.strategy.name}, {study.rounds} rounds, {study.model.name} with {simulation.trainer_context.spec.num_parameters:,} parameters, "
        f"trainer {environment['trainer']} on {select_device(study).type} with {format_count(environment['threads'], 'thread')}; "
        f"partial updates are {'accepted' if round_policy.partial_updates == 'keep' else 'dropped'}",
    )
    for line in privacy_plan_lines(simulation):
        console.print(line, soft_wrap=True)
    for note in dataset.skipped[:MAX_SHOWN_NOTES]:
        console.print(f"left out: {note}", soft_wrap=True)
    if len(dataset.skipped) > MAX_SHOWN_NOTES:
        console.print(f"left out: {len(dataset.skipped) - MAX_SHOWN_NOTES} more; --json lists them all")
    run_arguments = [
        study_name,
        *(part for override in overrides for part in ("--set", override)),
        *(["--data", str(data)] if data else []),
    ]
    console.print(f"valid; run it with: hemofed run {shlex.join(run_arguments)}", soft_wrap=True, markup=False)


def privacy_plan_lines(simulation: Simulation) -> list[str]:
    """The privacy plan of every site, and warnings about it."""
    study, privacy_setup = simulation.round_loop.study, simulation.privacy_setup
    if privacy_setup is None:
        return []
    lines = []
    for site, plan in privacy_setup.privacy_plans.items():
        params = plan.dp_sgd_params
        lines.append(
            f"{site}: epsilon {plan.epsilon:.4g} at delta {plan.delta:g} for each of {params.num_units} {params.privacy_unit}s "
            f"({plan.num_examples:,} examples), after {plan.max_rounds} rounds of {plan.steps_per_round} steps; noise multiplier {params.noise_multiplier:.3g}, "
            f"sampling rate {params.sampling_rate:.3g}"
        )
    return (
        lines
        + [f"warning: {warning}" for warning in _noise_warnings(simulation)]
        + few_sites_warnings(study, len(simulation.dataset.sites))
    )


def _noise_warnings(simulation: Simulation) -> list[str]:
    """A warning if the noise of a step is much larger than its gradient can be."""
    assert simulation.privacy_setup is not None
    trainer_context = simulation.trainer_context
    num_trainable = sum(
        trainer_context.spec.parameter_sizes[index]
        for index in trainer_context.trainable_positions(
            TrainJob(trainer_context.spec.read_state(trainer_context.make_model()).weights)
        )
    )
    noise_ratios = {
        site: plan.dp_sgd_params.noise_multiplier
        / (plan.dp_sgd_params.sampling_rate * plan.dp_sgd_params.num_units)
        * math.sqrt(num_trainable)
        for site, plan in simulation.privacy_setup.privacy_plans.items()
    }
    worst_site = max(noise_ratios, key=lambda site: noise_ratios[site], default=None)
    if worst_site is None or noise_ratios[worst_site] <= MAX_NOISE_RATIO:
        return []
    return [
        (
            f"at {worst_site} the noise of a step is {noise_ratios[worst_site]:.0f} times the largest possible mean gradient, over "
            f"{num_trainable:,} parameters; use larger batches, fewer steps or fewer trainable parameters (local.trainable), "
            "see docs/epsilon.md"
        )
    ]


def few_sites_warnings(study: Study, num_sites: int) -> list[str]:
    if study.privacy.client_level_dp is None:
        return []
    from pipeline.aggregation.client_level_dp import MIN_USEFUL_SITES

    if num_sites >= MIN_USEFUL_SITES:
        return []
    return [
        (
            f"warning: privacy.client_level_dp with {num_sites} sites: below {MIN_USEFUL_SITES}, the noise of a useful epsilon is larger "
            "than the mean update; and it gives no protection from the coordinator itself"
        )
    ]


def preview_command(study_name: str, overrides: list[str], data: Path | None, out: Path, json: bool) -> None:
    import torch

    from pipeline.reports.site_preview import preview_sites, write_preview
    from sites.population.simulated_sites import load_federated_data

    study = load_study(find_study(study_name), dict(map(parse_override, overrides)))
    dataset = load_federated_data(study, data, torch.device("cpu"))
    previews = preview_sites(dataset)
    page = write_preview(study, dataset, previews, out / "preview.html" if out.is_dir() else out)
    if json:
        sites = {site: preview.to_dict(dataset.classes) for site, preview in previews.items()}
        dataset_info = {
            "study": study.name,
            "classes": dataset.classes,
            "shape": dataset.shape,
            "skipped": dataset.skipped,
        }
        print_json({**dataset_info, "sites": sites, "page": str(page)})
        return
    rows = [
        [
            site,
            preview.acquisition or "–",
            str(sum(preview.counts["train"])),
            " ".join(f"{mean:.2f}" for mean in preview.means),
        ]
        for site, preview in list(previews.items())[:MAX_SHOWN_PREVIEWS]
    ]
    console.print(build_table(["site", "acquisition", "train", "channel means"], rows, num_text_columns=2))
    if len(previews) > MAX_SHOWN_PREVIEWS:
        console.print(f"… {len(previews) - MAX_SHOWN_PREVIEWS} more on the page")
    console.print(f"wrote {page}: it shows training examples; nothing was sent anywhere", soft_wrap=True)

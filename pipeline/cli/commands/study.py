"""`hemofed study new | check | show | list`."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cli.output import build_table, console, print_json
from pipeline.core.errors import StudyError
from pipeline.protocol.tasks import TrainJob
from pipeline.reports.document.formatting import format_count
from pipeline.study.schema import Study, load_study
from pipeline.study.toml_file import PACKAGED_STUDIES, find_study, parse_override, to_toml

if TYPE_CHECKING:
    from pipeline.runs.simulation import Simulation

MAX_SHOWN_SITES = 5


def new_command(path: Path, template: str) -> None:
    if path.exists():
        raise StudyError(f"{path} exists; choose another name")
    path.write_text(find_study(template).read_text(encoding="utf-8"), encoding="utf-8")
    console.print(f"wrote {path}; edit it, then: hemofed study check {path}", soft_wrap=True)


def show_command(study_name: str, overrides: list[str], json: bool) -> None:
    study = load_study(find_study(study_name), dict(map(parse_override, overrides)))
    if json:
        print_json(study.to_dict() | {"hash": study.hash})
    else:
        console.print(to_toml(study.to_dict()), soft_wrap=True)


def list_command(json: bool) -> None:
    studies = [load_study(path) for path in sorted(PACKAGED_STUDIES.glob("*.toml"))]
    if json:
        print_json(
            [
                {"name": s.name, "about": s.description, "data": s.data.name, "strategy": s.strategy.name}
                for s in studies
            ]
        )
    else:
        rows = [[s.name, s.data.name, s.strategy.name, str(s.rounds), s.description] for s in studies]
        console.print(build_table(["study", "data", "strategy", "rounds", "about"], rows, num_text_columns=5))


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
                "hash": study.hash,
                "parameters": simulation.trainer_context.spec.num_parameters,
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
        f"work cut short is {'kept' if round_policy.partial_updates == 'keep' else 'dropped'}",
    )
    for line in privacy_plan_lines(simulation):
        console.print(line, soft_wrap=True)
    for note in dataset.skipped[:MAX_SHOWN_SITES]:
        console.print(f"left out: {note}", soft_wrap=True)
    if len(dataset.skipped) > MAX_SHOWN_SITES:
        console.print(f"left out: {len(dataset.skipped) - MAX_SHOWN_SITES} more; --json lists them all")
    run_arguments = [
        study_name,
        *(word for s in overrides for word in ("--set", s)),
        *(["--data", str(data)] if data else []),
    ]
    console.print(f"good to run: hemofed run {shlex.join(run_arguments)}", soft_wrap=True, markup=False)


# What a study promises, before it is run: lines for `hemofed study check` and `hemofed run`.

MAX_NOISE_RATIO = 3.0  # times the longest gradient; noise beyond it needs many steps to average out


def privacy_plan_lines(simulation: Simulation) -> list[str]:
    study, privacy_setup = simulation.round_loop.study, simulation.privacy_setup
    if privacy_setup is None:
        return []
    lines = []
    for site, plan in privacy_setup.privacy_plans.items():
        params = plan.dp_sgd_params
        lines.append(
            f"{site}: epsilon {plan.epsilon:.4g} at delta {plan.delta:g} for each of {params.num_units} {params.privacy_unit}s "
            f"({plan.num_examples:,} examples), after {plan.max_rounds} turns of {plan.steps_per_round} steps; noise {params.noise_multiplier:.3g}, rate {params.sampling_rate:.3g}"
        )
    return (
        lines
        + [f"careful: {warning}" for warning in _noise_warnings(simulation)]
        + few_sites_warnings(study, len(simulation.dataset.sites))
    )


def _noise_warnings(simulation: Simulation) -> list[str]:
    """Where noise would drown what is learnt."""
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
            f"at {worst_site} a step's noise is {noise_ratios[worst_site]:.0f} times as long as the mean gradient can be, over {num_trainable:,} "
            "parameters; larger batches, fewer steps and fewer trained parameters (local.trainable) help: docs/epsilon.md"
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
            f"careful: privacy.client_level_dp with {num_sites} sites: below {MIN_USEFUL_SITES} the noise of a useful epsilon drowns the mean; "
            "and it protects nobody from the coordinator itself"
        )
    ]


# `hemofed site preview`.

SHOWN_SITES = 20


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
        for site, preview in list(previews.items())[:SHOWN_SITES]
    ]
    console.print(build_table(["site", "acquisition", "train", "means"], rows, num_text_columns=2))
    if len(previews) > SHOWN_SITES:
        console.print(f"… {len(previews) - SHOWN_SITES} more on the page")
    console.print(f"wrote {page}: it shows training examples; nothing of it was sent anywhere", soft_wrap=True)

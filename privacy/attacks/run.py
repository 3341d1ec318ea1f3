"""Attacks on a finished run, as evidence next to the stated epsilon: attacks.json and an image in the run folder.

Membership inference attacks the final model. The canary audit repeats one site's training with canaries among its units,
by the run's own trainer and DP-SGD parameters; it discards the models and charges nothing, so it is for simulations and
public data. Gradient inversion takes one step on one image of each site, which is the worst case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import RunFolderError
from pipeline.core.files import write_atomically
from pipeline.core.parameters import ModelState, ParamVector
from pipeline.core.tensor_io import load_tensors
from pipeline.protocol.messages import SiteId
from pipeline.protocol.tasks import TrainJob, TrainResult
from pipeline.runs.simulation import Simulation, dry_run_study
from privacy.attacks.canaries import (
    CanaryAudit,
    CanaryUnits,
    RoundWeights,
    audit_canaries,
    combine_scores,
    gradient_score,
    loss_score,
    make_canaries,
)
from privacy.attacks.inversion_figure import make_inversion_figure
from privacy.attacks.membership import average_by_unit, compute_losses, evaluate_membership
from privacy.audit.attack_findings import (
    ATTACKS_FILE,
    AttackFindings,
    CanaryFinding,
    InversionCase,
    InversionFinding,
    MembershipFinding,
)
from sites.data.pool import ExamplePool
from sites.training.base import Trainer, TrainerContext, TrainRequest
from sites.training.select_trainer import restored_num_threads
from sites.training.sequential import SequentialTrainer

NUM_CANARIES = 200
EXAMPLES_PER_CANARY = 2
NUM_UNPROTECTED_ROUNDS = 10  # of the canary training for an unprotected run
MAX_ATTACKED_SITES = 8  # in the attacked sum
INVERSION_STEPS = 600  # of the search for an image
DEFAULT_DP_PARAMS = (1.0, 1.0)  # max_grad_norm and noise multiplier of the figure, if the run has none


@restored_num_threads()
def attack_run(folder: RunFolder, data_folder: Path | None) -> AttackFindings:
    if not folder.is_finished:
        raise RunFolderError(f"{folder.path} is not finished; continue it with `hemofed run --resume {folder.path}`")
    if not (folder.path / "models" / "global.safetensors").is_file():
        raise RunFolderError(f"{folder.path} has no global model to attack; its sites keep their own models")
    study = folder.load_study()
    simulation = dry_run_study(study, data_folder)
    findings = AttackFindings(
        membership=_attack_membership(simulation, _load_final_model(simulation, folder)),
        canaries=_audit_canaries(simulation),
        inversion=_attack_inversion(simulation, folder),
    )
    folder.write_json(ATTACKS_FILE, findings.model_dump(mode="json"))
    return findings


def _load_final_model(simulation: Simulation, folder: RunFolder) -> nn.Module:
    _, tensors = load_tensors(folder.path / "models" / "global.safetensors")
    module = simulation.trainer_context.make_model()
    simulation.trainer_context.spec.write_state(module, ModelState(tensors["weights"], tensors["stats"]))
    return module


def _attack_membership(simulation: Simulation, module: nn.Module) -> MembershipFinding:
    dataset, pool = simulation.dataset, simulation.dataset.pool
    loss_sides = []
    for split in ("train", "test"):
        rows = torch.cat([getattr(dataset.split_indices[site], split) for site in dataset.sites]).unique().cpu()
        loss_sides.append(
            (
                compute_losses(module, pool.inputs(rows), pool.labels(rows)),
                None if pool.unit_ids is None else pool.unit_ids[rows],
            )
        )
    (member_losses, member_units), (nonmember_losses, nonmember_units) = loss_sides
    unit = "example"
    if member_units is not None and nonmember_units is not None:
        member_losses, nonmember_losses, unit = (
            average_by_unit(member_losses, member_units),
            average_by_unit(nonmember_losses, nonmember_units),
            dataset.privacy_unit or "unit",
        )
    result = evaluate_membership(member_losses, nonmember_losses, unit=unit)
    outcome = "succeeds" if result.auc_low > 0.5 else "does no better than chance"
    return MembershipFinding(
        auc=result.auc,
        auc_low=result.auc_low,
        auc_high=result.auc_high,
        unit=unit,
        num_members=result.num_members,
        num_nonmembers=result.num_nonmembers,
        advantage=result.advantage,
        summary=f"Guessing from the final model's loss whether a {unit} was in the training data {outcome}: AUC {result.auc:.3f} "
        f"(95 % interval {result.auc_low:.3f} to {result.auc_high:.3f}; 0.5 is chance, 1 certainty).",
    )


@dataclass(frozen=True)
class CanaryTraining:
    """Training of one site with canaries among its units."""

    simulation: Simulation
    site: SiteId
    canaries: CanaryUnits
    initial_weights: ParamVector

    def __call__(self, included: Tensor) -> RoundWeights:
        context, num_rounds, steps = self._context_with_canaries(included), NUM_UNPROTECTED_ROUNDS, None
        privacy_plan = (
            self.simulation.privacy_setup.privacy_plans.get(self.site) if self.simulation.privacy_setup else None
        )
        trainer: Trainer = SequentialTrainer(context)
        if privacy_plan is not None:
            from sites.privacy.plan import dp_sgd_training
            from sites.training.dp_sgd import DpSgdTrainer

            assert self.simulation.privacy_setup is not None
            dp_params = replace(
                privacy_plan.dp_sgd_params, num_units=privacy_plan.dp_sgd_params.num_units + NUM_CANARIES // 2
            )  # the expected number: it must not depend on the coins
            dp_sgd = dp_sgd_training(self.simulation.round_loop.study, self.simulation.privacy_setup.privacy_plans)
            assert dp_sgd is not None
            trainer = DpSgdTrainer(context, {self.site: dp_params}, dp_sgd.resolve_clipping(context.make_model()))
            num_rounds, steps = privacy_plan.max_rounds, privacy_plan.steps_per_round
        local, round_weights, weights = self.simulation.round_loop.study.local, [], self.initial_weights
        stats = context.spec.read_state(context.make_model()).norm_stats
        for round_number in range(1, num_rounds + 1):
            job = TrainJob(weights, stats, steps=steps or local.steps, epochs=None if steps else local.epochs)
            (result,) = trainer.run(
                [TrainRequest(self.site, round_number, 0, job, is_private=privacy_plan is not None)]
            )
            assert isinstance(result, TrainResult)
            round_weights.append((weights, result.weights))
            weights, stats = result.weights, result.norm_stats
        return round_weights

    def _context_with_canaries(self, included: Tensor) -> TrainerContext:
        context = self.simulation.trainer_context
        pool, site_examples = context.pool, context.split_indices[self.site]
        first_row, rows = len(pool.y), self.canaries.included_rows(included)
        own_units = torch.arange(len(pool.y)) if pool.unit_ids is None else pool.unit_ids
        x = self.canaries.x if pool.x.is_floating_point() else (self.canaries.x * 255).round().to(pool.x.dtype)
        unit = torch.cat([own_units, int(own_units.max()) + 1 + self.canaries.unit_index])
        extended_pool = ExamplePool(torch.cat([pool.x, x]), torch.cat([pool.y, self.canaries.y]), pool.device, unit)
        train = torch.cat([site_examples.train, first_row + rows])
        return replace(
            context,
            pool=extended_pool,
            split_indices={
                **context.split_indices,
                self.site: replace(site_examples, train=train, examples_per_epoch=None),
            },
        )


def _audit_canaries(simulation: Simulation) -> CanaryFinding:
    dataset = simulation.dataset
    privacy_plans = simulation.privacy_setup.privacy_plans if simulation.privacy_setup else {}
    site = max(
        dataset.sites,
        key=lambda s: (
            privacy_plans[s].dp_sgd_params.num_units if s in privacy_plans else len(dataset.split_indices[s].train)
        ),
    )
    promised_epsilon, delta = (
        (privacy_plans[site].epsilon, privacy_plans[site].delta) if site in privacy_plans else (None, 1e-5)
    )
    examples_per_unit = (
        1
        if site in privacy_plans and privacy_plans[site].dp_sgd_params.privacy_unit == "example"
        else EXAMPLES_PER_CANARY
    )
    canaries = make_canaries(dataset.shape, len(dataset.classes), NUM_CANARIES, examples_per_unit)
    module = simulation.trainer_context.make_model()
    initial_weights = simulation.trainer_context.spec.read_state(module).weights.clone()
    power = 1.0 if simulation.round_loop.study.local.optimizer == "sgd" else 0.5  # Adam equalizes gradient magnitudes
    score = combine_scores(loss_score(module, canaries), gradient_score(module, canaries, power=power))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # canaries are scored in batches of a few images
    try:
        result = audit_canaries(CanaryTraining(simulation, site, canaries, initial_weights), score, NUM_CANARIES, delta)
    finally:
        torch.set_num_threads(num_threads)
    return CanaryFinding(
        epsilon_low=result.epsilon_lower_bound,
        confidence=result.confidence,
        epsilon_promised=promised_epsilon,
        delta=delta,
        num_canaries=result.num_canaries,
        num_guesses=result.num_guesses,
        num_correct=result.num_correct,
        max_epsilon_low=result.max_epsilon_lower_bound,
        site=site,
        summary=_describe_canary_audit(result, promised_epsilon, site),
    )


def _describe_canary_audit(result: CanaryAudit, promised_epsilon: float | None, site: SiteId) -> str:
    description = (
        f"A coin decided for each of {result.num_canaries} canaries at {site} whether it was in the training data; "
        f"{result.num_correct} of {result.num_guesses} guesses were right. That refutes any epsilon below "
        f"{result.epsilon_lower_bound:.2f} at {100 * result.confidence:g} % confidence; with every guess right the bound "
        f"would be {result.max_epsilon_lower_bound:.2f}."
    )
    if promised_epsilon is None:
        return description + " The run states no epsilon."
    if result.epsilon_lower_bound <= promised_epsilon:
        return description + f" The stated epsilon, {promised_epsilon:.2f}, is consistent with that."
    return (
        description
        + f" The stated epsilon, {promised_epsilon:.2f}, is REFUTED: do not use this software until that is explained."
    )


def _attack_inversion(simulation: Simulation, folder: RunFolder) -> InversionFinding | None:
    dataset, pool = simulation.dataset, simulation.dataset.pool
    if len(dataset.shape) != 3:
        return None  # points are not images
    privacy_plan = (
        next(iter(simulation.privacy_setup.privacy_plans.values()), None) if simulation.privacy_setup else None
    )
    max_grad_norm, noise_multiplier = (
        (privacy_plan.dp_sgd_params.max_grad_norm, privacy_plan.dp_sgd_params.noise_multiplier)
        if privacy_plan
        else DEFAULT_DP_PARAMS
    )
    rows = torch.stack([dataset.split_indices[site].train[0] for site in dataset.sites[:MAX_ATTACKED_SITES]])
    test_rows = torch.cat([dataset.split_indices[site].test for site in dataset.sites])[:500]
    mean_image = pool.inputs(test_rows if len(test_rows) else rows).mean(0)
    figure = make_inversion_figure(
        module=simulation.trainer_context.make_model(),
        x=pool.inputs(rows),
        y=pool.labels(rows),
        mean_image=mean_image,
        max_grad_norm=max_grad_norm,
        noise_multiplier=noise_multiplier,
        steps=INVERSION_STEPS,
    )
    write_atomically(folder.path / "attacks" / "inversion.png", figure.to_png())
    cases = tuple(
        InversionCase(name=f.title, ssim=f.similarity.ssim, psnr=f.similarity.psnr, route=f.route)
        for f in figure.reconstructions
    )
    return InversionFinding(
        image="attacks/inversion.png",
        cases=cases,
        summary="The attack reconstructs an image from the update of one step on it, at the model before training. "
        "Similarity to the original (SSIM, 1 is identical): "
        + "; ".join(f"{case.name}: {case.ssim:.2f}" for case in cases)
        + ". The mean image is known without an attack.",
    )

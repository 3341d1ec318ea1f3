"""DP-SGD with Opacus: Poisson sampling of privacy units, per-unit clipping, Gaussian noise.

Abadi et al. 2016, arXiv 1607.00133, with patients or slides in place of examples. The local regularizer (FedProx,
SCAFFOLD) depends on no data and is added after the noise.

Only jobs whose result leaves the site are private: the training of a `train` task. Training for evaluation, for models
that stay at the site, or on public examples runs in a `SequentialTrainer`.

Neighbouring data sets differ in one unit, added or removed. A unit's clipped gradient must therefore depend on this
unit, the model and independent randomness alone: augmentation and dropout use `SecureRandom`, because with the study's
seeds the augmentation of a unit would depend on the units before it in the batch. The numbers of units and examples
from which `DpSgdParams` were computed when the plan was made count as public.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pipeline.core.errors import IncompatibleStudyError
from pipeline.core.parameters import ModelState
from pipeline.protocol.messages import SiteId
from pipeline.protocol.tasks import JobResult, TrainJob, TrainResult
from privacy.dpsgd.secure_rng import SecureRandom
from sites.data.pool import SplitIndices
from sites.training.base import StepBudget, TrainerContext, TrainRequest
from sites.training.sequential import SequentialTrainer, split_regularizer
from sites.training.unit_clipping import CLIPPING_METHODS, ClippingMode, DpSgdParams, UnitLoss, ignored_hook_warnings


class DpSgdTrainer:
    """Private jobs with DP-SGD, all others with a `SequentialTrainer`. `make_secure_random`: replaced in tests only."""

    def __init__(
        self,
        context: TrainerContext,
        dp_params: Mapping[SiteId, DpSgdParams],
        clipping_mode: ClippingMode,
        make_secure_random: Callable[[], SecureRandom] = SecureRandom,
    ) -> None:
        self.context, self.dp_params, self.make_secure_random = context, dp_params, make_secure_random
        self.sequential_trainer = SequentialTrainer(context)
        self.has_dropout = self.sequential_trainer.has_dropout
        self.clipping = CLIPPING_METHODS[clipping_mode](context)
        self._unit_rows: dict[SiteId, list[Tensor]] = {}

    def run(self, requests: Sequence[TrainRequest]) -> list[JobResult]:
        with ignored_hook_warnings():
            return [self.run_request(request) for request in requests]

    def run_request(self, request: TrainRequest) -> JobResult:
        job = request.job
        if not request.is_private:
            return self.sequential_trainer.run_request(request)
        if not isinstance(job, TrainJob) or job.inexactness is not None or job.maml_lr:
            raise IncompatibleStudyError(
                f"{request.site}: {type(job).__name__} has no privacy mechanism; use another strategy"
            )
        return self.train(request, job, self.context.indices_for(request), self.dp_params[request.site])

    def train(self, request: TrainRequest, job: TrainJob, indices: SplitIndices, dp_params: DpSgdParams) -> TrainResult:
        """`indices`: the site's examples. Each step takes a Poisson sample of their units."""
        context, config, clipping = self.context, self.context.config, self.clipping
        secure_random = self.make_secure_random()
        budget = StepBudget.from_job(job, indices, config)
        units = self._rows_by_unit(request.site, indices.train)
        context.spec.write_state(clipping.module, ModelState(job.initial_weights, job.norm_stats))
        clipping.select_trainable(context.trainable_positions(job))
        lr = config.learning_rate(job, request.round)
        base_optimizer = config.make_torch_optimizer(clipping.trainable_params, lr)
        optimizer = clipping.make_optimizer(base_optimizer, secure_random, dp_params)
        trainable_ids = {id(p) for p in clipping.trainable_params}
        regularizer_terms = [
            term
            for term in split_regularizer(context, clipping.params, job.regularizer)
            if id(term[0]) in trainable_ids
        ]
        unit_loss = UnitLoss(context, secure_random, context.public_class_weights, dp_params.loss_scale)
        clipping.module.train()
        if self.has_dropout:
            torch.manual_seed(secure_random.torch_generator().initial_seed())
        loss_sum, num_sampled_examples = 0.0, 0
        for _ in range(budget.steps_allowed):
            unit_indices = secure_random.poisson_sample(len(units), dp_params.sampling_rate)
            sampled_units = [units[i] for i in unit_indices.tolist()]
            loss_sum += clipping.compute_noised_gradient(sampled_units, unit_loss, optimizer)
            num_sampled_examples += sum(map(len, sampled_units))
            for p, slope, offset in regularizer_terms:  # after clipping and noise, because Opacus overwrites p.grad
                p.grad.add_(slope * p.detach() + offset)  # type: ignore[union-attr]
            base_optimizer.step()
            optimizer.zero_grad(True)
        clipping.restore_trainable()
        weights = context.spec.read_state(clipping.module).weights.cpu()
        lr_sum = lr * budget.steps_allowed if config.is_plain_sgd else None
        mean_loss = loss_sum / max(num_sampled_examples, 1)
        return TrainResult(weights, job.norm_stats, budget.local_work(budget.steps_allowed), mean_loss, lr_sum)

    def _rows_by_unit(self, site: SiteId, train_indices: Tensor) -> list[Tensor]:
        """The pool rows (n_u,) of each unit u of the site's training split; computed once per site."""
        if site not in self._unit_rows:
            is_example_level = self.dp_params[site].privacy_unit == "example"
            self._unit_rows[site] = split_by_unit(
                train_indices, None if is_example_level else self.context.pool.unit_ids
            )
        return self._unit_rows[site]


def split_by_unit(train_indices: Tensor, unit_ids: Tensor | None) -> list[Tensor]:
    """The pool rows (n_u,) of each unit u. `unit_ids` (N,): of all pool rows; None: every example is a unit."""
    if unit_ids is None:
        return list(train_indices.split(1))
    unit_of_row = np.unique(unit_ids[train_indices].cpu().numpy(), return_inverse=True)[1]
    order = torch.from_numpy(np.argsort(unit_of_row, kind="stable")).to(train_indices.device)
    return list(train_indices[order].split(np.bincount(unit_of_row).tolist()))

"""Three ways to the sum of the units' clipped gradients. All give the same sum; they differ in time and memory.

whole   a unit at a time by plain backward passes: nothing per example is kept, units may be of any size
hooks   gradients of single examples by Opacus's hooks, added up by unit: for units of few examples
ghost   norms first, then a second backward pass of the weighted losses: single examples, large dense layers
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import Tensor, nn

from privacy.dpsgd.optimizer import GhostOptimizer, UnitOptimizer
from privacy.dpsgd.secure_rng import Entropy
from sites.training.base import Bench
from sites.training.sequential import losses_of

# of the first layer: images need no gradient. For good, because trainers run in threads, which share their filters
warnings.filterwarnings("ignore", message="Full backward hook is firing")

Mode = Literal["whole", "hooks", "ghost"]
Noised = UnitOptimizer | GhostOptimizer
Piece = Sequence[Tensor]  # whole units: each one's rows of the pool
FLOATS = 1 << 24  # numbers of per-example gradients kept at a time
WIDEST = 256  # examples in a pass that keeps none
LARGE = 6  # examples a unit


@dataclass(frozen=True)
class Terms:
    """What a site's private training is bound to. Fixed when the plan is, so that one patient more changes none of it."""

    noise: float  # standard deviation, in clipping norms
    clip: float
    unit: str
    units: int
    rate: float  # chance of a unit to be in a step
    scale: float = 1.0  # units / examples: the mean over units is then, unclipped, that over examples

    def optimiser(self) -> dict[str, Any]:
        """The noisy sum is divided by the number of units that a step draws on average, never by how many it drew."""
        return {"noise_multiplier": self.noise, "max_grad_norm": self.clip, "loss_reduction": "mean",
                "expected_batch_size": self.rate * self.units}  # fmt: skip


@dataclass(frozen=True)
class Sight:
    """How the network sees a unit's examples, and what their losses count."""

    bench: Bench
    entropy: Entropy
    weights: Tensor | None  # (C,) of the classes
    scale: float

    def losses(self, module: nn.Module, rows: Tensor) -> Tensor:
        """(B,)"""
        x = self.bench.pool.inputs(rows)
        if not self.bench.recipe.augment.absent:
            x = self.bench.recipe.augment(x, self.entropy.generator())
        return losses_of(module(x), self.bench.pool.labels(rows), self.weights) * self.scale


class Clipping:
    """`module` is what trains."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.moving = self.params

    def move(self, places: Collection[int]) -> None:
        """Only these parameters are trained: what does not move is neither clipped nor noised."""
        self.moving = [p for place, p in enumerate(self.params) if place in places]

    def optimiser(self, inner: torch.optim.Optimizer, entropy: Entropy, terms: Terms) -> Noised:
        return UnitOptimizer(inner, entropy, **terms.optimiser())

    def mean_of(self, drawn: Piece, sight: Sight, optimiser: Noised) -> float:
        """Leaves the noised mean gradient of these units in .grad; the sum of their losses."""
        pieces = self.cut(drawn)
        total = 0.0
        for place, piece in enumerate(pieces):
            total += self.backward(piece, sight, optimiser)
            optimiser.signal_skip_step(place < len(pieces) - 1)
            if not optimiser.pre_step():
                optimiser.zero_grad(True)
        if not pieces:  # nobody was drawn: the step is noise
            optimiser.nobody()
            optimiser.pre_step()
        return total / sight.scale

    def restore(self) -> None:
        """As it was before `move`, to be read."""

    @abstractmethod
    def cut(self, drawn: Piece) -> list[Piece]:
        """What goes through the network at once."""

    @abstractmethod
    def backward(self, piece: Piece, sight: Sight, optimiser: Noised) -> float:
        """Leaves with the optimiser what it clips."""


class Whole(Clipping):
    def __init__(self, bench: Bench) -> None:
        super().__init__(bench.make().to(bench.pool.device))

    def move(self, places: Collection[int]) -> None:
        """Nothing is computed for the others. Opacus's hooks could not do that: they expect every layer to take part."""
        super().move(places)
        for place, p in enumerate(self.params):
            p.requires_grad_(place in places)

    def restore(self) -> None:
        for p in self.params:
            p.requires_grad_(True)

    def cut(self, drawn: Piece) -> list[Piece]:
        return [[rows] for rows in drawn]

    def backward(self, piece: Piece, sight: Sight, optimiser: Noised) -> float:
        assert isinstance(optimiser, UnitOptimizer)
        total = 0.0
        for rows in piece[0].split(WIDEST):
            loss = sight.losses(self.module, rows).sum()
            loss.backward()
            total += float(loss.detach())
        optimiser.alone()
        return total


class Hooks(Clipping):
    def __init__(self, bench: Bench) -> None:
        super().__init__(GradSampleModule(bench.make().to(bench.pool.device), loss_reduction="sum"))
        self.most = max(1, FLOATS // max(bench.spec.size, 1))  # examples at once, unless one unit has more

    def cut(self, drawn: Piece) -> list[Piece]:
        """No unit is split: its gradients have to be added up before they are clipped."""
        pieces: list[list[Tensor]] = []
        held = 0
        for rows in drawn:
            if not pieces or held + len(rows) > self.most:
                pieces.append([])
                held = 0
            pieces[-1].append(rows)
            held += len(rows)
        return list(pieces)

    def backward(self, piece: Piece, sight: Sight, optimiser: Noised) -> float:
        assert isinstance(optimiser, UnitOptimizer)
        loss = sight.losses(self.module, torch.cat(list(piece))).sum()
        loss.backward()
        moving = {id(p) for p in self.moving}
        for p in self.params:
            if id(p) not in moving:
                p.grad_sample = p.grad = None  # type: ignore[attr-defined]
        sizes = torch.tensor([len(rows) for rows in piece])
        owners = torch.arange(len(piece)).repeat_interleave(sizes)
        optimiser.owners(owners.to(piece[0].device), len(piece))
        return float(loss.detach())


class Ghost(Clipping):
    def __init__(self, bench: Bench) -> None:
        self.wrapped = GradSampleModuleFastGradientClipping(bench.make().to(bench.pool.device), loss_reduction="sum")
        super().__init__(self.wrapped)

    def optimiser(self, inner: torch.optim.Optimizer, entropy: Entropy, terms: Terms) -> Noised:
        self.wrapped.max_grad_norm = terms.clip
        self.wrapped.trainable_parameters = self.moving  # whose norms are added up
        return GhostOptimizer(inner, entropy, **terms.optimiser())

    def cut(self, drawn: Piece) -> list[Piece]:
        return [[rows] for rows in torch.cat(list(drawn)).split(WIDEST)] if drawn else []

    def backward(self, piece: Piece, sight: Sight, optimiser: Noised) -> float:
        losses = sight.losses(self.module, piece[0])
        DPTensorFastGradientClipping(self.wrapped, optimiser, losses, "sum").backward()
        return float(losses.detach().sum())


WAYS: dict[Mode, type[Whole] | type[Hooks] | type[Ghost]] = {"whole": Whole, "hooks": Hooks, "ghost": Ghost}


def way_for(module: nn.Module, per_unit: float) -> Mode:
    """Measured on a CPU: plain passes win from some six examples a unit on; ghost norms where all layers are dense."""
    if per_unit >= LARGE:
        return "whole"
    layers = [m for m in module.modules() if any(True for _ in m.parameters(recurse=False))]
    return "ghost" if per_unit == 1 and all(isinstance(m, nn.Linear) for m in layers) else "hooks"

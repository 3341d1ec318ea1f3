"""Which trainer: a deterministic rule, from measurements on two cores.

Chains of dense layers gain 2 to 4 times from stacking; convolutions lose 1.5 times on a CPU, where whole sites on one
thread each gain a little. On a GPU everything that can be stacked is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

import torch

from pipeline.core.errors import Refused
from pipeline.protocol.messages import SiteId
from pipeline.study.run_spec import Blueprint
from pipeline.study.schema import Study
from sites.population.simulated_sites import Population
from sites.training.augmentation import Augment
from sites.training.base import Bench, Recipe, Trainer
from sites.training.sequential import Loop, has_dropout
from sites.training.stacked_mlp import Chain

if TYPE_CHECKING:
    from sites.training.unit_clipping import Mode, Terms

Kind = Literal["loop", "stacked", "pool"]


def device_of(study: Study) -> torch.device:
    if study.device != "auto":
        there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        if not there[study.device]:
            raise Refused(f"device = {study.device!r}, but there is none here; use device = 'auto'")
        return torch.device(study.device)
    return torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")


def recipe_of(study: Study, lr: Callable[[int], float]) -> Recipe:
    local = study.local
    return Recipe(
        None if local.batch == "all" else local.batch,
        local.optimiser,
        local.momentum,
        local.weight_decay,
        lr,
        Augment(**study.augment.model_dump()),
        local.balance,
        None if local.trains is None else frozenset(local.trains),
        study.public.batch,
    )


def bench_of(blueprint: Blueprint, people: Population, recipe: Recipe) -> Bench:
    make, spec, classes = blueprint.make, blueprint.spec, len(blueprint.classes)
    return Bench(make, spec, people.pool, people.examples, recipe, classes, blueprint.study.seed, people.public)


def choose(
    asked: Literal["auto", "loop", "stacked", "pool"], bench: Bench, threads: int, private: bool = False
) -> Kind:
    if asked != "auto":
        return asked
    module = bench.make()
    stackable = not private and not bench.spec.stat_size and not has_dropout(module)
    if bench.pool.device.type != "cpu":
        return "stacked" if stackable else "loop"
    if stackable and Chain.of(module):
        return "stacked"
    several = threads > 1 and len(bench.examples) > 2
    return "pool" if several and not has_dropout(module) else "loop"


def threads_for(asked: int | None, bench: Bench) -> int:
    """Small models lose more by waiting for other threads than they gain from them."""
    small = bench.spec.size * (bench.recipe.batch or 1000) < 1_000_000
    return asked or (1 if small else os.cpu_count() or 1)


def make_trainer(
    kind: Kind, bench: Bench, terms: Mapping[SiteId, Terms] | None = None, mode: Mode = "whole"
) -> Trainer:
    """`terms`: of sites whose training is private, in that mode."""
    if terms:
        from sites.training.dp_sgd import Private

        if kind == "pool":
            from sites.training.threaded import ThreadPool

            return ThreadPool(bench, torch.get_num_threads(), lambda each: Private(each, terms, mode))
        return Private(bench, terms, mode)
    if kind == "stacked":
        from sites.training.stacked import Stacked

        # a GPU is one core that takes all sites at once
        return Stacked(bench, torch.get_num_threads() if bench.pool.device.type == "cpu" else 1)
    if kind == "pool":
        from sites.training.threaded import ThreadPool

        return ThreadPool(bench, torch.get_num_threads())
    return Loop(bench)

"""Federated learning for blood-smear classifiers, from Python: run studies, read runs, export and use their models,
write plugins. Anything heavy is imported when it is first used; see docs/python.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from hemofed._shadows import ShadowedPackageError, refuse_shadows

refuse_shadows()

from pipeline.core.errors import (  # noqa: E402  after the check that this is our pipeline
    BudgetError,
    BundleError,
    DataError,
    HemofedError,
    IncompatibleStudyError,
    KeyFileError,
    LedgerError,
    MessageError,
    MissingDataError,
    MissingExtraError,
    ModelError,
    NoSpaceError,
    QuorumNotReachedError,
    ReplyError,
    RunFolderError,
    RunHaltedError,
    ServiceError,
    StrategyContractError,
    StudyError,
    TaskDeclinedError,
)

if TYPE_CHECKING:
    from hemofed import data, networks, strategies, updates
    from hemofed._models import audit, compare, evaluate, export, predict, trust
    from hemofed._runs import Run, load_run, load_study, run
    from pipeline.study.schema import Study

    __version__: str

# module -> what it defines; imported at first use
_LAZY_NAMES = {
    "hemofed._models": ("audit", "compare", "evaluate", "export", "predict", "trust"),
    "hemofed._runs": ("Run", "load_run", "load_study", "run"),
    "pipeline.study.schema": ("Study",),
}
_MODULE_OF_NAME = {name: module for module, names in _LAZY_NAMES.items() for name in names}
_LAZY_MODULES = ("data", "networks", "strategies", "updates")

__all__ = [
    "BudgetError",
    "BundleError",
    "DataError",
    "HemofedError",
    "IncompatibleStudyError",
    "KeyFileError",
    "LedgerError",
    "MessageError",
    "MissingDataError",
    "MissingExtraError",
    "ModelError",
    "NoSpaceError",
    "QuorumNotReachedError",
    "ReplyError",
    "Run",
    "RunFolderError",
    "RunHaltedError",
    "ServiceError",
    "ShadowedPackageError",
    "StrategyContractError",
    "Study",
    "StudyError",
    "TaskDeclinedError",
    "__version__",
    "audit",
    "compare",
    "data",
    "evaluate",
    "export",
    "load_run",
    "load_study",
    "networks",
    "predict",
    "run",
    "strategies",
    "trust",
    "updates",
]


if not TYPE_CHECKING:  # a type checker would take any name for defined

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from importlib.metadata import version

            return version("hemofed")
        from hemofed._calls import api_call

        with api_call():
            if name in _LAZY_MODULES:
                return importlib.import_module(f"hemofed.{name}")
            if name in _MODULE_OF_NAME:
                return getattr(importlib.import_module(_MODULE_OF_NAME[name]), name)
        raise AttributeError(f"module 'hemofed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

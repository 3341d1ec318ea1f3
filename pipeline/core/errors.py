"""All errors of hemofed, as one tree. Each message says what is wrong, where, and what to do.

HemofedError
├── StudyError                 the study file or an override
│   └── IncompatibleStudyError parts of a study that cannot be combined
├── StrategyContractError      an algorithm or plugin that breaks its contract
├── MissingExtraError          an optional package is not installed
├── MissingDataError           a data set is not in the expected folder
├── DataError                  images, labels or manifests that cannot be used
├── ModelError                 a model that does not fit the data or the weights
├── MessageError               bytes that are not a message, or a message that this site does not accept
├── ReplyError                 a reply that must not enter the state
├── QuorumNotReachedError      fewer replies than the quorum
├── TaskDeclinedError          a client's task that the site does not perform, or not in time
├── KeyFileError               a private key that is damaged, locked or readable by others
├── LedgerError                a privacy ledger that fails verification, or an entry that may not be appended
├── BudgetError                noise, rates or budgets that cannot be accounted for
├── BundleError                a model bundle that is damaged, unsigned, or signed by an untrusted key
├── RunFolderError             a run folder that is missing, damaged or belongs to another study
├── RunHaltedError             a run between hospitals that halted: by request, or because too few sites are connected
├── ServiceError               a coordinator or site agent that cannot be reached, or refuses
└── NoSpaceError               the disk is full
"""

from __future__ import annotations


class HemofedError(Exception):
    """An error with a message for people; the command line prints it without a traceback."""


class StudyError(HemofedError): ...


class IncompatibleStudyError(StudyError): ...


class StrategyContractError(HemofedError): ...


class MissingExtraError(HemofedError): ...


class MissingDataError(HemofedError): ...


class DataError(HemofedError): ...


class ModelError(HemofedError): ...


class MessageError(HemofedError): ...


class ReplyError(HemofedError): ...


class QuorumNotReachedError(HemofedError): ...


class TaskDeclinedError(HemofedError):
    """`kind`: a `DeclineKind` of pipeline/protocol/messages.py."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class KeyFileError(HemofedError): ...


class LedgerError(HemofedError): ...


class BudgetError(HemofedError): ...


class BundleError(HemofedError): ...


class RunFolderError(HemofedError): ...


class RunHaltedError(HemofedError): ...


class ServiceError(HemofedError): ...


class NoSpaceError(HemofedError): ...

"""Everything hemofed refuses, as one tree. Each message says what was wrong, where, and what to do.

HemofedError
├── BadStudy       the study file or an override
│   └── Refused    parts of a study that do not go together
├── BadStrategy    an algorithm or plugin that breaks its contract
├── MissingExtra   an optional package is not installed
├── MissingData    a data set is not where it was looked for
├── BadData        images, labels or manifests that cannot be used
├── BadModel       a model that does not fit the data or the weights
├── BadMessage     bytes that are no message, or one this site does not take
├── BadReply       an answer that may not enter the state
├── TooFew         fewer answers than the quorum
├── BadKey         a private key that is damaged, locked or readable by others
├── BadLedger      a privacy ledger that cannot be believed, or an entry that may not be added
├── BadBudget      noise, rates or budgets that cannot be accounted for
├── BadBundle      a model bundle that is damaged, unsigned, or signed by nobody this machine trusts
├── BadRun         a run folder that is missing, damaged or belongs to another study
├── Halted         a run across hospitals that rests: it was told to, or too few sites are there
├── BadService     a coordinator or site agent that cannot be reached, or refuses
└── NoSpace        the disk is full
"""

from __future__ import annotations


class HemofedError(Exception):
    """An error whose text is meant for a person; the command line prints it without a traceback."""


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


class KeyFileError(HemofedError): ...


class LedgerError(HemofedError): ...


class BudgetError(HemofedError): ...


class BundleError(HemofedError): ...


class RunFolderError(HemofedError): ...


class RunHaltedError(HemofedError): ...


class ServiceError(HemofedError): ...


class NoSpaceError(HemofedError): ...

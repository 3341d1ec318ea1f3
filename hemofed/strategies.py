"""What a federated algorithm imports: `Strategy` to subclass, jobs, messages and helpers; see docs/add-a-strategy.md."""

from pipeline.strategies import *  # noqa: F403
from pipeline.strategies import __all__ as __all__

"""Removes all request processors of FLARE's client, except those that start and end the jobs of runs.

FLARE checks the site's authorization only for requests that ask for it. Without this module, a malicious server could
read files of the site.
"""

from __future__ import annotations

from nvflare.apis.fl_component import FLComponent
from nvflare.private.defs import TrainingTopic
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

ALLOWED_TOPICS = frozenset({
    TrainingTopic.CHECK_RESOURCE, TrainingTopic.CANCEL_RESOURCE, TrainingTopic.DEPLOY, TrainingTopic.START_JOB,
    TrainingTopic.ABORT, TrainingTopic.ABORT_TASK, TrainingTopic.CHECK_STATUS, TrainingTopic.NOTIFY_JOB_STATUS,
})  # fmt: skip


class FlareRequestHardening(FLComponent):  # type: ignore[misc]
    """A component of the client's kit. FLARE builds it before the client connects; if that fails, the client does not start."""

    def __init__(self) -> None:
        super().__init__()
        processors = ClientRequestProcessors.request_processors
        processors[:] = [processor for processor in processors if set(processor.get_topics()) <= ALLOWED_TOPICS]

"""What FLARE's client does for the coordinator: starts and ends the jobs of runs. Everything else is taken out of it.

FLARE asks the site's authorization only where a request says that it wants to be authorised. So files could be read here
by whoever speaks as the server.
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
    """A component of the client's kit, built before the client speaks to anybody; where it cannot be, none starts."""

    def __init__(self) -> None:
        super().__init__()
        processors = ClientRequestProcessors.request_processors
        processors[:] = [processor for processor in processors if set(processor.get_topics()) <= ALLOWED_TOPICS]

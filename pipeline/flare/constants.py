"""Names that both ends of the FLARE engine use. No import of FLARE: kits and agents need them, too."""

from __future__ import annotations

DATA_SUMMARY_TASK, EXCHANGE_TASK = "about", "ask"  # tasks
HEARTBEAT_TOPIC, RECEIPT_TOPIC = "hemofed.alive", "hemofed.receipt"  # messages aside
MESSAGE_BYTES_KEY, JSON_TEXT_KEY = "parcel", "told"  # what they carry: bytes, JSON text
COORDINATOR_HOME_ENV = "HEMOFED_COORDINATOR"  # environment: the coordinator's home
SITE_HOME_ENV = "HEMOFED_SITE"  # environment: the site's home
MAX_SILENCE_SECONDS = 20.0  # seconds after which a silent site is not waited for
HEARTBEAT_SECONDS = 1.0  # seconds between two signs of life of a site at work
CONTROLLER_PATH, EXECUTOR_PATH = (
    "pipeline.service.runtime.flare_job.FlareController",
    "sites.worker.flare_executor.SiteExecutor",
)

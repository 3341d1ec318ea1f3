"""Names that coordinator and sites share in FLARE. Does not import nvflare: kits and agents use them, too."""

from __future__ import annotations

DATA_SUMMARY_TASK, EXCHANGE_TASK = "data_summary", "exchange"  # tasks
HEARTBEAT_TOPIC, RECEIPT_TOPIC = "hemofed.alive", "hemofed.receipt"  # topics of auxiliary messages
MESSAGE_BYTES_KEY, JSON_TEXT_KEY = "message", "json"  # keys in a Shareable: bytes, JSON text
COORDINATOR_HOME_ENV = "HEMOFED_COORDINATOR"  # environment variable: the coordinator's home
SITE_HOME_ENV = "HEMOFED_SITE"  # environment variable: the site's home
MAX_SILENCE_SECONDS = 20.0  # after which the engine stops waiting for a silent site
HEARTBEAT_SECONDS = 1.0  # between two heartbeats of a working site
CONTROLLER_PATH, EXECUTOR_PATH = (
    "pipeline.service.runtime.flare_job.FlareController",
    "sites.worker.flare_executor.SiteExecutor",
)

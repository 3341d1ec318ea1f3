"""Names that both ends of the FLARE engine use. No import of FLARE: kits and agents need them, too."""

from __future__ import annotations

ABOUT, ASK = "about", "ask"  # tasks
ALIVE, RECEIPT = "hemofed.alive", "hemofed.receipt"  # messages aside
PARCEL, TOLD = "parcel", "told"  # what they carry: bytes, JSON text
HOME = "HEMOFED_COORDINATOR"  # environment: the coordinator's home
SITE_HOME = "HEMOFED_SITE"  # environment: the site's home
SILENCE = 20.0  # seconds after which a silent site is not waited for
BEAT = 1.0  # seconds between two signs of life of a site at work
CONTROLLER, EXECUTOR = "pipeline.engines.flare.Federation", "sites.worker.flare_executor.SiteExecutor"

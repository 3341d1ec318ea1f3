"""The notice that every bundle, every result and every page carries."""

from __future__ import annotations

RESEARCH_USE_NOTICE = "research use only, not a medical device"

"""The sections of a run's report, one subject a module."""

"""The report's section on baselines: local-only and pooled training beside the federation."""

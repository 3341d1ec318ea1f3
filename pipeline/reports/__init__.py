"""Figures and pages: a run's report, comparison of runs, the preview and the check of a site's data."""

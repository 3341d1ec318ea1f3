"""The audit report: facts of a run, what they mean, and the report as HTML, PDF and JSON."""

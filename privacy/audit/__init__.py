"""The audit report: facts of a run, words about them, and HTML, PDF and JSON made of both."""

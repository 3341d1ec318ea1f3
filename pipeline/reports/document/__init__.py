"""The document model of all reports, and its HTML and PDF."""

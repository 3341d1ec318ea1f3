"""The chapters of the audit report."""

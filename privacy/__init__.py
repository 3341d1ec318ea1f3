"""Differential privacy, privacy ledgers, secure aggregation, attacks, and the audit report."""

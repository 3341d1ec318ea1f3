"""Processes: server, run supervisor, run states, receipts, TLS router, and the HTTP client of the commands."""

"""What runs: the server process, the supervisor of studies, run states, receipts, the TLS router, the HTTP client of the commands."""

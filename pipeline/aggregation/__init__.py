"""How the replies of a round become one: client sampling, requests, aggregation rules, secure aggregation, client-level DP."""

"""Federated algorithms, one a module, with both halves: what the coordinator does and what a client does."""

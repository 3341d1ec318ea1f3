"""Enforces a study's privacy at the site: the privacy plan, the budget guard, the client of secure aggregation."""

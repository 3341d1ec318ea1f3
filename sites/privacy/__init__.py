"""What enforces a study's privacy at the site: the plan, the budget guard, the client of secure aggregation."""

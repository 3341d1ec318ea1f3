"""The report's section on clusters of sites."""

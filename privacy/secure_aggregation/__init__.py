"""Secure aggregation (Bonawitz et al. 2017): the coordinator learns the sum of the sites' updates and no single update."""

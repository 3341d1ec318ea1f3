"""Secure aggregation (Bonawitz et al. 2017): the coordinator learns a sum and no summand."""

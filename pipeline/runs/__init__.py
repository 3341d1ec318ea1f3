"""Composition roots: a study becomes a simulation, a run across hospitals, baselines, or a late join."""

"""Finds cells in a field: illumination, foreground, touching cells, classes."""

"""Shared by all packages: errors, files, seeds, flat parameter vectors, the component registry. Imports no other package."""

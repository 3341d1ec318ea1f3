"""Reproductions of published results, one table or report per module."""

"""Epsilon of noisy steps, and the filter that guards a data set across studies."""

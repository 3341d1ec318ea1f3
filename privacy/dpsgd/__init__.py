"""DP-SGD: the optimizer that clips by privacy unit, and secret random numbers."""

"""Trainers: they perform local jobs, sequentially, stacked, in threads, or privately (DP-SGD)."""

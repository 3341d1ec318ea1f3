"""Engines carry messages to clients and replies back: simulated clients in this process, or sites behind NVIDIA FLARE."""

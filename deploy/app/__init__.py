"""The local page of the edge machine."""

"""From a finished run to the edge: export, bundles, inference without torch, whole slides, the local page."""

"""Networks that are trained, and the probe that measures what a network is shown."""

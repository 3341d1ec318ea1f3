"""Networks for training, and the probe that measures images and their features."""

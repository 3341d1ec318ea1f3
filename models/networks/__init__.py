"""Networks that a study selects by name, one family per module. Convolutional networks use GroupNorm by default."""

"""Who holds which examples and how each site sees them: partitions, feature skew, color normalization."""

"""Everything that runs at a hospital, beside its images."""

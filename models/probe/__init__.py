"""Features and image-quality measures, computed identically at training sites and inside the exported graph."""

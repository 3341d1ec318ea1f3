"""Data sources: images and labels from folders, manifests, cell files or the renderer."""

"""`hemofed site check`: class counts, duplicates, image quality, and personal data (PHI) in files."""

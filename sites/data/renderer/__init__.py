"""A procedural renderer of blood smears. No image is copied: colors, sizes and shapes are numbers, set after
figures measured on a public set (Chula RBC-12, folds 1 to 3) and after its look."""

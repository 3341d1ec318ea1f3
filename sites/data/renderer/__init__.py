"""A procedural renderer of blood smears, which copies no image. Colours, sizes and shapes are random numbers whose
distributions were set from measurements on a public data set (Chula-RBC-12, folds 1 to 3) and by eye."""

"""What every other package may use: errors, files, seeds, flat parameter vectors, the component registry. Imports nothing of hemofed."""

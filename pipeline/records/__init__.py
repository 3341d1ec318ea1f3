"""The files of a run and the files by which its processes talk: one typed record a file, read and written here only."""

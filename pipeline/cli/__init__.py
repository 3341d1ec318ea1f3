"""The command line. A command's code is imported only when the command runs."""

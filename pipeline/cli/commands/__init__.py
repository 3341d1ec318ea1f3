"""What the commands do, one command or family a module."""

"""`hemofed site ...`: what a hospital's data engineer and officer run."""

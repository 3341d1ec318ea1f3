"""The study, the federation's rounds and the coordinator that runs them; `pipeline.cli` is the command `hemofed`."""

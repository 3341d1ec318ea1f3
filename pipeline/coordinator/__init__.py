"""The round loop, evaluation, checkpoints and the run folder."""

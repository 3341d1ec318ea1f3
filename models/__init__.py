"""Networks that a study file chooses by name, one a file; GroupNorm unless asked otherwise."""

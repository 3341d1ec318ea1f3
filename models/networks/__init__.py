"""Networks that a study chooses by name, one or one family a module; GroupNorm unless asked otherwise."""

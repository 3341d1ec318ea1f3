"""The study file: schema, TOML, validation, and the offer that sites are asked to approve; packaged studies."""

"""Machine files in TOML: reading, writing, and machines with changed figures."""

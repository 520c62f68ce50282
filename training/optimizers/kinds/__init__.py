"""One optimizer a file; each has its record, which the registry lists."""

"""One optimizer per file; each has its record, which the registry lists."""

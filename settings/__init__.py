"""How a setting is declared: once, as a field of a dataclass."""

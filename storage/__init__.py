"""Reads, writes, hashes and locks files. All other code may import it; it imports none of theirs."""

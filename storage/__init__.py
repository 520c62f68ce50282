"""The one place that reads, writes, hashes and locks files. Everyone may import it; it imports nobody."""

"""Pictures and captions on disk, and what training sees of them."""

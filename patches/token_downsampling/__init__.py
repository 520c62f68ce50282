"""Token downsampling (ToDo): fewer keys and values in self-attention."""

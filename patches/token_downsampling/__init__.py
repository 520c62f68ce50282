"""Token downsampling (ToDo): thins the keys and values of self-attention."""

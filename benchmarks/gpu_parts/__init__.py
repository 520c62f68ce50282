"""The parts of `python dev.py gpu`: checks and measurements on one device, each in a process of its own."""

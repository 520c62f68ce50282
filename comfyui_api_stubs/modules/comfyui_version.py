"""The version of ComfyUI's interface that the embedded host follows."""

__version__ = "0.3.64"

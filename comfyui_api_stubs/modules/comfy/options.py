"""Whether the command line belongs to the host (ComfyUI's `comfy.options`); the embedded host never reads it."""

args_parsing = False


def enable_args_parsing(enable=True):
    """Remember that a launcher asked for command-line parsing."""
    global args_parsing
    args_parsing = enable

"""What the embedded engine says to a module that it cannot run in parallel."""


class CaptureError(ValueError):
    """The module does something that the engine cannot run in parallel."""

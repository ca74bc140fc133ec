"""Custom ops with annotations, for auto-parallelizers and for calling directly."""

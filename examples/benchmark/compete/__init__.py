"""Who takes part, what is asked of them, and whether what they compute is right."""

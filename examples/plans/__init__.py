"""Examples that print and draw plans."""

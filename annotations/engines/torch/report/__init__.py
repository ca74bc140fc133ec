"""A plan as a value that prints, is saved and is read again."""

"""The contestants, the problems that they are given, and whether their results are right."""

"""Small matrices and vectors as lists of numbers."""

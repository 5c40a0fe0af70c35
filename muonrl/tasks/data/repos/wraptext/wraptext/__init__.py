"""Plain text in columns: wrapping, padding and words."""

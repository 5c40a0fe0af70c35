"""Scores and statistics of short lists of numbers."""

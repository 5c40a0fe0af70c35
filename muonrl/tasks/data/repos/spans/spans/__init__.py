"""Closed integer intervals: clamp, merge and count."""

"""Temperatures, roman numerals and slugs."""

"""Rectangular grids as lists of rows."""

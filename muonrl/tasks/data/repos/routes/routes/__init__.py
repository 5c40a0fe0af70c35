"""Trips between stops: legs, times and roads."""

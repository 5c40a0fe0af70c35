"""Repair tasks: what they are, how they are loaded, made from a repository and verified."""

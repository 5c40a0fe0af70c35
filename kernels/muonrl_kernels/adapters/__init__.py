"""The losses behind other systems' argument lists; nothing of those systems is imported."""

"""Dates, weekdays and clock times as plain numbers."""

"""Whole-cent money: sums, change, shares and prices."""

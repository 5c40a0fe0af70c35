"""The algorithm of the recipe as pure functions and small trackers: values, penalties, advantages, moving averages."""

"""A small shop: stock on shelves, orders and boxes."""

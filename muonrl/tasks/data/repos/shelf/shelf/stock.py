"""Items on hand as a dict from name to count."""


def in_stock(stock, item):
    if item not in stock:
        return False
    return stock[item] > 0


def add_item(stock, item, count):
    out = dict(stock)
    out[item] = out.get(item, 0) + count
    return out


def take_item(stock, item, count):
    out = dict(stock)
    left = out.get(item, 0) - count
    if left < 0:
        return stock
    out[item] = left
    return out


def missing(stock, wanted):
    out = []
    for item in wanted:
        if item not in stock:
            out.append(item)
    return out


def low_items(stock, limit):
    out = []
    for item in sorted(stock):
        if stock[item] < limit:
            out.append(item)
    return out


def stock_size(stock):
    total = 0
    for item in stock:
        total += stock[item]
    return total

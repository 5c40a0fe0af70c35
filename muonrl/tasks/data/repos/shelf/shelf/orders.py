"""Orders as lists of (count, price) pairs."""


def order_total(order):
    total = 0
    for count, price in order:
        total += count * price
    return total


def shipping(total, limit, fee):
    if total >= limit:
        return 0
    return fee


def biggest_line(order):
    best = 0
    for count, price in order:
        if count * price > best:
            best = count * price
    return best


def reorder(have, level, pack):
    if have >= level:
        return 0
    need = level - have
    return (need + pack - 1) // pack


def is_free(total, member):
    if total == 0:
        return True
    return member and total < 10


def first_short(have, need):
    for i in range(len(need)):
        if have[i] < need[i]:
            return i
    return -1

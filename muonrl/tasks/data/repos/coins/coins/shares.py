"""Splitting amounts and working out prices."""


def split_even(cents, people):
    share = cents // people
    rest = cents % people
    out = []
    for i in range(people):
        out.append(share + 1 if i < rest else share)
    return out


def add_tax(cents, percent):
    if percent <= 0:
        return cents
    return cents + cents * percent // 100


def discount(cents, percent):
    if percent >= 100:
        return 0
    return cents - cents * percent // 100


def cheapest(prices):
    best = 0
    for i in range(len(prices)):
        if prices[i] < prices[best]:
            best = i
    return best


def bulk_price(price, count, limit):
    if count >= limit and limit > 0:
        return price * count // 2
    return price * count


def running(amounts):
    total = 0
    out = []
    for cents in amounts:
        total += cents
        out.append(total)
    return out


def round_up(cents, unit):
    rest = cents % unit
    if rest == 0:
        return cents
    return cents + unit - rest

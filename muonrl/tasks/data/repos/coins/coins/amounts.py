"""Amounts in cents, written as "1.05": always two digits."""


def total_of(amounts):
    total = 0
    for cents in amounts:
        total += cents
    return total


def parse_cents(text):
    whole, _, part = text.partition(".")
    if not part:
        return int(whole) * 100
    return int(whole) * 100 + int(part)


def show(cents):
    if cents < 0:
        return "-" + show(-cents)
    part = cents % 100
    if part < 10:
        return f"{cents // 100}.0{part}"
    return f"{cents // 100}.{part}"


def largest(amounts):
    if not amounts:
        return 0
    best = amounts[0]
    for cents in amounts:
        if cents > best:
            best = cents
    return best


def refund(paid, price):
    if paid <= price:
        return 0
    return paid - price


def count_over(amounts, limit):
    count = 0
    for cents in amounts:
        if cents > limit:
            count += 1
    return count

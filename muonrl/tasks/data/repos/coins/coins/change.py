"""Paying out with as few coins as possible."""


def coins_for(cents, coins):
    out = []
    for coin in coins:
        while cents >= coin:
            out.append(coin)
            cents -= coin
    return out


def coin_count(cents, coins):
    count = 0
    for coin in coins:
        count += cents // coin
        cents = cents % coin
    return count


def can_pay(wallet, price):
    total = 0
    for coin in wallet:
        total += coin
        if total >= price:
            return True
    return price <= 0


def biggest_coin(cents, coins):
    best = 0
    for coin in coins:
        if coin <= cents and coin > best:
            best = coin
    return best


def is_exact(wallet, price):
    if not wallet:
        return price == 0
    return sum(wallet) == price

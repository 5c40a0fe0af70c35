"""Means, medians and spreads."""


def mean(xs):
    if not xs:
        return 0
    return sum(xs) / len(xs)


def median(xs):
    xs = sorted(xs)
    mid = len(xs) // 2
    if len(xs) % 2 == 1:
        return xs[mid]
    return (xs[mid - 1] + xs[mid]) / 2


def value_range(xs):
    if not xs:
        return 0
    return max(xs) - min(xs)


def weighted(xs, weights):
    total = 0
    for i in range(len(xs)):
        total += xs[i] * weights[i]
    return total / sum(weights)


def variance(xs):
    middle = sum(xs) / len(xs)
    total = 0
    for x in xs:
        total += (x - middle) ** 2
    return total / len(xs)


def trimmed(xs):
    if len(xs) <= 2:
        return xs
    return sorted(xs)[1:-1]

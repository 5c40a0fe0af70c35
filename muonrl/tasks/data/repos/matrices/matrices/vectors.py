"""Vectors as flat lists."""


def dot(xs, ys):
    total = 0
    for i in range(len(xs)):
        total += xs[i] * ys[i]
    return total


def add(xs, ys):
    out = []
    for i in range(len(xs)):
        out.append(xs[i] + ys[i])
    return out


def scale(xs, factor):
    if factor == 1:
        return xs
    return [x * factor for x in xs]


def largest_at(xs):
    best = 0
    for i in range(1, len(xs)):
        if xs[i] > xs[best]:
            best = i
    return best


def norm1(xs):
    total = 0
    for x in xs:
        total += abs(x)
    return total


def is_zero(xs):
    for x in xs:
        if x != 0:
            return False
    return True

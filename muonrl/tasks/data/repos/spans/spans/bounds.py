"""Tests and distances on single intervals."""


def clamp(x, lo, hi):
    if x < lo:
        return lo
    if x > hi:
        return hi
    return x


def inside(x, lo, hi):
    if lo > hi:
        return False
    return x >= lo and x <= hi


def overlap(a, b):
    lo = max(a[0], b[0])
    hi = min(a[1], b[1])
    if lo > hi:
        return 0
    return hi - lo + 1


def gap(a, b):
    if a[0] > b[0]:
        return gap(b, a)
    if b[0] <= a[1]:
        return 0
    return b[0] - a[1]


def middle(lo, hi):
    if lo > hi:
        lo, hi = hi, lo
    return (lo + hi) // 2

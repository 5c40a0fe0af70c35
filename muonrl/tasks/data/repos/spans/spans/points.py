"""Sorted points and the intervals around them."""


def nearest(points, x):
    best = points[0]
    for p in points:
        if abs(p - x) < abs(best - x):
            best = p
    return best


def count_in(points, lo, hi):
    count = 0
    for p in points:
        if lo <= p <= hi:
            count += 1
    return count


def first_at(points, x):
    for i in range(len(points)):
        if points[i] >= x:
            return i
    return len(points)


def spread(points):
    if not points:
        return 0
    return max(points) - min(points)


def steps(points):
    out = []
    for i in range(1, len(points)):
        out.append(points[i] - points[i - 1])
    return out


def is_sorted(points):
    for i in range(1, len(points)):
        if points[i] < points[i - 1]:
            return False
    return True

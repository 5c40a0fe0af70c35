"""Stops in the order in which they are visited."""


def is_loop(stops):
    if len(stops) < 2:
        return False
    return stops[0] == stops[-1]


def leg_pairs(stops):
    out = []
    for i in range(1, len(stops)):
        out.append((stops[i - 1], stops[i]))
    return out


def visits(stops, name):
    count = 0
    for stop in stops:
        if stop == name:
            count += 1
    return count


def between(stops, a, b):
    first = stops.index(a)
    last = stops.index(b)
    if first > last:
        return between(stops, b, a)
    return stops[first + 1 : last]


def skip(stops, closed):
    out = []
    for stop in stops:
        if stop not in closed:
            out.append(stop)
    return out

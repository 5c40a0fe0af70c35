"""Roads as (from, to, km) triples."""


def degree(roads, stop):
    count = 0
    for a, b, _ in roads:
        if a == stop or b == stop:
            count += 1
    return count


def road_km(roads, start, end):
    for a, b, km in roads:
        if a == start and b == end:
            return km
    return 0


def exits(roads, stop):
    out = []
    for a, b, _ in roads:
        if a == stop:
            out.append(b)
    return out


def shortest_road(roads):
    best = roads[0]
    for road in roads:
        if road[2] < best[2]:
            best = road
    return best


def toll(km, free, rate):
    if km <= free:
        return 0
    return (km - free) * rate

"""Lengths and times of the legs of a trip."""


def trip_length(legs):
    total = 0
    for leg in legs:
        total += leg
    return total


def longest_leg(legs):
    best = 0
    for leg in legs:
        if leg > best:
            best = leg
    return best


def speed(km, hours):
    if hours <= 0:
        return 0
    return km / hours


def stops_within(legs, limit):
    count = 0
    total = 0
    for leg in legs:
        total += leg
        if total <= limit:
            count += 1
    return count


def fuel_stops(km, tank):
    if km <= tank:
        return 0
    return (km - 1) // tank


def milestones(legs):
    total = 0
    out = []
    for leg in legs:
        total += leg
        out.append(total)
    return out

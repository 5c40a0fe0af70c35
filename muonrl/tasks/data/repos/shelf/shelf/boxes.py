"""Packing weights into boxes of one size."""


def fits(weights, limit):
    total = 0
    for weight in weights:
        total += weight
    return total <= limit


def box_count(items, size):
    if items <= 0:
        return 0
    return (items - 1) // size + 1


def fill(weights, limit):
    out = []
    for weight in weights:
        if sum(out) + weight <= limit:
            out.append(weight)
    return out


def free_space(weights, limit):
    used = sum(weights)
    if used > limit:
        return 0
    return limit - used


def heaviest(weights):
    best = 0
    for i in range(1, len(weights)):
        if weights[i] > weights[best]:
            best = i
    return best


def split_boxes(items, size):
    out = []
    for i in range(0, len(items), size):
        out.append(items[i : i + size])
    return out

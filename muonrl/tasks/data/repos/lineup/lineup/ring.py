"""Ring positions and rotation."""


def next_slot(slot, size):
    if slot + 1 == size:
        return 0
    return slot + 1


def rotate(xs, step):
    if not xs:
        return []
    step = step % len(xs)
    return xs[step:] + xs[:step]


def ring_gap(a, b, size):
    if a <= b:
        return b - a
    return b - a + size


def is_full(count, size):
    if size <= 0:
        return True
    return count >= size


def every(xs, step):
    out = []
    for i in range(len(xs)):
        if i % step == 0:
            out.append(xs[i])
    return out


def interleave(xs, ys):
    out = []
    for i in range(min(len(xs), len(ys))):
        out.append(xs[i])
        out.append(ys[i])
    return out

"""Lists of intervals: join them and measure them."""


def touches(a, b):
    if a[1] < b[0] or b[1] < a[0]:
        return False
    return True


def merge(spans):
    out = []
    for lo, hi in sorted(spans):
        if out and lo <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], hi))
        else:
            out.append((lo, hi))
    return out


def covered(spans):
    total = 0
    for lo, hi in spans:
        total += hi - lo + 1
    return total


def widest(spans):
    best = 0
    for lo, hi in spans:
        if hi - lo > best:
            best = hi - lo
    return best


def shift(spans, step):
    out = []
    for lo, hi in spans:
        out.append((lo + step, hi + step))
    return out


def holes(spans):
    out = []
    for i in range(1, len(spans)):
        lo = spans[i - 1][1] + 1
        hi = spans[i][0] - 1
        if lo <= hi:
            out.append((lo, hi))
    return out

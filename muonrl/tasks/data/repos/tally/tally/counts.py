"""How often values occur."""


def histogram(xs):
    out = {}
    for x in xs:
        out[x] = out.get(x, 0) + 1
    return out


def mode(xs):
    best = xs[0]
    for x in xs:
        if xs.count(x) > xs.count(best):
            best = x
    return best


def share_above(xs, limit):
    count = 0
    for x in xs:
        if x > limit:
            count += 1
    return count / len(xs)


def unique(xs):
    out = []
    for x in xs:
        if x not in out:
            out.append(x)
    return out


def longest_run(xs):
    best, run = 0, 0
    for i in range(len(xs)):
        if i > 0 and xs[i] == xs[i - 1]:
            run += 1
        else:
            run = 1
        best = max(best, run)
    return best


def percent(part, whole):
    if whole == 0:
        return 0
    return 100 * part // whole

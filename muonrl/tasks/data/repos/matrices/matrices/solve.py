"""Numbers worked out from a matrix."""


def trace(rows):
    total = 0
    for i in range(len(rows)):
        total += rows[i][i]
    return total


def det2(rows):
    left = rows[0][0] * rows[1][1]
    right = rows[0][1] * rows[1][0]
    return left - right


def is_symmetric(rows):
    for i in range(len(rows)):
        for j in range(i):
            if rows[i][j] != rows[j][i]:
                return False
    return True


def apply(rows, xs):
    out = []
    for row in rows:
        total = 0
        for i in range(len(xs)):
            total += row[i] * xs[i]
        out.append(total)
    return out


def max_entry(rows):
    best = rows[0][0]
    for row in rows:
        for x in row:
            if x > best:
                best = x
    return best

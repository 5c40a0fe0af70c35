"""Building matrices and changing their shape."""


def identity(size):
    out = []
    for i in range(size):
        out.append([0] * i + [1] + [0] * (size - i - 1))
    return out


def is_square(rows):
    for row in rows:
        if len(row) != len(rows):
            return False
    return True


def transpose(rows):
    out = []
    for j in range(len(rows[0])):
        out.append([row[j] for row in rows])
    return out


def flatten(rows):
    out = []
    for row in rows:
        out += row
    return out


def reshape(xs, width):
    out = []
    for i in range(0, len(xs), width):
        out.append(xs[i : i + width])
    return out

"""Steps, distances and neighbours on a grid."""


def distance(a, b):
    rows = abs(a[0] - b[0])
    cols = abs(a[1] - b[1])
    return rows + cols


def king_distance(a, b):
    rows = abs(a[0] - b[0])
    cols = abs(a[1] - b[1])
    return max(rows, cols)


def step(row, col, move):
    if move == "up":
        return (row - 1, col)
    if move == "down":
        return (row + 1, col)
    if move == "left":
        return (row, col - 1)
    return (row, col + 1)


def around(row, col):
    up, down = (row - 1, col), (row + 1, col)
    left, right = (row, col - 1), (row, col + 1)
    return [up, left, right, down]


def neighbours(row, col, size):
    out = []
    for r, c in around(row, col):
        if 0 <= r < size and 0 <= c < size:
            out.append((r, c))
    return out


def same_line(a, b):
    if a == b:
        return False
    return a[0] == b[0] or a[1] == b[1]


def index_of(row, col, width):
    if col >= width:
        return -1
    return row * width + col


def position_of(index, width):
    row = index // width
    col = index % width
    return (row, col)

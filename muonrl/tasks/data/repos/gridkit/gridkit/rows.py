"""Sums and transformations of whole rows."""


def row_sums(grid):
    out = []
    for row in grid:
        out.append(sum(row))
    return out


def best_row(grid):
    best = 0
    for i in range(len(grid)):
        if sum(grid[i]) > sum(grid[best]):
            best = i
    return best


def flip_rows(grid):
    out = []
    for row in grid:
        out.append(row[::-1])
    return out


def diagonal(grid):
    out = []
    for i in range(len(grid)):
        out.append(grid[i][i])
    return out


def border_count(height, width):
    if height <= 0 or width <= 0:
        return 0
    if height == 1 or width == 1:
        return height * width
    return 2 * (height + width) - 4

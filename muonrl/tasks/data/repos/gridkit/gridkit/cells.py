"""Reading, counting and changing cells."""


def in_grid(grid, row, col):
    if row < 0 or col < 0:
        return False
    return row < len(grid) and col < len(grid[0])


def cell_at(grid, row, col, default=0):
    if row < 0 or row >= len(grid):
        return default
    if col < 0 or col >= len(grid[row]):
        return default
    return grid[row][col]


def make_grid(height, width, value=0):
    out = []
    for _ in range(height):
        out.append([value] * width)
    return out


def count_value(grid, value):
    count = 0
    for row in grid:
        for cell in row:
            if cell == value:
                count += 1
    return count


def find_value(grid, value):
    for i in range(len(grid)):
        for j in range(len(grid[i])):
            if grid[i][j] == value:
                return (i, j)
    return None


def column_of(grid, col):
    out = []
    for row in grid:
        out.append(row[col])
    return out

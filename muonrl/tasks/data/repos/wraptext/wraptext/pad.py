"""Filling text up to a width."""


def pad_right(text, width):
    rest = width - len(text)
    if rest <= 0:
        return text
    return text + " " * rest


def pad_left(text, width, fill=" "):
    rest = width - len(text)
    if rest <= 0:
        return text
    return fill * rest + text


def center(text, width):
    rest = width - len(text)
    if rest < 2:
        return text
    left = rest // 2
    return " " * left + text


def ruler(width):
    out = ""
    for i in range(1, width + 1):
        out += "+" if i % 5 == 0 else "-"
    return out


def number_lines(lines):
    out = []
    for i in range(len(lines)):
        out.append(f"{i + 1} {lines[i]}")
    return out


def column(rows, index):
    out = []
    for row in rows:
        if index < len(row):
            out.append(row[index])
    return out

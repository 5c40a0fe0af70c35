"""Breaking text into lines of a given width."""


def wrap_at(text, width):
    out = []
    for i in range(0, len(text), width):
        out.append(text[i : i + width])
    return out


def wrap_words(words, width):
    out = []
    for word in words:
        if out and len(out[-1]) + len(word) < width:
            out[-1] += " " + word
        else:
            out.append(word)
    return out


def shorten(text, width):
    if len(text) <= width:
        return text
    return text[: width - 2] + ".."


def longest_line(lines):
    best = 0
    for line in lines:
        if len(line) > best:
            best = len(line)
    return best


def trim_blank(lines):
    out = list(lines)
    while out and not out[-1]:
        out.pop()
    return out


def indent_of(line):
    count = 0
    for char in line:
        if char != " ":
            return count
        count += 1
    return count

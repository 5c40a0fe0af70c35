"""Short names for files and pages."""


def slug(words):
    out = ""
    for word in words:
        if out:
            out += "-"
        out += word.lower()
    return out


def is_slug(text):
    for c in text:
        if c == " " or c != c.lower():
            return False
    return len(text) > 0


def cut_slug(text, limit):
    if len(text) <= limit:
        return text
    return text[:limit].rstrip("-")


def version_less(a, b):
    for i in range(min(len(a), len(b))):
        if a[i] != b[i]:
            return a[i] < b[i]
    return len(a) < len(b)


def extension(name):
    base, _, end = name.rpartition(".")
    if not base:
        return ""
    return end


def free_name(name, taken):
    count = 1
    out = name
    while out in taken:
        count += 1
        out = f"{name}-{count}"
    return out

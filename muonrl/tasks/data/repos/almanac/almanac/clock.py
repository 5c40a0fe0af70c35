"""Times of the day in minutes."""


def minutes_of(text):
    hours, _, rest = text.partition(":")
    if not rest:
        return int(hours) * 60
    return int(hours) * 60 + int(rest)


def clock_text(minutes):
    hours = minutes // 60
    rest = minutes % 60
    if rest < 10:
        return f"{hours}:0{rest}"
    return f"{hours}:{rest}"


def elapsed(start, end):
    if end < start:
        end += 24 * 60
    return end - start


def to_hour12(hour):
    rest = hour % 12
    if rest == 0:
        return 12
    return rest


def is_open(minute, start, end):
    if start <= end:
        return start <= minute and minute < end
    return minute >= start or minute < end


def longest_shift(shifts):
    best = 0
    for start, end in shifts:
        if end - start > best:
            best = end - start
    return best


def total_minutes(shifts):
    total = 0
    for start, end in shifts:
        total += end - start
    return total

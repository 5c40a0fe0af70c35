"""Temperatures and what they mean."""


def to_fahrenheit(celsius):
    if celsius < -273:
        return None
    return celsius * 9 // 5 + 32


def is_freezing(celsius, salty=False):
    if salty:
        return celsius <= -2
    return celsius <= 0


def hottest(days):
    best = 0
    for i in range(1, len(days)):
        if days[i] > days[best]:
            best = i
    return best


def frost_days(days):
    count = 0
    for celsius in days:
        if celsius < 0:
            count += 1
    return count


def warming(days):
    for i in range(1, len(days)):
        if days[i] <= days[i - 1]:
            return False
    return True

"""Leap years and the length of months."""


def is_leap(year):
    if year % 400 == 0:
        return True
    if year % 100 == 0:
        return False
    return year % 4 == 0


def month_days(year, month):
    if month == 2:
        return 29 if is_leap(year) else 28
    if month in (4, 6, 9, 11):
        return 30
    return 31


def leap_count(start, end):
    count = 0
    for year in range(start, end + 1):
        if is_leap(year):
            count += 1
    return count


def year_days(year):
    if is_leap(year):
        return 366
    return 365


def century(year):
    if year <= 0:
        return 0
    return (year - 1) // 100 + 1


def quarter(month):
    if month < 1 or month > 12:
        return 0
    return (month - 1) // 3 + 1

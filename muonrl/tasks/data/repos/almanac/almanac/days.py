"""Counting days within one year and over weeks."""

from almanac.years import month_days


def day_of_year(year, month, day):
    total = day
    for m in range(1, month):
        total += month_days(year, m)
    return total


def is_valid(year, month, day):
    if month < 1 or month > 12:
        return False
    return day >= 1 and day <= month_days(year, month)


def days_left(year, month, day):
    last = month_days(year, month)
    if day > last:
        return 0
    return last - day


def next_day(year, month, day):
    if day < month_days(year, month):
        return (year, month, day + 1)
    if month < 12:
        return (year, month + 1, 1)
    return (year + 1, 1, 1)


def weekday_after(weekday, days):
    if days == 0:
        return weekday
    return (weekday + days) % 7


def is_weekend(weekday):
    if weekday < 0:
        return False
    return weekday % 7 >= 5


def workdays(start, days):
    count = 0
    for i in range(days):
        if (start + i) % 7 < 5:
            count += 1
    return count

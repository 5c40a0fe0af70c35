"""Roman numerals and other number words."""


VALUES = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100}
MARKS = ((10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"))
ENDS = {1: "st", 2: "nd", 3: "rd"}


def from_roman(text):
    total = 0
    for i in range(len(text)):
        value = VALUES[text[i]]
        if i + 1 < len(text) and value < VALUES[text[i + 1]]:
            total -= value
        else:
            total += value
    return total


def to_roman(number):
    out = ""
    for value, mark in MARKS:
        while number >= value:
            out += mark
            number -= value
    return out


def ordinal(number):
    rest = number % 100
    if rest >= 11 and rest <= 13:
        return f"{number}th"
    return f"{number}{ENDS.get(number % 10, 'th')}"


def digit_sum(number):
    total = 0
    while number > 0:
        total += number % 10
        number = number // 10
    return total


def scale_to(value, size, limit):
    if size <= 0:
        return 0
    return value * limit // size

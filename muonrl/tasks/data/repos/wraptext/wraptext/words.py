"""Counting and changing words."""


def count_words(text):
    count = 0
    for word in text.split(" "):
        if word:
            count += 1
    return count


def longest_word(words):
    best = ""
    for word in words:
        if len(word) > len(best):
            best = word
    return best


def initials(words):
    out = ""
    for word in words:
        if word:
            out += word[0]
    return out


def capitalize(word):
    if not word:
        return ""
    return word[0].upper() + word[1:]


def is_palindrome(text):
    for i in range(len(text) // 2):
        if text[i] != text[-1 - i]:
            return False
    return True


def count_char(text, char):
    count = 0
    for c in text:
        if c == char:
            count += 1
    return count

"""Places, grades and records."""


def rank(scores, score):
    place = 1
    for other in scores:
        if other > score:
            place += 1
    return place


def winner(names, scores):
    best = 0
    for i in range(len(scores)):
        if scores[i] > scores[best]:
            best = i
    return names[best]


def grade(score):
    if score >= 90:
        return "A"
    if score >= 75:
        return "B"
    return "C" if score >= 50 else "F"


def records(scores):
    count = 0
    best = -1
    for score in scores:
        if score > best:
            best = score
            count += 1
    return count


def top(scores, count):
    if count <= 0:
        return []
    return sorted(scores, reverse=True)[:count]


def passed(scores, limit):
    out = []
    for score in scores:
        if score >= limit:
            out.append(score)
    return out

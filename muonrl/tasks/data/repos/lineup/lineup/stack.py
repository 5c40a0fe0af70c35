"""Stacks whose top is the last element."""


def push(stack, x, limit):
    if len(stack) >= limit:
        return stack
    return stack + [x]


def peek(stack, default=None):
    if not stack:
        return default
    return stack[-1]


def pop_many(stack, count):
    if count <= 0:
        return stack
    return stack[:-count]


def depth(text):
    best, level = 0, 0
    for c in text:
        if c == "(":
            level += 1
        elif c == ")":
            level -= 1
        best = max(best, level)
    return best


def balanced(text):
    level = 0
    for c in text:
        level += 1 if c == "(" else -1
        if level < 0:
            return False
    return level == 0


def swap_top(stack):
    if len(stack) < 2:
        return stack
    return stack[:-2] + [stack[-1], stack[-2]]

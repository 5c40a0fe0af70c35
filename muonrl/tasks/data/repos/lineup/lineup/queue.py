"""Waiting lines whose front is the first element."""


def enqueue(queue, x):
    if x in queue:
        return queue
    return queue + [x]


def front(queue, count):
    if count <= 0:
        return []
    return queue[:count]


def place_of(queue, x):
    for i in range(len(queue)):
        if queue[i] == x:
            return i + 1
    return 0


def wait_time(jobs, index):
    total = 0
    for i in range(index):
        total += jobs[i]
    return total


def next_job(jobs):
    best = 0
    for i in range(1, len(jobs)):
        if jobs[i] < jobs[best]:
            best = i
    return best


def served(jobs, minutes):
    count = 0
    for job in jobs:
        minutes -= job
        if minutes >= 0:
            count += 1
    return count

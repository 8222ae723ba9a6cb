"""Ranks that are threads of one process, for what several processes do to files together."""

import threading


class ThreadRank:
    """One of several ranks that gather values; `others` is shared by all of them."""

    def __init__(self, rank, size, shared):
        self.rank, self.size, self.shared = rank, size, shared

    def gather_objects(self, value):
        barrier, values = self.shared
        values[self.rank] = value
        barrier.wait()
        gathered = list(values)
        barrier.wait()
        return gathered


def on_ranks(size, work):
    """Call `work(rank)` on `size` ranks at once; return what they returned, or raise what the first of them raised."""
    shared = (threading.Barrier(size), [None] * size)
    results, errors = [None] * size, [None] * size

    def run(number):
        try:
            results[number] = work(ThreadRank(number, size, shared))
        except BaseException as error:
            errors[number] = error
            if not isinstance(error, Exception):  # it is dead, and the others learn of it
                shared[0].abort()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if error is not None:
            raise error
    return results

"""The guard: is the working tree slower than a release? Paired runs, by turns, in one session.

`__main__` makes the trees and shows the table, `turns` starts the processes and times them by
turns, `worker` is such a process, `cases` is the work, and `verdict` decides.
"""

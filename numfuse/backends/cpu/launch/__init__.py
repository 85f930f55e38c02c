"""Launching cells on threads: one choke point for every kernel of the CPU backend.

A program is one sequence of steps or several, and a step is so many cells. Steps come in phases: a
cell begins when the phases before its own are finished. So a whole backward is one launch, and the
products of one phase share its threads.

- `sequence`: from plans to the words of a program, and running it on the arrays of a call
- `threads`: the calling thread, alone or with helpers of our own
- `workspace`: the memory of a launch, kept for the next one
- `entries`: the native functions behind these
"""

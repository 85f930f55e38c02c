"""Memory and threads of the launches that XLA's calls are, as templates (`frame` binds them)."""

from __future__ import annotations

# ruff: noqa: F821  (the free names of a template are bound at specialisation)
# mypy: disable-error-code="name-defined"


def take(root: int, size: int) -> int:
    """Return a slot whose memory has so many bytes, or 0 where the system gives none.

    Waits while others have them all: they wait for nobody.
    """
    r = WORDS(root)
    slot = root + 8 * R_SLOTS
    looks = 0
    while FETCH_ADD(slot, 1) != 0:
        FETCH_ADD(slot, -1)
        slot += 8 * SLOT_WORDS
        if slot == root + 8 * R_SLOTS + 8 * SLOT_WORDS * SLOTS:
            slot = root + 8 * R_SLOTS
            looks = LOOK_AGAIN(looks, r[R_YIELD])
    s = WORDS(slot)
    if s[S_SIZE] < size:
        FREE_SLOT(root, slot)
        size = (size + HUGE_PAGE - 1) // HUGE_PAGE * HUGE_PAGE
        if ASK_3(r[R_ALLOCATE], slot + 8 * S_MEMORY, HUGE_PAGE, size) & LOW != 0:
            s[S_MEMORY] = 0
            FETCH_ADD(slot, -1)
            return 0
        if r[R_ADVISE] != 0:
            CALL_3(r[R_ADVISE], s[S_MEMORY], size, MADV_HUGEPAGE)
        s[S_SIZE] = size
        FETCH_ADD(root + 8 * R_KEPT, size)
    return slot


def free_slot(root: int, slot: int) -> None:
    """Give the memory of a slot back to the system."""
    s = WORDS(slot)
    if s[S_MEMORY] != 0:
        FETCH_ADD(root + 8 * R_KEPT, -s[S_SIZE])
        CALL_1(WORDS(root)[R_FREE], s[S_MEMORY])
        s[S_MEMORY] = 0
        s[S_SIZE] = 0


def give_back(root: int, slot: int) -> None:
    """Let others have a slot, without its memory where more is kept than should be."""
    if LOAD(root + 8 * R_KEPT) > WORDS(root)[R_MOST]:
        FREE_SLOT(root, slot)
    FETCH_ADD(slot, -1)


def share_out(frame: int, root: int, sequence: int, memory: int) -> None:
    """Work at an open sequence with the threads of XLA's pool that come in time.

    A launch is a gate in one word: how often it was moved, opened and closed, by GATE, and who
    looks at it, by 1. A helper may come when all is over: what it looks at goes with the last that
    knows of it.
    """
    f, r, q = WORDS(frame), WORDS(root), WORDS(sequence)
    table = memory + q[Q_TABLE]
    place = STACK_3()
    size = 8 * SHARED_WORDS + 8 * TASK_WORDS * q[Q_THREADS]
    if ASK_3(r[R_ALLOCATE], place, 64, size) & LOW != 0:
        WORK(table, memory, 0)
        return
    launch = WORDS(place)[0]
    shared = WORDS(launch)
    shared[L_GATE] = GATE
    shared[L_KNOWN] = q[Q_THREADS]
    about = STACK_5()
    a = WORDS(about)
    a[0] = 40
    a[1] = 0
    a[2] = f[F_CONTEXT]
    a[3] = r[R_HELP]
    for i in range(1, q[Q_THREADS]):
        task = launch + 8 * SHARED_WORDS + 8 * TASK_WORDS * (i - 1)
        k = WORDS(task)
        k[K_LAUNCH] = launch
        k[K_TABLE] = table
        k[K_WORKSPACE] = memory + i * q[Q_STRIDE]
        k[K_YIELD] = r[R_YIELD]
        k[K_FREE] = r[R_FREE]
        a[4] = task
        error = ASK_1(WORDS(f[F_API])[A_SCHEDULE], about)
        if error != 0:  # there is no pool
            WORDS(place)[0] = 24
            WORDS(place)[1] = 0
            WORDS(place)[2] = error
            CALL_1(WORDS(f[F_API])[A_ERROR_DESTROY], place)
            FETCH_ADD(launch + 8 * L_KNOWN, -1)
    WORK(table, memory, r[R_YIELD])
    FETCH_ADD(launch, GATE)
    looks = 0
    while LOAD(launch) != 2 * GATE:
        looks = LOOK_AGAIN(looks, r[R_YIELD])
    LEAVE(launch, r[R_FREE])


def leave(launch: int, free: int) -> None:
    """Forget a launch; the last one gives its memory back."""
    if FETCH_ADD(launch + 8 * L_KNOWN, -1) == 1:
        CALL_1(free, launch)


def help_out(task: int) -> None:
    """Take part in a launch, unless it is over: a task of XLA's pool."""
    k = WORDS(task)
    launch, free = k[K_LAUNCH], k[K_FREE]
    if FETCH_ADD(launch, 1) // GATE == 1:
        WORK(k[K_TABLE], k[K_WORKSPACE], k[K_YIELD])
    FETCH_ADD(launch, -1)
    LEAVE(launch, free)

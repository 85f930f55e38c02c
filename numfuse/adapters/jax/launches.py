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
        s[S_MEMORY], s[S_SIZE] = 0, 0


def give_back(root: int, slot: int) -> None:
    """Let others have a slot, without its memory where more is kept than should be."""
    if LOAD(root + 8 * R_KEPT) > WORDS(root)[R_MOST]:
        FREE_SLOT(root, slot)
    FETCH_ADD(slot, -1)


def share_out(frame: int, root: int, slot: int, sequence: int) -> None:
    """Work at an open sequence with the threads of XLA's pool that come in time.

    A launch offers seats at its slot, and whoever takes one off has it. What is left is withdrawn
    at the end, so a helper that comes late finds none, or one of the next launch there.
    """
    r, q, s = WORDS(root), WORDS(sequence), WORDS(slot)
    table, helpers = s[S_MEMORY] + q[Q_TABLE], q[Q_THREADS] - 1
    s[S_TABLE], s[S_STRIDE], s[S_YIELD] = table, q[Q_STRIDE], r[R_YIELD]
    EXCHANGE(slot + 8 * S_SEATS, helpers)
    about = STACK_5()
    a = WORDS(about)
    a[3], a[4] = r[R_HELP], slot
    for _ in range(helpers):
        error = ASKED(frame, A_SCHEDULE, about, 40)
        if error != 0:  # there is no pool
            a[0], a[2] = 24, error
            CALL_1(WORDS(WORDS(frame)[F_API])[A_ERROR_DESTROY], about)
            break
    WORK(table, s[S_MEMORY], r[R_YIELD])
    # (late helpers may have counted the seats down below none)
    joined = helpers - max(0, EXCHANGE(slot + 8 * S_SEATS, 0))
    looks = 0
    while LOAD(slot + 8 * S_LEFT) < joined:
        looks = LOOK_AGAIN(looks, r[R_YIELD])
    EXCHANGE(slot + 8 * S_LEFT, 0)


def help_out(slot: int) -> None:
    """Take a seat of a launch, if there is one: a task of XLA's pool."""
    seat = FETCH_ADD(slot + 8 * S_SEATS, -1)
    if seat > 0:
        s = WORDS(slot)
        WORK(s[S_TABLE], s[S_MEMORY] + seat * s[S_STRIDE], s[S_YIELD])
        FETCH_ADD(slot + 8 * S_LEFT, 1)

"""``python -m tests.adversary``: starts processes that make calls, watches them, and tells.

A process that dies or hangs is a finding like any other: its last word makes the call again. The
next process goes on behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: Shares of the time, where all places are there.
SHARES = {
    "cpu": 50, "reference": 5, "webgpu": 13, "cuda": 5, "torch": 9, "jax": 7, "autograd": 5,
    "dask": 6, "cpu-bf16x6": 3, "cpu-bf16x3": 2, "cpu-int8": 5,
}  # fmt: skip
#: Seconds that one call may take: a kernel of lavapipe or a formula's jet takes some.
LONGEST = 120.0
#: Seconds between two looks at a process.
TURN = 0.2
#: Findings of one kind (a way and the beginning of what is wrong) that are printed in full.
MOST = 3


class Watched:
    """A process that makes the calls of one place, one process after another."""

    def __init__(self, name: str, how: argparse.Namespace, seconds: float, tell: Findings) -> None:
        self.name, self.how, self.tell = name, how, tell
        self.end = time.monotonic() + seconds
        self.first, self.tally = how.first, dict[str, Any]()

    def run(self) -> None:
        """Make calls until the time is over."""
        with tempfile.TemporaryDirectory(prefix="adversary-") as folder:
            while (left := self.end - time.monotonic()) > 1:
                if not self._once(left, Path(folder) / "state"):
                    return

    def _once(self, seconds: float, state: Path) -> bool:
        """Run one process; return whether another one has to go on."""
        how = {
            "name": self.name, "seed": self.how.seed, "first": self.first, "seconds": seconds,
            "function": self.how.function, "state": str(state), "step": self.how.step,
        }  # fmt: skip
        state.write_bytes(b"")
        words = [sys.executable, "-X", "faulthandler", "-m", "tests.adversary.worker"]
        process = subprocess.Popen(
            [*words, json.dumps(how)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=ROOT, env=environment(self.name),
        )  # fmt: skip
        errors: list[str] = []
        assert process.stdout is not None and process.stderr is not None
        readers = [
            threading.Thread(target=self._read, args=(process.stdout,)),
            threading.Thread(target=lambda: errors.extend(process.stderr or ())),
        ]
        for reader in readers:
            reader.start()
        hangs = self._watch(process, state)
        for reader in readers:
            reader.join()
        if process.returncode == 0:
            return False
        text = state.read_bytes().split(b"\0")[0].decode().split(" ")[0]
        what = f"hangs for {LONGEST:.0f} s" if hangs else f"the process died ({process.returncode})"
        self.tell.add({"word": text, "call": "", "fault": f"{what}: {''.join(errors)[-1500:]}"})
        if not text:
            return False
        self.first = int(text.rpartition(":")[2]) + self.how.step
        return True

    def _read(self, lines: Any) -> None:
        for line in lines:
            found = json.loads(line)
            if "fault" in found:
                self.tell.add(found)
            else:
                self.tally = found["tally"]

    def _watch(self, process: subprocess.Popen[str], state: Path) -> bool:
        """Wait for the end; kill a process whose call does not end, and return whether one was."""
        before, turns = b"", 0
        while process.poll() is None:
            # (turns, not the clock: a machine may stop both processes for a while)
            time.sleep(TURN)
            now, turns = state.read_bytes(), turns + 1
            if now != before:
                before, turns = now, 0
            if turns * TURN > LONGEST + 180 * (not now):
                process.send_signal(signal.SIGABRT)  # faulthandler tells where it hangs
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                return True
        return False


class Findings:
    """What was found, printed once in full for each kind."""

    def __init__(self) -> None:
        self.kinds: dict[tuple[str, str], int] = {}
        self.lock = threading.Lock()

    def add(self, found: dict[str, Any]) -> None:
        place, _, rest = found["word"].partition(":")
        kind = f"{place}:{rest.partition(':')[0]}", _kind(found["fault"])
        with self.lock:
            count = self.kinds[kind] = self.kinds.get(kind, 0) + 1
            if count <= MOST:
                print(f"\n{found['fault'][:1500]}\n  {found['call'][:1200]}", flush=True)
                again = f"--replay {found['word']}"
                if place == "scenario":
                    again = f"--scenario '{found['call']}'"
                print(f"  again: python -m tests.adversary {again}", flush=True)


def _kind(fault: str) -> str:
    """Return the beginning of a text, without its numbers."""
    return "".join("#" if x.isdigit() else x for x in fault)[:60]


def environment(name: str) -> dict[str, str]:
    """Return the environment of a process for a place."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    if name == "cuda":
        env["NUMBA_ENABLE_CUDASIM"] = "1"
    if name == "jax":
        env["JAX_PLATFORMS"] = "cpu"
    return env


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.adversary", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="of all processes together")
    parser.add_argument("--seed", type=int, default=None, help="default: that of the day")
    parser.add_argument("--backend", action="append", help="a backend or a library; several times")
    parser.add_argument("--function", help="a public function, or a way to draw a call")
    parser.add_argument("--processes", type=int, default=1, help="at once")
    parser.add_argument("--first", type=int, default=0, help="the number of the first call")
    parser.add_argument("--replay", metavar="WORD", help="make one call again, in this process")
    parser.add_argument("--before", type=int, default=0, help="with --replay: calls before it")
    parser.add_argument("--scenario", action="append", help="of processes; 'all', or a name")
    return parser


def replay(text: str, before: int) -> int:
    """Make the call of a word again, and print what is wrong."""
    name = text.partition(":")[0]
    if name == "cuda" and os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
        words = [sys.executable, "-m", "tests.adversary", "--replay", text]
        return subprocess.call([*words, f"--before={before}"], cwd=ROOT, env=environment(name))
    from . import checks, worker
    from .kinds import place

    last, there, tally = worker.Word.read(text), place(name), checks.Tally()
    among = worker.ways(None)
    for index in range(max(0, last.index - before), last.index):
        worker.judge(worker.word(name, last.seed, index, among), there, tally)
    told, faults = worker.judge(last, there, tally)
    print(told)
    for fault in faults:
        print(f"  {fault}")
    print(f"{len(faults)} faults")
    return bool(faults)


def main() -> int:
    how = arguments().parse_args()
    if how.replay:
        return replay(how.replay, how.before)
    if how.seed is None:
        how.seed = int(time.time() // 86400)
    tell, start = Findings(), time.monotonic()
    if how.scenario:
        from . import scenarios

        for found in scenarios.run(how.scenario, environment("cpu")):
            tell.add(found)
        return bool(tell.kinds)
    from .kinds import available

    there = available()
    for name, reason in there.items():
        if reason and name in (how.backend or ()):
            raise SystemExit(f"{name} cannot be served: {reason}")
    names = how.backend or [name for name, reason in there.items() if not reason]
    print(f"seed {how.seed}; {', '.join(names)}; python -m tests.adversary --seed {how.seed}")
    total = sum(SHARES[name] for name in names)
    how.step = 1
    work = [Watched(x, how, 0, tell) for x in names]

    def some(mine: list[Watched]) -> None:
        for x in mine:
            share = SHARES[x.name] / total
            x.end = time.monotonic() + 60 * how.minutes * how.processes * share
            x.run()

    lines = [threading.Thread(target=some, args=(mine,)) for mine in _dealt(work, how.processes)]
    for line in lines:
        line.start()
    for line in lines:
        line.join()
    _summary(work, tell, time.monotonic() - start)
    return bool(tell.kinds)


def _dealt(work: list[Watched], processes: int) -> list[list[Watched]]:
    """Deal places to so many lines, each about as long as the others."""
    lines: list[list[Watched]] = [[] for _ in range(processes)]
    for x in sorted(work, key=lambda x: -SHARES[x.name]):
        min(lines, key=lambda line: sum(SHARES[y.name] for y in line)).append(x)
    return [line for line in lines if line]


def _summary(work: list[Watched], tell: Findings, seconds: float) -> None:
    """Print calls, elements and shares of bounds, by place and function."""
    calls = 0
    for x in work:
        rows = x.tally.get("by_function", {})
        calls += x.tally.get("calls", 0)
        compared = sum(row[1] for row in rows.values())
        open_ = sum(row[2] for row in rows.values())
        print(
            f"{x.name}: {x.tally.get('calls', 0)} calls of {len(rows)} functions, "
            f"{compared} elements compared, {open_} beyond what is promised"
        )
    print(f"{calls} calls in {seconds:.0f} s: {3600 * calls / max(1, seconds):.0f} an hour")
    for (where, fault), count in sorted(tell.kinds.items()):
        print(f"{count} x {where}: {fault}")
    print("nothing was found" if not tell.kinds else f"{len(tell.kinds)} kinds of findings")


if __name__ == "__main__":
    raise SystemExit(main())

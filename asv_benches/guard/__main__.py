"""Whether the working tree is slower than a release: ``python asv_benches/guard``.

    python asv_benches/guard                        the last tag beside this tree
    python asv_benches/guard --base v0.2.0 --only kernel
    python asv_benches/guard --base . --head .      this tree beside itself: nothing may fail

Both versions run with one interpreter and the same dependencies, by turns on one machine: what
differs is numfuse. A base or head is a commit, a tag or a folder. The exit status is 1 where a case
has become slower, 2 where this machine is too noisy to tell, and `verdict.py` says how that is
decided.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from turns import Version, measure
from verdict import ALLOWED, PROMISED, RATE, status, table, verdicts

ROOT = Path(__file__).resolve().parents[2]


def git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True).stdout


def last_release() -> str:
    """Return the last release's tag before this commit; SystemExit where there is none."""
    try:
        return git("describe", "--tags", "--abbrev=0", "--match", "v[0-9]*").decode().strip()
    except subprocess.CalledProcessError:
        raise SystemExit(
            "expected a tag v<version> before this commit, or --base with a commit or a folder"
        ) from None


def placed(what: str, folder: Path) -> Path:
    """Put the package as it is in a commit or a folder into a folder of its own, and return that.

    Of a folder, only the package is taken: two versions lie in folders whose names are equally
    long, and nothing that is built or kept beside one of them is found.
    """
    folder.mkdir(parents=True)
    source = Path(what)
    if (source / "numfuse" / "__init__.py").is_file():
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.add(source / "numfuse", "numfuse", filter=_source)
        data = buffer.getvalue()
    else:
        data = git("archive", what, "numfuse")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def _source(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if Path(member.name).name == "__pycache__" else member


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="guard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--base", metavar="VERSION", help="the old version (default: the last tag)")
    add("--head", metavar="VERSION", default=str(ROOT), help="the new one (default: this tree)")
    add("--python", default=sys.executable, help="the interpreter (default: this one)")
    add("--rounds", type=int, default=9, help="of fresh processes (default: %(default)s)")
    add("--only", nargs="+", default=[], metavar="WORD", help="cases whose names hold one of these")
    add("--rate", type=float, default=RATE, help="of false alarms (default: %(default)s)")
    add("--allow", type=float, default=ALLOWED, help="a drop without a word (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write all times there")
    given = parser.parse_args(words)
    base = given.base or last_release()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)

        def version(name: str, what: str) -> Callable[[], Version]:
            tree = placed(what, place / name)
            return lambda: Version(tree, given.python, place / f"{name}-kernels", given.only)

        old, new = version("base", base), version("head", given.head)
        times, missing = measure(old, new, given.rounds)
    if given.json:
        given.json.write_text(json.dumps(times, indent=1) + "\n", encoding="utf-8")
    if not times:
        raise SystemExit(f"no case is in both versions and holds one of {given.only}")
    found = verdicts(times, given.rate, given.allow)
    lines = [
        f"{base} (old) beside {given.head} (new): {given.rounds} rounds of fresh processes. A case "
        f"fails where the machine alone gives such a change in less than {given.rate:.2g} of all "
        f"runs, and from {given.allow:+.0%} on.",
        "",
        *table(found),
        *(f"- left out: {case}: {why}" for case, why in missing.items()),
    ]
    code = status(found)
    if code == 2:
        lines.append(f"\nToo noisy: most cases would not have shown {PROMISED:.0%}.")
    text = "\n".join(lines)
    print(text)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a", encoding="utf-8") as file:
            file.write(text + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())

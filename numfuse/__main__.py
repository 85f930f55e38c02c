"""``python -m numfuse``: see :mod:`numfuse.cli`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "demo": "train a gated network on handwritten digits, timed beside NumPy and PyTorch",
    "info": "what was found on this machine, and why the rest was not",
    "bench": "measure this machine: its ceilings, numfuse and its peers",
}


class VersionAction(argparse.Action):
    """Look the version up when asked for: the metadata take longer to read than the help."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import numfuse

        print(f"numfuse {numfuse.__version__}")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m numfuse",
        description="Fused numerical kernels for scientific Python.",
    )
    parser.add_argument(
        "--version", action=VersionAction, nargs=0, help="print the version and exit"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        module = importlib.import_module(f"numfuse.cli.{name}")
        command = commands.add_parser(
            name,
            help=summary,
            description=(module.__doc__ or "").strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # what a shell reports for a process ended by SIGINT
    return code


if __name__ == "__main__":
    sys.exit(main())

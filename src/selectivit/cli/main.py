"""The command line: one parser, one file a command."""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Sequence

from selectivit.cli import (
    analyse,
    budget,
    compare,
    cores,
    demo,
    diagnose,
    distill,
    doctor,
    export,
    features,
    models,
    pretrain,
    probe,
    regions,
    scenes,
    segment,
    segment_eval,
    umap,
)
from selectivit.cli.memory import ADVICE, out_of_memory

COMMANDS = {
    "doctor": doctor,
    "models": models,
    "features": features,
    "compare": compare,
    "segment": segment,
    "segment-eval": segment_eval,
    "regions": regions,
    "analyse": analyse,
    "probe": probe,
    "diagnose": diagnose,
    "scenes": scenes,
    "distill": distill,
    "pretrain": pretrain,
    "budget": budget,
    "cores": cores,
    "umap": umap,
    "export": export,
    "demo": demo,
}
"""Name -> module with HELP, add_arguments(parser) and run(options) -> exit status."""

DONE, SOME_SKIPPED, NOTHING_DONE, FAULT, INTERRUPTED = 0, 1, 2, 70, 130

DESCRIPTION = """Selective token interaction for Vision Transformers.

Exit status: 0 all done; 1 done, but something was skipped (named on stderr and in the JSON); 2 nothing could be done;
70 a fault of the program, with its traceback; 130 interrupted."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments without the program's name; None takes the process's.

    Returns:
        The exit status: 0 all done, 1 something was skipped, 2 nothing could be done, 130 interrupted. A fault of ours
        is 70 with its traceback on stderr, where the arguments are the process's; who calls from Python gets the error.

    Example:
        >>> main(["doctors"])
        2
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    unknown = _unknown_command(arguments)
    if unknown:
        return _fail("selectivit", unknown)
    name = "selectivit"
    try:
        options = _parser().parse_args(arguments)
        name = f"selectivit {options.command}"
        return COMMANDS[options.command].run(options[options.command])
    except SystemExit as stop:  # how argparse ends after --help or a wrong option; it has said why
        return stop.code if isinstance(stop.code, int) else NOTHING_DONE
    except KeyboardInterrupt:
        _say(f"{name}: interrupted, finished files are kept")
        return INTERRUPTED
    except BrokenPipeError:  # `selectivit models | head`: who read the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Exception as error:
        if out_of_memory(error):
            why = next(iter(str(error).splitlines()), "")
            return _fail(name, f"not enough memory: {ADVICE}" + (f" ({why})" if why else ""))
        if isinstance(error, (ValueError, OSError, ImportError)):  # how the library says what was wrong with the input
            return _fail(name, str(error))
        if argv is not None:
            raise
        traceback.print_exc()
        return FAULT  # Python's own 1 would say that something was done


def _parser():
    import jsonargparse

    from selectivit import __version__

    parser = jsonargparse.ArgumentParser(
        prog="selectivit", description=DESCRIPTION, version=__version__, parser_mode="yaml"
    )
    commands = parser.add_subcommands(dest="command", metavar="COMMAND", title="commands")
    for name, module in COMMANDS.items():
        command = jsonargparse.ArgumentParser(description=module.__doc__)
        command.add_argument("--config", action="config", help="file with options of this command, YAML or JSON")
        commands.add_subcommand(name, command, help=module.HELP)  # before its own: nested ones must come in this order
        module.add_arguments(command)
    return parser


def _unknown_command(arguments: list[str]) -> str | None:
    """Say what is wrong when the first argument is no command; None when it is one, or an option."""
    known = ", ".join(COMMANDS)
    if not arguments:
        return f"expected a command, one of: {known}; `selectivit --help` tells more"
    first = arguments[0]
    if first in COMMANDS or first.startswith("-"):
        return None
    close = difflib.get_close_matches(first, COMMANDS, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown command {first!r}; {hint}the commands are: {known}"


def _fail(name: str, message: str) -> int:
    _say(f"{name}: error: {message}")
    return NOTHING_DONE


def _say(message: str) -> None:
    print(message, file=sys.stderr)


if __name__ == "__main__":  # python -m selectivit.cli.main, as torchrun -m starts it
    sys.exit(main())

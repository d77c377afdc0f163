"""What the command lines share: a mistake as one line and exit code 2, and a clean end of the processes."""

import argparse
import os
import sys
import traceback
from collections.abc import Callable

from minitrain.errors import InputError


class Parser(argparse.ArgumentParser):
    """argparse with `--debug`; its own complaints are one line too."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def error(self, message: str):
        raise InputError(f"{message} (see --help)")


def run(main: Callable[[list[str]], None]) -> None:
    """Run a command line's `main(arguments)` and exit: 0, or 2 after an InputError or a failing disk, in one line."""
    arguments = sys.argv[1:]
    code = 0
    try:
        main(arguments)
    except (InputError, OSError) as error:
        code = 2
        if "--debug" in arguments:
            traceback.print_exc()
        # before the group starts, every rank finds the same mistake: one of them tells it
        if group_is_up() or os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        code = 130
    if group_is_up():
        leave_group(code)
    sys.exit(code)


def group_is_up() -> bool:
    """Has this process joined others? Without importing torch, which takes seconds, for what did not need it."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_initialized()


def leave_group(code: int) -> None:
    """End a process whose group is still up. After an error the others are not waited for: the launcher stops them.

    The interpreter's own teardown sometimes aborts after FSDP has run on gloo, making success a crash: hence _exit.
    """
    import torch.distributed as dist

    if code == 0:
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

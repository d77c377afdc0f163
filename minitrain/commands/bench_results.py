"""Print results, and append them to the file of --json, each at once."""

import json
import math
import sys
import traceback
from datetime import date
from pathlib import Path

from minitrain.bench.tables import details, table
from minitrain.errors import as_input_error
from minitrain.run.config.environment import rank
from minitrain.run.launch import cli

UNSTEADY = "steps were not of one speed, or faster than the machine's matrix products: was it busy with other things?"


def write_result(outcome: dict, file: str | None, wide: bool = False) -> None:
    """Print a result and append it to the file of results, at once: what comes later may fail.

    Either is done though the other cannot be: the reader may have gone, or the disk be full.
    """
    if rank() != 0:
        return
    try:
        print(table([outcome], wide), flush=True)
        if "breakdown_s" in outcome:
            print(details(outcome), flush=True)
        if outcome["mode"] == "extrapolated":
            print(f"without {outcome['left_out']}", flush=True)
        slowed = outcome["step_time_s"] > 1.5 * outcome.get("step_time_min_s", math.inf)
        if outcome["mode"] == "measured" and (slowed or outcome["mfu"] > 1):
            print(f"warning: {outcome['row']}: {UNSTEADY}", file=sys.stderr, flush=True)
        if outcome["mfu"] > 1:
            fault = f"{outcome['matmul_tflops']:.4g} TFLOP/s, is at fault, or a rate above it is"
            line = f"MFU of {outcome['mfu']:.1%}: the matmul rate of {outcome['device']}, {fault}"
            print(f"warning: {outcome['row']}: {line}", file=sys.stderr, flush=True)
    finally:
        append(outcome, file)


def append(outcome: dict, file: str | None) -> None:
    """Append a line of JSON to a file, apart from one that a kill has cut short before it."""
    if not file:
        return
    note = {"date": date.today().isoformat(), "command": " ".join(["python", *sys.argv])}
    line = json.dumps(outcome | note) + "\n"
    with as_input_error(f"--json={file} cannot be written"):
        if Path(file).is_file() and Path(file).read_bytes()[-1:] not in (b"", b"\n"):
            line = "\n" + line
        with open(file, "a", encoding="utf-8") as results:
            results.write(line)


def tell(row: str, error: Exception, debug: bool) -> None:
    """Report the error in one line, as the command line reports its own."""
    if debug:
        traceback.print_exception(error)
    if rank() == 0:
        line = cli.in_one_line(error) or f"{error!r:.200}"
        print(f"error: {row}: {line}", file=sys.stderr, flush=True)

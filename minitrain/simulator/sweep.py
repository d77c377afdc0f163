"""Try every combination of some settings: `bench.py --sweep`.

Combinations are simulated and ranked by tokens/s, or measured and compared with how FLOPs grow.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import product

from tqdm import tqdm

from minitrain.bench.rows import load_row
from minitrain.bench.tables import in_width, sized
from minitrain.errors import InputError
from minitrain.run.config.load import load
from minitrain.run.config.ranks import stated_ranks, training_ranks
from minitrain.settings import Config, Parallel
from minitrain.simulator.predict import predicted_row
from minitrain.simulator.timeline import System


def sweep(file: str, overrides: list[str], choices: list[str], system: System) -> Iterator[dict]:
    """Yield the simulated result of each combination, or {"settings", "error"} if it cannot run.

    choices: words such as `tp=1,2,4` (a key of `parallel`) and `recompute=none,full`.
    The number of GPUs stays that of the file: dp_shard is set to what the other dimensions leave.
    """
    if any(parse(word)[0] == "parallel.dp_shard" for word in choices):
        raise InputError(
            "--simulate --sweep dp_shard: shards take the GPUs that others leave (sweep those; a fixed "
            "parallel.dp_shard=N stands before --sweep)"
        )
    gpus = stated_ranks(load_row(file, overrides)[1])
    for settings, words in tqdm(combinations(choices), leave=False):
        try:
            config = with_all_gpus(file, [*overrides, *words], gpus)
            yield {"settings": settings} | predicted_row(config, settings, system)[1]
        except InputError as error:
            yield {"settings": settings, "error": str(error)}


def rank_layouts(
    file: str,
    overrides: list[str],
    choices: list[str],
    system: System,
    keep: Callable[[dict], None],
) -> None:
    """Print each combination of `sweep` when it is simulated, and all of them ranked at the end.

    keep(result): called for each combination that can run. Raises InputError if none can.
    """
    results = []
    try:
        for result in sweep(file, overrides, choices, system):
            results.append(result)
            outcome = (
                result.get("error") or f"{result['tokens_per_sec_per_gpu']:,.0f} tokens/s/GPU"
            )
            print(f"{result['settings']}: {outcome}", flush=True)
            if "error" not in result:
                keep(result)
    finally:
        # printed after SIGTERM and Ctrl-C too
        print(ranking(results), flush=True)
    if all("error" in result for result in results):
        raise InputError(f"--sweep: none of {len(results)} combination(s) can run")


def with_all_gpus(file: str, overrides: list[str], gpus: int) -> Config:
    """Return the config with dp_shard set to the GPUs that other dimensions and samplers leave over."""
    config = load(file, [*overrides, "parallel.dp_shard=1"])
    left = gpus - config.grpo.generation_ranks
    others = training_ranks(config)
    if left % others:
        raise InputError(f"{others} ranks per shard do not divide {left}")
    return load_row(file, [*overrides, f"parallel.dp_shard={left // others}"])[1]


def combinations(choices: list[str]) -> list[tuple[str, list[str]]]:
    """Return each combination's short name and its overrides. Raises InputError."""
    names, lists = zip(*(parse(word) for word in choices), strict=True)
    if len(set(names)) < len(names):
        raise InputError(f"--sweep has a key twice: {' '.join(choices)}")
    found = []
    for values in product(*lists):
        words = [f"{name}={value}" for name, value in zip(names, values, strict=True)]
        found.append((" ".join(words).replace("parallel.", ""), words))
    return found


def parse(word: str) -> tuple[str, list[str]]:
    """Return the setting and the values of a word `key=value,value`. Raises InputError."""
    name, equals, values = word.partition("=")
    values = split(values)
    if not equals or not all(values):
        raise InputError(
            f"--sweep {word!r} is not of the form key=value,value (such as tp=1,2,4)"
        )
    dimension = name in (field.name for field in fields(Parallel))
    return (f"parallel.{name}" if dimension else name), values


def split(text: str) -> list[str]:
    """Split at commas that are not inside of brackets or braces."""
    parts = [""]
    depth = 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def ranking(results: list[dict]) -> str:
    """Return a table, the fastest first, and below it why the other combinations cannot run.

    Combinations that do not fit into memory come after those that do.
    """
    ran = sorted(
        (r for r in results if "error" not in r),
        key=lambda r: (not r["fits"], -r["tokens_per_sec_per_gpu"]),
    )
    columns = {
        "settings": [r["settings"] for r in ran],
        "tokens/s/GPU": [f"{r['tokens_per_sec_per_gpu']:,.0f}" for r in ran],
        **sized("step", "s", ran, "step_time_s"),
        "MFU": [f"{r['mfu']:.1%}" for r in ran],
        **sized("peak", "GiB", ran, "peak_memory_gib"),
        "fits": ["yes" if r["fits"] else "no" for r in ran],
    }
    errors = [f"{r['settings']}: {r['error']}" for r in results if "error" in r]
    return "\n".join([in_width(columns) if ran else "nothing can run", *errors])


def growth(results: list[dict]) -> str:
    """Return a table of measured step times and FLOPs per rank, as multiples of the first row's."""
    times = [result["step_time_s"] for result in results]
    work = [result["clean_tflops_per_gpu"] * result["step_time_s"] for result in results]
    return in_width(
        {
            "settings": [result["row"] for result in results],
            **sized("step", "s", results, "step_time_s"),
            "times the first": [f"{time / times[0]:.2f}" for time in times],
            "FLOPs": [f"{each / work[0]:.2f}" for each in work],
            "MFU": [f"{result['mfu']:.1%}" for result in results],
        }
    )

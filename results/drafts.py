"""Time generation with drafts by multi-token prediction: python results/drafts.py FOLDER [K ...]

FOLDER is a run's out_dir, such as that of configs/train/python-source-mtp.yaml. Each line is of K
drafts a step (default 1, 2 and 3): one sample of a prompt, without and with drafts in turns, 200
tokens each. The ratio is the median over turns of seconds without drafts over seconds with them.
"""

import sys
import time
from statistics import median

from minitrain import Sampler, SamplingParams, load_pretrained, load_tokenizer
from minitrain.settings import Rollout

PROMPTS = ("def ", "class ", "import ", "    for ", "    return ", "if __name__")
# of python -m minitrain.generate
PARAMS = SamplingParams(temperature=0.8, max_tokens=200, ignore_eos=True)
TURNS = 3 * len(PROMPTS)


def main(folder: str, *counts: str) -> None:
    model, tokenizer = load_pretrained(folder), load_tokenizer(folder)
    samplers = {0: Sampler(model, tokenizer, Rollout(), samples=1)}
    for count in map(int, counts or "123"):
        settings = Rollout(draft="mtp", draft_tokens=count)
        samplers[count] = Sampler(model, tokenizer, settings, samples=1)
    # what is computed once
    seconds(samplers, 0)
    for sampler in samplers.values():
        if sampler.drafter:
            sampler.drafter.counts.clear()
    turns = [seconds(samplers, turn) for turn in range(TURNS)]
    print("| drafts | accepted | times as fast |\n| ---: | ---: | ---: |")
    for count, sampler in samplers.items():
        if count:
            drafts = sampler.drafter.counts
            ratio = median(turn[0] / turn[count] for turn in turns)
            print(f"| {count} | {drafts['accepted'] / drafts['drafted']:.1%} | {ratio:.2f} |")


def seconds(samplers: dict[int, Sampler], turn: int) -> dict[int, float]:
    """Return the seconds in which each sampler continues the turn's prompt."""
    found = {}
    for count, sampler in samplers.items():
        begin = time.perf_counter()
        sampler.generate([PROMPTS[turn % len(PROMPTS)]], PARAMS, seed=turn)
        found[count] = time.perf_counter() - begin
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])

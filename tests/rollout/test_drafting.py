"""Decoding with drafts: the tokens are those without, whatever the drafts are."""

import copy
import itertools
import re
import runpy
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minitrain import Sampler, SamplingParams, save_pretrained
from minitrain import generate as commands
from minitrain.data.tokenizer import ByteTokenizer
from minitrain.errors import InputError
from minitrain.models.decoder import Decoder
from minitrain.models.zoo import model_config
from minitrain.rollout import cpu as cpu_attention
from minitrain.rollout.drafting import check_draft
from minitrain.rollout.scheduler import Sample
from minitrain.run.config import load as configs
from minitrain.run.tasks.train_model import check_sources
from minitrain.settings import Rollout
from tests.helpers.families import families
from tests.helpers.grpo import TREE
from tests.helpers.oracle import grouped_mm_by_expert
from tests.helpers.sampling import make, prompts_of, uncached

FAMILIES = [name.removesuffix("-tiny") for name in families()]
SETTINGS = {
    "one at a time, in large pages": dict(slots=1, page_size=32, pages=2),
    "together, prompts shared": dict(slots=16, page_size=4, pages=200, steps=3),
    "interrupted, prompts in pieces": dict(slots=5, page_size=4, pages=12, chunk=7),
}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, n=2),
    SamplingParams(temperature=1.0, max_tokens=9, n=3, seed=5),
    SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.01, max_tokens=12, n=2),
    SamplingParams(temperature=1.3, max_tokens=7, seed=9),
]
# models with layers of multi-token prediction, and their fields
PREDICTORS = {
    "llama3-8b": dict(num_nextn_predict_layers=1),
    "kimi-k2": dict(num_nextn_predict_layers=2, tie_word_embeddings=True),
    "nemotron3-super-120b-a12b": dict(num_nextn_predict_layers=1),
    "qwen3-next-80b-a3b": dict(num_nextn_predict_layers=1),
}
# families that are also sampled one at a time
ALONE = ("qwen3-32b", "deepseek-v3", "nemotron3-nano-30b-a3b")
ROOMY = dict(slots=16, page_size=4, pages=200)


@pytest.fixture(autouse=True)
def experts_in_fp64(monkeypatch):
    """torch has no grouped product of this type."""
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", grouped_mm_by_expert)


def disturbed(model: Decoder, by: float = 0.02) -> Decoder:
    """A draft model that is often right, and often wrong."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    for parameter in draft.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=by)
    return draft


def draft_for(model: Decoder) -> Decoder:
    """As `disturbed`; for a hybrid, a model of attention alone."""
    if not model.config.is_recurrent:
        return disturbed(model)
    return make("qwen3-32b", vocab_size=model.config.vocab_size).to(model.head_weight.dtype)


def generate(model, prompts, params, draft=None, **settings) -> tuple[list, Sampler]:
    own = draft if draft == "mtp" else ""
    draft = None if own else draft
    sampler = Sampler(model, settings=Rollout(draft=own, **settings), draft=draft)
    return sampler.generate(prompts, params), sampler


def counts(sampler: Sampler) -> dict[str, int]:
    return sampler.drafter.counts


def assert_same(found, expected):
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
        assert ours.finish_reason == theirs.finish_reason


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_without_drafts(name):
    """Of every family: windows, sinks, latents, experts, states; greedy and drawn, filtered, several of a prompt."""
    model, prompts = make(name).double(), prompts_of()
    draft = draft_for(model)
    expected, _ = generate(model, prompts, PARAMS, **ROOMY)
    for setting in list(SETTINGS)[name not in ALONE :]:
        found, sampler = generate(model, prompts, PARAMS, draft, **SETTINGS[setting])
        assert_same(found, expected)
        assert (sampler.scheduler.preemptions > 0) == setting.startswith("interrupted")
        assert 0 < counts(sampler)["accepted"] < counts(sampler)["drafted"]


@torch.no_grad()
def mtp_guesses(model: Decoder, tokens: list[int], count: int) -> list[int]:
    """Greedy drafts of a layer of multi-token prediction, over the whole text for each of them."""
    row = torch.tensor([tokens])
    # of each token but the last, with the one after it
    hidden = model(row, head=lambda hidden, *_: hidden)[:, :-1]
    drafts = []
    for _ in range(count):
        states = model.predict_mtp(hidden, row[:, 1:])
        drafts.append(int((states[0, -1] @ model.head_weight.T).argmax()))
        hidden = torch.cat([hidden, states[:, -1:]], 1)
        row = torch.cat([row, torch.tensor([drafts[-1:]])], 1)
    return drafts


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("qwen3-32b", 0),
        ("gpt-oss-20b", 1),
        ("deepseek-v3", 2),
        ("llama3-8b", 0),
        ("kimi-k2", 1),
        ("nemotron3-super-120b-a12b", 2),
    ],
)
def test_drafts_are_those_of_the_draft_model(name, number):
    """Without caches: wrong ones would change no token, and be told by nothing but the speed."""
    model, prompts = make(name, **PREDICTORS.get(name, {})).double(), prompts_of()
    setting = list(SETTINGS.values())[number]
    settings = Rollout(**setting, draft="mtp" if name in PREDICTORS else "")
    draft = None if name in PREDICTORS else disturbed(model)
    guess = partial(uncached, draft) if draft else partial(mtp_guesses, model)
    sampler = Sampler(model, settings=settings, draft=draft)
    params = SamplingParams(temperature=0, max_tokens=8, n=2)
    for prompt in prompts[1:]:
        sampler.submit(prompt, params)
    count = 0
    while sampler.busy:
        for sample, _ in sampler.step():
            if sample.finish_reason is None:
                # the oracle is slow
                assert count % 2 or sample.drafts == guess(sample.tokens, 3)
                count += 1
    assert count > 6


@pytest.mark.parametrize("name", PREDICTORS)
def test_a_model_that_drafts_for_itself(name):
    model, prompts = make(name, **PREDICTORS[name]).double(), prompts_of()
    expected, _ = generate(model, prompts, PARAMS, **ROOMY)
    for settings in list(SETTINGS.values())[1:]:
        found, sampler = generate(model, prompts, PARAMS, draft="mtp", **settings)
        assert_same(found, expected)
        assert 0 < counts(sampler)["accepted"] < counts(sampler)["drafted"]


def test_a_thousand_prompts():
    """In fp64: identical tokens, with half of all drafts wrong."""
    model = make("qwen3-32b").double()
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(512, (1000, 5), generator=generator).tolist()
    params = SamplingParams(temperature=0.9, max_tokens=5)
    expected, _ = generate(model, prompts, params, slots=250, page_size=8, pages=1000)
    draft = disturbed(model, 0.05)
    found, sampler = generate(
        model, prompts, params, draft, slots=250, page_size=8, pages=1000, draft_tokens=2
    )
    assert_same(found, expected)
    assert 0.2 < counts(sampler)["accepted"] / counts(sampler)["drafted"] < 0.9


@pytest.mark.parametrize("name", ["qwen3-32b", "gpt-oss-20b", "nemotron3-nano-30b-a3b"])
def test_drafts_that_are_always_right_or_never(name, monkeypatch):
    """Steps are as many as that says, and a guess by no model changes nothing either."""
    model, prompts = make(name).double(), prompts_of((9, 6))
    params = SamplingParams(temperature=0.8, max_tokens=13)
    expected, _ = generate(model, prompts, params, **ROOMY)
    right = {tuple(prompt): each.tokens for prompt, each in zip(prompts, expected, strict=True)}
    drafts = []
    steps = []

    def known(sample: Sample) -> list[int]:
        begin = len(sample.produced)
        tokens = right[tuple(sample.prompt)][begin : begin + 4]
        return [(token + wrong) % 512 for token in tokens]

    monkeypatch.setattr(
        Sample, "drafts", property(known, lambda self, value: None), raising=False
    )
    for wrong in (0, 1):  # noqa: B007
        found, sampler = generate(
            model, prompts, params, draft_for(model), draft_tokens=4, **ROOMY
        )
        assert_same(found, expected)
        steps.append(counts(sampler)["drafted"] // 8)
        drafts.append(counts(sampler)["accepted"])
    # 13 tokens are 5 + 5 + 3; the last step's drafts beyond the end are of no meaning
    assert steps == [3, 13] and drafts[0] >= 20 and drafts[1] == 0


@pytest.mark.parametrize("name", ["qwen3-32b", "nemotron3-nano-30b-a3b"])
def test_a_sample_that_stops_amid_a_step_is_resumed(name, monkeypatch):
    """Behind other tokens than those that were accepted after its end, of which states know."""
    model, (prompt,) = make(name).double(), prompts_of((9,))
    (whole,), _ = generate(model, [prompt], SamplingParams(0, max_tokens=14), **ROOMY)
    end = next(i for i in range(2, 12) if whole.tokens[i] not in whole.tokens[:i])
    guesses = property(lambda sample: whole.tokens[len(sample.produced) :][:3])
    guesses = guesses.setter(lambda sample, value: None)
    params = SamplingParams(0, max_tokens=30, stop_tokens=(whole.tokens[end],))
    found = []
    for draft in (None, draft_for(model)):
        sampler = Sampler(model, settings=Rollout(**ROOMY), draft=draft)
        with monkeypatch.context() as patch:
            if draft:
                patch.setattr(Sample, "drafts", guesses, raising=False)
            (sample,) = sampler.submit(prompt, params, keep=True)
            while sampler.busy:
                sampler.step()
        after = sampler.resume(sample, [5, 6, 7])
        while sampler.busy:
            sampler.step()
        found.append((sample.produced, after.produced))
    assert found[0] == found[1] and found[0][0] == whole.tokens[: end + 1]


def test_a_draft_model_that_is_the_model():
    """All is accepted, also when one prompt is in the cache, and another took its pages back."""
    model, prompts = make("qwen3-32b").double(), prompts_of((21, 9))
    sampler = Sampler(
        model, settings=Rollout(**SETTINGS["interrupted, prompts in pieces"]), draft=model
    )
    for _ in range(2):
        for params in (SamplingParams(0.8, max_tokens=14, n=3), SamplingParams(0, max_tokens=9)):
            expected, _ = generate(model, prompts, params, **ROOMY)
            assert_same(sampler.generate(prompts, params), expected)
    assert counts(sampler)["accepted"] == counts(sampler)["drafted"] > 0
    assert sampler.scheduler.preemptions > 0


@pytest.mark.parametrize("name", ["qwen3-32b", "gpt-oss-20b"])
def test_groups_that_read_their_prompt_once(name, monkeypatch):
    monkeypatch.setattr(cpu_attention, "MIN_SHARED_TOKENS", 1)
    model, prompts = make(name).double(), prompts_of((21, 18, 9))
    params = [SamplingParams(max_tokens=10, n=n) for n in (4, 3, 1)]
    expected, _ = generate(model, prompts, params, **ROOMY)
    found, sampler = generate(model, prompts, params, disturbed(model), **ROOMY)
    assert sampler.caches.step.rows.shared > 0
    assert_same(found, expected)


def test_ends_amid_a_step():
    """Stop tokens and strings, and the last token that there is room for."""
    model, tokenizer = make("qwen3-32b", vocab_size=258).double(), ByteTokenizer()
    model.lm_head.weight[128:].fill_(-1)
    settings = Rollout(page_size=4, pages=50, draft_tokens=5)
    plain = Sampler(model, tokenizer, settings)
    drafting = Sampler(model, tokenizer, settings, draft=model)
    (whole,) = plain.generate([[5, 6, 7]], SamplingParams(0.8, max_tokens=20))
    text = tokenizer.decode(whole.tokens)
    for ending in (dict(stop=(text[6:8],)), dict(stop_tokens=(whole.tokens[8],)), {}):
        params = SamplingParams(0.8, max_tokens=20, **ending)
        (expected,), (found,) = (s.generate([[5, 6, 7]], params) for s in (plain, drafting))
        assert found.tokens == expected.tokens and found.finish_reason == expected.finish_reason
    assert "".join(drafting.stream("ab", params)) == "".join(plain.stream("ab", params))


def test_the_last_position():
    """Of the model; and a draft model with fewer, which guesses on as well as it can."""
    for name in ("gpt3-175b", "qwen3-32b"):
        model = make(name, max_position_embeddings=16).double()
        draft = make(name, max_position_embeddings=9).double()
        params = SamplingParams(temperature=0, max_tokens=20)
        for steps in (1, 7):
            settings = dict(page_size=4, steps=steps)
            expected, _ = generate(model, prompts_of((12, 3)), params, **settings)
            found, _ = generate(model, prompts_of((12, 3)), params, draft, **settings)
            assert_same(found, expected)


def test_memory_is_of_both_and_free_at_once():
    model = make("qwen3-32b")
    sampler = Sampler(model, settings=Rollout(page_size=4, pages=50), draft=disturbed(model))
    sampler.generate(prompts_of((6,)), SamplingParams(max_tokens=3))
    layers = [*sampler.caches.layers, *sampler.caches.drafts.layers]
    alive = [weakref.ref(tensor) for layer in layers for tensor in layer.pools + layer.buffers]
    del layers
    sampler.free()
    assert alive and not any(ref() is not None for ref in alive)
    sampler.refresh()
    sampler.generate(prompts_of((6,)), SamplingParams(max_tokens=3))


def test_new_weights_reach_what_drafts():
    """Their products and packed copies, too: else drafts are guessed by weights that are gone."""
    model = make("deepseek-v3", **PREDICTORS["llama3-8b"])
    sampler = Sampler(model, settings=Rollout(draft="mtp", page_size=4, pages=50))
    sampler.generate(prompts_of((6,)), SamplingParams(max_tokens=3))
    (layer,) = [each for each in sampler.caches.drafts.layers if each is not None]
    assert layer.constants is not None
    sampler.refresh()
    assert layer.constants is None
    model = make("qwen3-32b")
    sampler = Sampler(model, settings=Rollout(page_size=4, pages=50), draft=disturbed(model))
    packed = sampler.weights.draft.packed
    packed[()] = None
    sampler.refresh()
    assert not packed


def test_a_draft_whose_embedding_is_no_number_is_told(monkeypatch):
    """Although it is never drawn: tokens before it see its keys with a weight of 0. It spoils no later sample."""
    model, (prompt,) = make("qwen3-32b", tie_word_embeddings=False).double(), prompts_of((6,))
    params = SamplingParams(temperature=0, max_tokens=4)
    settings = dict(page_size=4, pages=4)
    expected, _ = generate(model, [prompt], params, **settings)
    bad = next(token for token in range(512) if token not in [*prompt, *expected[0].tokens])
    guesses = property(lambda sample: [bad] * 3, lambda sample, value: None)
    monkeypatch.setattr(Sample, "drafts", guesses, raising=False)
    sampler = Sampler(model, settings=Rollout(**settings), draft=disturbed(model))
    model.model.embed_tokens.weight[bad] = torch.nan
    with pytest.raises(InputError, match="logits are not finite"):
        sampler.generate([prompt], params)
    model.model.embed_tokens.weight[bad] = 0.0
    counts(sampler).clear()
    assert_same(sampler.generate([prompt], params), expected)
    assert counts(sampler)["accepted"] == 0 < counts(sampler)["drafted"]


def test_drafts_that_cannot_be():
    config = model_config("qwen3-32b-tiny")
    with pytest.raises(InputError, match="^the draft model knows 300 tokens, and the model 512"):
        Sampler(make("qwen3-32b"), draft=make("qwen3-32b", vocab_size=300))
    with pytest.raises(InputError, match="^the draft model knows 0 tokens"):
        check_draft(config, model_config("wan2.1-1.3b-tiny"))
    with pytest.raises(InputError, match="^the draft model has recurrent layers"):
        Sampler(make("qwen3-32b"), draft=make("nemotron3-nano-30b-a3b"))
    with pytest.raises(InputError, match="^rollout.draft=small: the sampler needs that model"):
        Sampler(make("qwen3-32b"), settings=Rollout(draft="small"))
    with pytest.raises(InputError, match="^the model has no layers of multi-token prediction"):
        Sampler(make("qwen3-32b"), settings=Rollout(draft="mtp"))


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ({"draft": "small"}, "^rollout.draft=small: the draft model knows 300 tokens, and the "),
        (
            {"draft": "other"},
            "^rollout.draft=other: bytes: 1 of 258 ids are other tokens in other",
        ),
        ({"draft": "empty"}, "^rollout.draft=empty: .*safetensors"),
        (
            {"draft": "mtp"},
            "^rollout.draft=mtp: the model has no layers of multi-token prediction",
        ),
        ({"draft": "none"}, "^rollout.draft=none: none/config.json"),
        ({"draft_tokens": 0}, "^rollout.draft_tokens=0 must be between 1 and 64"),
        ({"draft_tokens": 65}, "^rollout.draft_tokens=65 must be between 1 and 64"),
    ],
)
def test_settings_that_make_no_sense(setting, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, size in (("small", 300), ("other", 258), ("empty", 258)):
        save_pretrained(make("qwen3-32b", vocab_size=size), folder)
    Path("empty/model.safetensors").unlink()
    ByteTokenizer().save("other")
    file = Path("other/tokenizer.json")
    file.write_text(file.read_text(encoding="utf-8").replace("<|bos|>", "<|begin|>"))
    with pytest.raises(InputError, match=line):
        check_sources(configs.from_dict(TREE | {"rollout": setting}))


def test_the_command_line(tmp_path, capsys):
    folders = [tmp_path / name for name in ("model", "draft", "other")]
    depths = dict(num_nextn_predict_layers=1)
    save_pretrained(make("deepseek-v3", vocab_size=258, **depths), folders[0])
    for folder, size in zip(folders[1:], (258, 300), strict=True):
        save_pretrained(make("qwen3-32b", vocab_size=size), folder)
    ByteTokenizer().save(folders[0])
    told = f"--model {folders[0]} --prompt ab --n 2 --max-tokens 8 --device cpu".split()
    shown = []
    for more in ([], ["--draft", str(folders[1]), "--draft-tokens", "2"], ["--draft", "mtp"]):
        commands.main([*told, *more])
        captured = capsys.readouterr()
        shown.append(captured.out)
        assert bool(re.search(r"note: \d+ of \d+ drafts were right", captured.err)) == bool(more)
    assert shown[0] == shown[1] == shown[2] != ""
    told = [str(folders[1]) if word == str(folders[0]) else word for word in told]
    ByteTokenizer().save(folders[1])
    with pytest.raises(InputError, match="^--draft mtp: the model has no layers of multi-token"):
        commands.main([*told, "--draft", "mtp"])
    for folder, line in (
        (folders[2], "the draft model knows 300"),
        ("no", "--draft no is no fo"),
    ):
        with pytest.raises(InputError, match=line):
            commands.main([*told, "--draft", str(folder)])


def test_the_script_that_times_drafts(tmp_path, capsys, monkeypatch):
    """By a clock on which a sample takes 3 seconds without drafts, 2 with one, and 1 with two."""
    save_pretrained(make("deepseek-v3", vocab_size=258, num_nextn_predict_layers=1), tmp_path)
    ByteTokenizer().save(tmp_path)
    script = runpy.run_path(Path(__file__).parents[2] / "results/drafts.py")
    times = itertools.accumulate(itertools.cycle([0, 3, 0, 2, 0, 1]))
    clock = SimpleNamespace(perf_counter=partial(next, times))
    for name, value in (("TURNS", 2), ("PARAMS", SamplingParams(max_tokens=9)), ("time", clock)):
        monkeypatch.setitem(script["main"].__globals__, name, value)
    script["main"](str(tmp_path), "1", "2")
    table = capsys.readouterr().out
    rows = re.findall(r"^\| (\d) \| [\d.]+% \| ([\d.]+) \|$", table, re.MULTILINE)
    assert rows == [("1", "1.50"), ("2", "3.00")]

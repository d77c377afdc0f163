"""DPO against TRL: losses and gradients of the same model, every layout against one process, and lines of data."""

import json
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from trl.trainer.dpo_trainer import DataCollatorForPreference, DPOTrainer
from trl.trainer.utils import add_fused_lm_head

from minitrain import load_pretrained, train
from minitrain.data.chat.preferences import Pairs
from minitrain.data.chat.read_pairs import read_pair
from minitrain.data.datasets import open_dataset
from minitrain.data.faults.wording import counted
from minitrain.errors import InputError
from minitrain.run.config import load as configs
from minitrain.settings import DPO
from minitrain.training.dpo import Preferences, pair_losses, reply_sums
from minitrain.training.log_probs import label_log_probs
from minitrain.training.packing import rows
from tests.helpers.hf_models import build
from tests.helpers.oracle import check_close
from tests.helpers.preferences import TREE, as_samples, compare, learn, made_up_pairs, refuse_cp

METRICS = defaultdict(lambda: defaultdict(list))
SETTINGS = [
    {},
    {"loss": "ipo"},
    {"length_normalized": True},
    {"loss": "ipo", "length_normalized": True, "beta": 0.3},
]


# ----------------------------------------------------------------------------------------------------------------- TRL


def loss_of_trl(model, reference, pairs, kind: str, beta: float) -> torch.Tensor:
    """The mean loss that TRL's trainer computes; what it logs goes to METRICS."""
    METRICS.clear()
    for each in (model, reference):
        add_fused_lm_head(each, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    alike = SimpleNamespace(
        gather_for_metrics=lambda x: x, gather=lambda x: x, device=torch.device("cpu")
    )
    trainer = SimpleNamespace(
        model=model,
        ref_model=reference,
        beta=beta,
        loss_types=[kind],
        loss_weights=[1.0],
        accelerator=alike,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        _metrics=METRICS,
        _total_train_tokens=0,
        _tp_size=1,
        args=SimpleNamespace(gradient_checkpointing=False, gradient_checkpointing_kwargs={}),
    )
    return DPOTrainer._compute_loss(trainer, model, DataCollatorForPreference(0)(pairs), False)


@pytest.mark.parametrize(
    "kind, settings",
    [
        ("sigmoid", DPO()),
        ("sigmoid", DPO(beta=0.5)),
        ("sigmoid_norm", DPO(beta=2.0, length_normalized=True)),
        ("ipo", DPO(loss="ipo", length_normalized=True)),
    ],
    ids=str,
)
def test_losses_and_gradients_are_those_of_trl(tmp_path, kind, settings):
    """Pairs packed into rows here, padded there."""
    theirs, reference = build("llama3"), build("llama3", seed=1)
    for name, model in (("policy", theirs), ("reference", reference)):
        model.save_pretrained(tmp_path / name)
    ours, our_reference = (load_pretrained(tmp_path / name) for name in ("policy", "reference"))
    pairs = made_up_pairs(7)
    expected = loss_of_trl(theirs, reference, pairs, kind, settings.beta)
    expected.backward()

    data = Pairs(
        as_samples(pairs), configs.from_dict(TREE | {"batch": TREE["batch"] | {"seq_len": 40}})
    )
    assert 2 < len(data) < 6  # rows with several pairs, and not all with as many
    batch = rows(data, range(len(data)))
    with torch.no_grad():
        batch["reference"] = reply_sums(label_log_probs(our_reference, batch), batch)
    objective = Preferences(settings)
    assert objective.count(batch) == len(pairs)
    loss = objective.loss(ours.requires_grad_(True), batch) / len(pairs)
    loss.backward()
    torch.testing.assert_close(loss, expected.detach(), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        objective.loss(ours, batch)
    # of training and, apart from it, of validation; TRL logs theirs as lists over batches
    logged = {key: values[0] for key, values in next(iter(METRICS.values())).items()}
    held = objective.held_out(lambda x: x)
    trained = objective.metrics(objective.sums().tolist())
    assert held == {f"val_{name}": value for name, value in trained.items()}
    # TRL's rewards are of sums in any case
    if not settings.length_normalized:
        for ours_, name in (("accuracy", "accuracies"), ("margin", "margins"), ("chosen",) * 2):
            assert trained[f"reward_{ours_}"] == pytest.approx(
                logged[f"rewards/{name}"], abs=1e-5
            )
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    check_close(
        [{name: p.grad for name, p in ours.named_parameters()}], gradients, 1e-4, "gradients"
    )


def test_the_closed_form_of_ipo_without_normalization():
    margin = torch.tensor([0.3, -2.0])
    torch.testing.assert_close(pair_losses(DPO(loss="ipo", beta=0.25), margin), (margin - 2) ** 2)


# ------------------------------------------------------------------------------------------------------------- layouts


@pytest.fixture(scope="module")
def one_process(pool):
    return {str(dpo): pool.run(1, learn, tree_of(dpo))[0] for dpo in SETTINGS[:2]}


def tree_of(dpo: dict) -> dict:
    """IPO's squares run away at the rate of the others, to 2e10 in two steps, and roundings with them."""
    rate = {"optim": TREE["optim"] | {"lr": 0.01}} if dpo.get("loss") == "ipo" else {}
    return TREE | {"dpo": dpo} | rate


MOE = {"name": "mixtral-8x7b-tiny", "vocab_size": 258, "num_layers": 2, "initializer_range": 0.05}


@pytest.mark.parametrize(
    "parallel, dpo",
    [
        ({"dp_shard": 2}, SETTINGS[0]),
        ({"dp_shard": 2, "tp": 2}, SETTINGS[0]),
        ({"dp_shard": 2, "pp": 2}, SETTINGS[0]),
        ({"dp_replicate": 2, "dp_shard": 2, "reshard_after_forward": False}, SETTINGS[0]),
        ({"tp": 2, "pp": 2}, SETTINGS[1]),
        ({"pp": 2, "vp": 2, "schedule": "Interleaved1F1B"}, SETTINGS[0]),
    ],
    ids=str,
)
def test_every_layout_learns_as_one_process(pool, one_process, parallel, dpo):
    compare(pool, one_process[str(dpo)], tree_of(dpo) | {"parallel": parallel})


def test_experts(pool):
    tree = TREE | {"model": MOE}
    for parallel in ({"dp_shard": 2, "ep": 2}, {"tp": 2, "ep": 2}):
        compare(pool, pool.run(1, learn, tree)[0], tree | {"parallel": parallel})


def test_context_parallelism_is_refused(pool):
    for line in pool.run(2, refuse_cp, TREE | {"parallel": {"cp": 2}}):
        assert line.startswith("parallel.cp=2: Preferences does not name cp")


# ---------------------------------------------------------------------------------------------------------------- data


def message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


ASKED, GOOD, BAD = message("user", "1+1?"), message("assistant", "2"), message("assistant", "3")
LINES = [
    {"prompt": "1+1?", "chosen": "2", "rejected": "3"},
    {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
    {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    {"prompt": "1+1?", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    {"prompt": "1+1?", "chosen": "2", "rejected": [BAD]},
    {"question": "1+1?", "chosen": "2", "rejected": "3"},
    {"messages": [ASKED], "chosen": GOOD, "rejected": BAD},  # axolotl's
    # LLaMA-Factory's
    {
        "conversations": [{"from": "human", "value": "1+1?"}],
        "chosen": {"from": "gpt", "value": "2"},
        "rejected": {"from": "gpt", "value": "3"},
    },
    # UltraFeedback's
    {
        "messages": [ASKED, GOOD],
        "prompt": "1+1?",
        "chosen": [ASKED, GOOD],
        "rejected": [ASKED, BAD],
    },
]


@pytest.mark.parametrize("line", LINES, ids=str)
def test_all_forms_of_a_line_are_one_pair(line):
    chosen, rejected = read_pair(line)
    assert [(turn.role, turn.content, turn.learned) for turn in chosen] == [
        ("user", "1+1?", False),
        ("assistant", "2", True),
    ]
    assert [turn.content for turn in rejected] == ["1+1?", "3"]


def test_replies_in_the_prompt_are_not_learned(tmp_path):
    turns = [ASKED, GOOD, message("user", "2+1?")]
    line = {"prompt": turns, "chosen": [BAD], "rejected": [message("assistant", "44")]}
    (tmp_path / "x.jsonl").write_text(json.dumps(line))
    tree = TREE | {
        "data": TREE["data"] | {"path": str(tmp_path / "x.jsonl")},
        "batch": {"seq_len": 256},
    }
    data, held = open_dataset(configs.from_dict(tree))
    row = data.row(0)
    learned = [
        row["labels"][(row["document_ids"] == n) & (row["labels"] >= 0)].tolist() for n in (0, 1)
    ]
    assert [bytes(t for t in tokens if t < 256) for tokens in learned] == [
        b"3",
        b"44",
    ] and held is None
    assert row["document_ids"].unique().tolist() == [-1, 0, 1]


@pytest.mark.parametrize(
    "line, told",
    [
        ({"prompt": "1+1?", "chosen": "2"}, "no key 'rejected'"),
        (
            {"prompt": "1+1?", "chosen": "2", "rejected": "2"},
            "'chosen' and 'rejected' are the same",
        ),
        ({"prompt": "1+1?", "chosen": "2", "rejected": " "}, "'rejected' is empty"),
        ({"prompt": 3, "chosen": "2", "rejected": "3"}, "'prompt' must be text, not int"),
        (
            {"chosen": "1+1? 2", "rejected": "1+1? 3"},
            "'chosen' is a text, and there is no 'prompt' that it answers",
        ),
        (
            {"prompt": "1+1?", "chosen": "2", "rejected": "3", "weight": 0.5},
            "'weight' is 0.5, but a reply is learned or",
        ),
        (
            {"prompt": "1+1?", "chosen": "2", "rejected": "3", "image": "x.png"},
            "'image' is not supported",
        ),
        (
            {
                "prompt": [{"role": "user", "content": "1+1?"}],
                "context": "c",
                "chosen": "2",
                "rejected": "3",
            },
            "'context' is not supported",
        ),
    ],
    ids=str,
)
def test_lines_that_are_no_pair_are_refused(tmp_path, line, told):
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps(line))
    with pytest.raises(InputError) as error:
        open_dataset(configs.from_dict(TREE | {"data": TREE["data"] | {"path": str(file)}}))
    assert str(error.value).startswith(f"{file}:1: {told}")


def test_pairs_that_fill_more_than_a_row_are_cut_or_dropped(tmp_path):
    file = tmp_path / "x.jsonl"
    lines = [
        {"prompt": "?", "chosen": "a" * 90, "rejected": "b"},
        {"prompt": "?", "chosen": "c", "rejected": "d"},
    ]
    masked = lines[1] | {"train": False}
    file.write_text("\n".join(map(json.dumps, [*lines, masked])))
    for over_long, count in (("truncate", 2), ("drop", 1)):
        tree = TREE | {"data": TREE["data"] | {"path": str(file), "over_long": over_long}}
        data, _ = open_dataset(configs.from_dict(tree))
        assert len(data.pairs) == count and data.about.startswith(
            f"{counted(count, 'pair')} ({3 - count} dropped)"
        )


def test_pairs_that_are_cut_before_they_differ_are_dropped_and_cuts_are_told(tmp_path):
    """By the bytes of each: a row has 32 for a reply, of which the last is predicted alone."""
    file = tmp_path / "x.jsonl"
    rows = []
    for prompt, alike in (
        (1, 2),
        (1, 27),
        (1, 28),
        (1, 29),
        (1, 30),
        (1, 31),
        (10, 18),
        (10, 40),
        (31, 0),
        (40, 1),
    ):
        reply = "a" * alike
        rows.append({"prompt": "?" * prompt, "chosen": reply + "GOOD", "rejected": reply + "BAD"})
    rows.append({"prompt": "?", "chosen": "same ", "rejected": "same"})
    file.write_text("\n".join(map(json.dumps, rows)))
    expected = []
    truncated = alike = 0
    for row in rows:
        # of the whole texts: the plain template ends a reply with eos, here a zero
        texts = [f"{row['prompt']}\n{row[side]}\0".encode() for side in ("chosen", "rejected")]
        if len(row["prompt"]) + 1 > 32:
            continue
        if texts[0][:33] == texts[1][:33]:
            alike += 1
            continue
        truncated += any(len(text) > 33 for text in texts)
        expected.append([text[:33] for text in texts])
    tree = TREE | {"data": TREE["data"] | {"path": str(file), "template": "plain"}}
    tree["batch"] = tree["batch"] | {"seq_len": 64}
    data, _ = open_dataset(configs.from_dict(tree))
    assert alike >= 2 and truncated >= 2
    found = []
    for pair in data.pairs:
        texts = [[*sample.tokens, sample.labels[-1]] for sample in pair]
        found.append([bytes(0 if n == 257 else n for n in text) for text in texts])
    assert found == expected
    assert f"({len(rows) - len(expected)} dropped), {truncated} truncated to 32 tok" in data.about
    assert f" {alike} dropped as both replies are the same" in data.about


# ----------------------------------------------------------------------------------------------------------------- run


def test_a_run_learns_and_resumes(tmp_path):
    """The same losses with a stop in between: the reference is that of the weights before the first step."""
    (tmp_path / "x.jsonl").write_text(
        "".join(
            json.dumps({"prompt": f"{n}?", "chosen": f"yes {n}", "rejected": f"no {n}"}) + "\n"
            for n in range(40)
        )
    )
    words = [
        f"data.path={tmp_path}/x.jsonl",
        "optim.lr=0.003",
        "optim.name=adamw",
        "data.validation=0.2",
    ]
    words += ["validation.every=4", "checkpoint.every=4", "batch.seq_len=128"]
    file = tmp_path / "x.yaml"
    file.write_text(json.dumps(TREE))

    def run(name, *steps):
        for count in steps:
            train.main(
                ["--config", str(file), *words, f"out_dir={tmp_path / name}", f"steps={count}"]
            )
        return [
            json.loads(line)
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]

    whole, stopped = run("whole", 8), run("stopped", 4, 8)
    assert [line["loss"] for line in whole] == [line["loss"] for line in stopped]
    assert whole[0]["loss"] == pytest.approx(0.6931, abs=1e-4) and whole[-1]["val_loss"] < 0.3
    assert (
        whole[-1]["reward_accuracy"] == 1.0
        and whole[-1]["reward_chosen"] > whole[-1]["reward_rejected"]
    )

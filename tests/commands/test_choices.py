"""minitrain evaluate --choices against transformers, asked as lm-evaluation-harness 0.4.13 asks it."""

import json
import re

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import minitrain
from minitrain import InputError
from minitrain.__main__ import dispatch
from minitrain.data.tokenizer import ByteTokenizer
from minitrain.models.decoder import Decoder
from minitrain.models.zoo import model_config

HELLASWAG = [
    {
        "ind": 24,
        "activity_label": "Roof shingle removal",
        "ctx_a": "A man is sitting on a roof. [step] He talks.",
        "ctx_b": "he Starts",
        "ctx": "A man is sitting on a roof. he",
        "endings": [
            "is using wrap to wrap a pair of skis.",
            "is ripping level tiles off.  [title] Do it",
            "is holding a rubik's cube né.",
            "starts pulling up roofing on a roof.",
        ],
        "label": "3",
    },
    {
        "activity_label": "Food [substeps]",
        "ctx_a": "[header] How to cook [title] Wash. ",
        "ctx_b": "",
        "endings": ["Boil it.", "Fry it, slowly, then eat it.", "Go", "[step] Serve it cold."],
        "label": 0,
    },
]
ARC = [
    {
        "id": "x",
        "question": "Which is a gas?",
        "choices": {"text": ["iron", "oxygen", "wood"], "label": ["1", "2", "3"]},
        "answerKey": "2",
    },
    {
        "question": "What melts ",
        "choices": {
            "text": ["ice", "a very old stone", "air", "x"],
            "label": ["A", "B", "C", "D"],
        },
        "answerKey": "A",
    },
]
MMLU = [
    {
        "question": " Find 2 + 2. ",
        "subject": "abstract_algebra",
        "choices": ["1", "4", "3", "22"],
        "answer": 1,
    },
    {"question": "Who?", "choices": ["me", "you", "they", "we"], "answer": "D"},
]
SETS = {"hellaswag": HELLASWAG, "arc": ARC, "mmlu": MMLU}


def without_marks(text: str) -> str:
    # lm_eval/tasks/hellaswag/utils.py
    text = text.strip()
    text = text.replace(" [title]", ". ")
    text = re.sub("\\[.*?\\]", "", text)
    return text.replace("  ", " ")


def asked(name: str, line: dict) -> tuple[str, list[str], int]:
    """The context, choices and right answer of a line, by lm_eval's templates."""
    if name == "hellaswag":
        query = line["activity_label"] + ": " + line["ctx_a"] + " " + line["ctx_b"].capitalize()
        endings = [without_marks(ending) for ending in line["endings"]]
        return without_marks(query), endings, int(line["label"])
    if name == "arc":
        choices = line["choices"]
        right = choices["label"].index(line["answerKey"])
        return f"Question: {line['question']}\nAnswer:", choices["text"], right
    a, b, c, d = line["choices"]
    text = f"{line['question'].strip()}\nA. {a}\nB. {b}\nC. {c}\nD. {d}\nAnswer:"
    if "subject" in line:
        text = f"The following are multiple choice questions (with answers) about abstract algebra.\n\n{text}"
    return text, ["A", "B", "C", "D"], {"D": 3}.get(line["answer"], line["answer"])


def log_probs(folder, name: str, line: dict, length: int) -> list[float]:
    """Return transformers' log-probability of each choice, as lm_eval's HFLM computes it."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    context, choices, _ = asked(name, line)
    found = []
    for choice in choices:
        text, rest = context.rstrip(), context[len(context.rstrip()) :]
        whole = tokenizer.encode(f"{text}{rest} {choice}")
        before = tokenizer.encode(text)
        ids = torch.tensor([whole])[:, -length - 1 :]
        with torch.no_grad():
            scores = model(ids[:, :-1]).logits[0].log_softmax(-1)
        each = scores.gather(1, ids[0, 1:, None])[:, 0]
        found.append(each[len(before) - len(whole) :].sum().item())
    return found


@pytest.fixture(scope="module", params=["bytes", "bpe with bos"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(5)
    vocab = 258 if request.param == "bytes" else 300
    shape = {"num_layers": 1, "vocab_size": vocab, "max_position_embeddings": 400}
    model = Decoder(model_config("llama3-8b-tiny", **shape))
    with torch.no_grad():
        for x in model.parameters():
            x.normal_(0, 0.3) if x.ndim > 1 else x
    minitrain.save_pretrained(model, folder, ByteTokenizer() if vocab == 258 else None)
    if vocab == 300:
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = BpeTrainer(
            vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet
        )
        texts = [asked(name, line) for name, lines in SETS.items() for line in lines]
        bpe.train_from_iterator([f"{text} {choices[0]}" for text, choices, _ in texts], trainer)
        bpe.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
        PreTrainedTokenizerFast(
            tokenizer_object=bpe, bos_token="<s>", eos_token="</s>"
        ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("length", [400, 24])
def test_choices_have_the_log_probabilities_of_lm_eval(folder, tmp_path, capsys, length):
    for name, lines in SETS.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        words = ["evaluate", "--choices", str(file), "--model", str(folder), "--device", "cpu"]
        dispatch([*words, "--seq-len", str(length), "--out", str(tmp_path / "out.jsonl")])
        told = capsys.readouterr().out.splitlines()[0]
        found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        right = {"acc": [], "acc_norm": []}
        for line, ours in zip(lines, found, strict=True):
            expected = log_probs(folder, name, line, length)
            assert ours["log_probs"] == pytest.approx(expected, rel=1e-4)
            _, choices, answer = asked(name, line)
            shares = np.array(expected) / [float(len(choice)) for choice in choices]
            assert ours["choice"] == np.argmax(expected)
            assert ours["choice_norm"] == np.argmax(shares)
            right["acc"].append(np.argmax(expected) == answer)
            right["acc_norm"].append(np.argmax(shares) == answer)
            assert line.items() <= ours.items()
        parts = [
            f"{key} {np.mean(each):.4f} ± {np.std(each, ddof=1) / len(each) ** 0.5:.4f}"
            for key, each in right.items()
        ]
        assert told == f"2 questions: {', '.join(parts)}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "x"}, "neither 'endings' .as HellaSwag's lines., nor 'choices'"),
        (HELLASWAG[0] | {"label": ""}, "'label' is '': give the number of the right choice"),
        (HELLASWAG[0] | {"label": "4"}, "the answer 4 is none of 4 choices"),
        (HELLASWAG[0] | {"endings": ["a"]}, "'endings' must be a list of two texts or more"),
        (HELLASWAG[0] | {"endings": ["a", "[step]"], "label": 0}, "a choice is empty"),
        ({"endings": ["a", "b"], "label": 0}, "no key 'activity_label'"),
        (ARC[0] | {"answerKey": "B"}, "'answerKey' 'B' is none of the labels"),
        (ARC[0] | {"choices": ["a", "b"]}, "'choices' must be an object of 'text' and 'label'"),
        (MMLU[0] | {"answer": -1}, "the answer -1 is none of 4 choices"),
        (MMLU[0] | {"answer": "E"}, "'answer' is 'E': give the number"),
        (MMLU[0] | {"answer": "AB"}, "'answer' is 'AB': give the number"),
        (MMLU[0] | {"answer": None}, "'answer' is None: give the number"),
        (MMLU[0] | {"answer": True}, "'answer' is True: give the number"),
    ],
)
def test_lines_without_a_right_choice_are_refused(folder, tmp_path, line, message):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(MMLU[1]) + "\n" + json.dumps(line))
    with pytest.raises(InputError, match=f"a.jsonl:2: {message}"):
        dispatch(["evaluate", "--choices", str(file), "--model", str(folder), "--device", "cpu"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--choices", "--chat"], "--chat and --choices: give one of them"),
        (["--choices", "--kind", "text"], "--choices needs JSON or tables, not --kind text"),
        (["--out", "x"], "--out is for the numbers of --choices .add it."),
    ],
)
def test_options_that_would_be_lost_are_refused(folder, words, message):
    with pytest.raises(InputError, match=message):
        dispatch(["evaluate", "--model", str(folder), *words, "a.jsonl"])

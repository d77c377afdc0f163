"""Multi-token prediction in one process, against a naive one, and its layers in the families' files."""

import json
import re
from dataclasses import replace
from functools import partial
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers.modeling_layers import MtpModel

from minitrain import load_pretrained, train
from minitrain.formats.hf import find_weights, load_weights, read_config, save_pretrained
from minitrain.grpo.objective import PolicyGradient
from minitrain.models.decoder import Decoder
from minitrain.models.zoo import model_config
from minitrain.run.config.load import from_dict
from minitrain.settings import GRPO
from minitrain.training.build import initialize
from minitrain.training.language_modeling import LanguageModeling
from minitrain.training.loss import IGNORE
from minitrain.training.mtp_loss import MTPLoss
from tests.helpers.hf_models import (
    call_refused,
    edit_json,
    edit_weights,
    in_our_layout,
    random_tokens,
    reload,
)
from tests.helpers.oracle import packed_batch
from tests.helpers.training import logged

DEPTHS = 2
TREE = {
    "model": {
        "name": "llama3-8b-tiny",
        "vocab_size": 128,
        "num_layers": 2,
        "initializer_range": 0.1,
    },
    "batch": {"global": 4, "micro": 4, "seq_len": 24},
}


def model_of(name="llama3-8b-tiny", depths=DEPTHS, **fields):
    """With random weights, also of norms: nothing cancels."""
    config = model_config(
        name,
        num_nextn_predict_layers=depths,
        **{"vocab_size": 128, "initializer_range": 0.1} | fields,
    )
    model = Decoder(config)
    initialize(model, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return model


def naive_losses(model, tokens, labels):
    """-log p by depth, each [n - depth], of one document: tokens and labels [n].

    Depth k as in DeepSeek-V3's report, (21) to (24), on sequences that are k tokens shorter.
    """
    hidden = model(tokens[None], head=lambda hidden, weight, labels: hidden)
    found = [F.cross_entropy(hidden[0] @ model.head_weight.T, labels, reduction="none")]
    for k in range(1, model.config.num_nextn_predict_layers + 1):
        layer = model.model.layers[str(model.config.num_layers + k - 1)]
        length = len(tokens) - k
        if length <= 0:
            break
        embedded = model.model.embed_tokens.weight[tokens[k:]][None]
        both = torch.cat([layer.enorm(embedded), layer.hnorm(hidden[:, :length])], dim=-1)
        x = both @ layer.eh_proj.weight.T
        mask, _ = model._masks(length, x.device, None)
        rotary = model._rotary(torch.arange(length)[None])
        x = super(type(layer).__bases__[0], layer).forward(x, rotary, mask)
        hidden = layer.shared_head.norm(x)
        logits = hidden[0] @ model.head_weight.T
        found.append(F.cross_entropy(logits, labels[k:], reduction="none"))
    return found


def naive_loss(model, batch, weight):
    """The loss and the sum of each depth over its own labels, document by document."""
    total, count = 0.0, (batch["labels"] != IGNORE).sum()
    sums = torch.zeros(model.config.num_nextn_predict_layers, 2)
    for tokens, labels, ids in zip(
        batch["tokens"], batch["labels"], batch["document_ids"], strict=True
    ):
        for number in ids.unique():
            here = ids == number
            head, *mtp = naive_losses(model, tokens[here], labels[here])
            total = total + head.sum() / count
            for k, losses in enumerate(mtp):
                total = total + weight / len(sums) * losses.sum() / count
                sums[k, 0] += losses.sum().item()
                sums[k, 1] += (labels[here][k + 1 :] != IGNORE).sum()
    return total, sums


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama3-8b-tiny", {"num_layers": 2}),
        ("llama3-8b-tiny", {"num_layers": 2, "tie_word_embeddings": True}),
        ("deepseek-v3-tiny", {"num_layers": 2}),
        ("nemotron3-nano-30b-a3b-tiny", {"num_layers": 2, "layer_pattern": "ME"}),
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_a_naive_one(name, fields):
    """Of packed documents, some shorter than the depths, with masked labels."""
    model = model_of(name, **fields)
    batch = packed_batch(from_dict(TREE), 0)
    objective = LanguageModeling(mtp=MTPLoss(DEPTHS, 0.3))
    count = objective.count(batch)
    loss = objective.loss(model, objective.extend(batch)) / count
    expected, sums = naive_loss(model, batch, 0.3)
    head, _ = naive_loss(model, batch, 0.0)
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters)
    for name, mine, other in zip(
        names, found, torch.autograd.grad(expected, parameters), strict=True
    ):
        assert other.norm() > 0, name
        assert (mine - other).norm() <= 2e-5 * other.norm(), name
    # what is reported is next-token prediction alone
    assert loss.item() == pytest.approx(head.item(), rel=1e-5)
    metrics = logged(objective)
    assert metrics["mtp_loss"] == pytest.approx((sums[:, 0] / sums[:, 1]).mean().item(), rel=1e-5)
    assert "mtp_acceptance" not in metrics


def test_acceptance_is_the_share_of_tokens_that_the_depths_get_right():
    model, batch = model_of(num_layers=2), packed_batch(from_dict(TREE), 0)
    objective = LanguageModeling(mtp=MTPLoss(DEPTHS, 0.3))
    with torch.no_grad():
        objective.loss(model, objective.extend(batch))
        right = torch.zeros(DEPTHS, 2)
        for tokens, labels, ids in zip(
            batch["tokens"], batch["labels"], batch["document_ids"], strict=True
        ):
            for number in ids.unique():
                here = ids == number
                hidden = model(tokens[here][None], head=lambda hidden, *_: hidden)
                for k in range(1, DEPTHS + 1):
                    # the function that drafts, over sequences that are not cut
                    later = F.pad(tokens[here][k:], (0, k))[: here.sum()]
                    hidden = model.predict_mtp(hidden, later[None], k - 1)
                    likeliest = (hidden[0] @ model.head_weight.T).argmax(-1)
                    wanted = labels[here][k:]
                    right[k - 1, 0] += (likeliest[: len(wanted)] == wanted).sum()
                    right[k - 1, 1] += (wanted != IGNORE).sum()
    _, sums = naive_loss(model, batch, 0.0)
    assert right[:, 0].sum() > 0
    assert objective.held_out(lambda x: x) == {
        "val_mtp_loss": pytest.approx((sums[:, 0] / sums[:, 1]).mean().item(), rel=1e-5),
        "val_mtp_acceptance": pytest.approx((right[:, 0] / right[:, 1]).mean().item()),
    }


def test_layers_of_deepseek_are_those_of_transformers(tmp_path):
    """From a file of theirs: logits of both depths, and every gradient."""
    model = saved("deepseek-v3-tiny", tmp_path)
    main = reload(tmp_path)
    # which names the layer of the full size
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[45]\..*"]
    theirs = MtpModel.from_pretrained(main)
    tokens = random_tokens(2, 20)
    hidden = main(tokens, output_hidden_states=True).hidden_states[-1]
    ours = model(tokens, head=lambda hidden, weight, labels: hidden)
    torch.testing.assert_close(ours, hidden, atol=1e-4, rtol=0)
    found, expected = 0.0, 0.0
    for k in range(1, DEPTHS + 1):
        later = tokens[:, k:]
        positions = torch.arange(later.shape[1])[None]
        hidden = theirs.forward_layer(k - 1, hidden[:, :-1], positions, None, input_ids=later)
        ours = model.predict_mtp(ours, F.pad(later, (0, k)), k - 1)
        other = main.lm_head(hidden)
        mine = (ours @ model.head_weight.T)[:, :-k]
        assert other.std() > 0.1
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=0)
        cotangent = torch.randn(other.shape, generator=torch.Generator().manual_seed(k))
        found = found + (mine * cotangent).sum()
        expected = expected + (other * cotangent).sum()
    found.backward()
    expected.backward()
    names = {".post_norm.": ".shared_head.norm.", ".mtp_block.": "."}
    gradients = {}
    for name, parameter in chain(main.named_parameters(), theirs.named_parameters()):
        if match := re.match(r"layers\.(\d)(.*)", name):
            name = f"model.layers.{4 + int(match[1])}{match[2]}"
            for part, mine in names.items():
                name = name.replace(part, mine)
        gradients |= dict([in_our_layout(name, parameter.grad, kind="deepseek_v3")])
    for name, parameter in model.named_parameters():
        other = gradients[name]
        assert other.norm() > 0, name
        assert (parameter.grad - other).norm() <= 1e-3 * other.norm(), name


# --------------------------------------------------------------------------------------------------------------- files

# names of some stored tensors, and of copies of the embedding and the head
STORED = {
    "deepseek-v3-tiny": (
        "model.layers.{}.",
        ("4.enorm", "5.hnorm", "5.eh_proj", "4.shared_head.norm", "5.mlp.experts.3.up_proj"),
        ("5.embed_tokens", "5.shared_head.head"),
    ),
    "glm-4.5-tiny": (
        "model.layers.{}.",
        ("4.enorm", "5.eh_proj", "4.shared_head.norm", "5.mlp.experts.3.up_proj"),
        ("5.embed_tokens", "5.shared_head.head"),
    ),
    "nemotron3-nano-30b-a3b-tiny": (
        "mtp.layers.{}.",
        (
            "0.enorm",
            "2.eh_proj",
            "0.norm",
            "2.mixer.q_proj",
            "3.mixer.experts.3.up_proj",
            "1.final_layernorm",
        ),
        (),
    ),
    "minitrain": ("model.layers.{}.", ("4.enorm", "5.mlp.up_proj"), ()),
}


def saved(name, folder, depths=DEPTHS):
    model = model_of("llama3-8b-tiny" if name == "minitrain" else name, depths)
    if name == "minitrain":
        # no config.json of transformers describes it
        model.config = replace(model.config, family=name)
    save_pretrained(model, folder)
    return model


@pytest.mark.parametrize("name", STORED)
def test_files_hold_the_layers_both_ways(name, tmp_path):
    model = saved(name, tmp_path)
    again = load_pretrained(tmp_path)
    assert again.config == model.config
    assert again.state_dict().keys() == model.state_dict().keys()
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    stored = load_file(tmp_path / "model.safetensors")
    prefix, parts, copies = STORED[name]
    assert {prefix.format(part) + "weight" for part in parts} <= stored.keys()
    for part, ours in zip(copies, (model.model.embed_tokens, model.lm_head), strict=False):
        assert torch.equal(stored[prefix.format(part) + "weight"], ours.weight)
    assert (
        json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == DEPTHS
    )
    tokens = random_tokens(1, 8)
    for depths in range(DEPTHS):
        fewer = Decoder(replace(model.config, num_nextn_predict_layers=depths))
        load_weights(fewer, tmp_path)
        assert torch.equal(fewer(tokens), model(tokens))


@pytest.mark.parametrize("name", STORED)
def test_a_depth_that_files_do_not_hold(name, tmp_path):
    saved(name, tmp_path, 1)
    tree = {"model": {"path": str(tmp_path), "num_nextn_predict_layers": 2}}
    config = from_dict(tree).model.config
    call_refused(
        lambda: find_weights(config, tmp_path),
        "model.num_nextn_predict_layers=2",
        f"{tmp_path} holds 1 layer",
    )
    for wrong, line in ((-1, "must be at least 0"), (65, "must be at most 64")):
        change = partial(replace, config, num_nextn_predict_layers=wrong)
        call_refused(change, f"model.num_nextn_predict_layers={wrong} {line}")


def test_transformers_keeps_the_number_and_drops_the_layers(tmp_path):
    model = saved("deepseek-v3-tiny", tmp_path / "whole")
    theirs = reload(tmp_path / "whole", ignore_mismatched_sizes=True)
    theirs.save_pretrained(tmp_path / "theirs")
    edit_json(tmp_path / "theirs/config.json", num_nextn_predict_layers=DEPTHS)
    assert read_config(tmp_path / "theirs").num_nextn_predict_layers == 0
    tokens = random_tokens(2, 8)
    with torch.no_grad():
        found = load_pretrained(tmp_path / "theirs")(tokens)
        torch.testing.assert_close(found, theirs(tokens).logits, atol=1e-4, rtol=0)
        torch.testing.assert_close(found, model(tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("key", "what"), [("embed_tokens", "embedding"), ("shared_head.head", "head")]
)
def test_copies_must_be_what_they_copy(key, what, tmp_path):
    saved("deepseek-v3-tiny", tmp_path)
    name = f"model.layers.5.{key}.weight"
    tensor = load_file(tmp_path / "model.safetensors")[name]
    edit_weights(tmp_path, **{name: tensor + 1})
    call_refused(
        lambda: load_pretrained(tmp_path), name, f"is not the {what}", "layers=0 reads neither"
    )
    plain = replace(read_config(tmp_path), num_nextn_predict_layers=0)
    find_weights(plain, tmp_path)
    # files without copies are as good
    edit_weights(tmp_path, **{name: None})
    assert load_pretrained(tmp_path).config.num_nextn_predict_layers == DEPTHS


def test_nemotron_s_pattern_of_a_depth(tmp_path):
    saved("nemotron3-nano-30b-a3b-tiny", tmp_path)
    key = "mtp_hybrid_override_pattern"
    file = tmp_path / "config.json"
    assert json.loads(file.read_text())[key] == "*E"
    names = {"mtp_layers_block_type": ["attention", "moe"]}
    edit_json(file, **names | {key: None})
    assert read_config(tmp_path).num_nextn_predict_layers == DEPTHS
    edit_json(file, mtp_layers_block_type=None, **{key: "M*E"})
    call_refused(
        lambda: read_config(tmp_path), file, f"{key}='M*E' is not supported (must be '*E')"
    )


def test_a_family_without_such_files_is_saved_for_minitrain(tmp_path):
    call_refused(
        lambda: save_pretrained(model_of(depths=1), tmp_path),
        "model.num_nextn_predict_layers=1 cannot be saved as LlamaForCausalLM (must be 0)",
    )


def test_grpo_trains_them_along():
    """The gradient of the policy's loss and that of next tokens grow by the same."""
    model, batch = model_of(num_layers=2), packed_batch(from_dict(TREE), 0)
    generator = torch.Generator().manual_seed(0)
    for name in ("advantages", "sampled", "weights"):
        batch[name] = torch.rand(batch["tokens"].shape, generator=generator)
    keys = ("tokens", "labels", "positions", "document_ids")

    def gradients(mtp):
        objective = LanguageModeling(mtp=mtp)
        policy = PolicyGradient(GRPO(), 1.0, 8, mtp)
        given = objective.extend(batch)
        kept = {key: given[key] for key in given if key in keys or key.startswith("next")}
        losses = objective.loss(model, kept), policy.loss(model, given)
        return [torch.autograd.grad(loss, weights, allow_unused=True) for loss in losses]

    weights = list(model.parameters())
    before, after = gradients(None), gradients(MTPLoss(DEPTHS, 0.3))
    for parameter, *found in zip(weights, *before, *after, strict=True):
        old, old_policy, new, new_policy = (0 if g is None else g.double() for g in found)
        assert (new - old).norm() > 0
        assert (new - old - (new_policy - old_policy)).norm() <= 1e-4 * (new - old).norm()
        assert parameter.shape == new.shape


def test_grpo_with_means_over_responses_is_refused():
    fields = {"num_nextn_predict_layers": 1, "name": "llama3-8b-tiny", "vocab_size": 258}
    tree = {
        "model": fields,
        "task": "grpo",
        "grpo": {"aggregation": "sequence"},
        "data": {"template": "plain"},
    }
    call_refused(partial(from_dict, tree), "grpo.aggregation=sequence", "mtp_weight=0")
    from_dict(tree | {"mtp_weight": 0.0})


def test_a_run_logs_them_and_goes_on_exactly(tmp_path):
    """With averages of the weights, by which it validates, and which it writes."""
    tree = {
        "model": {"name": "llama3-8b-tiny", "num_layers": 1, "num_nextn_predict_layers": 1},
        "batch": {"global": 2, "micro": 1, "seq_len": 16},
        "optim": {"ema": 0.5, "lr": 0.01},
        "validation": {"every": 2, "batches": 1},
        "device": "cpu",
    }
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    logs, written = [], []
    for name, stops in (("whole", [4]), ("stopped", [2, 4])):
        for steps in stops:
            words = [f"out_dir={tmp_path / name}", f"steps={steps}"]
            train.main(["--config", str(tmp_path / "run.yaml"), *words])
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        logs.append([json.loads(line) for line in lines])
        written.append(load_pretrained(tmp_path / name))
    keys = ("loss", "mtp_loss", "val_loss", "val_mtp_loss", "val_mtp_acceptance")
    found, resumed = ([[line.get(key) for key in keys] for line in log] for log in logs)
    assert found == resumed and len(found) == 4
    for step, (loss, mtp, *held_out) in enumerate(found, 1):
        assert 0 < mtp != loss
        assert (None in held_out) == (step % 2 > 0)
    assert written[0].config.num_nextn_predict_layers == 1
    for name, tensor in written[0].state_dict().items():
        assert torch.equal(written[1].state_dict()[name], tensor), name

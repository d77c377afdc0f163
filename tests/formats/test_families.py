"""A family of one's own in the table: names of tensors, kinds of keys, functions of its own."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from minitrain import load_pretrained, save_pretrained
from minitrain.errors import InputError
from minitrain.formats.families import FAMILIES
from minitrain.formats.hf import read_config
from minitrain.models.decoder import Decoder
from minitrain.models.zoo import model_config
from tests.helpers.hf_models import edit_json

# as in Gemma, whose blocks have a norm of our name in another place
RENAMED = {
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "input_layernorm": "post_attention_layernorm",
}


@pytest.fixture
def family(monkeypatch):
    """Return a function that puts a family like Llama's into the table."""

    def add(**changes):
        changed = replace(FAMILIES["llama"], architecture="OddForCausalLM", **changes)
        monkeypatch.setitem(FAMILIES, "odd", changed)

    return add


def saved(folder, **fields):
    model = Decoder(model_config("llama3-8b-tiny", family="odd", num_layers=2, **fields))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    save_pretrained(model, folder)
    return model.state_dict()


def test_a_stored_tensor_of_our_name_may_have_another_meaning(family, tmp_path):
    family(renamed=RENAMED)
    ours = saved(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    layer = "model.layers.0."
    for name, theirs in RENAMED.items():
        assert torch.equal(stored[f"{layer}{theirs}.weight"], ours[f"{layer}{name}.weight"])
    assert f"{layer}input_layernorm.weight" not in stored
    again = load_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in ours.items())


def test_a_key_is_read_as_its_field_is_annotated(family, tmp_path):
    """A float, a switch and a word that Llama's config.json does not have."""
    fields = {"routed_scaling_factor": "scale", "qk_norm": "norms", "scoring_func": "score"}
    family(fields=fields)
    saved(tmp_path, qk_norm=True)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    assert (raw["scale"], raw["norms"], raw["score"]) == (1.0, True, "softmax")
    assert read_config(tmp_path).qk_norm is True
    for change, message in (
        (dict(scale="x"), "scale='x' must be a number"),
        (dict(norms=2), "norms=2 must be true or false"),
        (dict(score=0), "score=0 must be a text"),
    ):
        edit_json(file, **raw | change)
        with pytest.raises(InputError, match=message):
            read_config(tmp_path)


def test_functions_of_a_family_read_and_write_what_no_table_says(family, tmp_path):
    family(
        defaults=lambda raw: {"odd_eps": 1e-4} | raw,
        read=lambda raw: {"norm_eps": raw["odd_eps"]},
        write=lambda config, settings: settings | {"odd_eps": config.norm_eps},
    )
    saved(tmp_path, norm_eps=1e-3)
    assert read_config(tmp_path).norm_eps == 1e-3
    edit_json(tmp_path / "config.json", odd_eps=None)
    assert read_config(tmp_path).norm_eps == 1e-4

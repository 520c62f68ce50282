"""What the fuzzing has found, each once: inputs that hung, filled the memory or ended in an error nobody would
understand.
"""

import json
import os
import struct

import pytest
import torch
from graft_nodes.headless import hosts, workflow_file
from graft_nodes.headless.embedded import HostError, WorkflowError, workflow
from graft_nodes.patches.lora_files import metadata, stack_rows
from graft_nodes.patches.lora_files.peft_config import peft_configs
from graft_nodes.storage import safetensors
from graft_nodes.storage.digest import sha256_of_json
from graft_nodes.training.data import captions, images
from graft_nodes.training.data.cache import Cache
from graft_nodes.training.data.filters import Filters
from graft_nodes.training.data.folder_reader import read_folder
from graft_nodes.training.data.folder_settings import FolderSettings
from graft_nodes.training.data.layouts import registry
from graft_nodes.training.data.tags import fill_wildcards
from graft_nodes.training.data.yaml_values import load_mapping
from graft_nodes.training.store import listing, rank_files, store

from .damage import CORPUS
from .workflows import recorded_catalogue

DEEP, HUGE = "[" * 5000 + "]" * 5000, "9" * 5000
LAUGHS = "a: &a [x]\n" + "".join(
    f"k{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)
)
MERGES = LAUGHS.replace("[x]", "{x: 1}").replace("[*", "{<<: [*").replace("]\n", "]}\n")


def lora(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return str(path)


# --- LoRA files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [
        b'{"a": ' + DEEP.encode() + b"}",
        b'{"a": {"dtype": "F32", "shape": [' + HUGE.encode() + b'], "data_offsets": [0, 0]}}',
        {"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"a": [1]},
        {"a.alpha": {"dtype": "F64", "shape": [], "data_offsets": [0, 4]}},
        {"__metadata__": ["x"]},
        {"__metadata__": {"x": 1}},
        [1],
    ],
)
def test_a_header_that_is_none_is_refused_and_named(tmp_path, header):
    path = lora(tmp_path / "a.safetensors", header, b"\0" * 4)
    for act in (safetensors.read_header, metadata.describe, safetensors.load_safetensors):
        with pytest.raises(ValueError, match=r"a\.safetensors is not a whole safetensors file"):
            act(path)


@pytest.mark.parametrize("shape", [[0, 2**63], [2**62, 0, 8], [2**31, 2**32, 0]])
def test_an_empty_tensor_too_large_for_any_reader_is_refused(tmp_path, shape):
    whole = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    path = lora(
        tmp_path / "a.safetensors",
        {"a": whole, "b": {"dtype": "F32", "shape": shape, "data_offsets": [4, 4]}},
        b"\0" * 4,
    )
    for act in (safetensors.read_header, metadata.describe, safetensors.load_safetensors):
        with pytest.raises(ValueError, match=r"a\.safetensors is not a whole safetensors file.*'b'"):
            act(path)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rank_pattern": {"(a+)+": 4}}, "too complicated"),
        ({"alpha_pattern": {"a*a*a*a*b": 4}}, "too complicated"),
        ({"rank_pattern": {"(": 4}}, "is not a pattern"),
        ({"rank_pattern": ["a"]}, "expected an object"),
        ({"num_cayley_neumann_terms": 10**9}, "expected a whole number"),
    ],
)
def test_peft_settings_that_would_keep_a_reader_busy_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        peft_configs({"adapter_config": json.dumps({"r": 4, **settings})})
    kept = peft_configs(
        {
            "adapter_config": json.dumps(
                {"rank_pattern": {"^blocks.0.attn.(to_q|to_k)": 8, "to_v.*": 2}, "lora_alpha": 4}
            )
        }
    )
    assert kept[0].scale("blocks.0.attn.to_q") == 0.5 and kept[0].scale("x.to_v_y") == 2.0


def test_peft_settings_nested_without_end_are_refused_with_the_file_named(tmp_path):
    path = lora(tmp_path / "a.safetensors", {"__metadata__": {"lora_adapter_metadata": DEEP, "ss_tag_frequency": HUGE}})
    with pytest.raises(ValueError, match=r"a\.safetensors: its metadata lora_adapter_metadata: not JSON"):
        metadata.describe(path)


# --- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"kind": None},
        {"step": -1},
        {"step": 5},
        {"position": [["a"]]},
        {"history": {}},
        {"tensors": {}},
        {"key": "../x"},
        {"order": [1]},
        {"tensors": {"file": "../x.safetensors", "sha256": ""}},
        {"tensors": {"name": "../x", "files": {}}},
        {"tensors": {"name": "x" * 300, "files": {}}},
        {"tensors": {"name": "a\0b", "files": {}}},
        {"history": {"blocks": ["a\0b"], "loss": [], "rate": [], "norm": [], "validation": []}},
        {"effort": {"seconds": "1"}},
    ],
)
def test_a_record_of_another_form_is_refused_though_its_hash_fits(tmp_path, change):
    folder = tmp_path / "run" / ("0" * 32)
    folder.mkdir(parents=True)
    record = json.loads(next((CORPUS / "states").glob("run__*__state.json")).read_text())
    body = {key: value for key, value in {**record, **change}.items() if key != "sha256"}
    (folder / "state.json").write_text(json.dumps({**body, "sha256": sha256_of_json(body)}))
    with pytest.raises(store.Damaged, match=r"state\.json: (these entries|its position)"):
        store.read_record(folder)
    assert listing.runs(tmp_path) == [] and listing.states(tmp_path, "run") == []


def test_a_saved_state_in_a_run_s_folder_is_told_from_a_stored_one(tmp_path):
    for path in (CORPUS / "states").glob("saved__*"):
        (tmp_path / path.name.removeprefix("saved__")).write_bytes(path.read_bytes())
    with pytest.raises(store.Damaged, match="it is a saved state, not one of a run's own folder"):
        store.load(tmp_path, None)


@pytest.mark.parametrize("said", ["[" * 5000, "7", "[]"])
def test_parts_that_do_not_say_what_they_are(tmp_path, said):
    for rank, shape in enumerate(((2, 3), (2, 4))):
        tensors = {"trained/a": torch.ones(shape)}
        name = '["trained/a"]' if said == "[]" else said
        safetensors.write_safetensors(tmp_path / f"{rank}.safetensors", tensors, {rank_files.DIVIDED: name})
    with pytest.raises(ValueError, match="do not fit together" if said == "[]" else "does not say which"):
        rank_files.read(sorted(tmp_path.iterdir()))


@pytest.mark.parametrize("text", ["[" * 5000, f'{{"format": {HUGE}}}'])
def test_a_record_that_no_reader_takes_is_damaged(tmp_path, text):
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(store.Damaged, match=r"state\.json: cannot be read as JSON"):
        store.read_record(tmp_path)


def test_a_cache_that_can_only_be_read_is_read(tmp_path, monkeypatch):
    Cache(tmp_path).write("latents", "ab", {"latent": torch.ones(2)})

    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    assert Cache(tmp_path).read("latents", "ab") is not None


# --- workflows and the command line -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [DEEP, f'{{"1": {HUGE}}}'])
def test_json_that_no_reader_takes_is_no_workflow(tmp_path, text):
    path = tmp_path / "w.json"
    path.write_text(text)
    with pytest.raises(WorkflowError, match=r"w\.json: (JSON that cannot be read|not a workflow)"):
        workflow_file.read(str(path))


@pytest.mark.parametrize("meta", [[], "x", 0.5, {"title": ["x"]}])
def test_a_title_of_any_form(meta):
    graph = workflow.parse({"1": {"class_type": "KSampler", "inputs": {}, "_meta": meta}}).graph(recorded_catalogue())
    assert all(str(problem) for problem in workflow.check(graph, recorded_catalogue()))
    assert isinstance(graph["1"].get("_meta", {}), dict)


@pytest.mark.parametrize("last", ["lora_stack", {}, [1], "\u00b2", HUGE, 1.5, None])
def test_a_last_node_id_of_any_form(last):
    data = {
        "nodes": [{"id": "\u00b2", "type": "Note"}, {"id": "--5", "type": "Note"}],
        "last_node_id": last,
        "state": last,
    }
    assert workflow.parse(data).graph(recorded_catalogue()) == {}


@pytest.mark.parametrize("slot", [-1, -(2**64), 2**64, 99])
def test_a_link_from_a_slot_that_is_not_there(slot):
    sink = {"id": 5, "type": "OddSink", "inputs": [{"name": "name", "type": "STRING", "link": 1}]}
    link = {"id": 1, "origin_id": -10, "origin_slot": slot, "target_id": 5, "target_slot": 0}
    inside = {"id": "sub", "name": "s", "nodes": [sink], "links": [link], "inputs": [], "outputs": []}
    data = {"nodes": [{"id": 1, "type": "sub"}], "definitions": {"subgraphs": [inside]}}
    with pytest.raises(WorkflowError, match="of the subgraph, which has none there"):
        workflow.parse(data).graph(recorded_catalogue())


@pytest.mark.parametrize("nodes", [None, 0, ""])
def test_a_subgraph_without_nodes(nodes):
    data = {
        "nodes": [{"id": 1, "type": "sub"}],
        "definitions": {"subgraphs": [{"id": "sub", "nodes": nodes, "links": nodes}]},
    }
    document = workflow.parse(data)
    assert document.class_types() == set() and document.graph(recorded_catalogue()) == {}


@pytest.mark.parametrize("proxies", ["[", DEEP, {"a": 1}, 7])
def test_widgets_of_older_subgraphs_of_any_form(proxies):
    nodes = [{"id": 1, "type": "sub", "properties": {"proxyWidgets": proxies}, "widgets_values": [1]}]
    data = {"nodes": nodes, "definitions": {"subgraphs": [{"id": "sub", "nodes": [], "links": []}]}}
    with pytest.raises(WorkflowError, match="'proxyWidgets' is not"):
        workflow.parse(data).graph(recorded_catalogue())


def test_choices_in_a_prompt_and_rows_nested_without_end():
    node = {"id": 1, "type": "OddWidgets", "widgets_values": [3, "fixed", 1, "fixed", 0.5, True, "{a|" * 5000]}
    with pytest.raises(WorkflowError, match="are nested more than 100 deep"):
        workflow.parse({"nodes": [node]}).graph(recorded_catalogue())
    for text in (DEEP, HUGE, f'{{"version": 1, "rows": [{{"file": "a", "model": {"9" * 400}}}]}}'):
        with pytest.raises(ValueError, match="rows"):
            stack_rows.parse(text)
    with pytest.raises(ValueError, match="schedule: expected points"):
        stack_rows.parse_schedule(",")


def test_a_set_value_nested_without_end_is_a_text():
    graph = {"1": {"class_type": "OddSource", "inputs": {"text": "t", "number": 1}}}
    changed, problems = workflow.set_values(graph, [f"1.text={DEEP}", f"1.number={HUGE}"], recorded_catalogue())
    assert changed["1"]["inputs"]["text"] == DEEP and "expects INT" in str(problems[0])


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "~nobody-of-that-name"])
def test_a_folder_that_nothing_can_be_called_is_said(name):
    with pytest.raises(HostError, match="is not a valid folder name"):
        hosts.choose(name, False, {})
    with pytest.raises(HostError, match="--input"):
        hosts.open_host(hosts.Choice(None, "test"), True, name, None)


# --- datasets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        f"{LAUGHS}batch_id: *j\n",
        f"{MERGES}<<: *j\n",
        "a: &a [*a]\n",
        "a: !!bool x\n",
        "a: 2020-99-99\n",
        "a: !!timestamp x\n",
        f"a: {HUGE}\n",
        "a: " + "[" * 3000 + "]" * 3000,
    ],
)
def test_yaml_that_is_too_much_is_refused_at_once(text):
    with pytest.raises(ValueError, match=r"x\.yaml is not YAML"):
        load_mapping(text, "x.yaml")


def test_yaml_with_an_ordinary_anchor_is_read():
    assert load_mapping("a: &a {x: 1}\nb: {<<: *a, y: 2}\n", "x.yaml")["b"] == {"x": 1, "y": 2}


@pytest.mark.parametrize("name", ["zlib", "rot13", "hex", "nothing"])
def test_an_encoding_that_is_none_of_text(name):
    with pytest.raises(ValueError, match="the name of a text encoding"):
        Filters.parse(f"encoding: {name}")


def test_wrong_values_are_quoted_in_short():
    with pytest.raises(ValueError, match="crops is") as caught:
        Filters.parse(f"crop: random\ncrops: [{'x, ' * 5000}x]\nmin_score: {'9' * 400}\n")
    assert len(str(caught.value)) < 600 and "min_score is 9" in str(caught.value)


def dataset(folder, **texts):
    (folder / "a.png").write_bytes((CORPUS / "pictures" / "rgb.png").read_bytes())
    for name, text in texts.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return lambda filters="": read_folder(folder, FolderSettings(filters=filters, resolution=64))


def test_word_lists_that_name_each_other_without_measure(tmp_path):
    lists = {
        f"wildcards__{name}_dot_txt": " ".join([f"__{other}__"] * 40)
        for name, other in zip("abcdefg", "bcdefgh", strict=True)
    }
    read = dataset(tmp_path, a_dot_txt="__a__", wildcards__h_dot_txt="x", **lists)
    with pytest.raises(ValueError, match=r"may draw [0-9,]+ lines of word lists .* at most 1,000"):
        read("wildcards: true")


def test_choices_without_end_and_replacements_that_grow(tmp_path):
    with pytest.raises(ValueError, match="more than 200 deep"):
        fill_wildcards("{a|" * 5000 + "b" + "} " * 5000, None)
    grows = "".join(f"  {a}: {b * 30}\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
    with pytest.raises(ValueError, match="replacements make a tag of more than"):
        dataset(tmp_path, a_dot_txt="a")(f"replacements:\n{grows}")


def test_a_caption_of_megabytes_is_none(tmp_path):
    with pytest.raises(ValueError, match=r"a\.txt: .* bytes are not a caption"):
        dataset(tmp_path, a_dot_txt="x" * (captions.MAX_TEXT_BYTES + 1))()


@pytest.mark.parametrize(
    "text", [f'{{"tags": ["a"], "score": {"9" * 400}}}', f'{{"tags": {DEEP}}}', f'{{"tags": ["a"], "score": {HUGE}}}']
)
def test_one_json_a_picture_that_no_reader_takes_is_a_problem_of_that_picture(tmp_path, text):
    listed = dataset(tmp_path, a_dot_json=text)()
    assert len(listed.train) == 1 and any("a.json" in problem for problem in listed.problems)


def test_names_that_are_too_long_are_no_files(tmp_path):
    listed = dataset(tmp_path, a_dot_json=json.dumps({"tags": ["a"], "path": "x" * 300 + ".png"}))()
    assert any("names no file" in problem for problem in listed.problems)
    longest = tmp_path / f"{'y' * 251}.png"
    (tmp_path / "a.png").rename(longest)
    (tmp_path / "a.json").write_text(json.dumps({"tags": ["a"], "path": longest.name}))
    for mode in registry.options():
        listed = read_folder(tmp_path, FolderSettings(filters="", resolution=64, validation=0.0, captions=mode))
        assert [entry.name for entry in listed.train] == [longest.name], mode


def test_a_damaged_avif_is_no_picture(tmp_path):
    whole = (CORPUS / "pictures" / "rgb.avif").read_bytes()
    path = tmp_path / "a.avif"
    for body in (whole[:-60], whole[:-30] + b"\0" * 30, whole[:200]):
        path.write_bytes(body)
        with pytest.raises(ValueError, match=r"\w"):
            images.open_image(path)


# --- the server's routes ----------------------------------------------------------------------------------------------

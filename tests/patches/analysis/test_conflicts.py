"""Overlap and cancellation against dense float64: a hundred random stacks of every kind, and what is suggested."""

import random

import pytest
import torch
from graft_nodes.patches.adapters.diff import Diff
from graft_nodes.patches.adapters.dora import DoRA
from graft_nodes.patches.adapters.loha import LoHa
from graft_nodes.patches.adapters.lokr import LoKr
from graft_nodes.patches.adapters.lora import LoRA
from graft_nodes.patches.analysis import conflicts
from graft_nodes.patches.analysis.charts import draw_cells
from graft_nodes.patches.analysis.rows import RowPatches
from graft_nodes.patches.lora_files import block_weights
from graft_nodes.patches.lora_files.entry import LoraEntry
from graft_nodes.patches.patching.fuse import Patch

SHAPES = {
    "diffusion_model.time_embed.0.weight": (12, 10),
    "diffusion_model.input_blocks.1.0.weight": (14, 9),
    "diffusion_model.input_blocks.1.1.weight": (8, 6, 3, 3),
    "diffusion_model.middle_block.1.weight": (12, 8),
    "diffusion_model.output_blocks.3.0.weight": (6, 8, 1, 1),
    "diffusion_model.output_blocks.3.0.bias": (6,),
}


def block_of(name):
    return {"t": "BASE", "i": "IN01", "m": "M00", "o": "OUT03"}[name.removeprefix("diffusion_model.")[0]]


def layer_of(kind, shape, draw, generator):
    """(a layer, its difference at strength 1 in float64, whether it has factors)."""

    def random_of(*sides):
        return torch.randn(*sides, generator=generator)

    rank = draw.choice([1, 2, 4, 7])
    alpha = float(draw.choice([1, 3]))
    if len(shape) == 1:
        diff = random_of(*shape)
        return Diff(diff), diff.double(), False
    columns = torch.Size(shape[1:]).numel()
    if kind == "lora" and len(shape) == 4 and draw.random() < 0.5:
        core = draw.choice([1, 3])
        up, down, mid = (
            random_of(shape[0], core, 1, 1),
            random_of(rank, shape[1], 1, 1),
            random_of(core, rank, *shape[2:]),
        )
        change = torch.einsum("oa,abkl,bi->oikl", up[..., 0, 0].double(), mid.double(), down[..., 0, 0].double())
        return LoRA(up, down, alpha, mid), change * alpha / rank, True
    if kind == "lora":
        up, down = random_of(shape[0], rank, *(1,) * (len(shape) - 2)), random_of(rank, *shape[1:])
        change = (up.double().flatten(1) @ down.double().flatten(1)).view(shape)
        return LoRA(up, down, alpha), change * alpha / rank, True
    if kind == "loha":
        a1, b1, a2, b2 = random_of(shape[0], 2), random_of(2, columns), random_of(shape[0], 3), random_of(3, columns)
        change = (a1.double() @ b1.double()) * (a2.double() @ b2.double())
        return LoHa(a1, b1, a2, b2, alpha), change.view(shape) * alpha / 2, True
    if kind == "lokr" and len(shape) == 2:
        first, second = random_of(2, shape[1] // 2 if shape[1] % 2 == 0 else 1), None
        second = random_of(shape[0] // 2, shape[1] // first.shape[1])
        return LoKr(first, second), torch.kron(first.double(), second.double()), False
    diff = random_of(*shape)
    return Diff(diff), diff.double(), False


def stack_of(seed):
    """(rows, the dense change of each row by weight, which of them have factors)."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, dense, factored = [], [], []
    for number in range(draw.randint(2, 4)):
        kind = draw.choice(["lora", "lora", "lora", "loha", "lokr", "diff"])
        strength = draw.choice([-1.0, 0.5, 0.8])
        weights = {"IN01": draw.choice([0.0, 0.5, 1.0]), "OUT03": 1.5}
        blocks, changes, plain = {}, {}, set()
        for name, shape in SHAPES.items():
            factor = strength * weights.get(block_of(name), 1.0)
            if not factor or draw.random() < 0.2:
                continue
            layer, change, has_factors = layer_of(kind, shape, draw, generator)
            if number and name in dense[0] and draw.random() < 0.4:  # partly the same as the first row
                layer = Diff((0.5 * dense[0][name] + change).float())
                change, has_factors = layer.diff.double(), False
            blocks.setdefault(block_of(name), {})[name] = [Patch(layer, factor)]
            changes[name] = factor * change
            plain |= {name} if has_factors else set()
        text = ", ".join(f"{name}={value}" for name, value in weights.items())
        entry = LoraEntry(f"file {number}", {}, strength, blocks=text)
        rows.append(RowPatches(entry, blocks, ("BASE", "IN01", "M00", "OUT03"), 0))
        dense.append(changes)
        factored.append(plain)
    return rows, dense, factored


def vector(changes, names):
    return torch.cat([changes[name].flatten() if name in changes else torch.zeros(SHAPES[name]).double().flatten()
                      for name in names])  # fmt: skip


def cosine(first, second):
    size = first.norm() * second.norm()
    return float(first @ second / size) if size else 0.0


def shared(first, second):
    """By orthonormal bases of the dense matrices' column spaces."""
    bases = []
    for matrix in (first, second):
        left, values, _ = torch.linalg.svd(matrix.flatten(1), full_matrices=False)
        bases.append(left[:, values > 1e-6 * values[0]])
    cosines = torch.linalg.svdvals(bases[0].T @ bases[1])
    return float(cosines.square().sum()) / min(base.shape[1] for base in bases)


@pytest.mark.parametrize("tens", range(10))
def test_a_hundred_random_stacks_are_dense_float64(tens):
    for seed in range(10 * tens, 10 * tens + 10):
        rows, dense, factored = stack_of(seed)
        found = conflicts.compare(rows, SHAPES, lambda name: pytest.fail(f"{name} was read"))
        by_layer = {(layer.pair, layer.weight): layer for layer in found.layers}
        for first, second in found.whole:
            names = list(SHAPES)
            one, other = dense[first], dense[second]
            whole = cosine(vector(one, names), vector(other, names))
            assert found.whole[first, second].cosine == pytest.approx(whole, abs=2e-6)
            for block in found.blocks:
                inside = [name for name in names if block_of(name) == block]
                parts = vector(one, inside), vector(other, inside)
                if not (parts[0].any() and parts[1].any()):
                    assert block not in found.by_block[first, second]
                    continue
                assert found.by_block[first, second][block].cosine == pytest.approx(cosine(*parts), abs=2e-6)
                for place, part in zip((first, second), parts, strict=True):
                    assert found.energies[place][block] == pytest.approx(float(part.square().sum()), rel=2e-6)
            for name in set(one) & set(other):
                layer = by_layer[(first, second), name]
                expected = cosine(one[name].flatten(), other[name].flatten())
                assert layer.overlap.cosine == pytest.approx(expected, abs=2e-6)
                if name in factored[first] and name in factored[second]:
                    assert layer.overlap.outputs == pytest.approx(shared(one[name], other[name]), abs=1e-5)
                    turned = one[name].flatten(1).T, other[name].flatten(1).T
                    assert layer.overlap.inputs == pytest.approx(shared(*turned), abs=1e-5)
                else:
                    assert layer.overlap.outputs is None is layer.overlap.inputs


def row_of(layer, strength=1.0, name="file", weight="diffusion_model.middle_block.1.weight", blocks="", text=0):
    by_block = {block_of(weight): {weight: [Patch(layer, strength)]}}
    return RowPatches(LoraEntry(name, {}, strength, blocks=blocks), by_block, ("BASE", "IN01", "M00", "OUT03"), text)


def test_factors_are_never_multiplied_out(monkeypatch):
    """The dense weight of this layer would have 40 billion numbers."""
    up, down = torch.randn(200_000, 2), torch.randn(2, 200_000)
    rows = [row_of(LoRA(up, down)), row_of(LoRA(up, -down)), row_of(LoRA(up.flip(0), down.flip(1)))]
    found = conflicts.compare(rows, {"diffusion_model.middle_block.1.weight": (200_000, 200_000)}, pytest.fail)
    assert found.whole[0, 1].cosine == pytest.approx(-1.0) and found.whole[0, 1].outputs == pytest.approx(1.0)
    assert abs(found.whole[0, 2].cosine) < 0.01 and found.whole[0, 2].inputs < 0.01


def test_what_changes_the_weight_that_it_finds_is_compared_on_that_weight():
    weight = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
    up, down = torch.randn(12, 2), torch.randn(2, 8)
    dora = DoRA(LoRA(up, down), torch.rand(12, 1) + 0.5)
    rows = [row_of(dora, 0.7), row_of(LoRA(up, down), 0.5)]
    found = conflicts.compare(rows, SHAPES, lambda name: weight)
    change = 0.7 * (dora.apply(weight.clone()) - weight).double()
    expected = cosine(change.flatten(), (up.double() @ down.double()).flatten())
    assert found.whole[0, 1].cosine == pytest.approx(expected, abs=2e-5) and found.whole[0, 1].outputs is None


def test_the_weaker_row_gives_way_and_nothing_else_changes():
    generator = torch.Generator().manual_seed(0)
    up, down, other = (torch.randn(*sides, generator=generator) for sides in ((12, 2), (2, 8), (2, 8)))
    strong, weak = LoRA(up, down), LoRA(up, -down)
    rows = [row_of(strong, 1.0, "strong"), row_of(weak, 0.25, "weak", blocks="IN=0.5, OUT=0")]
    found = conflicts.compare(rows, SHAPES, pytest.fail)
    (fight,) = conflicts.find_fights(found, 0.1)
    assert (fight.block, fight.weaker, fight.factor) == ("M00", 1, 0.0)
    assert conflicts.suggest_weights(found, [fight]) == ["", "IN=0.5, M=0, OUT=0"]
    report = conflicts.report(found, [fight], 0.1)
    assert "rows 1 and 2 cancel: cosine -1.000, shared outputs 100.0%" in report
    assert "block weights of 2. weak at 0.25: IN=0.5, M=0, OUT=0" in report
    partly = [row_of(strong), row_of(LoRA(up, 0.5 * down + other), 0.1)]
    found = conflicts.compare(partly, SHAPES, pytest.fail)
    (fight,) = conflicts.find_fights(found, 0.1)
    assert fight.overlap.cosine > 0.1 and "repeat each other" in conflicts.report(found, [fight], 0.1)
    _, text = conflicts.suggest_weights(found, [fight])
    assert block_weights.parse(text)["M"] == pytest.approx(1 - fight.overlap.cosine, abs=0.005)
    assert conflicts.find_fights(found, 0.999) == []
    assert "nothing to change" in conflicts.report(found, [], 0.999)
    shown = conflicts.panel(found, [fight])
    assert shown["after"] == ["", text] and shown["pairs"][0]["rows"] == [0, 1] and shown["fights"] == 1


def test_a_picture_of_any_number_of_pairs_and_blocks():
    for count in (1, 40):
        rows = [row_of(LoRA(torch.randn(12, 1), torch.randn(1, 8)), name="名" * count) for _ in range(3)]
        picture = draw_cells(conflicts.table(conflicts.compare(rows, SHAPES, pytest.fail)))
        assert picture.shape[0] == 1 and picture.shape[-1] == 3 and picture.std() > 0


def unit(size, *places):
    vector = torch.zeros(size)
    vector[list(places)] = 1.0
    return vector


def test_report_table_and_panel_of_three_rows():
    """Of known angles: opposite in M00, the same output and inputs of 45 degrees in BASE; the third row lies apart."""
    base, apart, _, middle, *_ = SHAPES

    def layer(up, down):
        return LoRA(up[:, None], down[None])

    first = {
        "BASE": {base: [Patch(layer(unit(12, 0), unit(10, 0)), 1.0)]},
        "M00": {middle: [Patch(layer(unit(12, 0), unit(8, 0)), 1.0)]},
    }
    second = {
        "BASE": {base: [Patch(layer(unit(12, 0), unit(10, 0, 1)), 1.0)]},
        "M00": {middle: [Patch(layer(unit(12, 0), -3 * unit(8, 0)), 1.0)]},
    }
    third = {"IN01": {apart: [Patch(layer(unit(14, 0), unit(9, 0)), 1.0)]}}
    rows = []
    for name, blocks in (("cat", first), ("dog", second), ("hen", third)):
        rows.append(RowPatches(LoraEntry(name, {}, 1.0), blocks, ("BASE", "IN01", "M00", "OUT03"), 0))
    found = conflicts.compare(rows, SHAPES, pytest.fail)
    fights = conflicts.find_fights(found, 0.5)
    assert [(fight.pair, fight.block, fight.weaker, fight.factor) for fight in fights] == [
        ((0, 1), "M00", 0, 0.0),
        ((0, 1), "BASE", 0, 0.29),
    ]
    # 1 + (-3) as the inner product; (1 + 1) * (2 + 9) are the energies
    whole = -2 / 22**0.5
    suggestion, *unchanged = conflicts.suggest_weights(found, fights)
    assert unchanged == ["", ""] and suggestion == "BASE=0.29, IN=1, M=0, OUT=1"
    assert conflicts.report(found, fights, 0.5).splitlines() == [
        "Cosine of the changes: -1 they cancel, 0 independent, 1 the same. Shared outputs and inputs: 0% to 100%.",
        f"1. cat at 1 and 2. dog at 1: cosine {whole:+.3f}, shared outputs 100.0%, shared inputs 84.0%",
        "1. cat at 1 and 3. hen at 1: cosine +0.000",
        "2. dog at 1 and 3. hen at 1: cosine +0.000",
        "Blocks with a cosine of 0.5 or more, the strongest first:",
        "   M00   rows 1 and 2 cancel: cosine -1.000, shared outputs 100.0%, shared inputs 100.0%; row 1 times 0",
        "   BASE  rows 1 and 2 repeat each other: cosine +0.707, shared outputs 100.0%, shared inputs 50.0%; row 1"
        " times 0.29",
        "Layers where that comes from, the largest part first:",
        f"   {middle}: rows 1 and 2, cosine -1.000, shared outputs 100.0%, shared inputs 100.0%",
        f"   {base}: rows 1 and 2, cosine +0.707, shared outputs 100.0%, shared inputs 50.0%",
        f"block weights of 1. cat at 1: {suggestion}",
    ]
    table = conflicts.table(found)
    assert list(table.columns) == ["BASE", "IN01", "M00"]
    assert list(table.titles) == ["1. cat at 1", "2. dog at 1", "3. hen at 1"]
    assert [name for name, _ in table.lines] == ["1 and 2", "1 and 3", "2 and 3"]
    assert table.lines[0][1] == [pytest.approx(0.5**0.5), None, pytest.approx(-1)]
    assert table.lines[1][1] == table.lines[2][1] == [None, None, None]
    shown = conflicts.panel(found, fights)
    assert shown["blocks"] == ["BASE", "IN01", "M00"] and shown["fights"] == 2
    assert shown["rows"][0] == {"file": "cat", "strength": 1.0, "before": ""} and len(shown["rows"]) == 3
    pair = shown["pairs"][0]
    assert pair["rows"] == [0, 1] and pair["cosine"] == pytest.approx(whole)
    assert [cell[0] for cell in pair["blocks"]] == ["BASE", "M00"]
    assert pair["blocks"][0][1:] == pytest.approx([0.5**0.5, 1.0, 0.5])
    assert [worst[:2] for worst in shown["worst"]] == [[[0, 1], "M00"], [[0, 1], "BASE"]]
    assert shown["after"] == [suggestion, "", ""]


def test_long_reports_show_twenty_lines_and_count_the_others():
    rows = [row_of(LoRA(unit(12, 0)[:, None], unit(8, 0)[None]), name=f"{number}") for number in range(8)]
    found = conflicts.compare(rows, SHAPES, pytest.fail)
    fights = conflicts.find_fights(found, 0.5)
    report = conflicts.report(found, fights, 0.5)
    assert len(fights) == 28 and report.count("   M00 ") == 20 and "\n   and 8 more\n" in report
    assert report.count(f"   {list(SHAPES)[3]}: ") == 20 and "\n   and 8 more layers\n" in report
    assert len(conflicts.panel(found, fights)["worst"]) == 20

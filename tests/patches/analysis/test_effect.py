"""The effect of each block against dense float64 merges by hand, which blocks are kept, and what is refused."""

import random

import pytest
import torch
from graft_nodes.patches.analysis import effect
from graft_nodes.patches.analysis.rows import RowPatches, read_rows
from graft_nodes.patches.lora_files import block_weights
from graft_nodes.patches.lora_files.entry import LoraEntry
from graft_nodes.patches.lora_files.parse import Target
from graft_nodes.patches.lora_files.read_stack import ModelWeights
from graft_nodes.patches.patching import stack_ledger
from graft_nodes.patches.patching.plan import PatchTarget, plan_stack
from torch import nn

BLOCKS = {"IN01": "input_blocks.1", "IN02": "input_blocks.2", "M00": "middle_block.0", "OUT03": "output_blocks.3"}
LEVELS = (0.5, 2.0)
WIDTH = 6


class Tiny(nn.Module):
    """A network with UNet block names: a linear layer and a convolution in each block, and one layer outside."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.names = {}
        for path in ["time_embed", *BLOCKS.values()]:
            for leaf, layer in (("a", nn.Linear(WIDTH, WIDTH)), ("b", nn.Conv2d(WIDTH, WIDTH, 3, padding=1))):
                self.names[f"diffusion_model.{path}.{leaf}.weight"] = layer
                put(self, f"diffusion_model.{path}.{leaf}", layer.double())
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3

    def forward(self, level):
        x = torch.sin(torch.arange(2 * WIDTH * 25, dtype=torch.float64)).view(2, WIDTH, 5, 5) * level
        for name, layer in self.names.items():
            if name.endswith("a.weight"):
                x = x + torch.tanh(layer(x.movedim(1, -1)).movedim(-1, 1))
            else:
                x = x + torch.tanh(layer(x))
        return x


def put(model, path, layer):
    *parents, leaf = path.split(".")
    for name in parents:
        if not hasattr(model, name):
            model.add_module(name, nn.Module())
        model = getattr(model, name)
    model.add_module(leaf, layer)


def weights_of(model):
    shapes = {("model", name): tuple(p.shape) for name, p in model.named_parameters()}
    targets = {name.removesuffix(".weight"): Target("model", name) for _, name in shapes if name.endswith("weight")}
    return ModelWeights(targets, shapes)


def file_of(model, seed):
    """A random LoRA on some of the layers: plain, convolutions with a kernel, and convolutions with a Tucker core."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    state, dense = {}, {}
    for name in model.names:
        if draw.random() < 0.3:
            continue
        base, shape, rank = name.removesuffix(".weight"), model.names[name].weight.shape, draw.choice([1, 2, 5])
        alpha = float(draw.choice([1, 2, 8]))
        up = torch.randn(shape[0], rank, generator=generator) * 0.2
        if len(shape) == 2:
            down = torch.randn(rank, shape[1], generator=generator)
            change = up.double() @ down.double()
        elif draw.random() < 0.5:
            down = torch.randn(rank, *shape[1:], generator=generator)
            change = torch.einsum("or,rikl->oikl", up.double(), down.double())
            up = up[..., None, None]
        else:
            mid, down = torch.randn(rank, rank, 3, 3, generator=generator), torch.randn(rank, shape[1], 1, 1)
            change = torch.einsum("or,rskl,si->oikl", up.double(), mid.double(), down[..., 0, 0].double())
            up, state[f"{base}.lora_mid.weight"] = up[..., None, None], mid
        state |= {f"{base}.lora_up.weight": up, f"{base}.lora_down.weight": down, f"{base}.alpha": torch.tensor(alpha)}
        dense[name] = change * alpha / rank
    return state, dense


def by_ledger(model):
    """Predictions as the node makes them: patches at the activations, and the model as it was afterwards."""

    def predict(patches):
        if patches:
            stacks = plan_stack(PatchTarget("model", model), patches, "bypass").stacks
            found = stack_ledger.Version()
            stack_ledger.attach(model, "test", stacks, found)
        with torch.no_grad():
            predictions = [model(level) for level in LEVELS]
        stack_ledger.detach(model, "test", stack_ledger.Version())
        return predictions

    return predict


def dense_predictions(model, changes):
    """Predictions with changes added to the weights by hand."""
    before = {name: model.names[name].weight.data for name in changes}
    for name, change in changes.items():
        model.names[name].weight.data = before[name] + change
    with torch.no_grad():
        predictions = [model(level) for level in LEVELS]
    for name, weight in before.items():
        model.names[name].weight.data = weight
    return predictions


def relative(on, off):
    return [float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b)) for a, b in zip(on, off, strict=True)]


def block_name(weight):
    path = weight.removeprefix("diffusion_model.").rsplit(".", 2)[0]
    return {path: block for block, path in BLOCKS.items()}.get(path, "BASE")


@pytest.mark.parametrize("tens", range(10))
def test_a_hundred_random_stacks_are_dense_float64(tens):
    for seed in range(10 * tens, 10 * tens + 10):
        draw, model = random.Random(seed), Tiny(seed)
        entries, changes = [], []
        for number in range(draw.randint(1, 3)):
            state, dense = file_of(model, 1000 * seed + number)
            if not dense:
                continue
            strength, weights = draw.uniform(-1.5, 1.5), {"IN01": draw.choice([0.0, 0.5]), "OUT03": 2.0}
            text = ", ".join(f"{name}={value}" for name, value in weights.items())
            entries.append(LoraEntry(f"file {number}", state, strength, blocks=text))
            changes.append(
                {name: change * strength * weights.get(block_name(name), 1.0) for name, change in dense.items()}
            )
        keep = draw.uniform(0.3, 0.95)
        rows = read_rows(entries, weights_of(model), dict)
        base = dense_predictions(model, {})
        for found, change in zip(effect.measure(rows, by_ledger(model), keep), changes, strict=True):
            blocks = {block_name(name) for name, one in change.items() if one.any()}
            assert set(found.blocks) == blocks
            sums = 0.0
            for block in blocks:
                part = {name: one for name, one in change.items() if block_name(name) == block}
                expected = relative(dense_predictions(model, part), base)
                assert found.blocks[block] == pytest.approx(expected, rel=2e-6)
                sums += sum(expected) / len(LEVELS)
            whole = dense_predictions(model, change)
            assert found.whole == pytest.approx(relative(whole, base), rel=2e-6)
            assert sum(map(effect.mean, found.blocks.values())) == pytest.approx(sums, rel=2e-6)
            few = dense_predictions(model, {n: one for n, one in change.items() if block_name(n) in found.kept})
            missed = [
                float((a - b).norm() / (b - c).norm()) if (b - c).any() else 0.0
                for a, b, c in zip(few, whole, base, strict=True)
            ]
            assert found.missed == pytest.approx(sum(missed) / len(missed), rel=2e-6, abs=1e-9)
            assert found.kept_share >= min(keep, 1.0) - 1e-9 or not blocks


def test_the_strongest_blocks_reach_the_share_and_no_block_more():
    effects = {"IN01": 0.1, "IN02": 0.5, "M00": 0.0, "OUT03": 0.4}
    assert effect.strongest_blocks(effects, 0.5) == ("IN02",)
    assert effect.strongest_blocks(effects, 0.51) == ("IN02", "OUT03")
    assert effect.strongest_blocks(effects, 0.95) == ("IN01", "IN02", "OUT03")
    assert effect.strongest_blocks(effects, 1.0) == tuple(effects)
    assert effect.strongest_blocks({"IN01": 0.0, "M00": 0.0}, 0.1) == ("IN01", "M00"), (
        "without an effect nothing is chosen"
    )
    assert effect.strongest_blocks({}, 0.5) == ()


@pytest.mark.parametrize("seed", range(30))
def test_written_block_weights_switch_off_what_is_not_kept_and_nothing_else(seed):
    draw = random.Random(seed)
    model = Tiny(0)
    blocks = draw.sample(["BASE", *BLOCKS], draw.randint(1, 5))
    kept = [block for block in blocks if draw.random() < 0.5]
    before = draw.choice(["", "IN=0.5", "BASE=0.25, IN1=2", "MIDD", "CLIP=0.5, OUT=0", "BASE=0.3, T5=0.1"])
    entry = LoraEntry("file", {}, 1.0, blocks=before)
    old, more = entry.block_strengths(), [block for block in ["BASE", *BLOCKS] if block not in blocks]
    used = [block for block in blocks if block_weights.strength_of_block(old, block)]  # what has patches
    row = RowPatches(entry, {block: {} for block in used}, tuple([*blocks, *more]), draw.choice([0, 3]))
    text = effect.kept_block_weights(row, kept)
    if set(used) <= set(kept):
        assert text == before
        return
    new = block_weights.parse_for_model(text, [name for _, name in weights_of(model).shapes])
    for block in [*blocks, *more]:
        expected = block_weights.strength_of_block(old, block) if block in [*kept, *more] else 0.0
        assert block_weights.strength_of_block(new, block) == expected, (before, text, block)
    if row.text_layers:
        for block in ("CLIP", "T5"):
            assert block_weights.strength_of_block(new, block) == block_weights.strength_of_block(old, block), (
                before,
                text,
                block,
            )


def test_refusals_say_which_file():
    model = Tiny(0)
    state, _ = file_of(model, 1)
    known = weights_of(model)
    with pytest.raises(ValueError, match=r"foreign\.safetensors cannot be used:\n- no key matches this model"):
        read_rows([LoraEntry("foreign.safetensors", {"x.lora_up.weight": torch.ones(3, 1)})], known, dict)
    with pytest.raises(ValueError, match="this model has no OUT99"):
        read_rows([LoraEntry("file", state, blocks="OUT99=0")], known, dict)
    plain = {(space, f"other.{n}.weight"): shape for n, ((space, _), shape) in enumerate(known.shapes.items())}
    with pytest.raises(ValueError, match="Graft knows no blocks of this model"):
        effect.check_blocks(ModelWeights({}, plain))
    effect.check_blocks(known)
    rows = read_rows([LoraEntry("file", state, 0.5)], known, dict)
    with pytest.raises(ValueError, match=r"The prediction of file in block .* holds NaN"):
        effect.measure(rows, lambda patches: [torch.full((2,), float("nan") if patches else 1.0)], 0.9)
    with pytest.raises(ValueError, match="predicts only zeros"):
        effect.measure(rows, lambda patches: [torch.zeros(2)], 0.9)


def test_progress_reaches_its_end_and_the_report_names_what_is_kept():
    model, done = Tiny(0), []
    entries = [LoraEntry(f"file {n}", file_of(model, n)[0], 0.5) for n in (1, 2)]
    rows = read_rows(entries, weights_of(model), dict)
    effects = effect.measure(rows, by_ledger(model), 0.6, done.append)
    assert done == sorted(done) and done[-1] == effect.count_steps(rows)
    report = effect.report(effects, LEVELS, 0.6)
    for one in effects:
        assert f"{one.name} at 0.5" in report and f"block weights: {one.block_weights}" in report
        assert f"for 60% of the effect it needs {len(one.kept)} of {len(one.blocks)} blocks" in report
    shown = effect.panel(effects, LEVELS, 0.6)
    assert [row["after"] for row in shown["rows"]] == [one.block_weights for one in effects]
    assert [chart.title.partition(" at ")[0] for chart in effect.charts(effects)] == ["file 1", "file 2"]


def row(blocks, kept, missed=0.25, text_layers=0, name="cat"):
    whole = tuple(sum(levels) for levels in zip(*blocks.values(), strict=True)) or (0.0, 0.0)
    return effect.RowEffect(name, 0.5, blocks, whole, kept, missed, text_layers, "IN=0")


THREE = {"IN01": (0.1, 0.1), "M00": (0.5, 0.75), "OUT03": (0.25, 0.4)}


def test_the_report_ranks_blocks_and_says_what_is_enough():
    report = effect.report([row(THREE, ("M00", "OUT03"), text_layers=3), row({}, (), name="dog")], [14.6, 0.5], 0.8)
    assert report.splitlines() == [
        "How much each block changes the prediction, alone and beside the model without the stack (mean over 14.6, 0.5"
        " sigma):",
        "1. cat at 0.5: all blocks together 105.00%",
        "   M00     62.50%   60% of the sum  (50.00% 75.00%)",
        "   OUT03   32.50%   31% of the sum  (25.00% 40.00%)",
        "   IN01    10.00%   10% of the sum  (10.00% 10.00%)",
        "   for 80% of the effect it needs 2 of 3 blocks (M00, OUT03), 90% of the sum; together they differ from the"
        " whole row by 25% of its change",
        "   block weights: IN=0",
        "   its 3 text encoder layers are not measured, and stay on",
        "2. dog at 0.5: all blocks together 0.00%",
        "   it changes nothing: its block weights are 0 for every block that the file has",
    ]


def test_the_report_shows_twelve_blocks_and_counts_the_others():
    many = {f"IN{number:02}": (0.01 * number,) for number in range(1, 15)}
    lines = effect.report([row(many, tuple(many))], [1.0], 1.0).splitlines()
    assert [line.split()[0] for line in lines[2:14]] == [f"IN{number:02}" for number in range(14, 2, -1)]
    assert lines[14:] == ["   and 2 weaker blocks", "   for 100% of the effect it needs all 14 blocks"]
    twelve = dict(list(many.items())[:12])
    assert "weaker" not in effect.report([row(twelve, tuple(twelve))], [1.0], 1.0)
    silent = {"IN01": (0.0,), "M00": (0.0,)}
    last = effect.report([row(silent, tuple(silent))], [1.0], 0.9).splitlines()[-1]
    assert last == "   it changes nothing that this prompt and latent show; every block is kept"


def test_the_panel_and_the_charts_have_the_numbers_of_the_report():
    one = row(THREE, ("M00", "OUT03"))
    shown = effect.panel([one], [14.6, 0.5], 0.8)
    (found,) = shown["rows"]
    assert (shown["levels"], shown["keep"]) == ([14.6, 0.5], 0.8)
    assert {name: found[name] for name in ("file", "strength", "missed", "after")} == {
        "file": "cat",
        "strength": 0.5,
        "missed": 0.25,
        "after": "IN=0",
    }
    assert found["whole"] == pytest.approx(1.05)
    assert [block["name"] for block in found["blocks"]] == list(THREE)
    assert [block["effect"] for block in found["blocks"]] == pytest.approx([0.1, 0.625, 0.325])
    assert [block["share"] for block in found["blocks"]] == pytest.approx([0.1 / 1.05, 0.625 / 1.05, 0.325 / 1.05])
    assert [(block["levels"], block["kept"]) for block in found["blocks"]] == [
        ([0.1, 0.1], False),
        ([0.5, 0.75], True),
        ([0.25, 0.4], True),
    ]
    (chart,) = effect.charts([one])
    assert chart.title == "cat at 0.5: 105.00%"
    assert [(bar.name, bar.strong) for bar in chart.bars] == [("IN01", False), ("M00", True), ("OUT03", True)]
    assert [bar.value for bar in chart.bars] == pytest.approx([0.1, 0.625, 0.325])

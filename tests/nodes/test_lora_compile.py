"""Under ComfyUI's own way of compiling a model, another LoRA stack compiles nothing anew, and gives what it gives
without compiling.
"""

import pytest
import torch

BACKEND = "eager"  # guards are the same for every backend; this one needs no C++ compiler
KINDS = ("DoRA", "DoRA of columns", "IA3", "LoKr", "diff", "OFT", "GLoRA", "set_weight", "LoRA")


def of_kinds(model, kinds, rank):
    """A file for attention, feed-forward and convolutions, every weight of the next of these kinds."""
    generator, state = torch.Generator().manual_seed(rank), {}

    def random(*shape):
        return torch.randn(*shape, generator=generator) * 0.1

    touched = ("to_q.weight", "to_k.weight", "to_out.0.weight", "proj_in.weight", "in_layers.2.weight", "net.2.weight")
    weights = {name: weight for name, weight in model.model.named_parameters() if name.endswith(touched)}
    for number, (name, weight) in enumerate(weights.items()):
        base, (out, columns, *kernel), flat = name.removesuffix(".weight"), weight.shape, weight[0].numel()
        ones = (1,) * len(kernel)
        pair = {"lora_up.weight": random(out, rank, *ones), "lora_down.weight": random(rank, columns, *kernel)}
        state |= {
            f"{base}.{role}": tensor
            for role, tensor in {
                "LoRA": pair,
                "DoRA": pair | {"dora_scale": random(out, 1, *ones).abs() + 0.5},
                "DoRA of columns": pair | {"dora_scale": random(1, columns, *ones).abs() + 0.5},
                "IA3": {"weight": random(columns), "on_input": torch.tensor(True)},
                "LoKr": {"lokr_w1": random(2, 4), "lokr_w2": random(out // 2, columns // 4, *kernel)},
                "diff": {"diff": random(*weight.shape)},
                "OFT": {"oft_blocks": random(out // 4, 4, 4)},
                "GLoRA": {
                    "a1.weight": random(columns, rank),
                    "a2.weight": random(rank, columns),
                    "b1.weight": random(out, rank),
                    "b2.weight": random(rank, flat),
                },
                "set_weight": {"set_weight": random(*weight.shape)},
            }[kinds[number % len(kinds)]].items()
        }
    return state


@pytest.mark.parametrize(
    ("mode", "inference", "order"),
    [
        ("merge", True, "stack after compile"),
        ("merge", False, "before"),
        ("bypass", True, "before"),
        ("bypass", False, "after"),
    ],
)
def test_another_stack_compiles_nothing(host, small, mode, inference, order):
    helpers = pytest.importorskip("comfy_api.torch_helpers", reason="the embedded host does not compile")
    from graft_nodes.host import lora_stacks
    from graft_nodes.patches.lora_files.entry import LoraEntry

    with torch.inference_mode(inference):
        model = small.unet(channels=32, mult=(1,), depth=(1,))
    before = small.Snapshot(model.model)

    def stacked(base, states, strength):
        return lora_stacks.apply_lora_stack(
            base, None, [LoraEntry(str(n), state, strength) for n, state in enumerate(states)], mode
        ).model

    def compiled(base):
        clone = base.clone()
        helpers.set_torch_compile_wrapper(model=clone, backend=BACKEND)
        return clone

    def patched(states, strength):
        return (
            compiled(stacked(model, states, strength))
            if "before" in order
            else stacked(compiled(model), states, strength)
        )

    first = [small.lora(model, 1)]
    torch._dynamo.reset()
    sampled = patched(first, 1.0)
    for _ in range(2):  # torch.compile learns at the second call which sizes vary from layer to layer
        small.forward(sampled)
    changes = {
        "the same": (first, 1.0),
        "strength": (first, 0.5),
        "file": ([small.lora(model, 2)], 1.0),
        "rank": ([small.lora(model, 2, rank=12)], 1.0),
        "layer set": ([small.lora(model, 2, part="attn1")], 1.0),
        "number": ([small.lora(model, seed, rank=seed) for seed in (3, 4, 5)], 0.5),
        "kind": ([of_kinds(model, KINDS[:1], 4)], 1.0),
        "kinds": ([of_kinds(model, KINDS, 12)], 1.0),
        "number of kinds": ([of_kinds(model, KINDS[start:] + KINDS[:start], start) for start in (2, 3, 4)], 0.5),
        "kind again": (first, 1.0),
    }
    for change, (states, strength) in changes.items():
        with torch._dynamo.config.patch(error_on_recompile=True):
            found = small.forward(patched(states, strength))
        wanted = small.forward(stacked(model, states, strength))
        assert torch.allclose(found, wanted, atol=1e-5 * max(1.0, float(wanted.abs().max()))), change
    small.load(model)
    before.check(model.model)
    torch._dynamo.reset()

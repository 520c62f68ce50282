"""LoRAs on one of two MODELs of a base that sample at once, as ComfyUI's DualModelGuider samples: what is said, and
at which node. tests/with_comfyui has the guider itself.
"""

import logging
import os

import pytest
import torch
from safetensors.torch import save_file

MODES = ("merge", "bypass", "host")


@pytest.fixture
def at(host, small, caplog):
    """`at(negative, positive)` samples with two MODELs and gives what is said: (texts in the log, [(node, text)])."""
    import comfy.sampler_helpers
    import comfy.samplers
    from comfy_execution.utils import CurrentNodeContext

    class TwoModels(comfy.samplers.CFGGuider):
        def outer_sample(self, noise, *args, **kwargs):
            conds = {"negative": [dict(entry) for entry in self.conds["negative"]]}
            self.other, *_ = comfy.sampler_helpers.prepare_sampling(
                self.second, noise.shape, conds, self.second.model_options
            )
            self.second.pre_run()
            try:
                return super().outer_sample(noise, *args, **kwargs)
            finally:
                self.second.cleanup()

    def sampled(negative, positive):
        context, noise = torch.linspace(-1, 1, 120).view(1, 5, 24), torch.linspace(-1, 1, 256).view(1, 4, 8, 8)
        guider = TwoModels(positive)
        guider.second = negative
        guider.set_conds([[context, {}]], [[context, {}]])
        guider.set_cfg(3.0)
        sampler, sigmas = comfy.samplers.sampler_object("euler"), torch.tensor([1.0, 0.5, 0.0])
        caplog.clear()
        host.events.clear()
        with CurrentNodeContext("this run", "90"), torch.inference_mode(), caplog.at_level(logging.WARNING):
            guider.sample(noise, torch.zeros_like(noise), sampler, sigmas, seed=0, disable_pbar=True)
        logged = [record.getMessage() for record in caplog.records if "two MODELs" in record.getMessage()]
        notices = [data for name, data in host.events if name == "graft.notice"]
        assert {data["prompt"] for data in notices} <= {"this run"}
        return logged, [(data["node"], data["text"]) for data in notices]

    return sampled


@pytest.fixture
def stacked(host, small):
    """`stacked(model, node, mode)` is a MODEL with a stack that this node puts on."""
    from comfy_execution.utils import CurrentNodeContext
    from graft_nodes.patches.lora_files.stack_rows import StackRow

    def put(model, node, mode="merge", seed=1):
        name = f"two{seed}.safetensors"
        save_file(small.lora(model, seed), os.path.join(host.models, "loras", name))
        with CurrentNodeContext("an earlier run", node):
            return host.call("LoRAStackPatch", model=model, lora_stack=[StackRow(name, 1.0, 1.0)], mode=mode)[0]

    return put


@pytest.mark.parametrize("mode", MODES)
def test_a_stack_on_one_side_is_named_at_its_node(small, at, stacked, mode):
    base = small.unet(channels=32, mult=(1,), depth=(1,))
    logged, ((node, text),) = at(base, stacked(base, "7", mode))
    assert node == "7" and "works on both" in text and logged == [text]
    logged, ((node, text),) = at(stacked(base, "12:3", mode), base)
    assert node == "12:3" and "works on neither" in text and logged == [text]


def test_every_node_that_put_a_stack_on_is_told(small, at, stacked):
    base = small.unet(channels=32, mult=(1,), depth=(1,))
    both = stacked(stacked(base, "7"), "8", "bypass", seed=2)
    logged, notices = at(base, both)
    assert [node for node, _ in notices] == ["7", "8"] and len(logged) == 1


def test_different_stacks_on_both_sides_are_told_at_both(small, at, stacked):
    base = small.unet(channels=32, mult=(1,), depth=(1,))
    _, notices = at(stacked(base, "7"), stacked(base, "8", seed=2))
    assert {node: text.split("both: ")[1].split(".")[0] for node, text in notices} == {
        "7": "the stack of the MODEL that is loaded first works on neither",
        "8": "the stack of the MODEL that is loaded last works on both",
    }


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_said_of_the_same_stack_on_both_sides(small, at, stacked, mode):
    base = small.unet(channels=32, mult=(1,), depth=(1,))
    one = stacked(base, "7", mode)
    assert at(one, one) == at(one, one.clone()) == at(one.clone(), one) == ([], [])


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_said_of_bases_of_their_own(small, at, stacked, mode):
    first, second = (small.unet(channels=32, mult=(1,), depth=(1,)) for _ in range(2))
    assert at(second, stacked(first, "7", mode)) == at(stacked(second, "7", mode), first) == ([], [])


def test_the_next_sampling_with_one_model_says_nothing(small, at, stacked):
    base, alone = (small.unet(channels=32, mult=(1,), depth=(1,)) for _ in range(2))
    stack = stacked(base, "7")
    assert at(stack, base)[1] and at(alone, stack) == ([], [])

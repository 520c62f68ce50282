"""What --reproducible needs of torch that is private."""

import subprocess
import sys

import pytest
import torch
from graft_nodes.training.distributed import fsdp_order, process_group


def test_this_torch_has_the_private_names_that_reproducible_needs():
    assert fsdp_order.unknown_torch() == [], f"torch {torch.__version__} differs from {fsdp_order.SEEN_WITH}"


def test_a_torch_without_them_is_refused_by_name(monkeypatch):
    from torch.distributed.fsdp import FSDPModule

    monkeypatch.delattr(FSDPModule, "set_custom_reduce_scatter")
    with pytest.raises(ValueError, match=r"has not FSDPModule.set_custom_reduce_scatter: run without --reproducible"):
        fsdp_order.OrderedReduction(process_group.SingleProcess()).prepare(torch.nn.Linear(1, 1))


def test_a_hook_that_is_registered_first_runs_before_those_that_were_there():
    order = []
    made = torch.ones(2, requires_grad=True) * 2
    for name in ("there", "there too"):
        made.register_hook(lambda _, name=name: order.append(name))
    fsdp_order.register_first(made, lambda _: order.append("first"))
    made.sum().backward()
    assert order == ["first", "there", "there too"]


def test_no_private_name_of_torch_is_imported_before_it_is_asked_for():
    code = (
        "import sys; from graft_nodes.training.distributed import fsdp; print('torch.distributed.fsdp' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

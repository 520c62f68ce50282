"""Optimizer classes by import path: the same steps as the class itself makes, equal bytes after a resume, a reason for
each class that cannot be used, and nothing imported that its owner did not allow.
"""

import importlib
import re
import sys
from dataclasses import replace

import pytest
import torch
from graft_nodes.training.lora_metadata import lora_metadata
from graft_nodes.training.optimizers import from_package
from graft_nodes.training.optimizers.build import missing_for
from graft_nodes.training.optimizers.checks import check_run
from graft_nodes.training.optimizers.record import RunFacts
from graft_nodes.training.optimizers.settings import OptimizerSettings, same_state
from graft_nodes.training.optimizers.stepper import OptimizerStepper
from graft_nodes.training.optimizers.trial import find_faults
from graft_nodes.training.run.loop import train
from graft_nodes.training.state import equal
from graft_nodes.training.store.store import Store, load

PACKAGE = '''
import pathlib
import torch

pathlib.Path(__file__).with_name("imported").touch()


class Base(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, weight_decay=0.0, betas=(0.9, 0.99), kind="plain"):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas})

    def factor(self, group):
        return 1.0

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            factor = self.factor(group)
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"].lerp_(p.grad, 1 - group["betas"][0])
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(state["mean"], alpha=group["lr"] * factor)


class Counts(Base):
    """Counts steps in the group, from the first step on."""

    def factor(self, group):
        group["count"] = group.get("count", 0) + 1
        return 1 + 1 / group["count"]


class Marked(Base):
    """Wants to know of each group whether it is one of matrices."""

    def factor(self, group):
        assert all((p.ndim == 2) == group["use_muon"] for p in group["params"])
        return 2.0 if group["use_muon"] else 1.0


class Outside(Base):
    """Counts beside its state."""

    count = 0

    def factor(self, group):
        self.count += 1
        return 1 / self.count


class Draws(Base):
    def factor(self, group):
        return float(torch.rand(()))


class Nested(Base):
    @torch.no_grad()
    def step(self):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["more"] = {"mean": 1}


class TwoWeights(Base):
    def eval(self):
        pass


class Still(Base):
    def factor(self, group):
        return 0.0


class Closure(Base):
    def step(self, closure):
        closure()


class NoRate(torch.optim.Optimizer):
    def __init__(self, params, eps=1.0):
        super().__init__(params, {"eps": eps})


class NoDecay(Base):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, lr)


class Inner:
    Hidden = Base


class NoOptimizer:
    pass


def run(params, lr):
    raise SystemExit("this was called")
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of optimizers that is installed and that nobody has allowed; its folder."""
    folder = tmp_path / "site" / "made_up_optim"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(PACKAGE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.delitem(sys.modules, "made_up_optim", raising=False)
    importlib.invalidate_caches()
    yield folder
    sys.modules.pop("made_up_optim", None)


@pytest.fixture
def allowed(package, monkeypatch):
    """The package, and its owner allows it."""
    monkeypatch.setenv(from_package.VARIABLE, "others, made_up_optim")
    return package


def of_class(path, **settings):
    return OptimizerSettings(optimizer_class=path, **{"learning_rate": 1e-2, "clip_norm": 0.0, **settings})


@pytest.mark.parametrize(
    "path",
    [
        "made_up_optim.Counts",
        "os.system",
        "builtins.eval",
        "subprocess.Popen",
        "torch.hub.load",
        "torch.load",
        "torch.optimizers.Adam",
        "graft_nodes.training.optimizers.kinds.came.CAME",
    ],
)
def test_a_package_that_is_not_allowed_is_refused_and_not_imported(package, path):
    with pytest.raises(ValueError, match=rf"optimizer class {path} is of a package that is not allowed.*GRAFT_OPT"):
        of_class(path)
    assert "made_up_optim" not in sys.modules and not (package / "imported").exists()


@pytest.mark.parametrize(
    "path",
    [
        "adamw",
        "torch.optim.",
        ".Adam",
        "torch.optim._adam.Adam",
        "torch.optim.__class__",
        "../x.Adam",
        "torch optim.A",
        "torch.optim.Adam()",
        "torch.optim.Adam;import os",
        "made_up_optim.__init__.Base",
    ],
)
def test_what_is_no_path_of_a_class_is_refused(allowed, path):
    with pytest.raises(ValueError, match=r"optimizer class is .*, expected the import path of a class"):
        of_class(path)
    assert not (allowed / "imported").exists()


def test_nothing_is_imported_before_it_runs(allowed):
    """Settings come with a workflow that nobody has started yet."""
    settings = of_class("made_up_optim.Counts")
    assert missing_for(settings.record) == [] and not (allowed / "imported").exists()
    assert find_faults(settings) == [] and (allowed / "imported").exists()


@pytest.mark.parametrize("value", ["__import__('os')", "/etc/passwd", "[1]", "1; 2", "a.b", "x 1", ""])
def test_an_option_is_numbers_or_a_word(allowed, value):
    with pytest.raises(ValueError, match=r"optimizer options: .*expected numbers, true, false, none or a word"):
        of_class("made_up_optim.Base", options=f"betas = {value}")


@pytest.mark.parametrize("name", ["lr", "params", "weight_decay", "a b"])
def test_what_other_settings_say_is_no_option(allowed, name):
    with pytest.raises(ValueError, match=rf"made_up_optim.Base has no '{name}'"):
        of_class("made_up_optim.Base", options=f"{name} = 1")


def test_options_arrive_as_they_are_written():
    settings = of_class("torch.optim.NAdam", options="betas = 0.8 0.9, eps = 1e-6\nforeach = none, maximize = False")
    assert settings.parsed_options == {"betas": (0.8, 0.9), "eps": 1e-6, "foreach": None, "maximize": False}
    assert of_class("torch.optim.A", options="a = -1, b = word-2").parsed_options == {"a": -1, "b": "word-2"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Outside", "does not go on from its saved state to the same bytes"),
        ("Draws", "does not go on from its saved state to the same bytes"),
        ("Nested", "keeps what cannot be saved in its state: more"),
        ("TwoWeights", "trains other weights than it samples with"),
        ("Still", "leaves some tensors where they are"),
        ("Closure", r"fails on small tensors: TypeError: .*closure"),
        ("NoRate", r"takes no learning rate \(lr\)"),
        ("NoOptimizer", "is not an optimizer: expected a class that derives from torch.optim.Optimizer"),
        ("torch.optim.Optimizer", "is not an optimizer"),
        ("Inner.Hidden", "has no such class"),
        ("run", "has no such class"),
        ("Missing", "has no such class"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_with_the_reason(allowed, name, said):
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=rf"Optimizer Settings: optimizer class made_up_optim.{name}.*{said}"):
        check_run(of_class(f"made_up_optim.{name}", weight_decay=0.0), RunFacts({"a": torch.ones(2, 2)}, "lora"))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"options": "beta = 0.9 0.99"}, r"made_up_optim.Base has no 'beta', did you mean betas\?"),
        (
            {"optimizer_class": "made_up_optim.NoDecay", "weight_decay": 0.1},
            "has no weight decay: set weight decay to 0",
        ),
    ],
)
def test_settings_that_a_class_does_not_have_are_named(allowed, settings, said):
    (fault,) = find_faults(replace(of_class("made_up_optim.Base"), **settings))
    assert re.search(said, fault)


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setenv(from_package.VARIABLE, "not_there_at_all")
    for path, name in (("not_there_at_all.A", "not_there_at_all"), ("adv_optm.Adopt_adv", "adv_optm")):
        with pytest.raises(
            ValueError, match=f"optimizer {path} needs the package {name}: .*pip install {name}, or use"
        ):
            check_run(of_class(path), RunFacts({}, "lora"))


CLASSES = [
    "made_up_optim.Counts",
    "made_up_optim.Marked",
    "torch.optim.NAdam",
    "torch.optim.RMSprop",
    "lion_pytorch.Lion",
]


@pytest.mark.parametrize("path", CLASSES)
@pytest.mark.parametrize("precision", ["float32", "full-bf16"])
def test_two_calls_are_one_with_a_store_between(lab, allowed, tmp_path, path, precision):
    dataset = lab.pictures(7)
    start = lab.state(lab.Flow(), dataset, accumulation=2, optimizer_class=path, lora_plus=2.0, precision=precision)
    whole = train(start, lab.Flow(), dataset, 5)
    folder = Store(tmp_path, "run").save(train(start, lab.Flow(), dataset, 2))
    stored, _ = load(folder, start)
    parts = train(stored, lab.Flow(), dataset, 3)
    assert equal(whole, parts) and whole.history == parts.history
    assert lora_metadata(whole)["ss_optimizer"].startswith(path)


def test_its_steps_are_those_of_the_class(allowed):
    """Two rates, and what is not a matrix in a group of its own."""
    draws = torch.Generator().manual_seed(1)
    weights = {
        name: torch.randn(shape, generator=draws)
        for name, shape in (("a.lora_up.weight", (8, 4)), ("a.bias", (8,)), ("b.lora_down.weight", (4, 8)))
    }
    settings = of_class("made_up_optim.Counts", lora_plus=3.0, weight_decay=0.1, options="betas = 0.7 0.9")
    stepper = OptimizerStepper(settings, weights, {}, torch.device("cpu"), 0)
    by_hand = {name: tensor.clone() for name, tensor in weights.items()}
    means = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    for step in range(4):
        stepper.prepare(1e-2, step)
        for name, tensor in stepper.trained.items():
            tensor.grad = torch.randn(tensor.shape, generator=draws)
            means[name] = means[name] + 0.3 * (tensor.grad - means[name])
            rate = 3e-2 if "lora_up" in name else 1e-2
            by_hand[name] = by_hand[name] * (1 - rate * 0.1) - rate * (1 + 1 / (step + 1)) * means[name]
        stepper.step_()
    for name, tensor in stepper.copy_sampling_weights().items():
        assert torch.allclose(tensor, by_hand[name], atol=1e-6), name


def test_another_class_or_layout_does_not_go_on_from_the_state(allowed):
    one = of_class("torch.optim.NAdam")
    assert same_state(one, replace(one, learning_rate=1.0))
    assert not same_state(one, of_class("torch.optim.RAdam")) and not same_state(one, OptimizerSettings())
    assert not same_state(one, replace(one, options="foreach = true"))
    with pytest.raises(ValueError, match=r"torch.optim.NAdam takes its step size from all gradients together"):
        replace(one, fused_backward=True)

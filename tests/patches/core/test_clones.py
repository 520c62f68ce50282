"""Calls on MODEL clones: under a key, replaced, taken off, and never on the clone that they were made from."""

from graft_nodes.patches.core.clones import find_call, put_call, put_callback, put_object


class Patcher:
    """A host's patcher, whose clones share what is in their options."""

    def __init__(self, options=None):
        self.model_options = {"transformer_options": {} if options is None else options}
        self.callbacks, self.objects = {}, {}

    def clone(self):
        cloned = Patcher(self.model_options["transformer_options"])
        cloned.callbacks = {
            event: {key: list(of) for key, of in keyed.items()} for event, keyed in self.callbacks.items()
        }
        return cloned

    def add_callback_with_key(self, event, key, callback):
        self.callbacks.setdefault(event, {}).setdefault(key, []).append(callback)

    def remove_callbacks_with_key(self, event, key):
        self.callbacks.get(event, {}).pop(key, None)

    def add_object_patch(self, name, value):
        self.objects[name] = value


def first(executor, x):
    return executor(x) + 1


def second(executor, x):
    return executor(x) * 2


def test_put_replaced_and_taken_off():
    base = Patcher({"wrappers": {"apply_model": {"theirs": [second]}, "other": {}}, "patches": {"attn1": []}})
    before = str(base.model_options)
    one = base.clone()
    put_call(one, "ours", first)
    two = one.clone()
    put_call(two, "ours", second)
    three = two.clone()
    put_call(three, "ours", None)
    assert [find_call(each, "ours") for each in (base, one, two, three)] == [None, first, second, None]
    assert all(find_call(each, "theirs") is second for each in (base, one, two, three))
    assert str(base.model_options) == before == str(three.model_options)


def test_a_model_without_options_of_calls():
    clone = Patcher()
    put_call(clone, "ours", None)
    assert find_call(clone, "ours") is None
    put_call(clone, "ours", first)
    assert clone.model_options["transformer_options"]["wrappers"] == {"apply_model": {"ours": [first]}}


def test_callbacks_and_objects():
    clone = Patcher()
    put_callback(clone, "on_pre_run", "ours", first)
    put_callback(clone, "on_pre_run", "ours", second)
    assert clone.callbacks["on_pre_run"]["ours"] == [second]
    put_callback(clone, "on_pre_run", "ours", None)
    assert "ours" not in clone.callbacks["on_pre_run"]
    put_object(clone, "model_sampling", 3)
    assert clone.objects == {"model_sampling": 3}

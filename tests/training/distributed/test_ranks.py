"""Ranks that train as one on this machine: the bytes of one process, what they send, and how they end together."""

import pytest
from graft_nodes.training.distributed import gradient_sum


@pytest.fixture(scope="module")
def equal(found):
    return found("equal")


@pytest.fixture(scope="module")
def measured(found):
    return found("measured")


@pytest.fixture(scope="module")
def failing(found):
    return found("failing")


@pytest.mark.parametrize(
    "run",
    [
        "2 ranks, accumulation 2",
        "4 ranks, accumulation 4",
        "2 ranks, accumulation 4",
        "2 ranks, accumulation 3",
        "pictures of two sizes",
        "full weights",
        "dropout, full-bf16",
        "fp16",
        "the average takes over",
        "slices",
        "slices, dropout",
        "ranks that come and go",
    ],
)
def test_ranks_give_the_bytes_of_one_process_that_accumulates(equal, run):
    alone, *ranks = equal[run]
    assert len(alone) == 64 and ranks == [alone] * len(ranks) and len(ranks) >= 2


def test_a_step_sends_the_gradients_once(measured):
    for rank in measured["ranks"]:
        assert rank["sent"]["gradients"] == 10 * measured["gradients"]


def test_slices_go_out_once_and_come_back_once(measured):
    found = measured["others"]["slices"]
    for rank in found["ranks"]:
        assert (
            found["trained"] <= rank["gradients"] / 2 <= found["trained"] + 16 * 3 * 4
        )  # each bucket is made a multiple of three
        assert rank["sums"] * 3 == rank["gradients"]


def test_a_model_that_is_held_together_is_gathered_twice_a_step(measured):
    found = measured["others"]["shard, adapters"]
    for rank in found["ranks"]:
        assert (
            rank["gathered"] / 2 == 2 * found["model"] / 2
            and rank["scattered"] == 0
            and rank["gradients"] / 2 == found["trained"]
        )


def test_gradients_of_whole_weights_are_sent_once_a_step(measured):
    found = measured["others"]["shard, full"]
    for rank in found["ranks"]:
        assert (
            rank["gathered"] / 2 == 2 * found["model"] / 4
            and rank["gradients"] / 2 == found["trained"]
            and rank["scattered"] == 0
        )
        assert (
            found["trained"] / 4 <= rank["norms"] / 2 <= found["trained"] / 2
        )  # its rows once more, and how much that was


def test_what_else_a_step_sends_is_small(measured):
    """Flags and loss, and a byte for each gradient; the rest is said once a call."""
    for rank in measured["ranks"]:
        most = gradient_sum.STATUS_BYTES + measured["tensors"] * 5  # as many buckets as tensors
        steps = rank["sent"]["control"] - 10 * gradient_sum.STATUS_BYTES
        assert 0 <= steps <= 10 * most + 10 * 1024


def test_gradients_leave_while_the_backward_pass_still_runs(measured):
    for rank in measured["ranks"]:
        order = rank["order"]
        assert order.count("made") == measured["tensors"] and order.count("leaves") > 3
        last = len(order) - 1 - order[::-1].index("made")
        assert order[:last].count("leaves") >= order.count("leaves") // 2, (
            order
        )  # of two blocks the second's are on their way


def test_the_report_says_what_was_sent(measured):
    said = measured["ranks"][1]["said"]
    assert said[0].startswith("2 ranks, 2 micro-batches a step, 1 one after another")


@pytest.fixture(scope="module")
def killed(found):
    return found("killed")


@pytest.mark.long
def test_twenty_kills_each_end_the_job_and_cost_no_byte_of_its_result(killed):
    assert [sorted(kinds(end), key=str)[0] for end in killed["ends"]] == [-9] * 20
    assert {kind for end in killed["ends"] for kind in kinds(end)} - {
        -9,
        "RankConnectionError",
        "DistStoreError",
        "DistNetworkError",
    } == set()
    assert killed["progress"] == sorted(killed["progress"]) and 0 < killed["progress"][-1] < killed["steps"]
    assert len(set(killed["progress"])) > 8 and killed["last"] == [killed["alone"]] * 2


def kinds(told):
    return [one["kind"] if isinstance(one, dict) else one for one in told]


def test_an_error_after_a_step_ends_every_rank_and_the_first_keeps_that_step(failing):
    end = failing["after a step"]
    assert kinds(end["told"]) == ["RemoteRankError", "OSError", "RemoteRankError"] and end["kept"] == [4]
    assert end["told"][0]["rank"] == 1 and "Rank 1 ended with OSError" in end["told"][0]["error"]
    assert "No space left" in end["told"][2]["error"]


def test_an_interruption_ends_every_rank_and_says_so(failing):
    end = failing["interrupted"]
    assert kinds(end["told"]) == ["RemoteRankError", "RemoteRankError", "Interrupted"] and end["kept"] == [4]
    assert "Rank 2 ended with Interrupted: asked to stop" in end["told"][0]["error"]


def test_an_error_after_the_last_step_costs_nothing_of_the_result(failing):
    end = failing["after the last step"]
    assert kinds(end["told"])[2] == "OSError" and 9 in end["kept"]


def test_memory_that_runs_out_on_one_rank_ends_all_at_the_same_step(failing):
    end = failing["out of memory"]
    assert kinds(end["told"]) == ["Stopped"] * 3 and end["kept"] == [4]
    assert "Memory ran out at step 5 (Rank 1 ended with OutOfMemoryError: out of memory" in end["told"][0]["error"]


def test_a_loss_that_is_not_a_number_on_one_rank_is_so_on_all(failing):
    end = failing["not a number"]
    assert kinds(end["told"]) == ["Stopped"] * 3 and end["kept"] == [4]


def test_a_model_that_one_rank_cannot_open_is_said_by_all(failing):
    end = failing["cannot open"]
    assert kinds(end["told"]) == ["RemoteRankError", "RemoteRankError", "FileNotFoundError"]
    assert "model.safetensors is missing" in end["told"][0]["error"]


def test_ranks_that_train_different_things_do_not_begin(failing):
    end = failing["another seed"]
    assert kinds(end["told"]) == ["RemoteRankError", "ValueError", "RemoteRankError"]
    assert "Give every rank the same files" in end["told"][0]["error"] and end["kept"] == []


def test_all_ranks_stop_at_the_same_step(failing):
    end = failing["asked to stop"]
    assert len(set(end["told"])) == 1 and end["told"][0] in (4, 5) and end["told"][0] in end["kept"]


def test_a_rank_that_is_killed_ends_the_others_at_once_and_the_last_step_is_kept(failing):
    end = failing["killed in a collective"]
    assert kinds(end["told"]) == ["RankConnectionError", -9, "RankConnectionError"] and end["seconds"] < 20
    assert len(end["kept"]) == 1 and end["kept"][0] > 0

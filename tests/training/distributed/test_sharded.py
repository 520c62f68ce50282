"""Ranks that hold the model together (FSDP2): what comes out, what each holds, and that the model is as before."""

import pytest


@pytest.fixture(scope="module")
def sharded(found):
    return found("sharded")


ADAPTERS = ["adapters", "adapters, checkpointing", "adapters, blocks that are skipped"]
EQUAL = ["full, 2 ranks", "full, two parts a rank", "full, blocks that are skipped", "full, lion"]
FULL = [*EQUAL, "full, 4 ranks, average"]


@pytest.mark.parametrize("run", ADAPTERS)
def test_adapters_beside_divided_weights_have_the_bytes_of_one_process(sharded, run):
    assert all(rank["bytes"] and rank["same"] for rank in sharded[run])


@pytest.mark.parametrize("run", FULL)
def test_whole_weights_that_are_divided_end_where_one_process_ends(sharded, run):
    for rank in sharded[run]:
        assert rank["same"] and rank["far"] <= 1e-6 and rank["loss"] <= 1e-6 and rank["validated"]
        assert rank["validated average"] <= 1e-6


@pytest.mark.parametrize("run", EQUAL)
def test_whole_weights_have_its_very_bytes_where_each_rank_has_more_than_a_row_of_each(sharded, run):
    assert all(rank["bytes"] for rank in sharded[run])


@pytest.mark.parametrize("run", ADAPTERS + FULL)
def test_each_rank_holds_its_share_and_the_model_is_as_before(sharded, run):
    ranks = sharded[run]
    assert sum(rank["held"] for rank in ranks) == ranks[0]["of"] and all(rank["back"] for rank in ranks)
    assert max(rank["held"] for rank in ranks) <= 1.5 * ranks[0]["of"] / len(
        ranks
    )  # rows are whole: of four, ranks of three have 2, 2, 0


def test_a_block_gives_its_weights_back_before_the_one_before_takes_its_own(sharded):
    assert sharded["turns"] == [["takes inner.1", "gives inner.1", "takes inner.0", "gives inner.0"]] * 2


@pytest.mark.parametrize(
    "run",
    ["adapters", "adapters, checkpointing", "full", "full, two micro-batches a rank", "full, clipped"],
)
def test_shard_without_reproducible_ends_close_to_one_process(found, run):
    ranks = found("plain_fsdp")[run]
    assert len({rank["bytes"] for rank in ranks}) == 1
    for rank in ranks:
        assert rank["same"] and rank["back"]
        assert rank["far"] <= 1e-5 and rank["loss"] <= 1e-5 and rank["moved"] > 1e-4


def test_a_snapshot_is_written_by_all_ranks_and_goes_on_on_any_number_of_them(sharded):
    end = sharded["snapshots"]
    assert [one["kind"] for one in end["told"]] == ["RemoteRankError", "OSError"]
    assert end["files"] == [
        "state-00000006-00001-of-00002.safetensors",
        "state-00000006-00002-of-00002.safetensors",
        "state.json",
    ]
    for far in end["ends"]:
        assert len(far) in (1, 2, 4) and max(far) <= 1e-6
    assert end["left"] == ["state.json", "state.safetensors"]  # of the result; the snapshot is gone


def test_a_disk_that_fills_on_one_rank_ends_all_and_the_snapshot_before_goes_on(sharded):
    end = sharded["full disk"]
    assert [one["kind"] for one in end["told"]] == ["RemoteRankError", "OSError"] and "No space left" in end["told"][0][
        "error"
    ]
    assert end["kept"] == 3 and end["whole"] and end["again"] == [True, True]

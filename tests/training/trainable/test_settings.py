"""What adapter settings say of single layers: ranks, and which of them work at which noise level."""

import pytest
from graft_nodes.patches.adapters.rank_mask import RankMask
from graft_nodes.training.trainable.settings import AdapterSettings


@pytest.mark.parametrize(
    ("settings", "least"),
    [
        ({"rank": 8}, 4),
        ({"rank": 7}, 3),
        ({"rank": 1}, 1),
        ({"rank": 8, "min_rank": 2}, 2),
        ({"rank": 8, "min_rank": 6, "pattern": "*=rank 4"}, 4),  # a layer cannot have more than its own
    ],
)
def test_tlora_masks_the_ranks_of_the_model_alone(settings, least):
    made = AdapterSettings("tlora", rank_exponent=1.5, **settings)
    rank, _ = made.size_of("blocks.0.ff")
    assert made.rank_mask_of("blocks.0.ff") == RankMask(rank, least, 1.5)
    assert made.rank_mask_of("text_encoders.clip_l.layers.0.fc1") is None
    assert AdapterSettings("lora", rank=8).rank_mask_of("blocks.0.ff") is None

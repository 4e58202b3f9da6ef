"""What is refused of the arguments of every face."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lightning_dsgd as dsgd
from lightning_dsgd.algorithms import ALGORITHMS
from lightning_dsgd.elastic.suits import check_survival
from lightning_dsgd.session.options import choose
from lightning_dsgd.trainer.arguments import TrainerOptions


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"on_loss": "stop"}, 'on_loss must be "end" or "continue"'),
        ({"on_loss": "end", "min_ranks": 2}, 'min_ranks needs on_loss="continue"'),
        ({"on_loss": "end", "max_ranks": 2}, 'max_ranks needs on_loss="continue"'),
        ({"min_ranks": 0}, "min_ranks must be None or a whole number of at least 1"),
        ({"max_ranks": 2.5}, "max_ranks must be None or a whole number of at least 1"),
        ({"transport": "mpi"}, "MPI ends all ranks"),
    ],
)
def test_options_about_lost_ranks_must_suit_each_other(changed: dict[str, Any], match: str) -> None:
    given: Any = {"on_loss": "continue", "min_ranks": None, "max_ranks": None}
    assert choose("It", TrainerOptions, given)["transport"] == "auto"
    with pytest.raises(ValueError, match=match):
        choose("It", TrainerOptions, given | changed)


def test_a_loop_refuses_an_option_that_it_does_not_have() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(TypeError, match=r"no option transprot.*; did you mean transport\?"):
        dsgd.decentralized(model, optimizer, dsgd.LocalSGD(), transprot="mpi")


def test_hyperparameters_must_suit_the_ranks_that_may_be_left() -> None:
    algorithm, cpu = ALGORITHMS["wagma"](group_size=4), torch.device("cpu")
    with pytest.raises(ValueError, match="must be able to go on with 3 ranks, but group_size"):
        check_survival(algorithm, 8, 3, cpu)
    check_survival(algorithm, 8, 4, cpu, 16)
    with pytest.raises(ValueError, match=r"max_ranks must be at least .* max_ranks=7 with"):
        check_survival(algorithm, 8, 4, cpu, 7)
    with pytest.raises(
        ValueError,
        match=r"with 1 replica of 2 ranks, but .* suits 1 to 4 replicas .* set min_ranks=4, or",
    ):
        check_survival(ALGORITHMS["wagma"](group_size=2), 8, None, cpu, num_shards=2)
    check_survival(ALGORITHMS["wagma"](group_size=2), 8, 4, cpu, num_shards=2)
    check_survival(ALGORITHMS["wagma"](group_size=2), 8, 3, cpu, num_shards=2)
    with pytest.raises(ValueError, match="shards must be on CPUs to go on"):
        check_survival(algorithm, 8, 4, torch.device("cuda"), num_shards=2)

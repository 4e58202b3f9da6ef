"""Parameters as views of x train to the bit like plain ones; what x cannot hold is refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from lightning_dsgd.algorithms.local_sgd import LocalSGD
from lightning_dsgd.algorithms.no_sync import NoSync
from lightning_dsgd.replica.flat import ALIGNMENT_BYTES, FlatParameters, check_module, flatten
from lightning_dsgd.replica.wide import widened

MakeOptimizer = Callable[[Iterable[Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def mlp() -> nn.Module:
    """Odd sizes, so that there are gaps in x."""
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def channels_last() -> nn.Module:
    model = nn.Sequential(
        nn.Unflatten(1, (1, 1, 7)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 3, 3, padding=1),
    )
    return nn.Sequential(
        model.to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(21, 3)
    )


def transposed() -> nn.Module:
    model = mlp()
    model[0].weight = Parameter(torch.randn(7, 5).t())
    return model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(7, 7), nn.Linear(7, 7)
        self.decode.weight = self.encode.weight

    def forward(self, data: Tensor) -> Tensor:
        return self.decode(self.encode(data))[:, :3]


class Mixed(nn.Module):
    """fp32, bf16, fp64 and complex parameters, none of them next to its like."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(7, 5)
        self.brain = nn.Linear(5, 5, dtype=torch.bfloat16)
        self.phase = Parameter(torch.randn(5, dtype=torch.complex64))
        self.wide = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, data: Tensor) -> Tensor:
        hidden = self.brain(self.single(data).bfloat16()).float()
        return self.wide((hidden * self.phase).abs().double()).float()


class Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Parameter(torch.tensor(0.5))
        self.nothing = Parameter(torch.empty(0, 3))
        self.shift = Parameter(torch.tensor(-0.25))

    def forward(self, data: Tensor) -> Tensor:
        return data[:, :3] * self.scale + self.shift + self.nothing.sum()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "channels_last": channels_last,
    "transposed": transposed,
    "tied": Tied,
    "mixed": Mixed,
    "scalars": Scalars,
}


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 7, generator=generator) for _ in range(count)]


def backward(model: nn.Module, data: Tensor) -> None:
    (model(data) - data[:, :3]).square().mean().backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, flats: list[FlatParameters]) -> None:
    for number, data in enumerate(batches(4)):
        optimizer.zero_grad(set_to_none=number % 2 == 0)  # or they stay where they are, as zeros
        backward(model, data)
        for flat in flats:
            flat.gather()
            flat.scatter()
        optimizer.step()


def assert_equal(model: nn.Module, reference: nn.Module) -> None:
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()]
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert p.dtype == q.dtype, name
        assert torch.equal(p, q), name


# Training is what it was
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_trains_to_the_bit_like_the_plain_module(model: str, optimizer: str) -> None:
    if model == "mixed" and optimizer.endswith("fused"):
        pytest.skip("torch's fused optimizers take no complex parameters")
    reference, flat_model = build(MODELS[model]), build(MODELS[model])
    start = copy.deepcopy(reference)
    flats = flatten(flat_model.named_parameters())
    assert_equal(flat_model, start)
    train(reference, OPTIMIZERS[optimizer](reference.parameters()), [])
    train(flat_model, OPTIMIZERS[optimizer](flat_model.parameters()), flats)
    assert_equal(flat_model, reference)
    assert not torch.equal(next(reference.parameters()), next(start.parameters()))
    assert all(flat.is_intact() for flat in flats)


# What x is
@pytest.fixture
def _uninitialized_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_uninitialized_is_nan")
@pytest.mark.parametrize("model", MODELS)
def test_x_is_the_parameters(model: str) -> None:
    module = build(MODELS[model])
    before = dict(module.named_parameters())
    strides = [p.stride() for p in module.parameters()]
    flats = flatten(module.named_parameters())
    assert dict(module.named_parameters()) == before
    assert [p.stride() for p in module.parameters()] == strides
    for flat in flats:
        assert flat.x.is_contiguous()
        assert not flat.x.requires_grad
        for p in flat.parameters:
            assert p.is_leaf
            assert not p.numel() or p.data_ptr() % ALIGNMENT_BYTES == 0
            p.data.fill_(1 + 1j if p.is_complex() else 1)
        assert int(flat.x.count_nonzero()) == flat.numel, "the gaps are zero"
        flat.x.mul_(3)
        for p in flat.parameters:
            assert torch.equal(p, torch.full_like(p, 3 + 3j if p.is_complex() else 3))


def test_gradient_in_place_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    module = build(mlp)
    (flat,) = flatten(module.named_parameters())
    assert flat._g is None, "who needs no gradients has no memory for them"
    backward(module, batches(1)[0])
    flat.gather()
    flat.scatter()
    once = flat.g.clone()
    monkeypatch.setattr(torch, "_foreach_copy_", None)
    backward(module, batches(1)[0])
    assert torch.equal(flat.gather(), 2 * once)


def test_no_gradient_here_but_elsewhere() -> None:
    a, b, c = (Parameter(torch.ones(3)) for _ in range(3))
    (flat,) = flatten([("a", a), ("b", b), ("c", c)])
    for view in flat.views(flat.g):
        view.fill_(9)
    a.grad = torch.ones(3)
    g = flat.gather()
    assert int(g.count_nonzero()) == 3, "nothing is left of the last step"
    flat._g_views[1].fill_(torch.nan)
    flat.scatter()
    assert b.grad is not None
    assert b.grad.isnan().all()
    assert c.grad is None


# Leaving x and coming back
def test_refresh_moves_all_or_nothing() -> None:
    module = build(mlp)
    (flat,) = flatten(module.named_parameters())
    x = flat.x.clone()
    module[0].weight.data = torch.zeros(5, 7)
    module[2].weight.data = torch.zeros(5, 7)
    with pytest.raises(ValueError, match=r"'2.weight' must remain .* \(3, 5\).* got .* \(5, 7\)"):
        flat.refresh()
    assert torch.equal(flat.x, x)
    module.double()
    assert not flat.is_intact()
    with pytest.raises(ValueError, match=r"'0.weight' must remain torch.float32 on cpu .*float64"):
        flat.refresh()


@pytest.mark.parametrize("strides", ["same", "other", "swapped"])
def test_refresh_takes_values_back(strides: str) -> None:
    module = nn.Linear(4, 4)
    (flat,) = flatten(module.named_parameters())
    weight = module.weight
    drawn = weight.data if strides == "swapped" else torch.randn(4, 4)
    weight.data = drawn if strides == "same" else drawn.t()
    values = weight.detach().clone()
    assert not flat.is_intact()
    flat.refresh()
    assert flat.is_intact()
    assert module.weight is weight
    assert weight.is_contiguous()
    assert torch.equal(weight, values)
    flat.x.zero_()
    assert not weight.any()


# Copies
def saved(module: Any) -> bytes:
    file = io.BytesIO()
    torch.save(module, file)
    return file.getvalue()


def test_a_copy_has_memory_of_its_own() -> None:
    module = build(mlp)
    (flat,) = flatten(module.named_parameters())
    loaded = torch.load(io.BytesIO(saved(module)), weights_only=False)
    twins = (copy.deepcopy(module), loaded)
    flat.x.zero_()
    for twin in twins:
        assert_equal(twin, build(mlp))
        flatten(twin.named_parameters())


def test_saved_state_dict_holds_x_once() -> None:
    module = nn.Sequential(*(nn.Linear(50, 50) for _ in range(10)))
    plain = len(saved(module.state_dict()))
    flatten(module.named_parameters())
    assert len(saved(module.state_dict())) < plain * 1.1


# What cannot be flattened
class Tagged(Tensor):
    """A tensor subclass, as DTensor is one."""


BIG = torch.randn(4, 6)


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (nn.LazyLinear(3).weight, "lazy parameter 'p'; run a forward pass"),
        (Parameter(torch.empty(3, device="meta")), "'p' on the meta device; call module.to_empty"),
        (Parameter(torch.randn(3).as_subclass(Tagged)), "plain dense tensors, got Tagged"),
        (
            Parameter(torch.eye(3).to_sparse()),
            "plain dense tensors, got Tensor of layout torch.sparse",
        ),
        (Parameter(torch.ones(3, dtype=torch.int32), requires_grad=False), "torch.int32 for 'p'"),
        (Parameter(torch.ones(3).expand(4, 3)), r"strides \(0, 1\) for 'p' of shape \(4, 3\)"),
        (Parameter(BIG[:, :3]), r"strides \(6, 1\) for 'p'"),
        (Parameter(torch.ones(6).as_strided((3, 3), (1, 1))), r"without gaps and overlaps"),
    ],
)
def test_refuses(parameter: Parameter, message: str) -> None:
    good = Parameter(torch.ones(3))
    address = good.data_ptr()
    with pytest.raises(ValueError, match=message):
        flatten([("good", good), ("p", parameter)])
    assert good.data_ptr() == address, "nothing was moved"


def test_refuses_shared_memory_and_sparse_gradients() -> None:
    a = Parameter(torch.ones(6))
    with pytest.raises(ValueError, match="one object, got 'a' and 'b'; assign the same Parameter"):
        flatten([("b", Parameter(a.data[2:4])), ("a", a)])
    embedding = nn.Embedding(5, 3, sparse=True)
    (flat,) = flatten(embedding.named_parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="'weight'; make its embedding with sparse=False"):
        flat.gather()


@pytest.mark.parametrize("embedding", [nn.Embedding, nn.EmbeddingBag])
def test_check_module_names_sparse_embeddings(embedding: type[nn.Embedding]) -> None:
    module = nn.Sequential(nn.Linear(3, 3), embedding(5, 3, sparse=True))
    with pytest.raises(
        ValueError, match=f"'1', {embedding.__name__} with sparse=True; make it with"
    ):
        check_module(module)
    module.requires_grad_(False)
    check_module(module)
    check_module(nn.Sequential(nn.Linear(3, 3), embedding(5, 3)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_corrections_of_halves_add_up_and_a_zero_stays_zero(dtype: torch.dtype) -> None:
    parameters = nn.ParameterList([torch.tensor([0.0, 1.0, 1.0], dtype=dtype)])
    [flat] = widened(flatten(parameters.named_parameters()), LocalSGD())
    for _ in range(1000):
        flat.pull()
        flat.x += torch.tensor([1e-10, 1e-5, 0.0])
        flat.push()
    parameters[0].data[2] = 0.0
    flat.pull()
    torch.testing.assert_close(flat.x, torch.tensor([1e-7, 1.01, 0.0]), rtol=1e-3, atol=1e-9)


def test_a_frozen_parameter_gets_no_gradient_of_another_rank() -> None:
    model = mlp()
    [flat] = flatten(model.named_parameters())
    model[0].requires_grad_(False)
    model(torch.ones(2, 7)).sum().backward()
    model[2].bias.grad = None
    g = flat.gather()
    flat.scatter(torch.ones(4, dtype=torch.int64))  # as if another rank had gradients for all
    assert model[0].weight.grad is model[0].bias.grad is None
    assert model[2].bias.grad is not None
    assert model[2].bias.grad.untyped_storage().data_ptr() == g.untyped_storage().data_ptr()


def test_spans_join_neighbours_alone() -> None:
    model = nn.ParameterList(torch.ones(16) for _ in range(3))
    [flat] = flatten(model.named_parameters())
    assert flat.spans([model[2], model[0]]) == [slice(0, 16), slice(32, 48)]
    assert flat.spans([model[1], model[0]]) == [slice(0, 32)]


def test_parameters_that_were_pointed_at_each_others_places_keep_their_values() -> None:
    model = nn.ParameterList(torch.full((16,), float(k)) for k in range(2))
    [flat] = flatten(model.named_parameters())
    model[0].data, model[1].data = model[1].data, model[0].data
    flat.refresh()
    assert flat.is_intact()
    assert [each.unique().item() for each in model] == [1.0, 0.0]


def test_weights_that_are_never_averaged_stay_in_half_precision() -> None:
    model = nn.Linear(3, 3, dtype=torch.bfloat16)
    flats = flatten(model.named_parameters())
    assert widened(flats, NoSync()) == flats
    assert widened(flats, LocalSGD()) != flats

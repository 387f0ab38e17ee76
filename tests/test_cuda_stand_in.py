"""The stand-in for CUDA notices what it is there for: see cuda_stand_in.py."""

import copy

import pytest
import torch
from cuda_stand_in import cuda_stand_in
from torch import nn


@pytest.fixture
def cuda():
    with cuda_stand_in() as cuda:
        yield cuda


def capture(run, device="cuda"):
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    with torch.cuda.graph(graph, stream=stream):
        return graph, run()


def ones(*shape, device="cuda"):
    return torch.ones(*shape, device=device)


def test_tensors_are_where_they_are_said_to_be(cuda):
    x = torch.arange(4.0, device="cuda:1")
    for tensor in (x, x[1:], x * 2, torch.zeros_like(x), x.new_zeros(3), copy.deepcopy(x)):
        assert (tensor.device, tensor.is_cuda) == (torch.device("cuda:1"), True)
    for tensor in (x.cpu(), x.to("cpu"), torch.zeros(2), torch.zeros(2).pin_memory()):
        assert (tensor.device, tensor.is_cuda) == (torch.device("cpu"), False)
    model = nn.Linear(3, 2).to("cuda")
    model(ones(1, 3)).sum().backward()
    assert all(p.grad.device == torch.device("cuda:0") for p in model.parameters())


def test_outside_of_it_nothing_is_left():
    with cuda_stand_in():
        x = ones(3)
    assert x.device.type == "cpu"
    assert x.tolist() == [1, 1, 1]
    assert "stand_in" not in torch.cuda.is_available.__module__


def test_a_replay_overwrites_the_same_memory(cuda):
    x = ones(4)
    graph, y = capture(lambda: x * 2 + 1)
    address = y.data_ptr()
    for value in (3.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [2 * value + 1] * 4
        assert y.data_ptr() == address


def test_what_is_allocated_during_a_capture_is_used_again(cuda):
    x, kept = ones(4), []

    def run():
        kept.append(torch.zeros(4, device="cuda").add_(x))  # a graph's zeros are zeros every time
        return kept[0].cumsum(0)

    graph, y = capture(run)
    for _ in range(2):
        graph.replay()
        assert kept[0].tolist() == [1, 1, 1, 1]
        assert y.tolist() == [1, 2, 3, 4]


def test_a_capture_executes_nothing(cuda):
    x, state = ones(3), torch.get_rng_state()
    graph, y = capture(lambda: x.add_(torch.rand(3, device="cuda")).clone())
    assert x.tolist() == [1, 1, 1]
    assert y.isnan().all()
    assert torch.equal(torch.get_rng_state(), state)
    graph.replay()
    first = y.clone()
    graph.replay()  # on top of the first, with other random numbers
    assert not torch.equal(y - first, first - 1)


def test_a_whole_step_of_training_can_be_replayed(cuda):
    torch.manual_seed(0)
    model, eager = nn.Linear(3, 1), nn.Linear(3, 1)
    eager.load_state_dict(model.state_dict())
    model.to("cuda")
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, fused=True) for m in (model, eager)]
    x = ones(5, 3)

    def step(model, optimizer, x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    graph, _ = capture(lambda: step(model, optimizers[0], x))
    for _ in range(3):
        batch = torch.randn(5, 3)
        x.copy_(batch)
        graph.replay()
        step(eager, optimizers[1], batch)
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(a.cpu(), b)


def read_with_nonzero(x):
    return x[x > 0]


READS = [
    torch.Tensor.item, torch.Tensor.tolist, bool, float, torch.Tensor.nonzero, torch.Tensor.cpu,
    lambda x: x.to("cpu", non_blocking=True), lambda x: torch.zeros(1).copy_(x), read_with_nonzero,
    lambda x: torch.cuda.synchronize(), lambda x: torch.cuda.current_stream().synchronize(),
    lambda x: x.copy_(torch.zeros(1)), lambda x: torch.tensor([1.0], device="cuda"),
    lambda x: torch.zeros(1).to("cuda", non_blocking=True),  # not pinned
]  # fmt: skip


@pytest.mark.parametrize("read", READS)
def test_what_the_host_waits_for_is_counted_and_refused_in_a_capture(cuda, read):
    x = ones(1)
    cuda.waits.clear()
    read(x)
    assert len(cuda.waits) == 1
    with pytest.raises(RuntimeError, match="cannot wait while a CUDA graph is captured"):
        capture(lambda: read(x))


def test_what_costs_no_waiting_is_not_counted(cuda):
    x = ones(2, 3)
    pinned = torch.zeros(2, 3).pin_memory()
    x.copy_(pinned, non_blocking=True)
    pinned.to("cuda", non_blocking=True)
    x.to("cuda:1").clone().sum()
    x[0].fill_(2).add_(x[1].mean() * torch.tensor(2.0))
    assert torch.zeros(3).sum().item() == 0
    assert cuda.waits == []


def test_a_number_of_the_host_is_fixed_by_the_capture(cuda):
    x, factor = ones(2), torch.tensor(2.0)
    graph, y = capture(lambda: x * factor)
    factor.fill_(5)
    graph.replay()
    assert y.tolist() == [2, 2]


def test_devices_do_not_mix(cuda):
    with pytest.raises(RuntimeError, match="all tensors must be on one device"):
        ones(2) + ones(2, device="cuda:1")
    with pytest.raises(RuntimeError, match="all tensors must be on one device"):
        ones(2) + torch.ones(2)
    with pytest.raises(RuntimeError, match="there is no cuda:2"):
        ones(2, device="cuda:2")


def test_a_graph_is_of_one_device_and_one_stream(cuda):
    x = ones(2, device="cuda:1")
    with pytest.raises(RuntimeError, match="launched on cuda:1 while cuda:0 is captured"):
        capture(lambda: x + 1, device="cuda:0")
    graph, y = capture(lambda: x + 1, device="cuda:1")
    graph.replay()
    assert y.tolist() == [2, 2]

    # What torch.cuda.graph takes by itself is a stream of the device that was current at first.
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        ones(2) + 1
    with (
        pytest.raises(RuntimeError, match="launched on cuda:1 while cuda:0 is captured"),
        torch.cuda.device(1),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        x + 1

    def elsewhere():
        assert torch.cuda.is_current_stream_capturing()
        with torch.cuda.stream(torch.cuda.Stream("cuda:1")):
            assert not torch.cuda.is_current_stream_capturing()
            return x + 1

    with pytest.raises(RuntimeError, match="another stream than the one captured"):
        capture(elsewhere, device="cuda:1")


def test_a_graph_keeps_the_memory_and_not_the_name(cuda):
    layer = nn.Linear(1, 1, bias=False, device="cuda")
    graph, y = capture(lambda: layer.weight.detach() * 1)
    before = layer.weight.detach().clone()
    layer.weight.data = torch.zeros(1, 1, device="cuda")
    graph.replay()
    assert torch.equal(y, before)

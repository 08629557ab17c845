from __future__ import annotations

import torch
from fleet import Fleet
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(30, 30) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _train(name: str, steps: int) -> list:
    import torch.distributed as dist

    net = DistributedDataParallel(Net(), bucket_cap_mb=0.004)
    sieve = gradsieve.sparsify(net, gradsieve.method(name))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    out = []
    for _ in range(steps):
        opt.zero_grad()
        net(torch.randn(8, 30)).square().mean().backward()
        out.append(torch.cat([p.grad.flatten() for p in net.parameters()]).clone())
        opt.step()
    print(sieve, sieve.stats)
    return out


def test_it(fleet3: Fleet) -> None:
    for name in gradsieve.METHODS:
        a = fleet3.run(_train, name, 5)
        assert all(torch.equal(x, y) for x, y in zip(a[0], a[1]))

"""A search that was stopped goes on where it stopped, and ends as if it had never been."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradveil.attacks.keep import keep
from gradveil.attacks.optimise import Descent, minimise
from gradveil.attacks.progress import Progress, watch

HOW = Descent(steps=200, lr=0.05, signed=False)


def start(seed: int = 0) -> list[Tensor]:
    return [torch.randn(3, 1, 4, generator=torch.Generator().manual_seed(seed))]


def bowl(variables: list[Tensor], share: Tensor) -> tuple[Tensor, Tensor]:
    loss = (variables[0] - 1).pow(4).flatten(1).sum(1) * (1 + share)
    return loss, loss


def stop_at(step: int, seen: list[int]) -> None:
    def tell(progress: Progress) -> None:
        seen.append(progress.step)
        if progress.step == step:
            raise TimeoutError

    with watch(tell, every=10):
        minimise(bowl, start(), HOW)


@pytest.mark.parametrize("step", [10, 190, 200])
def test_a_stopped_search_ends_as_if_it_had_not_been(step: int, tmp_path: Path) -> None:
    straight, losses, _ = minimise(bowl, start(), HOW)
    with pytest.raises(TimeoutError), keep(tmp_path):
        stop_at(step, [])
    seen: list[int] = []
    with keep(tmp_path), watch(lambda p: seen.append(p.step), every=10):
        found, again, done = minimise(bowl, start(), HOW)
    assert seen[:1] == ([step + 10] if step < 200 else [])
    assert done == 200
    assert torch.equal(found[0], straight[0])
    assert torch.equal(again, losses)


def test_several_searches_are_kept_apart_and_a_finished_one_is_not_repeated(tmp_path: Path) -> None:
    def both() -> list[Tensor]:
        return [minimise(bowl, start(seed), HOW)[0][0] for seed in (0, 1)]

    straight = both()
    with keep(tmp_path, every=0.0):
        both()
    assert len(list(tmp_path.iterdir())) == 2
    seen: list[int] = []
    with keep(tmp_path, every=0.0), watch(lambda p: seen.append(p.step), every=10):
        found = both()
    assert seen == []
    assert all(map(torch.equal, found, straight))


@pytest.mark.parametrize("spoil", ["another start", "other rules", "bytes"])
def test_what_was_kept_of_something_else_is_not_used(spoil: str, tmp_path: Path) -> None:
    with pytest.raises(TimeoutError), keep(tmp_path):
        stop_at(100, [])
    if spoil == "bytes":
        (tmp_path / "1.safetensors").write_bytes(b"no tensors")
    begin = start(1) if spoil == "another start" else start()
    how = Descent(steps=100) if spoil == "other rules" else HOW
    with keep(tmp_path):
        found, *_ = minimise(bowl, begin, how)
    assert torch.equal(found[0], minimise(bowl, begin, how)[0][0])


def test_a_short_search_writes_nothing(tmp_path: Path) -> None:
    with keep(tmp_path / "short"):
        minimise(bowl, start(), HOW)
    assert not (tmp_path / "short").exists()

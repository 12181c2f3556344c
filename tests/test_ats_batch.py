"""ATS on whole batches: level for level what Pillow does picture by picture."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradveil.core import Batch, Step
from gradveil.defenses import ATS, Chain, ErrorFeedback, TopK, dgp
from gradveil.defenses.ats import _BATCHED, TRANSFORMATIONS, apply_policy, apply_to_batch, parse_policy
from gradveil.training import Settings, assemble
from gradveil.training.flat import Layout, Rows
from gradveil.training.protectors.stateless import Transformed
from gradveil.veil import derive_rng

INDICES = [index for index, (name, _) in enumerate(TRANSFORMATIONS) if name in _BATCHED]
VIEWS = {"view", "expand", "select", "slice", "unsqueeze", "detach", "permute", "alias"}


def random_levels(count: int, channels: int, height: int, width: int, seed: int) -> Tensor:
    """Pictures from nearly black to nearly white, some flat, some reaching both ends."""
    rng = torch.Generator().manual_seed(seed)
    middle, spread = (torch.rand(count, 1, 1, 1, generator=rng) for _ in range(2))
    noise = torch.randn(count, channels, height, width, generator=rng)
    return ((middle + spread * noise).clamp(0, 1) * 255).round().byte()


def by_pillow(levels: Tensor, policies: list[tuple[int, ...]], signs: list[list[int]]) -> Tensor:
    arrays = [level.permute(1, 2, 0).numpy() for level in levels]
    pictures = [Image.fromarray(array[..., 0] if array.shape[2] == 1 else array) for array in arrays]
    done = [np.array(apply_policy(*each)) for each in zip(pictures, policies, signs, strict=True)]
    return torch.from_numpy(np.stack(done)).view(len(done), *levels.shape[2:], -1).permute(0, 3, 1, 2)


def by_hand(defense: ATS, inputs: Tensor, seed: int) -> Tensor:
    """The published procedure with the draws in their documented order."""
    rng, policies = torch.Generator().manual_seed(seed), parse_policy(defense.policy)
    chosen = torch.randint(len(policies), (len(inputs),), generator=rng).tolist()
    signs = (2 * torch.randint(2, (len(inputs), max(map(len, policies))), generator=rng) - 1).tolist()
    mean, std = (torch.tensor(v, dtype=inputs.dtype).view(1, -1, 1, 1) for v in (defense.mean, defense.std))
    levels = ((inputs * std + mean).clamp(0, 1) * 255).round().byte()
    return (by_pillow(levels, [policies[which] for which in chosen], signs).to(inputs.dtype) / 255 - mean) / std


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("size", [(32, 32), (1, 1), (31, 33), (2, 331), (331, 2), (1, 64), (17, 1)])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_level_and_sign_is_that_of_pillow(index: int, size: tuple[int, int], channels: int) -> None:
    levels = random_levels(40, channels, *size, seed=index)
    rows = torch.arange(40)[:, None] % 2
    expected = by_pillow(levels, [(index,)] * 40, (2 * rows - 1).tolist())
    assert torch.equal(apply_to_batch(levels, ((index,),), rows), expected)


@settings(max_examples=60, deadline=None)
@given(
    policies=st.lists(st.lists(st.sampled_from(INDICES), min_size=1, max_size=4).map(tuple), min_size=1, max_size=3),
    channels=st.sampled_from([1, 3]),
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    seed=st.integers(0, 2**32),
)
def test_policies_of_any_length_are_those_of_pillow(
    policies: list[tuple[int, ...]], channels: int, size: tuple[int, int], seed: int
) -> None:
    levels, rng = random_levels(12, channels, *size, seed), torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(policies), (12,), generator=rng)
    positive = torch.randint(2, (12, max(map(len, policies))), generator=rng)
    done = apply_to_batch(levels, tuple(policies), 2 * chosen[:, None] + positive)
    expected = by_pillow(levels, [policies[which] for which in chosen.tolist()], (2 * positive - 1).tolist())
    assert torch.equal(done, expected)


@pytest.mark.parametrize("policy", [ATS().policy, "24", "3-1-7+0-4-8-2", "21-13-3+7-4-15"])
@pytest.mark.parametrize("shape", [(32, 3, 32, 32), (9, 1, 28, 28), (1, 3, 5, 7), (2, 3, 70, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_prepared_batch_is_the_one_made_by_hand(policy: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    defense = ATS(policy, (0.49, 0.48, 0.45)[: shape[1]], (0.25, 0.24, 0.26)[: shape[1]])
    scale = [torch.tensor(v, dtype=dtype).view(1, -1, 1, 1) for v in (defense.mean, defense.std)]
    inputs = (random_levels(*shape, seed=3).to(dtype) / 255 - scale[0]) / scale[1]
    batch, rng = Batch(inputs, torch.arange(shape[0])), torch.Generator().manual_seed(7)
    done = defense.prepare_batch(batch, Step(rng)).inputs
    expected = by_hand(defense, inputs, 7)
    assert torch.equal(done, expected)
    assert done.is_contiguous(memory_format=torch.channels_last)


def test_empty_batches_pass_and_nan_is_refused() -> None:
    empty = Batch(torch.zeros(0, 3, 8, 8), torch.zeros(0))
    assert ATS().prepare_batch(empty, Step(torch.Generator())).inputs.shape == (0, 3, 8, 8)
    with pytest.raises(ValueError, match="normalisation"):
        ATS().prepare_batch(Batch(torch.full((2, 3, 8, 8), torch.nan), torch.zeros(2)), Step(torch.Generator()))


class Launches(TorchDispatchMode):
    """Names the operations that start work on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        self.names += [] if name in VIEWS else [name]
        return func(*args, **(kwargs or {}))


def test_a_gpu_is_waited_for_once_and_has_few_kernels_to_start() -> None:
    batch = Batch(torch.rand(4, 3, 32, 32), torch.zeros(4))
    ATS().prepare_batch(batch, Step(torch.Generator()))  # fills the tables
    with Launches() as counted:
        ATS().prepare_batch(batch, Step(torch.Generator()))
    assert counted.names.count("_local_scalar_dense") == 1
    assert len(counted.names) < 60


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(32, 3, 32, 32), (9, 1, 28, 28), (2, 3, 70, 80)])
def test_a_gpu_gives_the_levels_of_a_cpu(shape: tuple[int, ...]) -> None:
    inputs = random_levels(*shape, seed=3) / 255
    done = ATS().prepare_batch(Batch(inputs.cuda(), torch.zeros(shape[0])), Step(torch.Generator().manual_seed(7)))
    assert torch.equal((done.inputs.cpu() * 255).round(), (by_hand(ATS(), inputs, 7) * 255).round())


def test_the_fast_engine_transforms_the_pictures_of_all_users_in_one_go() -> None:
    job = assemble(Settings(model="lenet", data="digits", defense="ats", users=3, batch_size=4))
    batches = [Batch(torch.rand(4, 1, 8, 8), torch.arange(4) + 4 * user) for user in range(3)]
    rows = Rows(torch.zeros(3, 2), Layout({"w": torch.zeros(2)}))
    found = Transformed(job.defense, rows, job).prepare(7, batches)
    seed = derive_rng(0, "all", 7, "pictures").initial_seed()
    expected = by_hand(job.defense, torch.cat([b.inputs for b in batches]), seed)
    assert torch.equal(torch.cat([b.inputs for b in found]), expected)
    assert torch.equal(torch.cat([b.labels for b in found]), torch.arange(12))


def test_the_normalisation_of_the_data_reaches_ats_wherever_it_sits() -> None:
    told = ATS(mean=(0.5,), std=(0.2,))
    assert Chain(ATS(), dgp()).fitted((0.5,), (0.2,)) == Chain(told, dgp())
    assert ErrorFeedback(Chain(ATS(), TopK())).fitted((0.5,), (0.2,)) == ErrorFeedback(Chain(told, TopK()))
    assert told.fitted((0.1,), (0.1,)) == told  # what was given stays

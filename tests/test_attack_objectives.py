import pytest
import torch

from gradveil.attacks import objectives


def test_cosine_and_its_slope_match_plain_autograd(rng):
    mine = torch.randn(3, 50, generator=rng, requires_grad=True)
    sent = torch.randn(3, 50, generator=rng)
    plain = 1 - torch.cosine_similarity(mine, sent, dim=1)
    assert torch.allclose(objectives.cosine(mine, sent), plain, atol=1e-6)
    ours, theirs = (torch.autograd.grad(c.sum(), mine)[0] for c in (objectives.cosine(mine, sent), plain))
    assert torch.allclose(ours, theirs, atol=1e-6)


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("weighted", [False, True])
def test_comparisons_match_plain_autograd(rng, device, weighted):
    mine, sent, drawn = (torch.randn(3, 9001, generator=rng) for _ in range(3))
    weight = (drawn.clamp_min(0)).to(device) if weighted else None
    mine, sent = mine.to(device).requires_grad_(), sent.to(device)

    def seen():
        return mine * weight if weighted else mine

    pairs = [
        (objectives.cosine(mine, sent, weight=weight), 1 - torch.cosine_similarity(seen(), sent, dim=1)),
        (objectives.l2(mine, sent, weight=weight), (seen() - sent).square().sum(1)),
    ]
    for ours, plain in pairs:
        assert torch.allclose(ours, plain, rtol=1e-5, atol=1e-6)
        slopes = [torch.autograd.grad((torch.arange(3.0, device=device) * c).sum(), mine)[0] for c in (ours, plain)]
        assert torch.allclose(*slopes, rtol=1e-5, atol=1e-7)


def test_cosine_ignores_scale_and_l2_does_not(rng):
    sent = torch.randn(2, 20, generator=rng)
    assert torch.allclose(objectives.cosine(3 * sent, sent), torch.zeros(2), atol=1e-6)
    assert torch.allclose(objectives.l2(3 * sent, sent, normalise=True), torch.full((2,), 4.0), rtol=1e-5)
    assert torch.allclose(objectives.l2(3 * sent, sent), 4 * sent.square().sum(1), rtol=1e-5)


@pytest.mark.parametrize("distance", [objectives.cosine, lambda a, b: objectives.l2(a, b, True)])
def test_nothing_sent_gives_finite_values_and_slopes(distance):
    mine = torch.zeros(1, 5, requires_grad=True)
    loss = distance(mine, torch.zeros(1, 5))
    assert torch.isfinite(loss).all()
    assert torch.isfinite(torch.autograd.grad(loss.sum(), mine)[0]).all()


def test_total_variation_of_stripes():
    stripes = torch.tensor([0.0, 1.0] * 4).expand(1, 1, 1, 8, 8)
    assert objectives.total_variation(stripes).tolist() == [1.0]
    assert objectives.total_variation(stripes.transpose(-1, -2)).tolist() == [1.0]
    assert objectives.total_variation(torch.ones(2, 1, 3, 4, 4)).tolist() == [0.0, 0.0]


def test_band_violation_is_zero_at_both_ends():
    low, high = torch.tensor([1.0]), torch.tensor([3.0])
    sizes = torch.tensor([[0.5, 1.0, -2.0, 2.5, 3.0, -9.0]])
    assert objectives.band_violation(sizes, low, high).tolist() == [[0.0, 0.0, 1.0, 0.5, 0.0, 0.0]]
    assert objectives.band_violation(sizes, low, torch.tensor([torch.inf])).tolist()[0][-1] == 8.0


def test_statistics_gap_is_zero_for_the_layer_s_own_data(rng):
    x = torch.randn(1, 6, 4, 5, 5, generator=rng)
    mean, var = x[0].mean((0, 2, 3)), x[0].var((0, 2, 3), unbiased=False)
    assert float(objectives.statistics_gap(x, mean, var)) < 1e-5
    assert float(objectives.statistics_gap(x + 1, mean, var)) == pytest.approx(2.0, rel=1e-4)


def test_a_long_gradient_fits_itself():
    # Added up one by one in float32, ten million squares fall short by a thousandth.
    long = torch.randn(1, 12_000_000, generator=torch.Generator().manual_seed(0))
    assert abs(float(objectives.cosine(long, long))) < 1e-5
    assert float(objectives.length_of(long)) == pytest.approx(float(long.double().norm()), rel=1e-6)

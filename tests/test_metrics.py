import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil import data, metrics
from gradveil.data.download import sha256
from gradveil.errors import ConfigError
from gradveil.metrics import perceptual

WEIGHTS = os.environ.get("GRADVEIL_LPIPS_WEIGHTS", "")
with_weights = pytest.mark.skipif(not Path(WEIGHTS).is_file(), reason="GRADVEIL_LPIPS_WEIGHTS names no file")


@pytest.fixture(scope="module")
def truth() -> Tensor:
    return data.load("photos", split="test").pixels(range(12))


@pytest.fixture
def noisy(truth: Tensor, rng: torch.Generator) -> Tensor:
    spread = torch.linspace(0, 0.5, len(truth)).view(-1, 1, 1, 1)
    return (truth + spread * torch.randn(truth.shape, generator=rng)).clamp(0, 1)


def random_weights() -> dict[str, Tensor]:
    shapes = {0: (64, 3, 11, 11), 3: (192, 64, 5, 5), 6: (384, 192, 3, 3), 8: (256, 384, 3, 3), 10: (256, 256, 3, 3)}
    rng = torch.Generator().manual_seed(1)
    made = {}
    for tap, (index, shape) in enumerate(shapes.items()):
        made[f"features.{index}.weight"] = torch.randn(shape, generator=rng) / np.sqrt(np.prod(shape[1:]))
        made[f"features.{index}.bias"] = torch.randn(shape[:1], generator=rng) * 0.1
        made[f"lin{tap}.weight"] = torch.rand(1, shape[0], 1, 1, generator=rng)
    return made


# ---- MSE, PSNR, SSIM


def test_psnr_agrees_with_scikit_image(noisy: Tensor, truth: Tensor):
    found = metrics.psnr(noisy, truth)
    assert found[0] == 100.0  # equal pictures
    pairs = zip(truth.numpy()[1:], noisy.numpy()[1:], strict=True)
    assert np.allclose(found[1:], [peak_signal_noise_ratio(t, g, data_range=1.0) for t, g in pairs], atol=1e-4)
    assert torch.allclose(metrics.mse(noisy, truth)[1:], 10 ** (-found[1:] / 10), rtol=1e-4)


@pytest.mark.parametrize("side", [32, 21, 11])
def test_ssim_agrees_with_scikit_image(noisy: Tensor, truth: Tensor, side: int):
    guess, true = noisy[..., :side, 32 - side :], truth[..., :side, 32 - side :]
    expected = [
        structural_similarity(
            t.double().numpy(),
            g.double().numpy(),
            channel_axis=0,
            data_range=1.0,
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
        )
        for g, t in zip(guess, true, strict=True)
    ]
    assert np.allclose(metrics.ssim(guess, true), expected, atol=2e-5)


def test_ssim_is_torchmetrics_own_inside_the_border(noisy: Tensor, truth: Tensor):
    from torchmetrics.functional.image import peak_signal_noise_ratio as psnr
    from torchmetrics.functional.image import structural_similarity_index_measure as ssim

    _, every = ssim(noisy.double(), truth.double(), data_range=1.0, reduction="none", return_full_image=True)
    assert torch.allclose(metrics.ssim(noisy, truth), every[..., 5:-5, 5:-5].mean(dim=(1, 2, 3)).float(), atol=2e-5)
    for i in range(1, len(truth)):
        assert torch.isclose(metrics.psnr(noisy, truth)[i], psnr(noisy[i], truth[i], data_range=1.0))


@pytest.mark.parametrize("size", [7, 8, 9, 2, 1])
def test_ssim_of_small_pictures_uses_a_window_that_fits(size: int, rng: torch.Generator):
    true = data.load("digits", split="test", size=size).pixels(range(5))
    guess = (true + 0.2 * torch.randn(true.shape, generator=rng)).clamp(0, 1)
    window, sigma = metrics.images.ssim_window((size, size))
    assert window == size - (size + 1) % 2
    found = metrics.ssim(guess, true)
    assert torch.allclose(metrics.ssim(true, true), torch.ones(5))
    assert torch.allclose(metrics.pairwise_ssim(guess, true).diag(), found, atol=2e-5)
    if window > 1:
        expected = [
            structural_similarity(
                *(t.double().numpy(), g.double().numpy()),
                data_range=1.0,
                gaussian_weights=True,
                sigma=sigma,
                use_sample_covariance=False,
            )
            for g, t in zip(guess[:, 0], true[:, 0], strict=True)
        ]
        assert np.allclose(found, expected, atol=2e-5)


def test_the_papers_ssim_agrees_with_scikit_images_old_default(noisy: Tensor, truth: Tensor):
    expected = [
        structural_similarity(t.double().numpy(), g.double().numpy(), channel_axis=0, data_range=2.0, win_size=7)
        for g, t in zip(noisy, truth, strict=True)
    ]
    assert np.allclose(metrics.paper_ssim(noisy, truth), expected, atol=2e-5)


def test_the_papers_ssim_flatters_a_grey_picture(truth: Tensor):
    grey = torch.full_like(truth, 0.5)
    assert metrics.paper_ssim(grey, truth).mean() > 1.3 * metrics.ssim(grey, truth).mean()


@pytest.mark.parametrize("name", ["mse", "psnr", "ssim", "paper_ssim"])
def test_more_noise_scores_as_less_leak(name: str, truth: Tensor, rng: torch.Generator):
    metric = metrics.METRICS[name]
    noise = torch.randn(truth.shape, generator=rng)
    means = [float(metric.fn((truth + s * noise).clamp(0, 1), truth).mean()) for s in (0.0, 0.05, 0.1, 0.3)]
    assert means == sorted(means, reverse=metric.leak == "high")
    assert torch.allclose(metric.fn(truth, noise.sigmoid()), metric.fn(noise.sigmoid(), truth), atol=1e-5)


def test_normalised_inputs_and_nan_are_refused(truth: Tensor):
    for wrong in (truth * 4 - 2, torch.full_like(truth, float("nan"))):
        with pytest.raises(ValueError, match=r"guess must have pixels in 0\.\.1: .*to_pixels"):
            metrics.ssim(wrong, truth)
    with pytest.raises(ValueError, match="share one shape"):
        metrics.mse(truth, truth[:3])


# ---- LPIPS


def slow_lpips(a: Tensor, b: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """The published definition, layer by layer, out of modules."""
    convs = [nn.Conv2d(3, 64, 11, 4, 2), nn.Conv2d(64, 192, 5, padding=2), nn.Conv2d(192, 384, 3, padding=1)]
    convs += [nn.Conv2d(384, 256, 3, padding=1), nn.Conv2d(256, 256, 3, padding=1)]
    pool = nn.MaxPool2d(3, 2)
    total = torch.zeros(len(a))
    shift, scale = torch.tensor([-0.030, -0.088, -0.188]), torch.tensor([0.458, 0.448, 0.450])
    pair = [((x * 2 - 1).movedim(1, -1) - shift).div(scale).movedim(-1, 1) for x in (a, b)]
    for tap, (index, conv) in enumerate(zip((0, 3, 6, 8, 10), convs, strict=True)):
        conv.load_state_dict({part: weights[f"features.{index}.{part}"] for part in ("weight", "bias")})
        pair = [F.relu(conv(pool(x) if tap in (1, 2) else x)) for x in pair]
        unit = [x / (x.square().sum(dim=1, keepdim=True).sqrt() + 1e-10) for x in pair]
        total += F.conv2d((unit[0] - unit[1]).square(), weights[f"lin{tap}.weight"]).mean(dim=(1, 2, 3))
    return total


@pytest.mark.parametrize("side", [31, 32, 65])
def test_lpips_is_the_published_network(side: int, rng: torch.Generator):
    weights = random_weights()
    a, b = (torch.rand(3, 3, side, side, generator=rng) for _ in range(2))
    found = (perceptual.embed(a, weights) - perceptual.embed(b, weights)).square().sum(dim=1)
    with torch.no_grad():
        assert torch.allclose(found, slow_lpips(a, b, weights), rtol=1e-4)
    grey = a[:, :1]
    assert torch.equal(perceptual.embed(grey, weights), perceptual.embed(grey.repeat(1, 3, 1, 1), weights))


def test_lpips_refuses_pictures_it_cannot_see():
    with pytest.raises(ValueError, match="at least 31 pixels"):
        perceptual.embed(torch.rand(1, 3, 30, 40), random_weights())


def test_without_weights_lpips_says_so(tmp_path: Path, truth: Tensor, monkeypatch):
    monkeypatch.delenv("GRADVEIL_LPIPS_WEIGHTS", raising=False)
    monkeypatch.setenv("GRADVEIL_DATA", str(tmp_path))
    assert not metrics.lpips_available()
    with pytest.raises(ConfigError, match=r"LPIPS has no weights .*set GRADVEIL_LPIPS_WEIGHTS"):
        metrics.lpips(truth, truth)
    assert "lpips" not in metrics.score(truth, truth)
    assert list(tmp_path.iterdir()) == []


def test_other_weights_are_refused(tmp_path: Path, truth: Tensor, monkeypatch):
    file = tmp_path / "weights.safetensors"
    monkeypatch.setenv("GRADVEIL_LPIPS_WEIGHTS", str(file))
    for content, message in ((None, "does not exist"), (b"junk", "cannot read"), ("random", "does not hold")):
        if content == "random":
            save_file(random_weights(), file)
        elif content:
            file.write_bytes(content)
        assert not metrics.lpips_available()
        with pytest.raises(ConfigError, match=message):
            metrics.lpips(truth, truth)


def test_weights_are_downloaded_and_joined(tmp_path: Path, truth: Tensor, monkeypatch):
    weights = random_weights()
    alexnet = {**{k: v for k, v in weights.items() if k.startswith("features")}, "classifier.1.weight": torch.ones(1)}
    heads = {f"lin{i}.model.1.weight": weights[f"lin{i}.weight"] for i in range(5)}
    for name, tensors in (("ALEXNET", alexnet), ("HEADS", heads)):
        torch.save(tensors, tmp_path / name)
        checksum = sha256(tmp_path / name)
        monkeypatch.setattr(perceptual, name, ((tmp_path / name).as_uri(), checksum[:8]))
    monkeypatch.setattr(perceptual, "DIGEST", perceptual.digest(weights))
    monkeypatch.delenv("GRADVEIL_LPIPS_WEIGHTS", raising=False)
    monkeypatch.delenv("GRADVEIL_OFFLINE", raising=False)
    monkeypatch.setenv("GRADVEIL_DATA", str(tmp_path / "cache"))
    assert torch.equal(metrics.lpips(truth, truth), torch.zeros(len(truth)))
    assert [f.name for f in (tmp_path / "cache").iterdir()] == ["lpips_alex.safetensors"]


@with_weights
@pytest.mark.shared
def test_lpips_gives_the_reference_implementations_distances():
    # Computed with the authors' own code (commit 082bb24) on pictures bundled with scikit-image.
    import skimage.data

    def crop(picture: np.ndarray, top: int, left: int) -> Tensor:
        cut = picture[top : top + 64, left : left + 64].copy()
        return torch.from_numpy(cut).permute(2, 0, 1)[None].float() / 255

    a, b = crop(skimage.data.astronaut(), 0, 200), crop(skimage.data.chelsea(), 100, 100)
    small = (slice(None), slice(None), slice(0, 32), slice(0, 32))
    pairs = [(a, b, 0.485117), (a, a.flip(3), 0.090693), (a[small], b[small], 0.374233), (a, a * 0.9, 0.006182)]
    for one, other, expected in pairs:
        assert float(metrics.lpips(one, other)) == pytest.approx(expected, abs=2e-5)


@with_weights
@pytest.mark.shared
def test_lpips_behaves_like_a_distance(truth: Tensor, rng: torch.Generator, monkeypatch):
    noise = torch.randn(truth.shape, generator=rng)
    means = [float(metrics.lpips((truth + s * noise).clamp(0, 1), truth).mean()) for s in (0.0, 0.05, 0.1, 0.3)]
    assert means[0] == 0
    assert means == sorted(means)
    other = truth.flip(0)
    once = metrics.lpips(truth, other)
    assert torch.allclose(once, metrics.lpips(other, truth))
    monkeypatch.setattr(perceptual, "CHUNK", 5)
    assert torch.allclose(metrics.lpips(truth, other), once, atol=1e-6)
    assert torch.allclose(metrics.pairwise_lpips(truth, other).diag(), once, atol=1e-5)


# ---- every pair, pairing, identification


def test_pairwise_scores_equal_single_ones(noisy: Tensor, truth: Tensor, monkeypatch):
    monkeypatch.setattr(metrics.pairwise, "VALUES", 5 * truth[0].numel())  # several pieces both ways
    for name in ("mse", "ssim"):
        every = getattr(metrics, f"pairwise_{name}")(noisy, truth[:7])
        for j in range(7):
            one = metrics.METRICS[name].fn(noisy, truth[j].expand_as(noisy))
            assert torch.allclose(every[:, j], one, atol=2e-5)


@given(st.permutations(range(12)), st.integers(0, 12))
@settings(max_examples=10, deadline=None)
def test_pairing_finds_the_order(truth: Tensor, order: list[int], kept: int):
    guess = (0.8 * truth[order] + 0.1)[:kept]
    index = metrics.pair(guess, truth)
    assert [order[i] for i in index.tolist() if i >= 0] == [t for t in range(12) if t in order[:kept]]
    assert int((index < 0).sum()) == 12 - kept
    lined_up = metrics.aligned(guess, index)
    assert torch.equal(lined_up[index < 0], torch.full_like(lined_up[index < 0], 0.5))


def test_no_guess_serves_twice_and_spare_ones_are_left(truth: Tensor):
    guess = torch.cat([truth[3:5], truth[:1], truth[3:5]])
    index = metrics.pair(guess, truth[3:5])
    assert len(set(index.tolist())) == 2
    assert torch.equal(metrics.aligned(guess, index), truth[3:5])
    assert metrics.pair(torch.eye(3)[[2, 0, 1]], torch.eye(3)).tolist() == [1, 2, 0]  # vectors: by squared error
    with pytest.raises(ValueError, match="agree but for their number"):
        metrics.pair(truth[..., :8], truth)


def test_ranks_count_who_is_nearer():
    gallery = torch.tensor([0.0, 0.5, 1.0, 0.5]).view(4, 1, 1, 1)
    guess = torch.tensor([0.1, 0.2, 0.25]).view(3, 1, 1, 1)
    ranks = metrics.identification_rank(guess, torch.tensor([0, 2, 0]), gallery, metrics=("mse",))
    assert ranks["mse"].tolist() == [1.0, 4.0, 2.0]  # a tie with two others counts half each
    copies = metrics.identification_rank(guess[:1] + 0.4, torch.tensor([1]), gallery, metrics=("mse",))
    assert copies["best"].tolist() == [1.0]  # a copy of the truth is not held against it
    gallery[3] += 1e-4  # nor is one that went through rounding, though it is nearer
    nearer = metrics.identification_rank(gallery[3:], torch.tensor([1]), gallery, metrics=("mse",))
    assert nearer["best"].tolist() == [1.0]


def test_a_noisy_picture_is_found_in_a_line_up(truth: Tensor, rng: torch.Generator):
    gallery = data.load("photos", split="test").pixels(range(100))
    noisy = (truth + 0.2 * torch.randn(truth.shape, generator=rng)).clamp(0, 1)
    ranks = metrics.identification_rank(noisy, torch.arange(12), gallery)
    assert ranks["mse"].tolist() == [1.0] * 12
    assert all(torch.all(ranks["best"] <= ranks[name]) for name in ranks)
    blind = metrics.identification_rank(torch.rand(truth.shape, generator=rng), torch.arange(12), gallery)
    assert blind["mse"].mean() > 20


# ---- scorecard and floor


def test_a_scorecard_after_pairing(truth: Tensor):
    order = torch.tensor([2, 0, 1])
    card = metrics.score(
        truth[:3][order],
        truth[:3],
        guess_labels=torch.tensor([7, 7, 1]),
        truth_labels=torch.tensor([1, 7, 5]),
        gallery=data.load("photos", split="test").pixels(range(40)),  # the truths are among them
    )
    assert card["mse"] == [0.0] * 3
    assert card["psnr"] == [100.0] * 3
    assert card["ssim"] == pytest.approx([1.0] * 3)
    assert card["label_accuracy"] == [1.0, 1.0, 0.0]
    assert card["rank"] == card["identified"] == [1.0] * 3
    assert ("lpips" in card) == metrics.lpips_available()


def test_missing_and_broken_guesses_score_as_grey(truth: Tensor):
    grey = metrics.score(torch.full_like(truth[:2], 0.5), truth[:2])
    assert metrics.score(torch.full_like(truth[:2], float("nan")), truth[:2]) == grey
    assert metrics.score(truth[:0], truth[:2], guess_labels=torch.tensor([]), truth_labels=torch.tensor([0, 1])) == {
        **grey,
        "label_accuracy": [0.0, 0.0],
    }
    assert metrics.score(truth[:1] * 1e9, truth[:1])["mse"][0] <= 1.0


def test_digits_have_a_scorecard_too():
    digits = data.load("digits", split="test").pixels(range(6))
    card = metrics.score(digits, digits, gallery=digits)
    assert card["identified"] == [1.0] * 6
    assert "lpips" not in card


def test_the_floor_never_holds_the_truth(truth: Tensor, rng: torch.Generator):
    public = data.load("photos", split="test").pixels(range(40))  # the truths are among them
    guesses = metrics.floor_guesses(truth, public, rng, count=60)
    assert {name: len(g) for name, g in guesses.items()} == {"mean_image": 12, "grey": 12, "random_picture": 60}
    assert metrics.pairwise_mse(guesses["random_picture"], truth).min() > 0
    assert torch.allclose(guesses["mean_image"][0], public[12:].mean(dim=0))
    with pytest.raises(ValueError, match="not among the truths"):
        metrics.floor_guesses(truth, truth, rng)


def test_more_blind_guesses_score_higher(truth: Tensor):
    public = data.load("photos").pixels(range(200))

    def ssim(count: int) -> float:
        floor = metrics.score_floor(truth, public, torch.Generator().manual_seed(0), count=count)
        assert set(floor) == {"mean_image", "grey", "random_picture"}
        return float(np.mean(floor["random_picture"]["ssim"]))

    assert ssim(12) < ssim(120) < 0.6


def test_importing_metrics_imports_no_torchmetrics():
    import subprocess
    import sys

    code = "import sys, gradveil.metrics; sys.exit('torchmetrics' in sys.modules or 'skimage' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_scores_on_the_gpu_are_the_same(noisy: Tensor, truth: Tensor):
    gallery = data.load("photos").pixels(range(20))
    labels = torch.arange(len(truth))
    wanted = metrics.score(noisy, truth, guess_labels=labels, truth_labels=labels, gallery=gallery)
    found = metrics.score(
        noisy.cuda(), truth.cuda(), guess_labels=labels.cuda(), truth_labels=labels.cuda(), gallery=gallery.cuda()
    )
    for name, values in wanted.items():
        assert found[name] == pytest.approx(values, abs=2e-3), name

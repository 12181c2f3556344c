import hashlib
import io
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gradveil import data
from gradveil.data import cifar, download
from gradveil.data.folder import read_picture
from gradveil.errors import ConfigError

CIFAR10_NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def records(count: int, label_bytes: int, classes: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    made = rng.integers(0, 256, (count, label_bytes + 3072), dtype=np.uint8)
    made[:, :label_bytes] = rng.integers(0, min(classes, 20), (count, label_bytes))
    return made


@pytest.fixture
def cifar_root(tmp_path: Path) -> Path:
    ten = tmp_path / "cifar-10-batches-bin"
    ten.mkdir()
    for i, file in enumerate((*cifar.LAYOUTS["cifar10"].train, *cifar.LAYOUTS["cifar10"].test)):
        records(4, 1, 10, seed=i).tofile(ten / file)
    (ten / "batches.meta.txt").write_text("\n".join(CIFAR10_NAMES) + "\n\n")
    hundred = tmp_path / "cifar-100-binary"
    hundred.mkdir()
    for i, file in enumerate(("train.bin", "test.bin")):
        records(6, 2, 100, seed=i).tofile(hundred / file)
    (hundred / "fine_label_names.txt").write_text("\n".join(f"fine{i}" for i in range(100)))
    return tmp_path


def test_cifar10_records_become_pictures(cifar_root: Path):
    train = data.load("cifar10", root=cifar_root)
    raw = records(4, 1, 10, seed=0)
    assert len(train) == 20
    assert train.classes == tuple(CIFAR10_NAMES)
    assert train.labels[:4].tolist() == raw[:, 0].tolist()
    # Row-major planes, red first: byte 1 + 1024 is the first green pixel.
    assert train.images[2, 1, 0, 0] == raw[2, 1 + 1024]
    assert train.images[2, 0, 1, 0] == raw[2, 1 + 32]
    assert len(data.load("cifar10", root=cifar_root, split="all")) == 24


def test_cifar100_takes_the_fine_label(cifar_root: Path):
    test = data.load("cifar100", root=cifar_root, split="test")
    assert test.labels.tolist() == records(6, 2, 100, seed=1)[:, 1].tolist()
    assert test.num_classes == 100


def test_cifar_is_searched_in_the_known_places(cifar_root: Path, monkeypatch, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("HOME", str(elsewhere))
    monkeypatch.setenv("GRADVEIL_DATA", str(cifar_root))
    assert len(data.load("cifar10")) == 20
    assert len(data.load("cifar10", root=cifar_root / "cifar-10-batches-bin")) == 20
    monkeypatch.delenv("GRADVEIL_DATA")
    with pytest.raises(ConfigError, match=r"put the unpacked folder cifar-10-batches-bin into .*\.cache/gradveil"):
        data.load("cifar10")
    (elsewhere / "local").symlink_to(cifar_root)
    assert len(data.load("cifar10")) == 20


def test_a_digest_tells_copies_of_a_dataset_apart(cifar_root: Path):
    one, again = (data.load("cifar10", root=cifar_root, split="test") for _ in range(2))
    assert one.digest == again.digest
    again.images[0, 0, 0, 0] += 1
    other_label = data.Dataset(one.name, one.images, (one.labels + 1) % 10, one.classes, one.mean, one.std)
    assert len({one.digest, replace(again).digest, other_label.digest}) == 3
    known = cifar.LAYOUTS["cifar10"].digests
    assert data.is_original("cifar10", known)
    assert data.is_original("cifar10", {"test": known["test"]})
    assert not data.is_original("cifar10", {"test": one.digest})
    assert not data.is_original("cifar10", {})
    assert data.is_original("digits", {})


def test_damaged_cifar_names_the_file(cifar_root: Path):
    file = cifar_root / "cifar-10-batches-bin" / "test_batch.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match=r"test_batch\.bin is damaged: 12291 bytes"):
        data.load("cifar10", root=cifar_root, split="test")
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"test_batch\.bin is damaged: 0 bytes"):
        data.load("cifar10", root=cifar_root, split="test")
    file.write_bytes(whole[:3073] + b"\x0a" + whole[3074:])
    with pytest.raises(ConfigError, match=r"test_batch\.bin is damaged: record 1 has label 10, expected 0\.\.9"):
        data.load("cifar10", root=cifar_root, split="test")
    (cifar_root / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*data_batch_3\.bin"):
        data.load("cifar10", root=cifar_root)
    file.write_bytes(whole)
    (cifar_root / "cifar-10-batches-bin" / "batches.meta.txt").write_text("cat dog")
    with pytest.raises(ConfigError, match=r"batches\.meta\.txt lists 2 class names, expected 10"):
        data.load("cifar10", root=cifar_root, split="test")


def archive_of(folder: Path, target: Path) -> str:
    with tarfile.open(target, "w:gz") as tar:
        tar.add(folder, arcname=folder.name)
    return hashlib.sha256(target.read_bytes()).hexdigest()


@pytest.fixture
def online(monkeypatch):
    monkeypatch.delenv("GRADVEIL_OFFLINE", raising=False)


def test_cifar_is_downloaded_checked_and_unpacked(cifar_root: Path, tmp_path_factory, monkeypatch, online):
    served = tmp_path_factory.mktemp("served") / "cifar.tar.gz"
    checksum = archive_of(cifar_root / "cifar-10-batches-bin", served)
    layout = replace(cifar.LAYOUTS["cifar10"], url=served.as_uri(), sha256=checksum)
    monkeypatch.setitem(cifar.LAYOUTS, "cifar10", layout)
    home = tmp_path_factory.mktemp("home")
    assert len(data.load("cifar10", root=home)) == 20
    assert [p.name for p in home.iterdir()] == ["cifar-10-batches-bin"]

    monkeypatch.setitem(cifar.LAYOUTS, "cifar10", replace(layout, sha256="0" * 64))
    fresh = tmp_path_factory.mktemp("fresh")
    with pytest.raises(ConfigError, match=f"SHA-256 {checksum}, expected 000"):
        data.load("cifar10", root=fresh)
    assert list(fresh.iterdir()) == []


def test_an_archive_cannot_write_outside_its_folder(tmp_path: Path, monkeypatch, online):
    evil = tmp_path / "evil.tar"
    with tarfile.open(evil, "w") as tar:
        info = tarfile.TarInfo("../../escaped")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
    layout = cifar.LAYOUTS["cifar10"]
    checksum = hashlib.sha256(evil.read_bytes()).hexdigest()
    monkeypatch.setitem(cifar.LAYOUTS, "cifar10", replace(layout, url=evil.as_uri(), sha256=checksum))
    with pytest.raises(ConfigError, match="could not be downloaded"):
        data.load("cifar10", root=tmp_path / "root")
    assert not (tmp_path / "escaped").exists()


def test_offline_means_offline(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("GRADVEIL_OFFLINE", "1")
    source = tmp_path / "file"
    source.write_bytes(b"x")
    with pytest.raises(OSError, match="GRADVEIL_OFFLINE"):
        download.download(source.as_uri(), tmp_path / "copy", "")


@pytest.mark.shared
@pytest.mark.skipif(
    cifar.find_folder(cifar.LAYOUTS["cifar10"], None) is None, reason="CIFAR-10 is not in $GRADVEIL_DATA or ./local"
)
def test_the_real_cifar10_has_its_known_statistics():
    test = data.load("cifar10", split="test")
    assert len(test) == 10000
    assert test.labels.bincount().tolist() == [1000] * 10
    inputs = test.batch(range(0, 10000, 10)).inputs
    assert inputs.mean(dim=(0, 2, 3)).abs().max() < 0.05
    assert (inputs.std(dim=(0, 2, 3)) - 1).abs().max() < 0.05


def test_digits_match_their_source():
    from sklearn.datasets import load_digits

    source = load_digits()
    every = data.load("digits", split="all")
    assert every.input_shape == (1, 8, 8)
    assert np.abs(every.pixels(range(1797))[:, 0].numpy() - source.images / 16).max() < 0.5 / 255 + 1e-6
    train, test = data.load("digits"), data.load("digits", split="test")
    assert (len(train), len(test)) == (1438, 359)
    assert train.mean == test.mean
    assert data.load("digits", size=32, grey=False).input_shape == (3, 32, 32)


def test_photos_are_bundled_deterministic_and_disjoint():
    train, test = data.load("photos"), data.load("photos", split="test")
    assert train.input_shape == (3, 32, 32)
    assert len(train) > 500
    assert len(test) > 250
    assert train.num_classes == len(set(test.labels.tolist())) == 10
    assert torch.equal(test.images, data.load("photos", split="test").images)
    assert test.labels[:10].tolist() == list(range(10))
    assert test.images.float().std(dim=(2, 3)).amax(dim=1).min() > 10  # no empty sky


def test_grey_pictures_have_the_same_constants_in_every_split():
    train, test = (data.load("photos", split=split, size=16, grey=True) for split in ("train", "test"))
    assert train.input_shape == (1, 16, 16)
    assert (train.mean, train.std) == (test.mean, test.std)
    inputs = train.batch(range(len(train))).inputs
    assert abs(float(inputs.mean())) < 0.01
    assert 0.8 < float(inputs.std()) < 1.1


def test_train_and_test_photos_share_no_pixel():
    from gradveil.data.bundled import _crops

    marked = Image.fromarray(np.random.default_rng(0).integers(0, 256, (96, 128, 3), dtype=np.uint8))
    before = list(_crops(marked, "train", 16))
    spoiled = np.array(marked)
    for row in range(3):
        for column in range(4):
            if (row + column) % 3 == 1:  # a test cell
                spoiled[row * 32 : row * 32 + 32, column * 32 : column * 32 + 32] = 0
    after = list(_crops(Image.fromarray(spoiled), "train", 16))
    assert len(before) == len(after) == 80
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def write_picture(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (40, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def test_sub_folders_are_classes(tmp_path: Path):
    for i in range(5):
        write_picture(tmp_path / "red" / f"{i}.png", (200, 0, 0))
        write_picture(tmp_path / "blue" / f"{i}.PNG", (0, 0, 200))
    (tmp_path / "notes.txt").write_text("no picture")
    train, test = (data.load(tmp_path, split=split, size=16) for split in ("train", "test"))
    assert train.classes == ("blue", "red")
    assert (len(train), len(test), train.input_shape) == (8, 2, (3, 16, 16))
    assert test.mean == train.mean
    assert test.images[0, :, 0, 0].tolist() == [0, 0, 200]


def test_train_and_test_folders_are_the_splits(tmp_path: Path):
    write_picture(tmp_path / "train" / "a" / "0.png", (9, 9, 9))
    write_picture(tmp_path / "test" / "b" / "0.png", (9, 9, 9))
    assert data.load(tmp_path).labels.tolist() == [0]
    assert data.load(tmp_path, split="test").labels.tolist() == [1]
    assert data.load(tmp_path, split="test").classes == ("a", "b")


def test_a_flat_folder_is_one_class(tmp_path: Path):
    write_picture(tmp_path / "0.jpg", (1, 2, 3))
    assert data.load(tmp_path, split="all").classes == (tmp_path.name,)
    with pytest.raises(ConfigError, match="gives no test picture"):
        data.load(tmp_path, split="test")


def test_the_centre_square_is_kept_upright(tmp_path: Path):
    picture = Image.new("RGB", (60, 20), (255, 0, 0))
    picture.paste((0, 255, 0), (20, 0, 40, 10))
    picture.paste((0, 0, 255), (20, 10, 40, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter right, so that the upper side comes to the right
    picture.save(tmp_path / "turned.png", exif=exif)
    found = read_picture(tmp_path / "turned.png", 10)
    assert found[:, 5, 8].tolist() == [0, 255, 0]
    assert found[:, 5, 1].tolist() == [0, 0, 255]


def test_odd_picture_modes_are_read(tmp_path: Path):
    Image.new("LA", (8, 8), (128, 0)).save(tmp_path / "alpha.png")
    Image.new("P", (8, 8), 3).save(tmp_path / "palette.gif")
    Image.fromarray(np.full((8, 8), 0x8000, dtype=np.uint16)).save(tmp_path / "deep.png")
    assert data.load(tmp_path, split="all", size=8).images.shape == (3, 3, 8, 8)
    assert read_picture(tmp_path / "deep.png", 8).unique().tolist() == [128]


def test_bad_folders_and_pictures_are_named(tmp_path: Path):
    with pytest.raises(
        ConfigError, match="nowhere is neither a folder of pictures nor one of cifar10, cifar100, digits, photos"
    ):
        data.load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty holds no picture"):
        data.load(tmp_path / "empty")
    write_picture(tmp_path / "cut" / "0.png", (5, 6, 7), (300, 300))
    whole = (tmp_path / "cut" / "0.png").read_bytes()
    (tmp_path / "cut" / "0.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"cannot read the picture .*0\.png"):
        data.load(tmp_path / "cut", split="all")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "fake.jpg").write_text("hello")
    with pytest.raises(ConfigError, match=r"cannot read the picture .*fake\.jpg"):
        data.load(tmp_path / "text", split="all")


def test_unknown_splits_and_sizes_are_refused():
    with pytest.raises(ValueError, match="split must be one of train, test, all"):
        data.load("digits", split="valid")
    with pytest.raises(ValueError, match="size must be"):
        data.load("digits", size=0)


def test_a_dataset_checks_itself():
    images, labels = torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1])
    good = data.Dataset("x", images, labels, ("a", "b"), (0.0,), (1.0,))
    for change, message in (
        ({"images": images.float()}, "images must be uint8"),
        ({"images": images[:0], "labels": labels[:0]}, "N above 0"),
        ({"labels": labels[:1]}, "labels must be int64"),
        ({"classes": ("a",)}, r"labels must lie in 0\.\.0, got 0\.\.1"),
        ({"std": (0.0,)}, "std above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(good, **change)


def test_batches_are_normalised_and_back():
    photos = data.load("photos", split="test")
    batch = photos.batch([3, 1])
    assert batch.labels.tolist() == [3, 1]
    assert torch.allclose(data.to_pixels(batch.inputs, photos.mean, photos.std), photos.pixels([3, 1]), atol=1e-6)
    part = photos.subset(torch.tensor([5, 6]))
    assert torch.equal(part.images, photos.images[5:7])
    assert part.num_classes == photos.num_classes


def test_statistics_of_a_constant_channel_stay_usable():
    mean, std = data.channel_statistics(torch.full((2, 1, 3, 3), 255, dtype=torch.uint8))
    assert mean == (1.0,)
    assert std == (1.0,)


def test_iid_shares_cover_everything_once():
    parts = data.partition_iid(103, 10, seed=1)
    assert sorted(torch.cat(parts).tolist()) == list(range(103))
    assert {len(p) for p in parts} == {10, 11}
    assert torch.equal(parts[0], data.partition_iid(103, 10, seed=1)[0])
    assert not torch.equal(parts[0], data.partition_iid(103, 10, seed=2)[0])
    with pytest.raises(ValueError, match="users must be at most"):
        data.partition_iid(3, 4, seed=0)


@pytest.mark.parametrize("alpha", [1e-3, 0.5, 1e4])
def test_dirichlet_shares_cover_everything_once(alpha: float):
    labels = torch.arange(400) % 10
    parts = data.partition_dirichlet(labels, 20, alpha, seed=3)
    assert sorted(torch.cat(parts).tolist()) == list(range(400))
    assert min(len(p) for p in parts) >= 1
    assert all(torch.equal(a, b) for a, b in zip(parts, data.partition_dirichlet(labels, 20, alpha, 3), strict=True))


def test_a_small_alpha_gives_few_classes_each():
    labels = torch.arange(2000) % 10

    def classes_per_user(alpha: float) -> float:
        parts = data.partition_dirichlet(labels, 10, alpha, seed=0)
        return sum(len(labels[p].unique()) for p in parts) / 10

    assert classes_per_user(0.05) < 5
    assert classes_per_user(100.0) == 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_data_on_the_gpu_is_the_same():
    photos = data.load("photos", split="test")
    on_gpu = photos.to("cuda")
    index = torch.arange(16)
    assert torch.allclose(on_gpu.batch(index).inputs.cpu(), photos.batch(index).inputs, atol=1e-6)
    assert on_gpu.batch(index, "cpu").inputs.device.type == "cpu"


def test_no_download_is_left_to_chance():
    assert os.environ.get("GRADVEIL_OFFLINE")
    assert all(len(layout.sha256) == 64 for layout in cifar.LAYOUTS.values())


def test_flat_train_and_test_folders_are_one_class(tmp_path: Path):
    for part in ("train", "test"):
        (tmp_path / "pics" / part).mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (40, 40), (i, i, i)).save(tmp_path / "pics" / part / f"{i}.png")
    for part in ("train", "test"):
        found = data.load(tmp_path / "pics", split=part)
        assert found.classes == ("pics",)
        assert found.labels.tolist() == [0, 0, 0]

"""A made-up report with everything in it, and a real browser where there is one."""

import base64
import io
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gradveil.audit.report import (
    COLUMNS,
    AttackInfo,
    ColumnInfo,
    DefenseInfo,
    FastScore,
    Finding,
    Floor,
    Layer,
    Original,
    Report,
    Risk,
    Row,
    Upload,
)
from gradveil.audit.verdict import judge

CHROMIUM = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-prefers-reduced-motion",
    "--window-size=1600,1000",
]


def _pictures(count: int) -> list[np.ndarray[Any, Any]]:
    """Soft colour blobs: enough like a photo to look at, and nobody's picture."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:32, 0:32] / 32
    out = []
    for _ in range(count):
        picture = np.zeros((32, 32, 3))
        for _ in range(6):
            cy, cx, width = rng.random(), rng.random(), 0.1 + 0.2 * rng.random()
            picture += rng.random(3) * np.exp(-((y - cy) ** 2 + (x - cx) ** 2) / width**2)[..., None]
        out.append(picture / picture.max())
    return out


def _png(picture: np.ndarray[Any, Any]) -> str:
    handle = io.BytesIO()
    Image.fromarray((255 * picture.clip(0, 1)).astype(np.uint8)).save(handle, "PNG")
    return base64.b64encode(handle.getvalue()).decode()


def make_report(
    strength: dict[str, tuple[float, float]], *, pictures: list[np.ndarray[Any, Any]], hostile: str = ""
) -> Report:
    """Return a report in which attack `i` on a defense scores about `strength[defense][i]`."""
    rng = np.random.default_rng(1)
    n = len(pictures)
    attacks = [
        AttackInfo("inverting_gradients", "gradient_matching()", {"name": "gradient_matching"}, False),
        AttackInfo("mask_aware", "gradient_matching(masked=True)", {"name": "gradient_matching"}, True),
    ]
    rows, defenses = [], []
    floor = (0.1 + 0.01 * rng.standard_normal(n)).tolist()
    for name, means in strength.items():
        for column in COLUMNS:
            for attack, mean in zip(attacks, means, strict=True):
                level = mean if column == "diagnostic" else 0.1 + 0.6 * (mean - 0.1)
                ssim = (level + 0.02 * rng.standard_normal(n)).clip(0, 1).tolist()
                noise = [s * p + (1 - s) * rng.random(p.shape) for s, p in zip(ssim, pictures, strict=True)]
                rows.append(
                    Row(
                        column,
                        name,
                        attack.name,
                        "ok",
                        attack.adaptive,
                        scores={"ssim": ssim, "psnr": [8 + 20 * s for s in ssim], "mse": [0.1 * (1 - s) for s in ssim]},
                        floor=floor,
                        contrast=[s - 0.1 for s in ssim],
                        identified=[s > 0.3 for s in ssim],
                        labels_right=1.0,
                        loss=1 - level,
                        seconds=4.2,
                        pictures=[_png(p) for p in noise],
                    )
                )
        share = 1.0 if name in ("none", "dp") else 0.23
        layers = [Layer(f"features.{i}.weight", 900 * (i + 1), share, share, 1.0 - 0.2 * i) for i in range(3)]
        uploads = [
            Upload(
                c,
                int(64e3 * share),
                64000,
                int(50e3 * share),
                4000,
                int(60e3 * share),
                0.4,
                0.9,
                1.3,
                0.002,
                0.0,
                layers,
            )
            for c in COLUMNS
        ]
        defenses.append(DefenseInfo(name, f"{name}()", {"name": name}, uploads, 0.9 - 0.02 * len(defenses)))
    report = Report(
        title=f"lenet on photos{hostile}",
        created="2030-01-01 12:00 UTC",
        seconds=151.0,
        settings={"model": f"lenet{hostile}", "data": "photos", "pictures": n, "batch_size": 4},
        environment={"gradveil": "0.1.0", "torch": "2.13.0", "cpu": "2 cores"},
        seed=0,
        metrics={"ssim": "high", "psnr": "high", "mse": "low"},
        lineup=20,
        chance=0.1,
        originals=[Original(i, f"class {i}{hostile}", _png(p)) for i, p in enumerate(pictures)],
        columns=[
            ColumnInfo("diagnostic", "eval", 1, 0, list(range(n)), {"labels": True, "defense": True}),
            ColumnInfo("realistic", "train", n // 2, 4, list(range(n)), {"labels": False, "defense": True}),
        ],
        floors=[Floor(c, "grey", {"ssim": floor}) for c in COLUMNS],
        attacks=attacks,
        defenses=defenses,
        rows=rows,
        findings=[Finding("labels", f"Labels were not recovered{hostile}", "0 of 4 right", "Use another rule")],
        fast=FastScore(1.5, 48, [Risk(d.name, [0.9] * n, [0.01] * n) for d in defenses], 0.71, 4 * n),
        notes=[f"A note{hostile}"] if hostile else [],
    )
    return replace(report, judgements=judge(report))


HOSTILE = "\"'><script>window.hacked=1</script><img src=x onerror=hacked=1>|`*"
STRENGTH = {"none": (0.8, 0.82), "topk": (0.4, 0.6), "dgp": (0.11, 0.55), "hardened": (0.1, 0.1), "dp": (0.1, 0.11)}


@pytest.fixture(scope="session")
def report() -> Report:
    """None, topk and dgp leak, the rest hold."""
    return make_report(STRENGTH, pictures=_pictures(4))


@pytest.fixture(scope="session")
def hostile_report() -> Report:
    """Every free text tries to break out of the markup."""
    return make_report(STRENGTH, pictures=_pictures(2), hostile=HOSTILE)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One Chromium for all tests; skips where there is none."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no chromium with chromedriver on this machine: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = binary
        for argument in [*CHROMIUM, f"--user-data-dir={profile}"]:
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        try:
            yield found
        finally:
            found.quit()


@pytest.fixture(scope="session")
def base() -> Iterator[str]:
    """The address of a live page, served on a free port."""
    pytest.importorskip("starlette", reason="the live page needs gradveil[ui]")
    pytest.importorskip("uvicorn", reason="the live page needs gradveil[ui]")
    from gradveil.ui.server import make_server

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        server = make_server("test-token", port)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{port}/test-token"
        server.should_exit = True
        thread.join(10)

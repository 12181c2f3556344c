"""The live page's server: who gets in, what it answers, and that several tabs take turns."""

import base64
import io
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

httpx = pytest.importorskip("httpx", reason="the page's tests need httpx")
pytest.importorskip("starlette", reason="the live page needs gradveil[ui]")
pytest.importorskip("uvicorn", reason="the live page needs gradveil[ui]")

from gradveil.errors import ConfigError  # noqa: E402
from gradveil.ui.experiment import Order, StoppedError, Studio, perform, read_order, read_picture  # noqa: E402
from gradveil.ui.server import MAX_RUNS, Desk  # noqa: E402

QUICK = {"defense": "none", "steps": 20}


def png(size: tuple[int, int] = (50, 40)) -> str:
    handle = io.BytesIO()
    Image.new("RGB", size, (200, 40, 40)).save(handle, "PNG")
    return base64.b64encode(handle.getvalue()).decode()


def follow(base: str, run: str) -> list[dict]:
    with httpx.stream("GET", f"{base}/runs/{run}", timeout=60) as answer:
        return [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]


def start(base: str, **order) -> str:
    answer = httpx.post(f"{base}/runs", json=order)
    assert answer.status_code == 200, answer.text
    return answer.json()["run"]


def test_only_who_knows_the_token_gets_in(base: str) -> None:
    root, host = base.rsplit("/", 1)[0], base.split("/")[2]
    assert httpx.get(f"{base}/").status_code == 200
    assert httpx.get(f"{root}/").status_code == 403
    assert httpx.get(f"{root}/wrong-token/").status_code == 403
    assert httpx.post(f"{root}/wrong-token/runs", json=QUICK).status_code == 403
    assert httpx.get(f"{base}/", headers={"Host": "evil.example"}).status_code == 403
    assert httpx.get(f"{base}/", headers={"Host": f"evil.example:{host.split(':')[1]}"}).status_code == 403
    for origin in ("http://evil.example", "null", f"https://{host}"):
        assert httpx.post(f"{base}/runs", json=QUICK, headers={"Origin": origin}).status_code == 403
    assert httpx.post(f"{base}/runs", json=QUICK, headers={"Origin": f"http://{host}"}).status_code == 200


def test_page_is_locked_down(base: str) -> None:
    answer = httpx.get(f"{base}/")
    rules = answer.headers["content-security-policy"]
    assert "default-src 'none'" in rules
    assert "connect-src 'self'" in rules
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-store"
    assert "http://" not in answer.text
    assert "https://" not in answer.text


def test_a_run_tells_its_story(base: str) -> None:
    run = start(base, **QUICK)
    events = follow(base, run)
    assert [events[0]["kind"], events[-1]["kind"]] == ["sent", "done"]
    steps = [event["step"] for event in events if event["kind"] == "step"]
    assert steps == sorted(steps)
    assert steps[-1] == 20
    assert 0 < events[0]["bytes"] <= events[0]["dense"]
    assert httpx.get(f"{base}/runs/{run}").status_code == 204  # over: the browser is told not to reconnect


def test_own_picture_under_a_defense(base: str) -> None:
    events = follow(base, start(base, upload=png(), defense="dgp", rounds=2, steps=5))
    assert events[-1]["kind"] == "done"
    shown = Image.open(io.BytesIO(base64.b64decode(events[0]["original"])))
    assert shown.size == (32, 32)
    assert shown.getpixel((16, 16)) == (200, 40, 40)


def test_stop(base: str) -> None:
    run = start(base, defense="none", steps=5000)
    with ThreadPoolExecutor() as pool:
        events = pool.submit(follow, base, run)
        time.sleep(1.5)
        assert httpx.post(f"{base}/runs/{run}/stop").status_code == 204
        assert events.result(timeout=30)[-1]["kind"] == "stopped"


def test_tabs_take_turns(base: str) -> None:
    runs = [start(base, **{**QUICK, "picture": i}) for i in range(3)]
    with ThreadPoolExecutor() as pool:
        stories = list(pool.map(lambda run: follow(base, run), runs))
    assert all(story[-1]["kind"] == "done" for story in stories)
    assert sum(story[0]["kind"] == "waiting" for story in stories) == 2
    originals = {next(e["original"] for e in story if e["kind"] == "sent") for story in stories}
    assert len(originals) == 3  # nobody got another tab's picture


def test_leaving_frees_the_turn(base: str) -> None:
    run = start(base, defense="none", steps=5000)
    with httpx.stream("GET", f"{base}/runs/{run}", timeout=60) as answer:
        next(answer.iter_lines())
    began = time.monotonic()
    assert follow(base, start(base, **QUICK))[-1]["kind"] == "done"
    assert time.monotonic() - began < 30


def test_runs_nobody_follows_make_room(base: str) -> None:
    runs = [start(base, **QUICK) for _ in range(2 * MAX_RUNS)]
    assert httpx.get(f"{base}/runs/{runs[0]}").status_code == 204  # forgotten
    assert follow(base, runs[-1])[-1]["kind"] == "done"


def test_a_followed_run_is_never_dropped_for_another() -> None:
    desk = Desk()
    names = [desk.add(Order()) for _ in range(MAX_RUNS)]
    for name in names[:-1]:
        desk.runs[name].taken = True
    newest = desk.add(Order())
    assert list(desk.runs) == [*names[:-1], newest]
    desk.runs[newest].taken = True
    assert desk.add(Order()) is None
    assert list(desk.runs) == [*names[:-1], newest]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ({"defense": "magic"}, "defense must be one of"),
        ({"steps": 10**6}, "steps at most 5000"),
        ({"picture": 99}, "picture must be below"),
        ({"upload": "%%%"}, "did not arrive whole"),
        ({"upload": base64.b64encode(b"no picture").decode()}, "not a picture"),
        ({"defense": "dgp", "top": 0.5, "bottom": 0.6}, "below 1"),
        ({"surprise": 1}, "unknown key 'surprise'"),
        ([1], "unknown key 'order'"),
    ],
)
def test_bad_orders_are_refused_in_words(base: str, order, message: str) -> None:
    answer = httpx.post(f"{base}/runs", json=order)
    assert answer.status_code == 400
    assert message in answer.json()["message"]


def test_too_large(base: str) -> None:
    assert httpx.post(f"{base}/runs", content=b"x" * 13_000_000).status_code == 413
    with pytest.raises(ConfigError, match="larger than"):
        read_picture(base64.b64encode(b"x" * 9_000_000).decode())


def test_perform_stops_at_once() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        perform(Order(steps=500), Studio(), lambda event: None, stop)


def test_every_choice_builds_its_defense() -> None:
    for name in ("none", "topk", "dgp", "hardened", "dp"):
        assert read_order({"defense": name, "noise": 0.5}).protection() is not None

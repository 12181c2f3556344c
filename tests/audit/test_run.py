"""The audit end to end on settings that take seconds: what is measured is true, and nothing that fails is hidden."""

import json
from dataclasses import dataclass, replace
from statistics import mean

import pytest
import torch
from torch import nn

import gradveil
from gradveil.audit import Audit, Plan, Report, subject
from gradveil.audit.plan import cells
from gradveil.audit.summary import advice, what_leaks
from gradveil.audit.verdict import judge
from gradveil.audit.words import percent
from gradveil.core import Attack, Observation, Reconstruction
from gradveil.data import load
from gradveil.errors import ConfigError, NeedError
from gradveil.training import Settings, Trainer, assemble

QUICK = {
    "model": "mlp(hidden=32)",
    "data": "digits",
    "pictures": 4,
    "batch_size": 2,
    "round": 2,
    "accuracy_rounds": 0,
    "device": "cpu",
}
READERS = ["linear_readout", "low_rank_completion"]


@pytest.fixture(scope="module")
def quick() -> Report:
    return gradveil.audit(defenses=["topk", "dgp", "gaussian_noise(std=10.0)"], attacks=READERS, **QUICK)


def test_bare_gradient_leaks_and_both_columns_are_there(quick: Report) -> None:
    assert [c.name for c in quick.columns] == ["diagnostic", "realistic"]
    assert [(c.mode, c.batch_size, c.rounds, c.grants["labels"]) for c in quick.columns] == [
        ("eval", 1, 0, True),
        ("train", 2, 2, False),
    ]
    assert len(quick.rows) == 4 * 2 * 2
    assert quick.judgement("none").verdict == "leaks"
    exact = quick.find("diagnostic", "none", "linear_readout")
    assert min(exact.scores["ssim"]) > 0.99
    assert all(exact.identified)


def test_completion_beats_pruning_where_the_naive_reading_does_not(quick: Report) -> None:
    completed = quick.find("diagnostic", "dgp", "low_rank_completion")
    assert sum(completed.scores["ssim"]) / 4 > 0.9
    assert quick.judgement("dgp").verdict == "leaks"
    assert quick.judgement("dgp", "diagnostic").worst_attack == "low_rank_completion"


def test_noise_beyond_the_gradient_is_never_called_a_leak(quick: Report) -> None:
    assert quick.judgement("gaussian_noise(std=10.0)", "diagnostic").verdict != "leaks"


def test_costs_are_those_of_the_bytes(quick: Report) -> None:
    found = {d.name: d.uploads[0] for d in quick.defenses}
    assert found["dgp"].bytes_sent < 0.3 * found["dgp"].bytes_dense
    assert 0 < found["dgp"].bytes_sent - found["dgp"].values_bytes - found["dgp"].positions_bytes < 1000  # the header
    entries = sum(layer.entries for layer in found["dgp"].layers)
    assert found["dgp"].paper_bytes == pytest.approx((0.2 * 32 + 0.8) * entries / 8, rel=0.02)
    assert found["none"].distance == 0.0
    assert found["none"].cosine == pytest.approx(1.0)
    layer = found["dgp"].layers[0]
    assert layer.sent == pytest.approx(0.2, abs=0.01)
    assert layer.largest < 0.05  # dual pruning sends none of the largest entries, but for ties between equal pixels
    assert found["topk"].layers[0].largest > 0.95
    assert found["dgp"].residual_ratio == 0.0
    assert (
        next(u for d in quick.defenses if d.name == "dgp" for u in d.uploads if u.column == "realistic").residual_ratio
        > 0
    )


def test_fast_score_knows_noise_from_pruning(quick: Report) -> None:
    readable = {r.defense: sum(r.readable) / len(r.readable) for r in quick.fast.risks}
    assert readable["none"] > readable["gaussian_noise(std=10.0)"]
    assert readable["dgp"] > 2 * readable["gaussian_noise(std=10.0)"]
    assert quick.fast.correlation > 0.3
    assert all(value == 0 for value in quick.fast.risks[0].bound)


def test_same_settings_same_report(quick: Report) -> None:
    again = gradveil.audit(defenses=["topk", "dgp", "gaussian_noise(std=10.0)"], attacks=READERS, **QUICK)
    for a, b in zip(quick.rows, again.rows, strict=True):
        assert replace(a, seconds=0) == replace(b, seconds=0)
    assert again.judgements == quick.judgements


def test_report_is_saved_and_rendered(quick: Report, tmp_path) -> None:
    page = gradveil.audit.write(quick, tmp_path)
    assert Report.load(tmp_path / "report.json") == quick
    assert "Every attack" in page.read_text()


class DigitPainter(nn.Module):
    """A generator of digits: the mean picture of a class, and the directions in which digits differ most."""

    latent = 12

    def __init__(self) -> None:
        super().__init__()
        train = load("digits", split="train")
        pixels = train.pixels(range(len(train))).flatten(1)
        means = torch.stack([pixels[train.labels == label].mean(0) for label in range(10)])
        _, sizes, directions = torch.pca_lowrank(pixels - means[train.labels], self.latent, niter=4)
        self.register_buffer("means", means)
        self.register_buffer("directions", directions.T * sizes[:, None] / len(pixels) ** 0.5)

    def forward(self, latents: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (self.means[labels] + latents @ self.directions).clamp(0, 1).view(-1, 1, 8, 8)


def test_a_generator_is_searched_and_what_the_label_alone_paints_is_no_leak() -> None:
    plan = Plan(attacks=("ggl(steps=80)",), defenses=("none", "gaussian_noise(std=10.0)"), **QUICK | {"pictures": 8})
    torch.manual_seed(0)  # of the painter's decomposition
    report = Audit(plan, subject(plan, prior=DigitPainter())).run()
    assert report.judgement("none", "diagnostic").verdict == "leaks"
    assert report.judgement("gaussian_noise(std=10.0)", "diagnostic").verdict == "holds"
    blind, found = (report.find("diagnostic", d, "ggl(steps=80)") for d in ("gaussian_noise(std=10.0)", "none"))
    assert "label alone" in blind.note
    # The label's picture is far above the guesses that know no label, and is the floor here.
    grey = next(f for f in report.floors if f.column == "diagnostic" and f.guess == "grey")
    assert mean(blind.floor) > mean(grey.scores["ssim"]) + 0.1
    assert blind.mistaken > report.chance
    assert f"Luck alone picks up to {percent(blind.mistaken)}" in what_leaks(report)
    assert mean(found.scores["ssim"]) > mean(found.floor) + 0.2
    assert mean(found.contrast) > mean(blind.contrast) + 0.2


def test_what_holds_without_a_search_through_a_generator_is_told_so() -> None:
    report = gradveil.audit(defenses=["gaussian_noise(std=10.0)"], attacks=READERS, **QUICK)
    held = replace(
        report, judgements=[j if j.defense == "none" else replace(j, verdict="holds") for j in judge(report)]
    )
    searched = [replace(column, grants={**column.grants, "prior": True}) for column in report.columns]
    assert "--generator" in " ".join(advice(held))
    assert "--generator" not in " ".join(advice(replace(held, columns=searched)))


def test_without_a_generator_the_search_is_skipped_with_the_remedy() -> None:
    report = gradveil.audit(defenses=["none"], attacks=["ggl(steps=2)"], **QUICK)
    row = report.find("diagnostic", "none", "ggl(steps=2)")
    assert row.status == "skipped"
    assert "--generator" in row.note


@dataclass(frozen=True)
class Broken(Attack):
    error: str = "runtime"

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        if self.error == "need":
            raise NeedError("this attack needs a first layer it can read")
        raise RuntimeError("it broke")


@dataclass(frozen=True)
class NeedsLabels(Attack):
    @property
    def needs(self):
        return frozenset({"labels"})

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        return Reconstruction(torch.zeros(seen.num_examples, *seen.input_shape))


def test_failures_are_rows_with_reasons() -> None:
    attacks = {"broken": Broken(), "needy": Broken("need"), "labels": NeedsLabels()}
    found = gradveil.audit(defenses=["dgp"], attacks=attacks, **{**QUICK, "pictures": 1, "round": 0})
    broken = found.find("diagnostic", "dgp", "broken")
    assert (broken.status, broken.note) == ("failed", "RuntimeError: it broke")
    assert "raise RuntimeError" in broken.traceback
    needy = found.find("diagnostic", "dgp", "needy")
    assert (needy.status, needy.note) == ("skipped", "this attack needs a first layer it can read")
    assert found.find("realistic", "dgp", "labels").note == "the attacker is not granted labels"
    assert found.judgement("dgp").verdict == "incomplete"
    assert "nothing here is evidence of privacy" in gradveil.audit.to_markdown(found)


@dataclass(frozen=True)
class Diverges(Attack):
    """Reads a bare gradient, but gives no number under a defense."""

    value: float

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        found = gradveil.attacks.LinearReadout().run(seen, rng)
        return found if seen.defense == gradveil.Identity() else found._replace(inputs=found.inputs + self.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_attack_that_diverged_was_not_withstood(value: float) -> None:
    found = gradveil.audit(defenses=["dgp"], attacks={"wild": Diverges(value)}, **QUICK)
    row = found.find("diagnostic", "dgp", "wild")
    assert (row.status, row.note) == ("failed", "the attack diverged (NaN) on 4 of 4 uploads")
    assert found.judgement("none").verdict == "leaks"
    assert found.judgement("dgp").verdict == "incomplete"


def test_every_name_is_given_once_and_none_is_the_control() -> None:
    for wrong, message in (
        ({"defenses": ("x=dgp", "x=hardened")}, "two defenses are called 'x'"),
        ({"attacks": ("x=blind", "x=linear_readout")}, "two attacks are called 'x'"),
        ({"defenses": ("none=hardened",)}, "undefended control"),
    ):
        with pytest.raises(ConfigError, match=message):
            subject(Plan(data="digits", **wrong))
    with pytest.raises(ConfigError, match="undefended control"):
        gradveil.audit(defenses={"none": gradveil.dgp()}, **QUICK)
    assert list(subject(Plan(data="digits", defenses=("none", "dgp"))).defenses) == ["none", "dgp"]


@dataclass(frozen=True)
class OneModelOnly(gradveil.Defense):
    """Knows the audited model's tensors by name, so that it breaks on every other."""

    def apply(self, grads, state, step):
        if grads["features.1.weight"].shape != (32, 64):
            raise RuntimeError("not my model")
        return grads, state


def test_accuracy_that_cannot_be_measured_is_a_note() -> None:
    settings = {**QUICK, "accuracy_rounds": 1}
    found = gradveil.audit(defenses={"mine": OneModelOnly()}, attacks=READERS[:1], **settings)
    assert next(d for d in found.defenses if d.name == "mine").accuracy is None
    assert "Accuracy under mine was not measured: not my model" in found.notes


def test_accuracy_rounds_may_change_when_an_audit_goes_on() -> None:
    plan = Plan(defenses=("dgp",), attacks=("linear_readout",), **{**QUICK, "accuracy_rounds": 1})
    done = Audit(plan, subject(plan)).run()
    again = Audit(replace(plan, accuracy_rounds=0), subject(plan), before=done).run()
    assert again.rows == done.rows
    assert [d.accuracy for d in again.defenses] == [None, None]  # of another training


def test_an_audit_goes_on_with_the_same_weights_and_pictures_only() -> None:
    plan = Plan(defenses=("dgp",), attacks=("linear_readout",), **QUICK)
    first = Audit(plan, subject(plan)).report
    other = subject(plan)
    next(other.model.parameters()).data += 1
    pictures = replace(subject(plan).victims, images=255 - subject(plan).victims.images)
    for changed, what in ((other, "weights"), (replace(subject(plan), victims=pictures), "pictures under attack")):
        with pytest.raises(ConfigError, match=f"the {what} are not those this audit began with"):
            Audit(plan, changed, before=first)
    assert Audit(plan, subject(plan), before=Report.from_json(first.to_json())).report.digests == first.digests


@dataclass(frozen=True)
class NeverSends(gradveil.Defense):
    def apply(self, grads, state, step):
        raise RuntimeError("no upload today")


def test_defense_that_cannot_send_is_a_row_not_a_crash() -> None:
    found = gradveil.audit(defenses={"mute": NeverSends()}, attacks=READERS[:1], **{**QUICK, "pictures": 2})
    assert [row.status for row in found.rows if row.defense == "mute"] == ["failed", "failed"]
    assert found.judgement("none").verdict == "leaks"
    assert found.judgement("mute").verdict == "incomplete"
    assert "no upload today" in gradveil.audit.to_html(found)


def test_an_empty_upload_is_never_attacked() -> None:
    defenses = {"mixing": gradveil.Hardened(examples=8, noise=1e-6, bits=0)}
    settings = {**QUICK, "round": 0, "pictures": 2}
    found = gradveil.audit(defenses=defenses, attacks=READERS[:1], **settings)
    waited = {u.column: u.waited for d in found.defenses if d.name == "mixing" for u in d.uploads}
    assert waited == {"diagnostic": 7, "realistic": 3}
    assert any("sends nothing until enough is mixed" in note for note in found.notes)
    assert all(upload.bytes_sent > 1000 for d in found.defenses for upload in d.uploads)
    silent = gradveil.audit(defenses={"silent": gradveil.Hardened(examples=10**6)}, attacks=READERS[:1], **settings)
    assert "nothing to attack" in silent.find("diagnostic", "silent", READERS[0]).note
    assert silent.judgement("silent").verdict == "incomplete"


def test_budget_cuts_and_says_so() -> None:
    attacks = ["gradient_matching(steps=100000)"]
    plan = {**QUICK, "pictures": 1, "round": 0, "budget": 0.03}
    found = gradveil.audit(defenses=["dgp"], attacks=attacks, **plan)
    assert found.seconds < 60 * 0.03 + 15
    assert all(row.status == "skipped" for row in found.rows)
    assert len(found.cut) == len(found.rows)
    assert "0.03 minutes" in found.cut[0]
    assert found.judgement("dgp").verdict == "incomplete"


@dataclass(frozen=True)
class Interrupted(Attack):
    """Reads pictures like `LinearReadout`, but the user presses Ctrl-C at the given call."""

    at: int

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        CALLS.append(1)
        if len(CALLS) == self.at:
            raise KeyboardInterrupt
        return gradveil.attacks.LinearReadout().run(seen, rng)


CALLS: list[int] = []


def test_interrupt_keeps_what_is_done_and_resume_goes_on(tmp_path) -> None:
    CALLS.clear()
    settings = {**QUICK, "pictures": 2, "round": 0}
    plan = Plan(defenses=("dgp",), attacks=("reader",), **settings)

    def start(at: int, before: Report | None = None) -> Audit:
        found = subject(plan, defenses={"dgp": gradveil.dgp()}, attacks={"reader": Interrupted(at)})
        return Audit(plan, found, save=lambda r: r.save(tmp_path / "report.json"), before=before)

    stopped = start(4)
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    kept = Report.load(tmp_path / "report.json")
    done = [row for row in kept.rows if row.status == "ok"]
    assert len(done) == 2
    assert len(kept.rows) == 4
    assert all("interrupted" in row for row in kept.cut)
    finished = start(0, before=kept).run()
    assert [row.status for row in finished.rows] == ["ok"] * 4
    assert finished.rows[:2] == done  # not done again
    assert not finished.cut
    assert finished.seconds > kept.seconds
    other = replace(plan, pictures=3)
    found = subject(other, attacks={"reader": Interrupted(0)})
    with pytest.raises(ConfigError, match="pictures = 2, not 3"):
        Audit(other, found, before=kept)


@pytest.fixture(scope="module")
def planted() -> Report:
    settings = {**QUICK, "model": "lenet", "pictures": 4, "batch_size": 2, "round": 0}
    defenses = {"dgp": gradveil.dgp(), "drowned": gradveil.GaussianNoise(std=1e6)}
    return gradveil.audit(defenses=defenses, attacks=["rob"], **settings)


def test_active_attack_is_shown_without_and_with_the_guard(planted: Report) -> None:
    assert planted.column("diagnostic").grants["active"]
    assert [row.guarded for row in planted.rows] == [False, True] * 6
    for defense in ("none", "dgp"):
        assert planted.find("diagnostic", defense, "rob").scores["ssim"][0] > 0.9
        refused = planted.find("diagnostic", defense, "rob", guarded=True)
        assert refused.status == "refused"
        assert "not the one you defined" in refused.note
    assert planted.judgement("dgp").verdict == "leaks"
    assert planted.attacks[0].adaptive  # its layout follows the defense
    page = gradveil.audit.to_html(planted)
    assert "rob, without the guard" in page
    assert "refused: nothing was sent" in page
    assert "keep the guard on" in page


def test_the_setting_decides_which_of_both_is_judged(planted: Report) -> None:
    guarded = replace(planted, settings={**planted.settings, "guard": True})
    guarded = replace(guarded, judgements=judge(guarded))
    found = {j.defense: j.verdict for j in guarded.judgements if j.column is None}
    # The guard stopped the attack; the defense behind it was never attacked.
    assert found == {"none": "leaks", "dgp": "incomplete", "drowned": "incomplete"}
    assert "the guard refused every attack" in guarded.judgement("dgp").reasons[0]
    assert "rob, without the guard" in gradveil.audit.to_html(guarded)  # what the guard hides is still shown


def test_a_guard_shares_the_credit() -> None:
    noise = "gaussian_noise(std=10.0)"
    settings = {**QUICK, "guard": True}
    found = gradveil.audit(defenses=[noise], attacks=["rob", READERS[0]], **settings)
    assert found.judgement(noise).verdict == "holds"
    assert gradveil.audit.to_markdown(found).startswith(
        "### gaussian\\_noise(std=10.0) holds against these attacks behind"
    )


def test_an_attack_that_finds_nothing_is_a_result(planted: Report) -> None:
    empty = planted.find("diagnostic", "drowned", "rob")
    assert empty.status == "ok", empty.traceback
    assert planted.judgement("drowned").verdict == "holds"


def test_audit_in_the_middle_of_a_training_run(tmp_path) -> None:
    settings = Settings(model="mlp(hidden=16)", data="digits", defense="dgp", users=3, rounds=4, batch_size=8)
    trainer = Trainer(assemble(replace(settings, device="cpu", lr="0.05")))
    for _ in trainer:
        pass
    trainer.save(tmp_path / "checkpoint.safetensors")
    plan = {"checkpoint": str(tmp_path / "checkpoint.safetensors"), "client": 1, "pictures": 2, "batch_size": 2}
    found = gradveil.audit(attacks=READERS, accuracy_rounds=0, device="cpu", **plan)
    assert [d.name for d in found.defenses] == ["none", "dgp"]
    assert found.column("realistic").rounds == 4
    assert found.title == "mlp(hidden=16) on digits after 4 rounds of training"
    assert [found.settings[key] for key in ("model", "data")] == ["mlp(hidden=16)", "digits"]
    dgp = next(d for d in found.defenses if d.name == "dgp")
    assert all(upload.residual_ratio > 0.5 for upload in dgp.uploads)  # the client's real residual, in both columns
    other = gradveil.audit(defenses=["topk"], attacks=READERS[:1], accuracy_rounds=0, device="cpu", **plan)
    assert [u.residual_ratio > 0 for d in other.defenses for u in d.uploads if d.name == "topk"] == [False, True]
    assert any("topk is not what this run was trained under" in note for note in other.notes)
    with pytest.raises(ConfigError, match="client must be below 3"):
        gradveil.audit(checkpoint=plan["checkpoint"], client=3)


def test_own_model_data_and_aligned_defense() -> None:
    model = gradveil.models.build("lenet", num_classes=10, input_shape=(1, 8, 8))
    before = [p.clone() for p in model.parameters()]
    digits = gradveil.data.load("digits")
    found = gradveil.audit(
        model,
        digits,
        defenses={"aligned": gradveil.adgp(), "transformed": gradveil.defenses.ATS()},
        attacks={"quick": gradveil.attacks.GradientMatching(steps=3)},
        pictures=2,
        batch_size=2,
        round=1,
        accuracy_rounds=0,
    )
    assert all(row.status == "ok" for row in found.rows), [row.traceback for row in found.rows if row.traceback][:1]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert found.settings["model"] == "Sequential"
    assert "mean=(0.3" in next(d.text for d in found.defenses if d.name == "transformed")  # told the normalisation


def test_size_and_normalisation_of_the_users_model() -> None:
    found = subject(Plan(model="lenet", data="digits", size=12, mean="0.5", std="0.2"))
    assert found.victims.input_shape == (1, 12, 12)
    assert [(d.mean, d.std) for d in (found.victims, found.private, found.public)] == [((0.5,), (0.2,))] * 3
    for wrong, message in (
        ({"mean": "0.5"}, "belong together"),
        ({"mean": "grey", "std": "0.2"}, "mean must be numbers"),
        ({"mean": "0.5,0.5", "std": "0.2,0.2"}, "need 1 entries"),
    ):
        with pytest.raises((ValueError, ConfigError), match=message):
            subject(Plan(data="digits", **wrong))


class Opaque(torch.autograd.Function):
    """An operation that can be differentiated backwards, but not forwards."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, slope):
        return slope * 2


class OpaqueModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)

    def forward(self, x):
        return Opaque.apply(self.layer(x.flatten(1)))


def test_model_without_a_fast_score_is_audited_all_the_same() -> None:
    digits = gradveil.data.load("digits")
    settings = {"pictures": 2, "batch_size": 2, "round": 0, "accuracy_rounds": 0}
    found = gradveil.audit(OpaqueModel(), digits, defenses=["dgp"], attacks=READERS, **settings)
    assert found.fast.note.startswith("It cannot be computed for this model")
    assert found.judgement("none").verdict == "leaks"
    assert "It cannot be computed" in gradveil.audit.to_html(found)


def test_the_most_telling_cells_come_first() -> None:
    plan = Plan(defenses=("dgp",), **QUICK)
    order = cells(subject(plan))
    assert [(c.defense, c.attack) for c in order[:3]] == [("none", name) for name in ("mask-aware", "coarse", "naive")]
    assert order[6].defense == "dgp"
    assert order[6].column == "diagnostic"


def test_progress_counts_cells_and_steps_and_tells_the_time_left() -> None:
    told = []
    settings = {**QUICK, "pictures": 1, "round": 0}
    gradveil.audit(defenses=["dgp"], attacks=["gradient_matching(steps=40)"], tell=told.append, **settings)
    assert (told[-1].done, told[-1].total, told[-1].stage) == (4, 4, "done")
    running = [event for event in told if event.steps]
    assert [event.step for event in running[:4]] == [10, 20, 30, 40]
    assert running[1].attack_seconds_left > 0
    assert running[3].attack_seconds_left == 0
    assert running[1].seconds_left > running[1].attack_seconds_left  # three more cells are to come


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="ask for fewer"):
        gradveil.audit(**{**QUICK, "pictures": 5000})
    with pytest.raises(ValueError, match="pictures must be"):
        gradveil.audit(pictures=0)
    with pytest.raises(ConfigError, match="unknown defense"):
        gradveil.audit(defenses=["dpg"])


def test_report_json_is_plain(quick: Report) -> None:
    json.loads(quick.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

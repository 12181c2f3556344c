"""Each cause of a failed attack is brought about on purpose and must be named; a healthy case names none of them."""

import torch
from torch import nn

import gradveil
from gradveil import models
from gradveil.audit import Plan, clients, diagnose, subject
from gradveil.audit.report import Row
from gradveil.data import Dataset


def sent(model: nn.Module, column: str = "diagnostic", data: Dataset | None = None, **changes):
    plan = Plan(data="digits", **{"pictures": 2, "batch_size": 2, "round": 0, "defenses": ("none",), **changes})
    found = subject(plan, model=model, dataset=data)
    return clients.uploads(plan, found, clients.column_info(column, plan, found), "none"), found.victims


def row(**values) -> Row:
    return Row("diagnostic", "none", "attack", "ok", **values)


def lenet() -> nn.Module:
    return models.build("lenet", num_classes=10, input_shape=(1, 8, 8))


def codes(model: nn.Module, rows=(), **settings) -> list[str]:
    uploads, data = sent(model, **settings)
    return [finding.code for finding in diagnose.diagnose(uploads, rows, data)]


def test_healthy_model_has_no_known_cause() -> None:
    assert codes(lenet(), [row(loss=0.02, labels_right=1.0)]) == ["unknown"]


def test_vanishing_gradient() -> None:
    deep = nn.Sequential(nn.Flatten(), *[layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.Sigmoid())])
    deep.append(nn.Linear(64, 10))
    assert "vanishing_gradient" in codes(deep)


def test_saturated_outputs() -> None:
    model = lenet()
    with torch.no_grad():
        model.classifier.weight.mul_(10_000)
    assert "saturated_outputs" in codes(model)


def test_wrong_normalisation() -> None:
    digits = gradveil.data.load("digits")
    raw = Dataset(digits.name, digits.images, digits.labels, digits.classes, (0.0,), (0.004,))
    assert "wrong_normalisation" in codes(lenet(), data=raw)
    assert "wrong_normalisation" not in codes(lenet(), data=digits)


def test_train_mode_batchnorm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    with torch.no_grad():
        model[1].running_mean.fill_(2.0)
    assert "train_mode_batchnorm" in codes(model, column="realistic")
    assert "train_mode_batchnorm" not in codes(model, column="diagnostic")


def test_labels_not_recovered() -> None:
    assert "labels_not_recovered" in codes(lenet(), [row(labels_right=0.25), row(labels_right=0.5)])
    assert "labels_not_recovered" not in codes(lenet(), [row(labels_right=0.25), row(labels_right=1.0)])


def test_not_converged_and_ambiguous() -> None:
    assert "not_converged" in codes(lenet(), [row(loss=0.4)])
    few = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(4, 10))
    assert "ambiguous" in codes(few, [row(loss=0.0001)])
    assert "ambiguous" not in codes(lenet(), [row(loss=0.0001)])


def test_a_failed_audit_explains_itself() -> None:
    model = lenet()
    with torch.no_grad():
        model.classifier.weight.mul_(10_000)
    attacks = {"short": gradveil.attacks.GradientMatching(steps=2)}
    settings = {"pictures": 2, "batch_size": 2, "round": 0, "accuracy_rounds": 0}
    found = gradveil.audit(model, gradveil.data.load("digits"), defenses=["dgp"], attacks=attacks, **settings)
    assert "saturated_outputs" in [finding.code for finding in found.findings]
    assert all(finding.remedy for finding in found.findings)
    assert "What to do" in gradveil.audit.to_html(found)

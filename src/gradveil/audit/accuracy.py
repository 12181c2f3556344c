"""What a defense costs in accuracy, in seconds: a small perceptron on real handwritten digits, trained under it.

An indication and a fair comparison between defenses, not the figure of the user's model: `gradveil train` gives that.
Noise of a fixed size hurts a model with small gradients more, so the loss is scaled until the perceptron's gradient
entries are as large as those of the audited model, and the learning rate is divided by the same factor.
"""

import math
from dataclasses import replace

from torch import Tensor, nn

from ..core import Defense, Grads
from ..errors import GradientError, GradveilError
from ..gradients import gradient
from ..training import Settings, Trainer, assemble

MODEL = "mlp(hidden=64)"
USERS = 4
RATE = 0.05
NOTE = (
    f"Accuracy is that of a small perceptron on handwritten digits after {{rounds}} rounds of {USERS} clients: "
    "it compares the defenses, it is not the accuracy of the audited model (use gradveil train for that)."
)


def measure(defense: Defense, rounds: int, seed: int, like: Grads) -> float | None:
    """Return the test accuracy after training under `defense` with gradients as large as `like`.

    Returns None where training cannot be done under this defense, and 0 where it diverged.
    """
    settings = Settings(
        model=MODEL,
        data="digits",
        users=USERS,
        batch_size=32,
        rounds=rounds,
        lr=str(RATE),
        eval_every=rounds,
        checkpoint_every=0,
        engine="reference",
        device="cpu",
        seed=seed,
    )
    try:
        job = assemble(settings, defense=defense)
        scale = rms(like) / rms(gradient(job.model, job.loss_fn, job.feed.batch(0, 0)))

        def scaled_loss(outputs: Tensor, labels: Tensor) -> Tensor:
            return scale * nn.functional.cross_entropy(outputs, labels)

        trainer = Trainer(replace(job, loss_fn=scaled_loss, settings=replace(settings, lr=repr(RATE / scale))))
        for _ in trainer:
            pass
    except GradientError:
        return 0.0
    except (GradveilError, ValueError):
        return None
    return trainer.evaluate()


def rms(grads: Grads) -> float:
    """Return the root mean square of all entries."""
    squares = sum(float(g.double().square().sum()) for g in grads.values())
    return math.sqrt(squares / max(sum(g.numel() for g in grads.values()), 1)) or 1.0

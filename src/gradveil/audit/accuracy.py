"""What a defense costs in accuracy, in seconds: a small perceptron on real handwritten digits, trained under it.

An indication and a fair comparison between defenses, not the figure of the user's model: `gradveil train` gives that.
"""

from ..core import Defense
from ..errors import GradveilError
from ..training import Settings, Trainer, assemble

MODEL = "mlp(hidden=64)"
USERS = 4
NOTE = (
    f"Accuracy is that of a small perceptron on handwritten digits after {{rounds}} rounds of {USERS} clients: "
    "it compares the defenses, it is not the accuracy of the audited model (use gradveil train for that)."
)


def measure(defense: Defense, rounds: int, seed: int) -> float | None:
    """Return the test accuracy after training under `defense`; None where training broke down or cannot be done."""
    settings = Settings(
        model=MODEL,
        data="digits",
        users=USERS,
        batch_size=32,
        rounds=rounds,
        lr="0.05",
        eval_every=rounds,
        checkpoint_every=0,
        engine="reference",
        device="cpu",
        seed=seed,
    )
    try:
        trainer = Trainer(assemble(settings, defense=defense))
        for _ in trainer:
            pass
    except (GradveilError, ValueError):
        return None
    return trainer.evaluate()

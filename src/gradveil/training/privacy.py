"""What a run has spent of differential privacy, for batches as `Feed` really draws them.

`epsilon` of the defenses counts on Poisson sampling. A user here goes through its pictures in passes, each in an order
drawn anew, without replacement. No gain from that chance is claimed: the figure is exact for the Gaussian noise and
holds for the worst order of every pass.
"""

import math
from typing import Any

from ..core import Defense
from ..defenses import Chain, ClipNoise, CorrelatedNoise, DPNoise, gaussian_epsilon, strategy_sensitivity
from ..models import has_batchnorm
from .job import Job

PASSES = "shuffled passes without replacement, worst order; no gain from sampling is counted (not Poisson)"
UPLOADS = "every upload of a user counts in full; no gain from sampling is counted"


def spent(job: Job, rounds: int) -> dict[str, Any]:
    """Return what `rounds` rounds give away, as plain data; `epsilon` is None where there is no guarantee."""
    noise = _mechanism(job.defense)
    if isinstance(noise, str):
        return {"unit": None, "epsilon": None, "delta": None, "why": noise}
    sizes = set(zip(map(len, job.feed.shards), job.feed.sizes, _uploads(job, rounds), strict=True))
    reach = max(_reach(noise, *size) for size in sizes)
    by_user = isinstance(noise, ClipNoise)
    outside = ["the noise comes from the run's seed: who knows it can subtract the noise", "numbers of examples"]
    if has_batchnorm(job.model) and job.settings.batchnorm != "local":
        outside.append("BatchNorm statistics, which are sent as they are")
    return {
        "unit": "user" if by_user else "example",
        "epsilon": gaussian_epsilon(noise.noise_multiplier / reach, job.settings.delta) if reach else 0.0,
        "delta": job.settings.delta,
        "rounds": rounds,
        "sampling": UPLOADS if by_user else PASSES,
        "accountant": "exact, of one Gaussian mechanism over the whole run",
        "not_covered": outside,
    }


def stated(privacy: dict[str, Any]) -> str:
    """Return what was spent in one line."""
    if privacy["epsilon"] is None:
        return f"none: {privacy['why']}"
    whose = "all that one user sends" if privacy["unit"] == "user" else "one example of a user"
    return f"epsilon {privacy['epsilon']:.4g} at delta {privacy['delta']:g} for {whose}"


def _mechanism(defense: Defense) -> DPNoise | ClipNoise | str:
    """Return the part whose noise covers all that is sent, or why there is none."""
    parts = defense.parts if isinstance(defense, Chain) else (defense,)
    # Exact types: a subclass may do something else.
    at = next((i for i, part in enumerate(parts) if type(part) in (DPNoise, CorrelatedNoise, ClipNoise)), None)
    if at is None:
        return "no clip bounds what one example or user adds"
    noise = parts[at]
    assert isinstance(noise, DPNoise | ClipNoise)
    if not noise.noise_multiplier:
        return f"the noise_multiplier of {noise.key()} is 0"
    if "mask" in defense.needs:
        return "the common mask is sent beside what the noise covers"
    again = [part.key() for part in parts[at + 1 :] if "batch" in part.needs]
    return f"{again[0]} looks at the batch again behind the noise" if again else noise


def _uploads(job: Job, rounds: int) -> list[int]:
    """Return how often each user has sent."""
    if job.settings.invited == job.settings.users:
        return [rounds] * job.settings.users
    counts = [0] * job.settings.users
    for round_ in range(rounds):
        for user in job.participants(round_):
            counts[user] += 1
    return counts


def _reach(noise: DPNoise | ClipNoise, pictures: int, size: int, uploads: int) -> float:
    """Return how far one unit of clipped norm 1 can move the mechanism, in the worst order of every pass.

    A picture is in one batch of each pass, and from one pass to the next but one a whole pass lies between. So its
    places in even passes are far apart, and so are those in odd passes; the two add up at most. This also covers a
    batch that ends one pass and begins the next, which can hold the picture twice. Where no batch does, the places are
    different rounds, which is the better bound without correlation.
    """
    if isinstance(noise, ClipNoise):
        return math.sqrt(uploads)
    passes = math.ceil(uploads * size / pictures)

    def moved(times: int, separation: int) -> float:
        correlation = noise.correlation if isinstance(noise, CorrelatedNoise) else 0.0
        if not times:
            return 0.0
        return strategy_sensitivity(correlation, rounds=uploads, participations=times, separation=separation)

    apart = max(1, (pictures + 1) // size)
    split = moved(math.ceil(passes / 2), apart) + moved(passes // 2, apart)
    return split if pictures % size else min(split, moved(passes, 1))

"""The client's shell: a defense bound to one client's state, the only mutable object of gradveil."""

import hashlib
import os
import threading
import time
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from . import tree, wire
from .core import Batch, Defense, Grads, Health, LossFn, Masks, Payload, State, Step, Tensors
from .errors import GradientError, GuardError, NeedError, StateError
from .files import write_tensors
from .gradients import gradient, parameters, per_example_gradient
from .guard import Guard, Seen
from .secret import SecretGenerator, system_seed
from .shares import gradient_and_shares

DEFAULT_GUARD = Guard()
OPEN_UPLOADS = 16  # how many sealed payloads can still be taken back
_commit = threading.Lock()  # of the module, so that a veil can be copied


def derive_rng(seed: int, client: str, round_: int, purpose: str = "", device: str = "cpu") -> torch.Generator:
    """Return a generator that depends on these values only, not on what was drawn before.

    A seed above 64 bits is a secret: on a CPU its generator is a `SecretGenerator`. Smaller seeds are for experiments.
    """
    text = f"{seed}|{client}|{round_}|{purpose}".encode()
    if seed >> 64 and device == "cpu":
        return SecretGenerator(text)
    return torch.Generator(device=device).manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1)


class Veil:
    """Protects the uploads of one client and remembers what was held back.

    `seed=None` takes entropy from the system; a fixed seed makes a run repeatable, and whoever knows it can subtract
    the noise. State is replaced, never changed in place, so `copy.copy(veil)` is a free probe of the real residual.

    `protect` lets `guard` look at the model first and refuses one that looks manipulated, or whose parameters are not
    `params` by name and shape: make the veil from your own model, not from what arrived. `Guard.pin(model)` also holds
    the modules and their settings to your own; the default to those it meets first. `guard=None` is for the study of
    attacks.

    >>> from gradveil import DualPrune, ErrorFeedback, unseal
    >>> veil = Veil(ErrorFeedback(DualPrune(top=0.25, bottom=0.5)), {"w": torch.zeros(4)})
    >>> payload = veil.seal({"w": torch.tensor([4.0, -3.0, 2.0, 1.0])}, num_examples=1)
    >>> unseal(payload)["w"], veil.residual["w"]
    (tensor([ 0., -3.,  0.,  0.]), tensor([4., 0., 2., 1.]))
    """

    def __init__(
        self,
        defense: Defense,
        params: Grads,
        *,
        seed: int | None = None,
        client: str = "0",
        guard: Guard | None = DEFAULT_GUARD,
    ) -> None:
        self.defense = defense
        self.guard = guard
        self.client = client
        self.seeded = seed is not None
        self.round = 0
        self.health: Health | None = None
        self.seconds = (0.0, 0.0)  # what the last `seal` spent in the defense and in encoding
        self._seed = system_seed() if seed is None else seed
        self._like = tree.zeros_like(params)
        self._state: State = defense.init(params)
        self._seen: Seen | None = None  # what the guard remembers of the last model
        self._open: dict[int, bytes] = {}  # round -> digest of a payload that may be taken back

    @property
    def residual(self) -> Grads | None:
        """What was held back so far, if the defense keeps it."""
        return self.defense.residual(self._state)

    def protect(self, model: nn.Module, loss_fn: LossFn, batch: Batch, *, mask: Masks | None = None) -> Payload:
        """Check the model, compute the gradient of `batch` and seal it: the whole client side of one round.

        Raises:
            GuardError: the model looks manipulated. Nothing is computed on it and no state changes.
        """
        before = self._seen
        self.admit(model, tuple(batch.inputs.shape[1:]))
        try:
            batch = self.prepare(model, batch)
            largest = None
            if "per_example" in self.defense.needs:
                grads = per_example_gradient(model, loss_fn, batch)
            elif self.defense.weighs_examples:
                grads, largest = gradient_and_shares(model, loss_fn, batch)
            else:
                grads = gradient(model, loss_fn, batch)
            return self.seal(grads, len(batch.labels), model=model, batch=batch, mask=mask, largest=largest)
        except BaseException:  # Ctrl-C in a notebook too
            self._seen = before  # the same model may come again for another batch
            raise

    def admit(self, model: nn.Module | Tensors, input_shape: tuple[int, ...] | None = None) -> None:
        """Let the guard look at the model of this round; `protect` does this by itself, `seal` does not.

        Raises:
            GuardError: the model must not be given a gradient.
        """
        if self.guard is not None:
            self._require_own(model)
            self._seen = self.guard.admit(model, self._seen, input_shape=input_shape, rng=self._rng("guard"))

    def prepare(self, model: nn.Module, batch: Batch) -> Batch:
        """Return the batch the gradient is to be computed on: a defense may transform it."""
        return self.defense.prepare_batch(batch, self._step(model, batch, None))

    def seal(
        self,
        grads: Grads,
        num_examples: int,
        *,
        model: nn.Module | None = None,
        batch: Batch | None = None,
        mask: Masks | None = None,
        largest: Tensors | None = None,
    ) -> Payload:
        """Return the protected gradient as bytes. If anything is wrong an error is raised and no state changes.

        `largest` are those of `shares.gradient_and_shares`, for defenses that weigh examples.
        """
        if num_examples < 1:
            raise ValueError(f"num_examples must be at least 1, got {num_examples}")
        self._check(grads)
        held, step = self._state, self._step(model, batch, mask, num_examples, largest)
        started = time.perf_counter()
        sent, state = self.defense.apply(grads, held, step)
        if {n: g.shape for n, g in sent.items()} != {n: g.shape for n, g in self._like.items()}:
            raise GradientError(f"{self.defense.key()} returned other tensors than the parameters': nothing is sent")
        tree.require_finite(sent)
        applied = time.perf_counter()
        payload = Payload(wire.encode(sent, within=mask), num_examples, step.round)
        self.seconds = (applied - started, time.perf_counter() - applied)
        self.health = _health(sent, self.defense.residual(state))
        opened = {**self._open, payload.round: hashlib.sha256(payload.body).digest()}
        with _commit:
            # Two uploads of one round would carry the same residual, and the same noise: their difference is bare.
            if self._state is not held or self.round != payload.round:
                raise StateError("another thread used this veil meanwhile: nothing is sent; a veil is for one thread")
            self._state, self.round = state, payload.round + 1
        self._open = dict(list(opened.items())[-OPEN_UPLOADS:])
        return payload

    def propose(self, grads: Grads) -> Masks:
        """Return the common mask this client proposes for an aligned round; changes no state."""
        self._check(grads)
        return self.defense.propose(grads, self._state, self._step(None, None, None))

    def undo(self, payload: Payload, *, mask: Masks | None = None) -> None:
        """Take an upload that did not arrive back into the residual, so that nothing is lost. Works once each."""
        if self._open.get(payload.round) != hashlib.sha256(payload.body).digest():
            raise StateError(
                f"the upload of round {payload.round} is not open: it was not sealed here, was taken back already, "
                f"or is more than {OPEN_UPLOADS} uploads old"
            )
        sent = wire.decode(payload.body, like=self._like, within=mask)
        self._state = self.defense.take_back(sent, self._state, newest=payload.round == self.round - 1)
        self.acknowledge(payload)

    def acknowledge(self, payload: Payload) -> None:
        """Note that an upload arrived; it can no longer be taken back."""
        self._open = {r: digest for r, digest in self._open.items() if r != payload.round}

    def state_dict(self) -> Tensors:
        """Return state, round, open uploads and the guard's memory as tensors; never the seed."""
        opened = {
            f"open.{r}": torch.frombuffer(bytearray(digest), dtype=torch.uint8) for r, digest in self._open.items()
        }
        seen = tree.under("guard", self._seen.state_dict()) if self._seen else {}
        return {**tree.under("state", self._state), **opened, **seen, "round": torch.tensor(self.round)}

    def load_state_dict(self, saved: Tensors) -> None:
        """Continue from `state_dict`; raises `StateError` and changes nothing if it does not fit."""
        state = tree.only("state", saved)
        fresh = self.defense.init(self._like)
        if "round" not in saved or state.keys() != fresh.keys():
            odd = [*sorted(state.keys() ^ fresh.keys()), "round"]
            raise StateError(f"this state belongs to another defense or model (differs in {odd[0]})")
        for name, tensor in fresh.items():
            found, wanted = ((tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in (state[name], tensor))
            if found != wanted:
                raise StateError(f"{name} is {found[1]} {found[0]}, expected {wanted[1]} {wanted[0]}")
            if state[name].is_floating_point() and not bool(torch.isfinite(state[name]).all()):
                raise StateError(f"{name} holds NaN or infinity: restore an older state file")
        device = next((t.device for t in self._like.values()), torch.device("cpu"))
        remembered = tree.only("guard", saved)
        try:
            seen = Seen.from_state_dict(remembered) if remembered else None
            opened = {int(r): bytes(t.tolist()) for r, t in tree.only("open", saved).items()}
            round_ = int(saved["round"])
        except (ValueError, TypeError, RuntimeError) as error:
            raise StateError(f"this state is damaged: {error}") from error
        self._state = {name: state[name].to(device) for name in fresh}
        self._seen, self._open, self.round = seen, opened, round_
        if not self.seeded:
            self._seed = system_seed()  # a round that comes again must not add the same noise to another gradient

    def save(self, path: str | Path) -> None:
        """Write the state to a file that only its owner can read; a kill leaves the old file or the new one."""
        write_tensors(path, self.state_dict())

    def load(self, path: str | Path) -> None:
        """Continue from a file written by `save`."""
        try:
            saved = load_file(path)
        except (OSError, SafetensorError) as error:
            raise StateError(f"cannot read the client state {path}: {error}") from error
        self.load_state_dict(saved)

    def _step(
        self,
        model: nn.Module | None,
        batch: Batch | None,
        mask: Masks | None,
        num_examples: int | None = None,
        largest: Tensors | None = None,
    ) -> Step:
        device = next((t.device.type for t in self._like.values()), "cpu")
        return Step(self._rng(device=device), self.round, model, batch, mask, num_examples, largest)

    def _rng(self, purpose: str = "", device: str = "cpu") -> torch.Generator:
        # A process that was forked off must not add the same noise to another gradient.
        client = self.client if self.seeded else f"{self.client}|{os.getpid()}"
        return derive_rng(self._seed, client, self.round, purpose, device)

    def _require_own(self, model: nn.Module | Tensors) -> None:
        """Refuse a model whose parameters are not the veil's: a layer was planted, or this is another model."""
        found = parameters(model) if isinstance(model, nn.Module) else model
        # Plain tensors by name may hold buffers too.
        odd = found.keys() ^ self._like.keys() if isinstance(model, nn.Module) else self._like.keys() - found.keys()
        odd |= {n for n in found.keys() & self._like.keys() if found[n].shape != self._like[n].shape}
        if odd:
            raise GuardError(
                f"the model's parameters are not those this veil was made for (they differ in {min(odd)!r}): "
                "no gradient is computed on it"
            )

    def _check(self, grads: Grads) -> None:
        if grads.keys() != self._like.keys():
            odd = sorted(grads.keys() ^ self._like.keys())
            raise NeedError(f"this gradient is not of the veil's parameters: they differ in {odd[0]!r}")
        skip = 1 if "per_example" in self.defense.needs else 0
        for name, g in grads.items():
            if g.shape[skip:] != self._like[name].shape:
                raise NeedError(f"{name} has shape {tuple(g.shape)}, expected {tuple(self._like[name].shape)}")
        tree.require_finite(grads)


def unseal(payload: Payload, *, like: Grads | None = None, within: Masks | None = None) -> Grads:
    """Return the gradient in a payload; raises `WireError` on anything that is not one."""
    return wire.decode(payload.body, like=like, within=within)


def _health(sent: Grads, residual: Grads | None) -> Health:
    sent_norm = tree.global_norm(sent)
    residual_norm = 0.0 if residual is None else tree.global_norm(residual)
    total = sent_norm if residual is None else tree.global_norm(tree.add(sent, residual))
    counts = {name: int(torch.count_nonzero(g)) for name, g in sent.items()}
    entries = sum(g.numel() for g in sent.values())
    return Health(
        gamma=min((residual_norm / total) ** 2, 1.0) if total else 0.0,
        residual_norm=residual_norm,
        sent_norm=sent_norm,
        density=sum(counts.values()) / entries if entries else 0.0,
        per_layer={name: counts[name] / g.numel() if g.numel() else 0.0 for name, g in sent.items()},
    )

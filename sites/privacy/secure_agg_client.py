"""What a site does around its strategy's work: asks the ledger before it, and masks the answer after it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pipeline.aggregation.secure_aggregation import PARCEL, Masking, as_tensor
from pipeline.core.errors import BadMessage, HemofedError
from pipeline.core.seeding import generator
from pipeline.protocol.messages import Excuse, Identity, Message, Reply, SiteId, Update, Weighting
from privacy.secure_aggregation.protocol import Member
from sites.governance.home import Home
from sites.privacy.budget_guard import Guard

TASKS = frozenset({"advertise", "share", "unmask"})


@dataclass
class Desk:
    site: SiteId
    home: Home
    guard: Guard | None = None
    masking: Masking | None = None
    weighting: Weighting = "examples"
    _member: Member | None = None  # of one attempt's secure sum; gone if the site is restarted
    _attempt: Identity | None = None  # whose it is

    def answer(self, message: Message) -> Reply | Excuse:
        """To one of TASKS."""
        try:
            sums = self._step(message)
        except HemofedError as error:
            return Excuse(self.site, message.task, message.turn, f"left the secure sum: {error}")
        return Reply(self.site, message.task, message.turn, message.attempt, Update(sum=sums), 1.0)

    def _step(self, message: Message) -> dict[str, Tensor]:
        if self.masking is None:
            raise BadMessage(f"{self.site}: this study has no secure sum")
        if message.task == "advertise":
            # the same numbers under two sets of survivors would give away their difference
            if self.home.unmasked(self.masking.study) >= message.turn:
                raise BadMessage(f"{self.site} has already helped to unmask turn {message.turn}; go on with the next")
            context = self.masking.context(message.turn, message.attempt)
            self._member = Member(self.site, self.home.key, self.masking.roster, context, self.masking.fewest)
            self._attempt = (message.turn, message.attempt)
            return {"advert": as_tensor(self._member.advertise())}
        if message.task == "share":
            adverts = {k.removeprefix("advert/"): v.numpy().tobytes() for k, v in message.vectors.items()}
            return {f"{PARCEL}{to}": as_tensor(parcel) for to, parcel in self._present(message).share(adverts).items()}
        member = self._present(message)
        self.home.note_unmasked(self.masking.study, message.turn)
        return {"shares": as_tensor(member.unmask(_names(message)))}

    def received(self, message: Message) -> tuple[Message, Mapping[str, bytes]]:
        """A training message without the parcels of the secure sum, and those."""
        parcels = {k.removeprefix(PARCEL): v.numpy().tobytes() for k, v in message.vectors.items() if k.startswith(PARCEL)}  # fmt: skip
        vectors = {k: v for k, v in message.vectors.items() if not k.startswith(PARCEL)}
        return replace(message, vectors=vectors), parcels

    def masked(self, message: Message, update: Update, weight: float, parcels: Mapping[str, bytes]) -> Update:
        assert self.masking is not None
        form = self.masking.form
        heaviest = float(form.settings.heaviest) if self.weighting == "examples" else 1.0
        dice = generator(self.masking.study, self.site, message.turn, "ring")
        numbers = form.numbers(update, weight, heaviest, dice)
        bits = [segment.bits for segment in form.segments]
        ring, exact = self._present(message).mask(parcels, list(zip(numbers, bits, strict=True)))
        return Update(sum={"ring": torch.from_numpy(ring.view(np.int32)), "exact": torch.from_numpy(exact.view(np.int64))})  # fmt: skip

    def _present(self, message: Message) -> Member:
        """The same numbers must not be summed in two attempts, so a step belongs to the attempt that it names."""
        if self._member is None or self._attempt != (message.turn, message.attempt):
            raise BadMessage(
                f"{self.site} takes no part in a secure sum of turn {message.turn}, attempt {message.attempt}: it was "
                "restarted, and counts as a dropout, or it was never asked"
            )
        return self._member


def _names(message: Message) -> list[str]:
    try:
        names = json.loads(message.vectors["survivors"].numpy().tobytes())
    except (KeyError, ValueError) as error:
        raise BadMessage(f"a message does not say who survived ({error}); is it of the same version?") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise BadMessage("a message does not say who survived; is the coordinator of the same version?")
    return names

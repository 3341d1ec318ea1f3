"""A site's side of secure aggregation in a run: answers the protocol's messages and masks the update after training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pipeline.aggregation.secure_aggregation import ENCRYPTED_SHARE_PREFIX, SecureAggregationSetup, bytes_to_tensor
from pipeline.core.errors import HemofedError, MessageError
from pipeline.core.seeding import seeded_generator
from pipeline.protocol.messages import (
    ADVERTISE_TASK,
    SHARE_TASK,
    ClientUpdate,
    Declined,
    Message,
    Reply,
    RoundAttempt,
    SiteId,
    Weighting,
)
from privacy.secure_aggregation.client import SecAggClient
from sites.governance.home import SiteHome


@dataclass
class UpdateMasker:
    """Masks the updates of one run at one site, with a client of the protocol (SecAggClient) for every attempt."""

    site: SiteId
    home: SiteHome
    secure_aggregation: SecureAggregationSetup
    weighting: Weighting
    _secagg_client: SecAggClient | None = None  # of one attempt; lost if the site restarts
    _round_attempt: RoundAttempt | None = None  # of `_secagg_client`

    def handle_message(self, message: Message) -> Reply | Declined:
        """Answers a message whose task is one of SECURE_AGGREGATION_TASKS."""
        try:
            tensors = self._run_step(message)
        except HemofedError as error:
            return Declined(self.site, message.task, message.round, "secure_aggregation", str(error))
        return Reply(self.site, message.task, message.round, message.attempt, ClientUpdate(summed=tensors), 1.0)

    def _run_step(self, message: Message) -> dict[str, Tensor]:
        if message.task == ADVERTISE_TASK:
            # sums of the same updates over two sets of survivors would reveal their difference
            if self.home.last_unmasked_round(self.secure_aggregation.study_hash) >= message.round:
                raise MessageError(
                    f"{self.site} has already helped to unmask round {message.round}; continue with the next round"
                )
            context = self.secure_aggregation.round_context(message.round, message.attempt)
            self._secagg_client = SecAggClient(
                self.site,
                self.home.agent_key,
                self.secure_aggregation.public_keys,
                context,
                self.secure_aggregation.min_clients,
            )
            self._round_attempt = (message.round, message.attempt)
            return {"advert": bytes_to_tensor(self._secagg_client.advertise_keys())}
        if message.task == SHARE_TASK:
            advertisements = {k.removeprefix("advert/"): v.numpy().tobytes() for k, v in message.vectors.items()}
            shares = self._current_secagg_client(message).share_secrets(advertisements)
            return {
                f"{ENCRYPTED_SHARE_PREFIX}{recipient}": bytes_to_tensor(share) for recipient, share in shares.items()
            }
        secagg_client = self._current_secagg_client(message)
        self.home.record_unmasked_round(self.secure_aggregation.study_hash, message.round)
        return {"shares": bytes_to_tensor(secagg_client.reveal_shares(_parse_survivors(message)))}

    def split_shares(self, message: Message) -> tuple[Message, Mapping[str, bytes]]:
        """The training message without the encrypted shares of secure aggregation, and the shares by sender."""
        encrypted_shares = {
            k.removeprefix(ENCRYPTED_SHARE_PREFIX): v.numpy().tobytes()
            for k, v in message.vectors.items()
            if k.startswith(ENCRYPTED_SHARE_PREFIX)
        }
        vectors = {k: v for k, v in message.vectors.items() if not k.startswith(ENCRYPTED_SHARE_PREFIX)}
        return replace(message, vectors=vectors), encrypted_shares

    def mask_update(
        self, message: Message, update: ClientUpdate, weight: float, encrypted_shares: Mapping[str, bytes]
    ) -> ClientUpdate:
        """Encodes the weighted update in fixed point and masks it: `ring` modulo a power of two, `exact` in 64 bits."""
        layout = self.secure_aggregation.update_layout
        max_weight = float(layout.max_examples) if self.weighting == "examples" else 1.0
        rng = seeded_generator(self.secure_aggregation.study_hash, self.site, message.round, "ring")
        segment_values = layout.encode_update(update, weight, max_weight, rng)
        bits = [segment.bits for segment in layout.segments]
        ring, exact = self._current_secagg_client(message).mask_vectors(
            encrypted_shares, list(zip(segment_values, bits, strict=True))
        )
        return ClientUpdate(
            summed={"ring": torch.from_numpy(ring.view(np.int32)), "exact": torch.from_numpy(exact.view(np.int64))}
        )

    def _current_secagg_client(self, message: Message) -> SecAggClient:
        """The client of the message's attempt, because an update must not be summed in two attempts."""
        if self._secagg_client is None or self._round_attempt != (message.round, message.attempt):
            raise MessageError(
                f"{self.site} does not take part in the secure aggregation of round {message.round}, attempt "
                f"{message.attempt}: it restarted and counts as a dropout, or it was not invited"
            )
        return self._secagg_client


def _parse_survivors(message: Message) -> list[str]:
    """The sites whose masked updates the coordinator received."""
    try:
        survivors = json.loads(message.vectors["survivors"].numpy().tobytes())
    except (KeyError, ValueError) as error:
        raise MessageError(
            f"the message has no valid list of survivors ({error}); is the coordinator's version the same?"
        ) from error
    if not isinstance(survivors, list) or not all(isinstance(name, str) for name in survivors):
        raise MessageError("the message has no valid list of survivors; is the coordinator's version the same?")
    return survivors

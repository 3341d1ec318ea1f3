"""For the security tests only: a site that sends a false reply in each training round, and requests receipts of others.

The interpreter runs this file if its folder is on PYTHONPATH; hemofed itself has no such switch.
FALSE_REPLIES: the kinds of the replies to rounds 1, 2, ...; later replies are honest.
"""

import os
import sys

if "FALSE_REPLIES" in os.environ and any("worker_process" in part for part in sys.orig_argv):
    import json
    from pathlib import Path

    import torch
    from nvflare.apis.fl_constant import ReservedKey
    from nvflare.apis.shareable import Shareable

    from pipeline.flare.constants import JSON_TEXT_KEY, RECEIPT_TOPIC, SITE_HOME_ENV
    from pipeline.protocol.serialization import deserialize_frame, serialize_frame
    from sites.worker.flare_executor import SiteExecutor
    from sites.worker.run_worker import RunWorker

    HOME = Path(os.environ[SITE_HOME_ENV])
    true_replies: list[bytes] = []

    def change_header(reply: bytes, **fields: object) -> bytes:
        header, tensors = deserialize_frame(reply)
        return serialize_frame(header | fields, tensors)

    def change_tensors(reply: bytes, changes: dict[str, torch.Tensor]) -> bytes:
        header, tensors = deserialize_frame(reply)
        return serialize_frame(header, tensors | changes)

    def largest_tensor(reply: bytes) -> tuple[str, torch.Tensor]:
        tensors = deserialize_frame(reply)[1]
        key = max(tensors, key=lambda name: tensors[name].numel())
        return key, tensors[key]

    def send_nan(reply: bytes) -> bytes:
        key, value = largest_tensor(reply)
        return change_tensors(reply, {key: value * torch.nan})

    def send_wrong_shape(reply: bytes) -> bytes:
        key, value = largest_tensor(reply)
        return change_tensors(reply, {key: torch.cat([value, value])})

    FALSIFY = {
        "honest": lambda reply: reply,
        "replay": lambda reply: true_replies[0],
        "nan": send_nan,
        "shape": send_wrong_shape,
        "name": lambda reply: change_header(reply, site="site-01"),
        "oversize": lambda reply: change_tensors(reply, {"mean/more": torch.zeros(17 << 20)}),
        "garbage": lambda reply: b"HF3\0" + os.urandom(1000),
        "weight": lambda reply: change_header(reply, weight=1e8),
    }
    reply_kinds = os.environ["FALSE_REPLIES"].split()
    answer_message, execute = RunWorker.answer_message, SiteExecutor.execute

    def answer_falsely(self: RunWorker, payload: bytes) -> bytes:
        reply = answer_message(self, payload)
        if deserialize_frame(payload)[0]["task"] != "train":
            return reply
        true_replies.append(reply)
        round_index = len(true_replies) - 1
        kind = reply_kinds[round_index] if round_index < len(reply_kinds) else "honest"
        return FALSIFY[kind](reply)

    def execute_after_requests(self, task_name, shareable, fl_ctx, abort_signal):  # type: ignore[no-untyped-def]
        stolen_path = HOME / "stolen.json"
        if stolen_path.exists():
            stolen_request = stolen_path.read_text()
            stolen_path.unlink()
            requests = (("site-03", "}{"), ("site-03", stolen_request), ("site-01", "}{"))
            replies = [request_receipt(fl_ctx, name, text) for name, text in requests]
            (HOME / "receipt_replies.json").write_text(json.dumps(replies))
        return execute(self, task_name, shareable, fl_ctx, abort_signal)

    def request_receipt(fl_ctx, name: str, request_json: str) -> str:  # type: ignore[no-untyped-def]
        """`name`: the site that this one claims to be."""
        engine = fl_ctx.get_engine()
        with engine.new_context() as context:
            context.set_prop(ReservedKey.IDENTITY_NAME, name, private=False, sticky=False)
            request = Shareable({JSON_TEXT_KEY: request_json, "epsilon": 99.0})
            replies = engine.send_aux_request(None, RECEIPT_TOPIC, request, 10.0, context)
        return str([reply.get(JSON_TEXT_KEY) for reply in replies.values()])

    RunWorker.answer_message = answer_falsely  # type: ignore[method-assign]
    SiteExecutor.execute = execute_after_requests  # type: ignore[method-assign]

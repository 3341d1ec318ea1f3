"""Only for the tests of security: a site that lies, in each training turn otherwise, and asks for what is not its own.

Found by the interpreter where this folder is on PYTHONPATH; nothing in hemofed itself can be asked to do that.
"""

import os
import sys

if "LIES" in os.environ and any("worker_process" in part for part in sys.orig_argv):
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
    sent: list[bytes] = []

    def changed(parcel: bytes, fields: dict = {}, **vectors: torch.Tensor) -> bytes:  # type: ignore[type-arg]  # noqa: B006
        header, found = deserialize_frame(parcel)
        return serialize_frame(
            header | fields, found | {key.replace("__", "/"): value for key, value in vectors.items()}
        )

    def vector(parcel: bytes) -> tuple[str, torch.Tensor]:
        found = deserialize_frame(parcel)[1]
        key = max(found, key=lambda name: found[name].numel())
        return key.replace("/", "__"), found[key]

    def nan(parcel: bytes) -> bytes:
        key, value = vector(parcel)
        return changed(parcel, **{key: value * torch.nan})

    def shape(parcel: bytes) -> bytes:
        key, value = vector(parcel)
        return changed(parcel, **{key: torch.cat([value, value])})

    def far(parcel: bytes) -> bytes:
        key, value = vector(parcel)
        return changed(parcel, **{key: value * 1e9})

    LIES = {
        "honest": lambda parcel: parcel,
        "replay": lambda parcel: sent[0],
        "nan": nan,
        "shape": shape,
        "name": lambda parcel: changed(parcel, {"site": "site-01"}),
        "oversize": lambda parcel: changed(parcel, mean__more=torch.zeros(17 << 20)),
        "garbage": lambda parcel: b"HF3\0" + os.urandom(1000),
        "weight": lambda parcel: changed(parcel, {"weight": 1e8}),
        "far": far,
    }
    told = os.environ["LIES"].split()
    answer, execute = RunWorker.answer_message, SiteExecutor.execute

    def lying(self: RunWorker, parcel: bytes) -> bytes:
        true = answer(self, parcel)
        if deserialize_frame(parcel)[0]["task"] != "train":
            return true
        sent.append(true)
        return LIES[told[len(sent) - 1] if len(sent) <= len(told) else "honest"](true)

    def asking(self, task_name, shareable, fl_ctx, abort_signal):  # type: ignore[no-untyped-def]
        if (HOME / "stolen.json").exists():
            stolen = (HOME / "stolen.json").read_text()
            (HOME / "stolen.json").unlink()
            heard = [ask(fl_ctx, *of) for of in (("site-03", "}{"), ("site-03", stolen), ("site-01", "}{"))]
            (HOME / "heard.json").write_text(json.dumps(heard))
        return execute(self, task_name, shareable, fl_ctx, abort_signal)

    def ask(fl_ctx, name: str, told: str) -> str:  # type: ignore[no-untyped-def]
        """A request for a receipt, by whoever this site claims to be."""
        engine = fl_ctx.get_engine()
        with engine.new_context() as context:
            context.set_prop(ReservedKey.IDENTITY_NAME, name, private=False, sticky=False)
            asked = Shareable({JSON_TEXT_KEY: told, "epsilon": 99.0})
            answers = engine.send_aux_request(None, RECEIPT_TOPIC, asked, 10.0, context)
        return str([answer.get(JSON_TEXT_KEY) for answer in answers.values()])

    RunWorker.answer_message, SiteExecutor.execute = lying, asking  # type: ignore[method-assign]

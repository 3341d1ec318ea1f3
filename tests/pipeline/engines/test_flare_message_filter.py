"""What comes over a site's connection: to the coordinator, in its own name, and only what a run needs."""

import pytest

pytest.importorskip("nvflare")

from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, MessageType
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.stream_const import (
    STREAM_ACK_TOPIC,
    STREAM_CHANNEL,
    STREAM_DATA_TOPIC,
    STREAM_ERROR_TOPIC,
    StreamHeaderKey,
)

from pipeline.engines.flare_message_filter import rejection_reason


def message(channel, topic, target="server", origin="north", kind=MessageType.REQ, **more):
    said = {
        MessageHeaderKey.ORIGIN: origin,
        MessageHeaderKey.DESTINATION: target,
        MessageHeaderKey.MSG_TYPE: kind,
        MessageHeaderKey.CHANNEL: channel,
        MessageHeaderKey.TOPIC: topic,
    }
    return Message(said | more, b"")


def streamed(channel, topic, target="server", as_topic=STREAM_DATA_TOPIC, **more):
    inner = {StreamHeaderKey.CHANNEL: channel, StreamHeaderKey.TOPIC: topic}
    return message(STREAM_CHANNEL, as_topic, target, **inner, **more)


@pytest.mark.parametrize("wrap", [message, streamed])
@pytest.mark.parametrize(
    ("channel", "topic", "target"),
    [
        ("task", "register", "server"),
        ("task", "heart_beat", "server"),
        ("cellnet.channel", "bye", "server"),
        ("server_command", "get_task", "server.job"),
        ("server_command", "submit_update", "server.job"),
        ("aux_communication", "hemofed.receipt", "server.job"),
        ("return_only", "any", "server"),
    ],
)
def test_what_a_run_needs_passes(wrap, channel, topic, target):
    assert rejection_reason("north", wrap(channel, topic, target)) == ""
    assert rejection_reason("north", wrap(channel, topic, target, origin="north.job")) == ""


@pytest.mark.parametrize("wrap", [message, streamed])
@pytest.mark.parametrize(
    ("channel", "topic", "target"),
    [
        ("admin", "sys.shell", "south"),
        ("client_command", "abort", "south.job"),
        ("task", "register", "south"),
        ("return_only", "any", "south"),
        ("aux_communication", "x", "south.job"),
        ("aux_communication", "x", "server"),
        ("server_command", "abort", "server.job"),
        ("server_command", "handle_dead_job", "server.job"),
        ("server_command", "get_task", "server"),
        ("server_parent_listener", "get_clients", "server"),
        ("_net_manager", "stop_cell", "server"),
        ("cellnet.channel", "bulk", "server"),
        ("hci_channel", "x", "server"),
    ],
)
def test_the_rest_does_not(wrap, channel, topic, target):
    assert rejection_reason("north", wrap(channel, topic, target))


def test_nor_what_is_said_in_anothers_name():
    for origin in ("south", "server", "northern", "server.job", ""):
        assert "in the name of" in rejection_reason("north", message("task", "heart_beat", origin=origin))


def test_replies_and_streams_go_back_but_no_run_is_ended_by_them():
    assert rejection_reason("north", message("", "", kind=MessageType.REPLY)) == ""
    assert rejection_reason("north", message("", "", "south", kind=MessageType.REPLY))
    assert rejection_reason("north", streamed("server_command", "get_task", as_topic=STREAM_ACK_TOPIC)) == ""
    ends = {StreamHeaderKey.ERROR_TYPE: "BlobSizeError"}
    assert rejection_reason(
        "north", streamed("server_command", "get_task", "server.job", as_topic=STREAM_ERROR_TOPIC, **ends)
    )

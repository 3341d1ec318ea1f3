"""The message filter: sites send only to the coordinator, under their own name, and only messages that a run needs."""

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


def make_message(channel, topic, target="server", origin="north", kind=MessageType.REQ, **extra_headers):
    headers = {
        MessageHeaderKey.ORIGIN: origin,
        MessageHeaderKey.DESTINATION: target,
        MessageHeaderKey.MSG_TYPE: kind,
        MessageHeaderKey.CHANNEL: channel,
        MessageHeaderKey.TOPIC: topic,
    }
    return Message(headers | extra_headers, b"")


def make_streamed_message(channel, topic, target="server", as_topic=STREAM_DATA_TOPIC, **extra_headers):
    inner = {StreamHeaderKey.CHANNEL: channel, StreamHeaderKey.TOPIC: topic}
    return make_message(STREAM_CHANNEL, as_topic, target, **inner, **extra_headers)


@pytest.mark.parametrize("wrap", [make_message, make_streamed_message])
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
def test_message_filter_passes_messages_that_a_run_needs(wrap, channel, topic, target):
    assert rejection_reason("north", wrap(channel, topic, target)) == ""
    assert rejection_reason("north", wrap(channel, topic, target, origin="north.job")) == ""


@pytest.mark.parametrize("wrap", [make_message, make_streamed_message])
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
def test_message_filter_rejects_other_messages(wrap, channel, topic, target):
    assert rejection_reason("north", wrap(channel, topic, target))


def test_message_filter_rejects_a_foreign_origin():
    for origin in ("south", "server", "northern", "server.job", ""):
        assert "with the origin" in rejection_reason("north", make_message("task", "heart_beat", origin=origin))


def test_message_filter_passes_replies_and_streams_but_not_a_blob_size_error():
    assert rejection_reason("north", make_message("", "", kind=MessageType.REPLY)) == ""
    assert rejection_reason("north", make_message("", "", "south", kind=MessageType.REPLY))
    assert (
        rejection_reason("north", make_streamed_message("server_command", "get_task", as_topic=STREAM_ACK_TOPIC)) == ""
    )
    error_headers = {StreamHeaderKey.ERROR_TYPE: "BlobSizeError"}
    assert rejection_reason(
        "north",
        make_streamed_message("server_command", "get_task", "server.job", as_topic=STREAM_ERROR_TOPIC, **error_headers),
    )

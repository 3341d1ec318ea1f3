"""Real TLS through the one port: a gRPC server on one side, uvicorn on the other."""

import contextlib
import socket
import ssl
import threading
import time
from concurrent import futures

import grpc
import httpx
import pytest
from fastapi import FastAPI, Request

from pipeline.service.runtime.tls_router import (
    BUFFER_BYTES,
    MAX_HELLO_BYTES,
    NotTlsError,
    TlsRouter,
    parse_alpn_protocols,
)
from tests.support.fake_coordinator import certificate_authority, serve_tls, wait_for

BIG = bytes(range(256)) * 4096 * 28  # 28 MB, as a model has
NOWHERE = ("127.0.0.1", 1)


def hello(alpn: list[str] | None) -> bytes:
    """As OpenSSL writes it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if alpn:
        context.set_alpn_protocols(alpn)
    out = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out, server_hostname="localhost").do_handshake()
    return out.read()


def in_records(whole: bytes, size: int) -> bytes:
    """The same handshake message in records of `size` bytes."""
    parts = [whole[5:][at : at + size] for at in range(0, len(whole) - 5, size)]
    return b"".join(whole[:3] + len(part).to_bytes(2, "big") + part for part in parts)


@pytest.mark.parametrize("alpn", [["h2"], ["h2", "http/1.1"], ["http/1.1"], None])
def test_protocols_are_read_however_the_hello_is_cut(alpn):
    whole = hello(alpn)
    for data in (whole, in_records(whole, 1), in_records(whole, 100)):
        assert parse_alpn_protocols(data) == tuple(alpn or ())
        assert parse_alpn_protocols(data + b"anything after it") == tuple(alpn or ())
        assert all(parse_alpn_protocols(data[:end]) is None for end in range(len(data)))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x15\x03\x01\x00\x02\x01\x00",  # an alert
        b"\x16\x02",  # SSL 2
        b"\x16\x03\x01\x00\x00",  # an empty record
        b"\x16\x03\x01\x00\x05\x02\x00\x00\x01\x00",  # a ServerHello
        b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00",  # a hello of one byte
        b"\x16\x03\x01\x00\x04\x01\xff\xff\xff",  # one of 16 MB
        b"\x16\x03\x01\xff\xff",
        in_records(b"12345" + b"\x01\x00\x3f\xff" + bytes(MAX_HELLO_BYTES - 5000), 100),  # never comes to its end
    ],
)
def test_what_is_no_hello_is_refused(data):
    with pytest.raises(NotTlsError):
        parse_alpn_protocols(data)


def test_every_cut_or_changed_extension_is_refused_or_read_but_never_crashes():
    whole = hello(["h2"])
    for at in range(5, len(whole)):
        changed = whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :]
        with contextlib.suppress(NotTlsError):
            assert isinstance(parse_alpn_protocols(changed), tuple | None)


@pytest.fixture
def flare(tmp_path):
    """A gRPC server that wants a client's certificate and turns its bytes round."""
    certificate, key = certificate_authority().write_server_certificate(tmp_path)
    credentials = grpc.ssl_server_credentials(
        [(key.read_bytes(), certificate.read_bytes())], certificate_authority().pem.encode(), require_client_auth=True
    )
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.server(futures.ThreadPoolExecutor(4), options=options)
    turn = grpc.unary_unary_rpc_method_handler(lambda data, context: data[::-1])
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test", {"turn": turn})])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    client = grpc.ssl_channel_credentials(certificate_authority().pem.encode(), key.read_bytes(), certificate.read_bytes())
    yield port, client, options
    server.stop(0).wait()


@pytest.fixture
def front():
    made = []

    def make(web=NOWHERE[1], flare=NOWHERE[1], **limits) -> TlsRouter:
        made.append(TlsRouter("127.0.0.1", 0, ("127.0.0.1", web), ("127.0.0.1", flare), **limits).start())
        return made[-1]

    yield make
    for one in made:
        one.stop()


def test_grpc_and_https_share_a_port(tmp_path, flare, front):
    app, seen = FastAPI(), []

    @app.post("/turn")
    async def turn(request: Request) -> int:
        seen.append((request.client.host, both.peer_address(request.client.port)))
        return len(await request.body())

    port, credentials, options = flare
    with serve_tls(app, tmp_path) as web:
        both = front(web, port)
        context = ssl.create_default_context(cadata=certificate_authority().pem)
        with grpc.secure_channel(f"localhost:{both.port}", credentials, options) as channel:
            call = channel.unary_unary("/test/turn")
            with httpx.Client(base_url=f"https://localhost:{both.port}", verify=context) as client:
                assert client.post("/turn", content=BIG, timeout=30).json() == len(BIG)
                assert call(BIG, timeout=30) == BIG[::-1]
                assert client.post("/turn", content=b"").json() == 0
                assert seen == [("127.0.0.1", "127.0.0.1")] * 2
                assert both.num_connections == 2
        wait_for(lambda: both.num_connections == 0)
        assert both.peer_address(1) is None
        assert both._peer_by_port == {}


def test_a_foreign_certificate_is_not_hidden_by_the_front(flare, front):
    """The front ends no TLS: the gRPC server itself refuses a client without a certificate."""
    port, _, options = flare
    both = front(flare=port)
    bare = grpc.ssl_channel_credentials(certificate_authority().pem.encode())
    with (
        grpc.secure_channel(f"localhost:{both.port}", bare, options) as channel,
        pytest.raises(grpc.RpcError) as response,
    ):
        channel.unary_unary("/test/turn")(b"x", timeout=5)
    assert response.value.code() == grpc.StatusCode.UNAVAILABLE


def talk(port: int, data: bytes, seconds: float = 10) -> bytes:
    """All that comes back until the other side closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as client:
        client.sendall(data)
        back = b""
        while more := client.recv(65536):
            back += more
        return back


def test_plain_http_is_told_that_this_is_a_tls_port(front):
    port = front().port
    answer = talk(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"this is a TLS port" in answer
    assert talk(port, b"SSH-2.0-OpenSSH\r\n") == b""


def test_nobody_behind_it_closes_and_says_so(front, caplog):
    assert talk(front().port, hello(["h2"])) == b""
    assert "nobody listens for flare at 127.0.0.1:1" in caplog.text


def test_a_slow_hello_is_given_up(front, monkeypatch):
    monkeypatch.setattr("pipeline.service.runtime.tls_router.HELLO_TIMEOUT_SECONDS", 0.3)
    began = time.monotonic()
    assert talk(front().port, hello(["h2"])[:50]) == b""
    assert 0.2 < time.monotonic() - began < 5


def test_connections_of_an_address_are_limited_and_free_again(front):
    with socket.create_server(("127.0.0.1", 0)) as web:
        both = front(web.getsockname()[1], max_per_address=2)
        whole = hello(None)
        held = [socket.create_connection(("127.0.0.1", both.port)) for _ in range(2)]
        wait_for(lambda: both.num_connections == 2)
        assert talk(both.port, b"") == b""
        for one in held:
            one.close()
        wait_for(lambda: both.num_connections == 0)
        with socket.create_connection(("127.0.0.1", both.port)) as again:
            again.sendall(whole)
            with web.accept()[0] as inside:
                assert inside.recv(65536) == whole


def test_half_a_close_passes_and_a_slow_reader_holds_the_sender_back(front):
    with socket.create_server(("127.0.0.1", 0)) as web:
        both = front(web.getsockname()[1])
        with socket.create_connection(("127.0.0.1", both.port), timeout=10) as client:
            first, sent = hello(None), []
            client.sendall(first)
            inside = web.accept()[0]
            with inside:
                inside.settimeout(10)

                def send() -> None:
                    for at in range(0, len(BIG), BUFFER_BYTES):
                        client.sendall(BIG[at : at + BUFFER_BYTES])
                        sent.append(at)
                    client.shutdown(socket.SHUT_WR)

                sender = threading.Thread(target=send)
                sender.start()
                time.sleep(0.5)
                held = len(sent)
                time.sleep(0.3)
                assert (
                    len(sent) == held < len(BIG) // BUFFER_BYTES
                )  # kernel buffers and ours are full, no more is taken
                whole = b""
                while more := inside.recv(1 << 20):
                    whole += more
                sender.join()
                assert whole == first + BIG
                inside.sendall(b"heard all")  # the other direction is still open
                inside.shutdown(socket.SHUT_WR)
                assert client.recv(100) == b"heard all"
                assert client.recv(100) == b""
        wait_for(lambda: both.num_connections == 0)


def test_stopping_closes_what_is_open(front):
    with socket.create_server(("127.0.0.1", 0)) as web:
        both = front(web.getsockname()[1])
        with socket.create_connection(("127.0.0.1", both.port), timeout=5) as client:
            client.sendall(hello(None))
            with web.accept()[0] as inside:
                both.stop()
                assert client.recv(1) == b""
                inside.recv(65536)
                assert inside.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", both.port))

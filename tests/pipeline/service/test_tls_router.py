"""The TLS router with real TLS: a gRPC server and uvicorn behind one port."""

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

LARGE_BODY = bytes(range(256)) * 4096 * 28  # 28 MB, the size of a model
CLOSED_PORT = 1


def make_client_hello(alpn: list[str] | None) -> bytes:
    """A ClientHello of OpenSSL."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if alpn:
        context.set_alpn_protocols(alpn)
    out = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out, server_hostname="localhost").do_handshake()
    return out.read()


def split_records(hello: bytes, size: int) -> bytes:
    """The same handshake message in records of `size` bytes."""
    parts = [hello[5:][start : start + size] for start in range(0, len(hello) - 5, size)]
    return b"".join(hello[:3] + len(part).to_bytes(2, "big") + part for part in parts)


@pytest.mark.parametrize("alpn", [["h2"], ["h2", "http/1.1"], ["http/1.1"], None])
def test_alpn_protocols_are_parsed_from_any_split_into_records(alpn):
    hello = make_client_hello(alpn)
    for data in (hello, split_records(hello, 1), split_records(hello, 100)):
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
        split_records(b"12345" + b"\x01\x00\x3f\xff" + bytes(MAX_HELLO_BYTES - 5000), 100),  # never complete
    ],
)
def test_bytes_that_are_no_client_hello_are_rejected(data):
    with pytest.raises(NotTlsError):
        parse_alpn_protocols(data)


def test_corrupted_client_hello_is_parsed_or_rejected():
    hello = make_client_hello(["h2"])
    for index in range(5, len(hello)):
        changed = hello[:index] + bytes([hello[index] ^ 0xFF]) + hello[index + 1 :]
        with contextlib.suppress(NotTlsError):
            assert isinstance(parse_alpn_protocols(changed), tuple | None)


@pytest.fixture
def flare(tmp_path):
    """A gRPC server that requires a client certificate and answers with the reversed bytes."""
    certificate, key = certificate_authority().write_server_certificate(tmp_path)
    credentials = grpc.ssl_server_credentials(
        [(key.read_bytes(), certificate.read_bytes())], certificate_authority().pem.encode(), require_client_auth=True
    )
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.server(futures.ThreadPoolExecutor(4), options=options)
    reverse = grpc.unary_unary_rpc_method_handler(lambda data, context: data[::-1])
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test", {"reverse": reverse})])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    client = grpc.ssl_channel_credentials(
        certificate_authority().pem.encode(), key.read_bytes(), certificate.read_bytes()
    )
    yield port, client, options
    server.stop(0).wait()


@pytest.fixture
def create_router():
    routers = []

    def create(web=CLOSED_PORT, flare=CLOSED_PORT, **limits) -> TlsRouter:
        routers.append(TlsRouter("127.0.0.1", 0, ("127.0.0.1", web), ("127.0.0.1", flare), **limits).start())
        return routers[-1]

    yield create
    for router in routers:
        router.stop()


def test_grpc_and_https_share_a_port(tmp_path, flare, create_router):
    app, peers = FastAPI(), []

    @app.post("/length")
    async def body_length(request: Request) -> int:
        peers.append((request.client.host, router.peer_address(request.client.port)))
        return len(await request.body())

    port, credentials, options = flare
    with serve_tls(app, tmp_path) as web:
        router = create_router(web, port)
        context = ssl.create_default_context(cadata=certificate_authority().pem)
        with grpc.secure_channel(f"localhost:{router.port}", credentials, options) as channel:
            call = channel.unary_unary("/test/reverse")
            with httpx.Client(base_url=f"https://localhost:{router.port}", verify=context) as client:
                assert client.post("/length", content=LARGE_BODY, timeout=30).json() == len(LARGE_BODY)
                assert call(LARGE_BODY, timeout=30) == LARGE_BODY[::-1]
                assert client.post("/length", content=b"").json() == 0
                assert peers == [("127.0.0.1", "127.0.0.1")] * 2
                assert router.num_connections == 2
        wait_for(lambda: router.num_connections == 0)
        assert router.peer_address(1) is None
        assert router._peer_by_port == {}


def test_grpc_server_itself_checks_client_certificates(flare, create_router):
    """The router does not terminate TLS, so the gRPC server refuses a client without a certificate."""
    port, _, options = flare
    router = create_router(flare=port)
    credentials = grpc.ssl_channel_credentials(certificate_authority().pem.encode())
    with (
        grpc.secure_channel(f"localhost:{router.port}", credentials, options) as channel,
        pytest.raises(grpc.RpcError) as raised,
    ):
        channel.unary_unary("/test/reverse")(b"x", timeout=5)
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE


def send_and_receive(port: int, data: bytes, timeout: float = 10) -> bytes:
    """Everything received until the other side closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as client:
        client.sendall(data)
        received = b""
        while chunk := client.recv(65536):
            received += chunk
        return received


def test_plain_http_gets_an_explanation(create_router):
    port = create_router().port
    answer = send_and_receive(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"this is a TLS port" in answer
    assert send_and_receive(port, b"SSH-2.0-OpenSSH\r\n") == b""


def test_unreachable_server_is_logged_and_the_connection_closed(create_router, caplog):
    assert send_and_receive(create_router().port, make_client_hello(["h2"])) == b""
    assert "the flare server at 127.0.0.1:1 cannot be reached" in caplog.text


def test_slow_client_hello_times_out(create_router, monkeypatch):
    monkeypatch.setattr("pipeline.service.runtime.tls_router.HELLO_TIMEOUT_SECONDS", 0.3)
    started_at = time.monotonic()
    assert send_and_receive(create_router().port, make_client_hello(["h2"])[:50]) == b""
    assert 0.2 < time.monotonic() - started_at < 5


def test_connections_per_address_are_limited(create_router):
    with socket.create_server(("127.0.0.1", 0)) as web:
        router = create_router(web.getsockname()[1], max_per_address=2)
        hello = make_client_hello(None)
        connections = [socket.create_connection(("127.0.0.1", router.port)) for _ in range(2)]
        wait_for(lambda: router.num_connections == 2)
        assert send_and_receive(router.port, b"") == b""
        for connection in connections:
            connection.close()
        wait_for(lambda: router.num_connections == 0)
        with socket.create_connection(("127.0.0.1", router.port)) as client:
            client.sendall(hello)
            with web.accept()[0] as upstream:
                assert upstream.recv(65536) == hello


def test_half_close_is_forwarded_and_a_slow_reader_slows_the_sender(create_router):
    with socket.create_server(("127.0.0.1", 0)) as web:
        router = create_router(web.getsockname()[1])
        with socket.create_connection(("127.0.0.1", router.port), timeout=10) as client:
            hello, sent = make_client_hello(None), []
            client.sendall(hello)
            upstream = web.accept()[0]
            with upstream:
                upstream.settimeout(10)

                def send() -> None:
                    for start in range(0, len(LARGE_BODY), BUFFER_BYTES):
                        client.sendall(LARGE_BODY[start : start + BUFFER_BYTES])
                        sent.append(start)
                    client.shutdown(socket.SHUT_WR)

                sender = threading.Thread(target=send)
                sender.start()
                time.sleep(0.5)
                num_sent = len(sent)
                time.sleep(0.3)
                # the buffers are full, so that no more is accepted
                assert len(sent) == num_sent < len(LARGE_BODY) // BUFFER_BYTES
                received = b""
                while chunk := upstream.recv(1 << 20):
                    received += chunk
                sender.join()
                assert received == hello + LARGE_BODY
                upstream.sendall(b"received all")  # the other direction is still open
                upstream.shutdown(socket.SHUT_WR)
                assert client.recv(100) == b"received all"
                assert client.recv(100) == b""
        wait_for(lambda: router.num_connections == 0)


def test_stop_closes_open_connections(create_router):
    with socket.create_server(("127.0.0.1", 0)) as web:
        router = create_router(web.getsockname()[1])
        with socket.create_connection(("127.0.0.1", router.port), timeout=5) as client:
            client.sendall(make_client_hello(None))
            with web.accept()[0] as upstream:
                router.stop()
                assert client.recv(1) == b""
                upstream.recv(65536)
                assert upstream.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", router.port))

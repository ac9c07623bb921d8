"""A connection that is another's is cut, so that whoever waits for it goes on."""

import os
import socket

import psutil

from dp_ray.system.linux import cut_sockets, open_sockets


def connected() -> tuple[socket.socket, socket.socket, socket.socket]:
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    return listener, one, listener.accept()[0]


def test_the_reader_gets_what_has_arrived_and_then_the_end() -> None:
    before = open_sockets()
    listener, one, other = connected()
    with listener, one, other:
        new = dict(open_sockets().items() - before.items())
        assert new.keys() == {each.fileno() for each in (listener, one, other)}
        other.sendall(b"arrived")
        cut_sockets({one.fileno(): new[one.fileno()], listener.fileno(): new[listener.fileno()]})
        one.settimeout(10)
        assert one.recv(100) == b"arrived" and one.recv(100) == b""
        one.sendall(b"still")
        other.settimeout(10)
        assert other.recv(100) == b"still"
        with socket.create_connection(listener.getsockname()):
            listener.accept()[0].close()


def test_another_socket_of_the_same_descriptor_stays() -> None:
    listener, one, other = connected()
    with listener, one, other:
        earlier = {one.fileno(): open_sockets()[one.fileno()]}
        there, again = socket.socketpair()
        with there, again:
            os.dup2(there.fileno(), one.fileno())  # as where the first one was closed, and its number given again
            cut_sockets(earlier)
            again.sendall(b"x")
            there.settimeout(10)
            assert there.recv(1) == b"x"


def test_what_is_no_socket_or_closed_is_passed_over() -> None:
    with open(os.devnull) as file:
        assert file.fileno() not in open_sockets()
        before = psutil.Process().num_fds()
        cut_sockets({file.fileno(): 1, 12345: 2})
        assert psutil.Process().num_fds() == before, "a copy of the file's descriptor holds it open"

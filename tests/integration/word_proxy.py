"""A network that breaks when a certain word is sent."""

from __future__ import annotations

import contextlib
import socket
import threading


class WordProxy:
    """A network that resets the connection over which a certain word is sent, once.

    `lose_reply`: the server gets the word and answers it, and the answer is thrown away.
    `lose_request`: the server never gets the word.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._armed: tuple[bytes, bool] | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        self.resets = 0

    def lose_reply(self, word: str) -> None:
        self._armed = (word.encode(), True)

    def lose_request(self, word: str) -> None:
        self._armed = (word.encode(), False)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._sockets:
            self._end(one)
        for thread in self._threads:
            thread.join(60)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, timeout=10)
            except OSError:
                self._end(client)
                continue
            server.settimeout(None)
            self._sockets += [client, server]
            for pair in ((client, server, True), (server, client, False)):
                thread = threading.Thread(target=self._copy, args=pair, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _copy(self, reader: socket.socket, writer: socket.socket, to_server: bool) -> None:
        with contextlib.suppress(OSError):
            while chunk := reader.recv(65536):
                armed = self._armed
                if to_server and armed is not None and armed[0] in chunk:
                    self._armed = None
                    self._break(reader, writer, chunk, deliver=armed[1])
                    return
                writer.sendall(chunk)
        self._end(writer)
        self._end(reader)

    def _break(
        self, client: socket.socket, server: socket.socket, chunk: bytes, *, deliver: bool
    ) -> None:
        self.resets += 1
        # The client's side goes first, so that the answer has nowhere to go.
        self._end(client)
        if deliver:
            server.sendall(chunk)
            # The other thread reads the answer, fails to hand it on, and closes the server's side.
        else:
            self._end(server)

    @staticmethod
    def _end(one: socket.socket) -> None:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()

"""An object store in this process, faulty://bucket/..., whose requests fail, get lost or come from a dying process."""

import random
import threading
from collections.abc import Callable
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


class Killed(BaseException):
    """The process is dead: whatever it asks for from now on does not happen."""


class Store:
    """Objects, and what happens to requests: `fault` returns a word for the number of each request."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.overwritten: list[str] = []
        self.uploads: set[object] = set()
        self.late: list[Callable[[], Any]] = []
        self.set_fault()

    def set_fault(self, fault: Callable[[int], str] = lambda number: "") -> None:
        self.fault, self.requests, self.faults = fault, 0, 0

    def request(self, act: Callable[[], Any]) -> Any:
        with self.lock:
            self.requests += 1
            kind = self.fault(self.requests)
            self.faults += bool(kind)
            if kind == "killed before":
                raise Killed
            if kind == "failed":
                raise TimeoutError("Read timeout on endpoint")
            if kind == "late":
                self.late.append(act)
                raise TimeoutError("Read timeout on endpoint")
            answer = act()
            if kind == "killed after":
                raise Killed
            if kind == "lost":
                raise ConnectionResetError("Connection reset by peer")
            return answer

    def put(self, path: str, data: bytes, mode: str = "overwrite") -> None:
        if path in self.objects:
            if mode == "create":
                raise FileExistsError(path)
            if self.objects[path] != data:
                self.overwritten.append(path)
        self.objects[path] = data


STORE = Store()


class FaultyFileSystem(AbstractFileSystem):
    protocol = "faulty"

    def find(self, path: str, detail: bool = False, **options: Any) -> Any:
        above = self._strip_protocol(path) + "/"
        sizes = STORE.request(lambda: {key: len(data) for key, data in STORE.objects.items() if key.startswith(above)})
        return {key: {"size": size} for key, size in sizes.items()} if detail else sorted(sizes)

    def info(self, path: str, **options: Any) -> Any:
        def look() -> Any:
            key = self._strip_protocol(path)
            if key in STORE.objects:
                return {"type": "file"}
            if any(stored_key.startswith(f"{key}/") for stored_key in STORE.objects):
                return {"type": "directory"}
            raise FileNotFoundError(path)

        return STORE.request(look)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        def read() -> bytes:
            if (key := self._strip_protocol(path)) not in STORE.objects:
                raise FileNotFoundError(path)
            return STORE.objects[key][start:end]

        return STORE.request(read)

    def get_file(self, path: str, target: str, **options: Any) -> None:
        data = self.cat_file(path)
        with open(target, "wb") as file:
            file.write(data)

    def pipe_file(self, path: str, data: bytes, mode: str = "overwrite", **options: Any) -> None:
        STORE.request(lambda: STORE.put(self._strip_protocol(path), bytes(data), mode))

    def rm_file(self, path: str) -> None:
        STORE.request(lambda: STORE.objects.pop(self._strip_protocol(path), None))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> "Upload":
        options["block_size"] = 256  # some parts, also of a small file
        return Upload(self, path, mode, **options)


class Upload(AbstractBufferedFile):
    """An upload in parts, which is there when it is completed."""

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []
        STORE.request(lambda: STORE.uploads.add(self))

    def _upload_chunk(self, final: bool = False) -> bool:
        part = self.buffer.getvalue()
        STORE.request(lambda: self.parts.append(part))
        if final:
            STORE.request(lambda: (STORE.put(self.path, b"".join(self.parts)), STORE.uploads.discard(self)))
        return True

    def discard(self) -> None:
        STORE.request(lambda: STORE.uploads.discard(self))


def some_fail(seed: int, share: float = 0.05) -> Callable[[int], str]:
    """Return a fault for a share of requests: they fail, or are done and their answer is lost."""
    draws = random.Random(seed)
    return lambda number: draws.choice(("failed", "lost")) if draws.random() < share else ""


fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)

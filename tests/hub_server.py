"""A stand-in for the buckets of the Hugging Face Hub: what huggingface_hub and hf_xet ask of it, on this machine.

Formats after https://huggingface.co/docs/xet: a xorb holds chunks, and a shard says of which chunks files consist.
"""

import json
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

HEADER = 48
"""Bytes of a shard's header, and of each of its entries."""
VERIFIED, HAS_METADATA = 1 << 31, 1 << 30


class Store:
    """Buckets, and the contents of their files."""

    def __init__(self):
        self.guard = threading.Lock()
        self.buckets, self.xorbs, self.files = {}, {}, {}

    def add_xorb(self, key, data):
        """Store a xorb as the chunks that it holds, each with its place in the data."""
        chunks, place = [], 0
        while place < len(data) and not data[place:].startswith(b"XETBLOB"):
            size = int.from_bytes(data[place + 1 : place + 4], "little")
            assert data[place + 4] == 0, "HF_XET_XORB_COMPRESSION_POLICY=none"
            chunks.append((place, place + 8 + size))
            place += 8 + size
        self.xorbs[key] = data, chunks

    def add_shard(self, data):
        """Store the pieces of each file: a xorb, its first chunk, the chunk after its last."""
        place = HEADER
        while (name := data[place : place + 32]) != b"\xff" * 32:
            flags, count = struct.unpack_from("<II", data, place + 32)
            pieces = []
            for entry in range(place + HEADER, place + HEADER * (1 + count), HEADER):
                _, size, first, end = struct.unpack_from("<IIII", data, entry + 32)
                pieces.append((key_of(data[entry : entry + 32]), first, end, size))
            self.files[key_of(name)] = pieces
            place += HEADER * (1 + count * (2 if flags & VERIFIED else 1) + bool(flags & HAS_METADATA))

    def content(self, key):
        """Return the bytes of a file."""
        content = b""
        for xorb, first, end, _ in self.files[key]:
            data, chunks = self.xorbs[xorb]
            content += b"".join(data[start + 8 : stop] for start, stop in chunks[first:end])
        return content

    def reconstruction(self, key, url):
        """Return where the pieces of a file are, as hf_xet reads it."""
        terms, places = [], {}
        for xorb, first, end, size in self.files[key]:
            chunks = self.xorbs[xorb][1]
            chunk_range = {"start": first, "end": end}
            terms.append({"hash": xorb, "unpacked_length": size, "range": chunk_range})
            byte_range = {"start": chunks[first][0], "end": chunks[end - 1][1] - 1}
            place = {"range": chunk_range, "url": f"{url}/xorb/{xorb}", "url_range": byte_range}
            places.setdefault(xorb, []).append(place)
        return {"offset_into_first_range": 0, "terms": terms, "fetch_info": places}


def key_of(name):
    """Return the text of a hash: four numbers of 64 bits."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", name))


class Hub(BaseHTTPRequestHandler):
    """One request, of the Hub's API or of its store of contents."""

    protocol_version = "HTTP/1.1"
    store = Store()

    def log_message(self, *_):
        """Write nothing."""

    def reply(self, body, status=200, headers=()):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": len(data), **dict(headers)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def missing(self):
        self.reply({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})

    @property
    def url(self):
        return "http://{}:{}".format(*self.server.server_address)

    def do_GET(self):
        address = urlsplit(self.path)
        with self.store.guard:
            match unquote(address.path).strip("/").split("/"):
                case ["api", "buckets", *_, "xet-read-token" | "xet-write-token"]:
                    token = {"accessToken": "tests", "exp": int(time.time()) + 3600, "casUrl": self.url}
                    names = ("X-Xet-Access-Token", "X-Xet-Token-Expiration", "X-Xet-Cas-Url")
                    self.reply(token, headers=dict(zip(names, token.values(), strict=True)))
                case ["api", "buckets", user, name]:
                    self.describe(f"{user}/{name}")
                case ["api", "buckets", user, name, "tree", *path]:
                    self.list("/".join((user, name)), "/".join(path), parse_qs(address.query))
                case ["buckets", user, name, "resolve", *path] if "/".join(path) in self.bucket(f"{user}/{name}"):
                    self.send_part(self.store.content(self.bucket(f"{user}/{name}")["/".join(path)]["xetHash"]))
                case ["v1", "reconstructions", key] if key in self.store.files:
                    self.reply(self.store.reconstruction(key, self.url))
                case ["xorb", key]:
                    self.send_part(self.store.xorbs[key][0])
                case _:
                    self.missing()

    do_HEAD = do_GET

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.store.guard:
            match unquote(urlsplit(self.path).path).strip("/").split("/"):
                case ["api", "buckets", user, name]:
                    self.store.buckets.setdefault(f"{user}/{name}", {})
                    self.reply({"url": f"{self.url}/buckets/{user}/{name}"})
                case ["api", "buckets", user, name, "paths-info"]:
                    files = self.bucket(f"{user}/{name}")
                    self.reply([files[path] for path in json.loads(body)["paths"] if path in files])
                case ["api", "buckets", user, name, "batch"]:
                    self.change(self.bucket(f"{user}/{name}"), [json.loads(line) for line in body.splitlines()])
                case [*_, "xorbs", "default", key]:
                    self.store.add_xorb(key, body)
                    self.reply({"was_inserted": True})
                case [*_, "shards"]:
                    self.store.add_shard(body)
                    self.reply({"result": 1})
                case _:
                    self.missing()

    def bucket(self, name):
        return self.store.buckets.get(name, {})

    def describe(self, name):
        if name not in self.store.buckets:
            return self.reply({"error": "Bucket not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        about = {"id": name, "private": True, "createdAt": "2026-01-01T00:00:00.000Z", "size": 0, "totalFiles": 0}
        return self.reply(about)

    def list(self, name, prefix, query):
        below = f"{prefix}/" if prefix else ""
        files = {path: file for path, file in self.bucket(name).items() if path.startswith(below) or path == prefix}
        if query.get("recursive") == ["true"] or query.get("recursive") == ["True"]:
            return self.reply(list(files.values()))
        direct = [file for path, file in files.items() if "/" not in path[len(below) :]]
        folders = {below + path[len(below) :].partition("/")[0] for path in files if "/" in path[len(below) :]}
        return self.reply(direct + [{"type": "directory", "path": path} for path in sorted(folders)])

    def change(self, files, operations):
        for operation in operations:
            path = operation["path"]
            if operation["type"] == "deleteFile":
                files.pop(path, None)
                continue
            key, now = operation["xetHash"], time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
            size = sum(piece[3] for piece in self.store.files[key])
            files[path] = {"type": "file", "path": path, "size": size, "xetHash": key, "mtime": now, "uploadedAt": now}
        self.reply({"success": True, "processed": len(operations), "succeeded": len(operations), "failed": []})

    def send_part(self, data):
        """Send the bytes that the header Range asks for, or all."""
        asked = self.headers.get("Range")
        if not asked:
            return self.reply(data, headers={"Content-Type": "application/octet-stream"})
        first, _, last = asked.removeprefix("bytes=").partition("-")
        content = data[int(first) : int(last) + 1 if last else None]
        headers = {"Content-Range": f"bytes {first}-{int(first) + len(content) - 1}/{len(data)}"}
        return self.reply(content, 206, {"Content-Type": "application/octet-stream", **headers})


@contextmanager
def serve_hub() -> Iterator[dict[str, str]]:
    """Run the stand-in at HF_ENDPOINT; yield the other variables that huggingface_hub and hf_xet need for it."""
    server = ThreadingHTTPServer(("127.0.0.1", int(os.environ["HF_ENDPOINT"].rpartition(":")[2])), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield {
        "HF_TOKEN": "hf_tests",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_XET_TELEMETRY_ENABLED": "false",
        "HF_XET_CLIENT_LEGACY_DIRECT_XORB_UPLOAD": "true",
        "HF_XET_XORB_COMPRESSION_POLICY": "none",
        "HF_XET_CLIENT_RECONSTRUCTION_API_VERSION": "1",
        "HF_XET_CLIENT_SHARD_API_VERSION": "1",
    }
    server.shutdown()
    server.server_close()

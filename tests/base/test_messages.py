"""Legato's messages on the streams of the program."""

import io

from legato.base.messages import STDERR


def test_a_message_is_written_to_a_stream_that_does_not_count(monkeypatch):
    """Replacement of stderr, as some packages have it: `write` returns nothing."""

    class Uncounted(io.StringIO):
        def write(self, text):
            super().write(text)

    stream = Uncounted()
    monkeypatch.setattr("sys.stderr", stream)
    assert STDERR.write("a message\n") == len("a message\n")
    assert stream.getvalue() == "a message\n"

"""API keys: digests, hot reload, salts, and no public address without them."""

import hmac
import os
import time
from pathlib import Path

import pytest

from app import security
from app.security import Keys, UnsafeBind, check_bind


def test_without_keys_everybody_may_come_in():
    assert Keys().salt(None) == ""
    assert not Keys().required


def test_several_keys_each_with_its_own_salt():
    keys = Keys("alpha, beta")
    salts = {keys.salt(b"Bearer alpha"), keys.salt(b"bearer beta")}
    assert len(salts) == 2
    assert None not in salts
    assert "" not in salts
    assert all("alpha" not in salt and "beta" not in salt for salt in salts)
    assert keys.salt(b"Bearer alpha") == keys.salt(b"Bearer alpha")


WRONG = [None, b"", b"Bearer", b"Bearer ", b"Bearer alph", b"Bearer alphaa", b"Basic alpha", b"alpha", b"Bearer \xff"]


@pytest.mark.parametrize("header", WRONG)
def test_wrong_keys_stay_out(header):
    assert Keys("alpha").salt(header) is None


def test_every_key_is_compared_whatever_the_first_says(monkeypatch):
    seen = []
    real = hmac.compare_digest
    monkeypatch.setattr(security.hmac, "compare_digest", lambda a, b: seen.append(a) or real(a, b))
    keys = Keys("a,b,c,d")
    keys.salt(b"Bearer a")
    assert len(seen) == 4


def test_key_file_is_read_again(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("# ours\nfirst\n\nsecond # of the batch job\n")
    keys = Keys("", file)
    assert keys.salt(b"Bearer second")
    assert keys.salt(b"Bearer third") is None
    file.write_text("third\n")
    os.utime(file, ns=(1, 1))
    monkeypatch.setattr(security, "RELOAD_SECONDS", 0.0)
    assert keys.salt(b"Bearer third")
    assert keys.salt(b"Bearer first") is None
    file.unlink()
    assert keys.salt(b"Bearer third"), "an unreadable file keeps the keys there are"


def test_a_key_file_that_cannot_be_read_is_told_with_its_flag(tmp_path, monkeypatch):
    with pytest.raises(OSError, match=r"^--api-keys-file /nope cannot be read: No such file or directory; "):
        Keys("", Path("/nope"))
    file = tmp_path / "keys"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(OSError, match=r"^--api-keys-file .*/keys cannot be read: 'utf-8' codec"):
        Keys("", file)
    file.write_text("first\n")
    keys = Keys("", file)
    monkeypatch.setattr(security, "RELOAD_SECONDS", 0.0)
    file.write_bytes(b"\xff\xfe\xff")
    assert keys.salt(b"Bearer first"), "what is no text keeps the keys there are"


KEY_LINES = {
    "a # inside a key belongs to it": (b"with#hash-secret\n", ["with#hash-secret"], ["with"]),
    "a # after white space does not": (b"key # ours\ntab\t# theirs\n", ["key", "tab"], ["key # ours", "key #"]),
    "lines that are comments": (b"#first\n  # second\nlast", ["last"], ["#first", "first", "# second"]),
    "a mark before the first key": (b"\xef\xbb\xbffirst\r\nsecond\r\n", ["first", "second"], ["\ufefffirst"]),
    "keys in any letters": ("ключ-1\ncaf\u00e9\n".encode(), ["ключ-1", "caf\u00e9"], ["cafe", "caf"]),
    "white space around": (b"  spaced\t\r\rold mac\r", ["spaced", "old mac"], ["old"]),
}


@pytest.mark.parametrize(("data", "valid", "wrong"), KEY_LINES.values(), ids=KEY_LINES)
def test_what_a_line_of_the_key_file_means(tmp_path, data, valid, wrong):
    file = tmp_path / "keys"
    file.write_bytes(data)
    keys = Keys("", file)
    assert all(keys.salt(b"Bearer " + key.encode()) for key in valid)
    assert not any(keys.salt(b"Bearer " + key.encode()) for key in wrong)


def test_keys_in_any_letters_come_from_the_environment_too():
    keys = Keys("ключ, caf\u00e9")
    assert keys.salt("Bearer ключ".encode())
    assert keys.salt("Bearer caf\u00e9".encode())
    assert keys.salt("Bearer caf\u00e9".encode("latin-1")) is None, "another spelling in bytes is another key"


@pytest.mark.parametrize("bad", ["secret\x85half", "secret\x0bhalf", "secret\u00a0half", "\ufeffsecret", "secret\x00"])
def test_a_key_that_no_header_can_carry_is_refused_unshown(tmp_path, monkeypatch, caplog, bad):
    file = tmp_path / "keys"
    file.write_bytes(("good\n" + bad + "\n").encode())
    with pytest.raises(OSError, match="line 2 holds a character that does not print") as told:
        Keys("", file)
    assert "secret" not in str(told.value)
    with pytest.raises(ValueError, match="EVERSTREAM_API_KEYS: key 2 holds a character that does not print") as told:
        Keys(f"good,{bad}")
    assert "secret" not in str(told.value)
    file.write_text("first\n")
    keys = Keys("", file)
    monkeypatch.setattr(security, "RELOAD_SECONDS", 0.0)
    file.write_bytes(("good\n" + bad + "\n").encode())
    assert keys.salt(b"Bearer first"), "the keys there are stay"
    assert keys.salt(b"Bearer good") is None
    assert "line 2" in caplog.text
    assert "secret" not in caplog.text


def test_a_file_changed_within_its_time_stamp_is_read_again(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("aaaa\n")
    keys, status = Keys("", file), file.stat()
    monkeypatch.setattr(security, "RELOAD_SECONDS", 0.0)
    time.sleep(0.02)  # the kernel's clock for files ticks every few milliseconds
    file.write_text("bbbb\n")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert keys.salt(b"Bearer bbbb")
    assert keys.salt(b"Bearer aaaa") is None


def test_an_emptied_key_file_locks_out(tmp_path):
    file = tmp_path / "keys"
    file.write_text("")
    keys = Keys("", file)
    assert keys.required
    assert keys.salt(None) is None
    assert keys.salt(b"Bearer ") is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_public_bind_needs_keys_or_insecure(host):
    with pytest.raises(UnsafeBind, match="--insecure"):
        check_bind(host, Keys(), insecure=False)
    check_bind(host, Keys("k"), insecure=False)
    check_bind(host, Keys(), insecure=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.3.2.1"])
def test_loopback_is_free(host):
    check_bind(host, Keys(), insecure=False)

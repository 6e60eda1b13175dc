"""Certificates for tests of servers and brokers with TLS, made by the program openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the program openssl")


def make_certificate(
    folder: Path, name: str = "here", *words: str, names: str = "IP:127.0.0.1,DNS:localhost"
) -> tuple[Path, Path]:
    """(certificate, key) that sign themselves, by default for this machine's own names."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    made += ["-subj", "/CN=localhost", "-addext", f"subjectAltName={names}", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*made, *(words or ("-nodes",))], check=True, capture_output=True)
    return cert, key

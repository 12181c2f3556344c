"""Files a user starts from: a complete Flower app, and certificates and keys for its deployment."""

import datetime
import ipaddress
import re
from importlib import resources
from pathlib import Path
from typing import Any

from .. import check
from ..errors import ConfigError

_IN_PACKAGE = ("client.py", "server.py", "task.py")


def write_app(folder: Path) -> list[Path]:
    """Write a runnable app into a new folder and return its files."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-")
    if not name or not name[0].isalpha():
        raise ConfigError(f"the app is named after its folder, which must start with a letter: {folder.name!r}")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: name a new folder")
    package = name.replace("-", "_")
    written = []
    for source in sorted(resources.files("gradveil.engines").joinpath("flower_app").iterdir(), key=lambda f: f.name):
        if not source.name.endswith(".txt"):
            continue
        target = source.name.removesuffix(".txt")
        path = folder / package / target if target in _IN_PACKAGE else folder / target
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source.read_text().replace("@NAME@", name).replace("@PACKAGE@", package))
        written.append(path)
    (folder / package / "__init__.py").write_text('"""A federated app protected by gradveil."""\n')
    return [*written, folder / package / "__init__.py"]


def write_keys(folder: Path, host: str, nodes: int, days: int = 365) -> list[Path]:
    """Write an authority, the server's certificate for `host`, and one key pair for each node.

    Guarantees: secret files can be read by their owner only; nothing is overwritten.
    """
    check.at_least(1, nodes=nodes, days=days)
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: keys are never overwritten")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    top = _certificate("gradveil authority", authority, authority, None, None, days)
    files = {
        "ca.crt": top.public_bytes(Encoding.PEM),
        "server.crt": _certificate(host, server, authority, top, host, days).public_bytes(Encoding.PEM),
        "server.key": server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    }
    for i in range(nodes):
        key = ec.generate_private_key(ec.SECP384R1())
        files[f"node-{i}"] = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        files[f"node-{i}.pub"] = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"
    for name, body in files.items():
        path = folder / name
        path.touch(mode=0o644 if name.endswith((".crt", ".pub")) else 0o600)
        path.write_bytes(body)
    return [folder / name for name in files]


def _certificate(name: str, key: Any, signer: Any, issuer: Any, host: str | None, days: int) -> Any:
    """Return a certificate for `key`: an authority's own, or a server's for `host`, signed by `signer`."""
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=host is None, path_length=0 if host is None else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(_usage(host is None), critical=True)
    )
    if host is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName([_alternative(host)]), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return builder.sign(signer, SHA256())


def _usage(authority: bool) -> Any:
    from cryptography import x509

    names = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only")
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        decipher_only=False,
        **dict.fromkeys(names, False),
    )


def _alternative(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)

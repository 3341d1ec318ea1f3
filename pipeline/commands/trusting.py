"""`hemofed trust add | list | remove`."""

from __future__ import annotations

from deploy.trust import Trust, read_key
from pipeline.commands.output import console, print_json, table
from privacy.keys import fingerprint


def add_command(name: str, key: str, json: bool) -> None:
    public, trust = read_key(key), Trust.here()
    trust.add(name, public)
    mark = fingerprint(bytes.fromhex(public))
    if json:
        print_json({"name": name, "key": public, "fingerprint": mark, "file": str(trust.path)})
        return
    console.print(f"pinned {name}: {mark}", soft_wrap=True)
    console.print("have its owner read this fingerprint to you, by another way than the bundle came", soft_wrap=True)


def list_command(json: bool) -> None:
    trust = Trust.here()
    found = [{"name": n, "key": k, "fingerprint": fingerprint(bytes.fromhex(k))} for n, k in trust.keys().items()]
    if json:
        print_json(found)
    elif found:
        console.print(table(["name", "fingerprint"], [[row["name"], row["fingerprint"]] for row in found], words=2))
    else:
        console.print(f"no key is pinned ({trust.path}); hemofed trust add NAME KEY", soft_wrap=True)


def remove_command(name: str) -> None:
    Trust.here().remove(name)
    console.print(f"removed {name}")

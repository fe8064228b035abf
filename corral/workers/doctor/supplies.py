"""What a node has to have: files, devices, memory, space."""

from __future__ import annotations

from collections.abc import Sequence

from corral.findings import Finding
from corral.workers.doctor.asked import Asked, SeenNode, Space

MIB = 1 << 20
MEMORY_MIB = 128  # available for each device: below that a rank does not even come up


def supplies(nodes: Sequence[SeenNode], asked: Asked) -> list[Finding]:
    found = _files(nodes, asked)
    for node in nodes:
        found += _devices(node, asked)
        found.append(_shm(node, asked.shm_mib))
        found += [_disk(node, name, space, asked.disk_mib) for name, space in node.facts.disk.items()]
        found.append(_memory(node, asked.devices or node.devices or 1))
    return found


def _files(nodes: Sequence[SeenNode], asked: Asked) -> list[Finding]:
    """What no node has was named wrongly, which is nobody's place; what some have did not get everywhere."""
    found = []
    for check, path in [*([("script", asked.script)] if asked.script else []), *(("paths", p) for p in asked.paths)]:
        reasons = [node.facts.unreadable.get(path) for node in nodes]
        if None not in reasons:
            where = "on every node" if len(nodes) > 1 else "there"
            fix = "name a path that every node has"
            found.append(Finding(check, False, f"{path} {where}", str(reasons[0]), fix, kind="config"))
            continue
        fix = "copy it to every node, or share its folder"
        found += [
            Finding(check, why is None, path, why or path, fix, node.number)
            for node, why in zip(nodes, reasons, strict=True)
        ]
    return found


def _devices(node: SeenNode, asked: Asked) -> list[Finding]:
    resource, files, visible = asked.platform.ray_resource, node.facts.device_files, node.facts.visible
    wanted = asked.devices if asked.devices is not None else node.devices or 1
    found = []
    if node.devices is not None:
        fix = f"start the node with {wanted} {resource}, or ask for fewer devices"
        has = f"{node.devices} {resource}{node.others}"
        found.append(Finding("devices", node.devices >= wanted, f"{wanted} {resource}", has, fix, node.number))
    if files is not None:
        pattern = f"/dev/{asked.platform.device_files}"
        found.append(
            Finding(
                "device_files", files >= wanted, f"{wanted} files {pattern}", str(files),
                "give the node's container its devices", node.number,
            )
        )  # fmt: skip
    if visible is not None:
        listed = len([part for part in visible.split(",") if part.strip()])
        found.append(
            Finding(
                "visible_devices", listed >= wanted, f"{wanted} in {asked.platform.visible_devices}",
                f"{listed} ({visible[:80]!r})", "unset the variable where the node is started", node.number,
            )
        )  # fmt: skip
    return found


def _shm(node: SeenNode, wanted: int) -> Finding:
    space, fix = node.facts.shm, "give the node's container more shared memory (--shm-size, or an emptyDir of Memory)"
    if space is None:
        return Finding("shm", False, f"{wanted} MiB free in /dev/shm", "no /dev/shm", fix, node.number)
    return Finding(
        "shm", space.free >= wanted * MIB, f"{wanted} MiB free in /dev/shm", _free(space), fix, node.number,
        value=float(space.free // MIB), unit="MiB",
    )  # fmt: skip


def _disk(node: SeenNode, name: str, space: Space, wanted: int) -> Finding:
    expected = f"{wanted} MiB free for the {name} {space.folder}"
    value = float(space.free // MIB)
    if not space.writable:
        fix = "choose a folder that can be written"
        return Finding("disk", False, expected, "a folder that cannot be written", fix, node.number)
    fix = "free space, or choose another folder"
    return Finding(
        "disk", space.free >= wanted * MIB, expected, _free(space), fix, node.number, value=value, unit="MiB"
    )


def _memory(node: SeenNode, devices: int) -> Finding:
    available, total = (node.facts.memory[name] // MIB for name in ("available", "total"))
    wanted = MEMORY_MIB * devices
    return Finding(
        "memory", available >= wanted, f"{wanted} MiB available for {devices} devices",
        f"{available} of {total} MiB", "end what else runs there, or use fewer devices", node.number,
        value=float(available), unit="MiB",
    )  # fmt: skip


def _free(space: Space) -> str:
    return f"{space.free // MIB} of {space.total // MIB} MiB"

"""Generate the `ip -batch` and `tc -batch` lines of a lab's network; pure functions of the lab file.

Every host is a namespace with one interface into a hub namespace, which holds the bridges; nothing is created in the
namespace of the machine. Four places are shaped by htb, so that all contention is real:

- at the sender, a class per destination host below a class for the port;
- at the hub's end of every host's cable, a class per source host below a class for the receiving port;
- on both ends of the cable between a rack's bridge and the core, a class per host of the rack below the uplink;
- on the loopback interface of a host, a class per destination device: the link class inside the host.

Classes borrow up to their own rate from the class above, and share it evenly under contention. Rates are of payload and
are raised by the headers of a full packet. htb cannot emulate latency.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum

from pipefit.cluster.types import Cluster
from pipefit.lab.spec import HostPort, LabFile

NETWORK = "10.77"
"""Network of the lab: host h has 10.77.h.0/24, its device d the address .d+1. Used only inside namespaces of the
lab."""

HEADERS_BYTES = 14 + 20 + 32
"""Ethernet, IP, and TCP headers with timestamps, per packet."""

PACKETS_PER_S = 20000
"""Packets per second of all hosts together, a small load for two cores beside the ranks."""

INSIDE_PACKET_S = 5e-5
"""Seconds of one packet on an intra-host link, and the burst of its class."""

QUEUE_PACKETS = 20000
"""Queue length, so long that no packet is lost; TCP's windows keep queues shorter."""

BURST_S = 3e-4
"""Burst: a class may fall behind by this time and catch up. With a longer burst, short messages would take no time."""

HUB = "hub"
CORE = "core"
LOOPBACK_LIMIT_BYTES_PER_S = 2e9
"""An intra-host link faster than this is not shaped and runs at the speed of the loopback interface."""

QUIET = ("net.ipv6.conf.all.disable_ipv6=1", "net.ipv6.conf.default.disable_ipv6=1")
"""Settings of every namespace: no unsolicited IPv6 traffic."""

SETTINGS = (
    *QUIET,
    "net.ipv4.tcp_congestion_control=reno",
    "net.ipv4.tcp_slow_start_after_idle=0",
    "net.ipv4.tcp_no_metrics_save=1",
    "net.ipv4.tcp_rmem=4096 131072 4194304",
)
"""Settings of every host's namespace. No packet is lost here, so TCP needs no loss recovery and no cached metrics."""

RTO_MIN_S = 3
"""TCP's least retransmission timeout. No packet is lost, but queues grow longer than the default of 0.2 s, after which
TCP would retransmit all of them."""

AHEAD_S = 0.02
"""Send buffer, in seconds of the sender's fastest link, so that the sender wakes up less often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabRates:
    """Payload rates of the lab's links in bytes per second, after scaling. Matrices and lists are indexed by host."""

    pair: tuple[tuple[float, ...], ...]
    send: tuple[float, ...]
    receive: tuple[float, ...]
    inside: tuple[float, ...]
    "Rate between the devices of each host; 0 means not shaped."
    up: tuple[float, ...]
    down: tuple[float, ...]
    "Downlink of each rack."


def rates_of(lab: LabFile) -> LabRates:
    """Return all rates of the lab. A port without a rate in the file is as fast as its fastest link, or as the sum of
    its links if the file says that ports are not shared."""
    cluster, scale = lab.cluster, lab.size_scale
    hosts = cluster.hosts
    count = range(len(hosts))
    matrix = cluster.rails[0].bandwidth_bytes_per_s if cluster.rails else tuple((0.0,) * len(hosts) for _ in count)
    join = max if not cluster.rails or cluster.rails[0].shared_ports else sum
    send, receive = [], []
    for h, host in enumerate(hosts):
        port = lab.ports.get(host.name, HostPort())
        row = [matrix[h][b] for b in count if b != h] or [0.0]
        column = [matrix[a][h] for a in count if a != h] or [0.0]
        send.append((port.send_bytes_per_s or join(row)) / scale)
        receive.append((port.receive_bytes_per_s or join(column)) / scale)
    inside = [cluster.links[host.link].bandwidth_bytes_per_s / scale if host.devices > 1 else 0.0 for host in hosts]
    return LabRates(
        pair=tuple(
            tuple(0.0 if a == b else min(matrix[a][b] / scale, send[a], receive[b]) for b in count) for a in count
        ),
        send=tuple(send),
        receive=tuple(receive),
        inside=tuple(rate if rate < LOOPBACK_LIMIT_BYTES_PER_S else 0.0 for rate in inside),
        up=tuple(rack.up_bytes_per_s / scale for rack in lab.uplinks),
        down=tuple(rack.down_bytes_per_s / scale for rack in lab.uplinks),
    )


def packet_bytes(lab: LabFile) -> int:
    """Return the largest packet size: the smallest that this machine can handle when all hosts send at once. A message
    gains the time of about one packet, because the first packet of an idle class does not wait."""
    if lab.packet_bytes:
        return lab.packet_bytes
    return int(min(9000.0, max(1500.0, fsum(rates_of(lab).send) / PACKETS_PER_S)))


def inside_packet_bytes(lab: LabFile, host: int) -> int:
    """Return the largest packet size between the devices of a host; large, because these links are fast."""
    return int(min(60000.0, max(packet_bytes(lab), INSIDE_PACKET_S * rates_of(lab).inside[host])))


def device_address(host: int, device: int = 0) -> str:
    """Return the address of a device, as seen from all hosts."""
    return f"{NETWORK}.{host}.{device + 1}"


def device_interface(device: int) -> str:
    """Return the interface name by which gloo finds the device's own address on its host."""
    return f"eth0:{device}"


def host_settings(lab: LabFile, host: int) -> list[str]:
    """Return the kernel settings of a host's namespace."""
    rates = rates_of(lab)
    buffer = int(min(4e6, max(131072.0, AHEAD_S * max(*rates.pair[host], rates.inside[host]))))
    return [*SETTINGS, f"net.ipv4.tcp_wmem=4096 65536 {buffer}"]


def rack_of(lab: LabFile) -> dict[str, int]:
    """Map host name to the index of its rack. Hosts without a rack are absent."""
    return {host: index for index, rack in enumerate(lab.uplinks) for host in rack.hosts}


def hub_lines(lab: LabFile, prefix: str) -> list[str]:
    """Return the `ip` commands of the hub: bridges, cables of the racks, and a cable into the namespace of every
    host."""
    packet = packet_bytes(lab)
    lines = []
    for bridge in (CORE, *(f"rack{index}" for index in range(len(lab.uplinks)))):
        lines += [f"link add {bridge} type bridge mcast_snooping 0", f"link set {bridge} mtu {packet} up"]
    for index in range(len(lab.uplinks)):
        lines += [f"link add up{index} type veth peer name down{index}"]
        lines += [f"link set {_cable_lines(f'up{index}', packet)} master rack{index} up"]
        lines += [f"link set {_cable_lines(f'down{index}', packet)} master {CORE} up"]
    racks = rack_of(lab)
    for h, host in enumerate(lab.cluster.hosts):
        bridge = f"rack{racks[host.name]}" if host.name in racks else CORE
        lines += [f"link add host{h} type veth peer name eth0 netns {prefix}{host_namespace(h)}"]
        lines += [f"link set {_cable_lines(f'host{h}', packet)} master {bridge} up"]
    return lines


def host_lines(lab: LabFile, host: int) -> list[str]:
    """Return the `ip` commands of a host's namespace: an address for every device, each with a label for gloo."""
    packet = packet_bytes(lab)
    lines = [
        f"link set {_cable_lines('lo', inside_packet_bytes(lab, host))} up",
        f"link set {_cable_lines('eth0', packet)} up",
    ]
    for device in range(lab.cluster.hosts[host].devices):
        # Only the first address has the network's prefix. The others are /32 on this host, and all hosts route to it.
        length = 16 if device == 0 else 32
        lines.append(f"addr add {device_address(host, device)}/{length} dev eth0 label {device_interface(device)}")
    lines.append(f"route replace {NETWORK}.0.0/16 dev eth0 src {device_address(host)} rto_min {RTO_MIN_S}s")
    return lines


def host_namespace(host: int) -> str:
    """Return the last part of the name of a host's namespace."""
    return f"h{host}"


def host_shaping(lab: LabFile, host: int) -> list[str]:
    """Return the `tc` commands of a host's namespace: its outgoing traffic and the links between its devices."""
    rates, packet = rates_of(lab), packet_bytes(lab)
    leaves = [
        _HtbLeaf(f"dst {NETWORK}.{b}.0/24", rates.pair[host][b]) for b in range(len(rates.pair)) if rates.pair[host][b]
    ]
    lines = _htb_tree("eth0", rates.send[host], leaves, packet) if leaves else []
    inside = rates.inside[host]
    if inside:
        devices = range(lab.cluster.hosts[host].devices)
        ports = [_HtbLeaf(f"dst {device_address(host, device)}/32", inside) for device in devices]
        lines += _htb_tree("lo", inside * len(devices), ports, inside_packet_bytes(lab, host), INSIDE_PACKET_S)
    return lines


def hub_shaping(lab: LabFile) -> list[str]:
    """Return the `tc` commands of the hub: traffic towards the hosts, and the uplinks of racks."""
    rates, packet = rates_of(lab), packet_bytes(lab)
    names = {host.name: h for h, host in enumerate(lab.cluster.hosts)}
    lines = []
    for b in range(len(names)):
        leaves = [_HtbLeaf(f"src {NETWORK}.{a}.0/24", rates.pair[a][b]) for a in range(len(names)) if rates.pair[a][b]]
        # Each class has the port's rate: senders are shaped on their own side.
        lines += _htb_tree(
            f"host{b}", rates.receive[b], [_HtbLeaf(leaf.match, rates.receive[b]) for leaf in leaves], packet
        )
    for index, rack in enumerate(lab.uplinks):
        for device, match, rate in ((f"up{index}", "src", rates.up[index]), (f"down{index}", "dst", rates.down[index])):
            leaves = [_HtbLeaf(f"{match} {NETWORK}.{names[host]}.0/24", rate) for host in rack.hosts]
            lines += _htb_tree(device, rate, leaves, packet)
    return lines


def unmade_facts(cluster: Cluster, rates: LabRates) -> list[str]:
    """Describe the properties of the file that the lab does not emulate."""
    notes = []
    asked = [value for rail in cluster.rails for row in rail.latency_s for value in row if value > 1e-4]
    if asked:
        notes.append(
            f"latencies of up to {max(asked) * 1e3:g} ms: links have the latency of this machine, about 0.05 ms"
        )
    for host, rate in zip(cluster.hosts, rates.inside, strict=True):
        if host.devices > 1 and not rate:
            notes.append(f"links inside {host.name}: as fast as the loopback interface")
    return notes


@dataclass(frozen=True, slots=True)
class _HtbLeaf:
    match: str
    rate: float


def _cable_lines(name: str, packet: int) -> str:
    """Limit segmentation offload to the packet size: htb charges a larger packet as one, after it has been sent."""
    return f"dev {name} mtu {packet} gso_max_size {packet} txqueuelen {QUEUE_PACKETS}"


def _htb_tree(device: str, rate: float, leaves: list[_HtbLeaf], packet: int, burst_s: float = BURST_S) -> list[str]:
    lines = [
        f"qdisc add dev {device} root handle 1: htb",
        f"class add dev {device} parent 1: classid 1:1 {_htb_rates(rate, rate, packet, burst_s)}",
    ]
    for index, leaf in enumerate(leaves):
        class_id = f"1:{0x10 + index:x}"
        guaranteed = min(leaf.rate, rate / len(leaves))
        lines.append(
            f"class add dev {device} parent 1:1 classid {class_id} "
            f"{_htb_rates(guaranteed, min(leaf.rate, rate), packet, burst_s)}"
        )
        lines.append(
            f"filter add dev {device} parent 1: protocol ip prio 1 u32 match ip {leaf.match} flowid {class_id}"
        )
    return lines


def _htb_rates(rate: float, ceiling: float, packet: int, burst_s: float) -> str:
    frame_bytes = packet + 14
    raised = frame_bytes / (packet + 14 - HEADERS_BYTES)
    words = []
    for name, burst, value in (("rate", "burst", rate), ("ceil", "cburst", ceiling)):
        bytes_per_s = value * raised
        words.append(
            f"{name} {max(8, round(bytes_per_s * 8))}bit {burst} {max(frame_bytes, round(bytes_per_s * burst_s))}b"
        )
    return f"htb {' '.join(words)} quantum {frame_bytes}"

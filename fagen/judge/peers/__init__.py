"""What users would run instead of fagen: pinned, named with their versions, never silent."""

from fagen.judge.peers.base import Peer, peer_launch
from fagen.judge.peers.lineup import (
    FUSED,
    STANDARD,
    Peers,
    backends_named,
    draw_inputs,
    peers,
)

__all__ = [
    "FUSED",
    "STANDARD",
    "Peer",
    "Peers",
    "backends_named",
    "draw_inputs",
    "peer_launch",
    "peers",
]

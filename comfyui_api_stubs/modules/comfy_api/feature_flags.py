"""What server and clients tell each other that they can do (ComfyUI's comfy_api.feature_flags)."""

from __future__ import annotations

from typing import Any

SERVER_FEATURE_FLAGS: dict[str, Any] = {"supports_preview_metadata": True, "max_upload_size": 100 * 1024 * 1024}


def get_connection_feature(
    sockets_metadata: dict[str, dict[str, Any]], sid: str, feature_name: str, default: Any = False
) -> Any:
    """What a client said of a feature."""
    return sockets_metadata.get(sid, {}).get("feature_flags", {}).get(feature_name, default)


def supports_feature(sockets_metadata: dict[str, dict[str, Any]], sid: str, feature_name: str) -> bool:
    """Whether a client said that it knows a feature."""
    return get_connection_feature(sockets_metadata, sid, feature_name) is True


def get_server_features() -> dict[str, Any]:
    """What the server says of itself."""
    return dict(SERVER_FEATURE_FLAGS)

"""Who may do what."""

from __future__ import annotations

from corral.job.service.agent_token import agent_token, service_key

__all__ = ["agent_token", "service_key"]

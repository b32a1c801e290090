"""The gate of dies that are always there."""

from __future__ import annotations


class NoGate:
    """Grants everything at once."""

    async def acquire(self, die: str) -> None:
        """Granted."""

    async def release(self, die: str) -> None:
        """Released."""

    async def close(self) -> None:
        """Nothing is held."""

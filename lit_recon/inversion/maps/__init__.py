"""Input maps of convolutions, computed exactly from a convolution's gradient, for every example of a batch."""

from __future__ import annotations

from lit_recon.inversion.maps.recovery import MapRecovery, RecoveredMaps

__all__ = ["MapRecovery", "RecoveredMaps"]

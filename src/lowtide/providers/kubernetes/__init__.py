"""Kubernetes: one Pod per sandbox, on any cluster a kubeconfig or a service account reaches."""

from __future__ import annotations

from lowtide.providers.kubernetes.options import KubernetesOptions
from lowtide.providers.kubernetes.provider import KubernetesProvider

__all__ = ["KubernetesOptions", "KubernetesProvider"]

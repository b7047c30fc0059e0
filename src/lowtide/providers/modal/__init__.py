"""Modal: one of Modal's sandboxes for each, through Modal's own SDK."""

from lowtide.providers.modal.options import ModalOptions
from lowtide.providers.modal.provider import ModalProvider

__all__ = ["ModalOptions", "ModalProvider"]

"""What every message of the wire has in common.

Rules of this file. A message is a frozen msgspec struct, encoded as a MessagePack
array: fields are only ever appended, with defaults, so that older and newer peers
understand each other (extra fields are ignored, missing ones defaulted). How they are
packed, and what surrounds them, is envelope.py's.

A message that answers another one repeats its `request`, `seq`, `pull` or
`(generation, call)`; receivers drop what they did not ask for.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

Short = Annotated[str, Meta(max_length=255)]
Count = Annotated[int, Meta(ge=0)]


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of all messages; the class name is the kind on the wire."""

    kinds: ClassVar[dict[str, type[Message]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Message.kinds[cls.__name__] = cls

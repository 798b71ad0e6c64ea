"""The log of the plugin for SGLang."""

from __future__ import annotations

import logging

from allnorm.integrations.engines import Announcer

logger = logging.getLogger("allnorm.integrations.sglang")
announcer = Announcer(logger)

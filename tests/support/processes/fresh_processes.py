"""Processes that share nothing with the test's own: forked from one that has only imported what they run."""

from __future__ import annotations

import multiprocessing

FRESH = multiprocessing.get_context("forkserver")
FRESH.set_forkserver_preload(["tests.of_storage.database.test_storage_database", "tests.of_storage.queue.test_tasks"])
